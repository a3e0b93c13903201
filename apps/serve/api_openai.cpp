// OpenAI's wire format (see api_openai.h).
#include "apps/serve/api_openai.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "apps/serve/answer.h"
#include "apps/serve/json.h"
#include "apps/serve/openai_fields.h"

namespace app::serve {

namespace {

constexpr int64_t kMostTop = 20;

// Fields that are read, besides those of sampling. All others are refused.
constexpr const char* kRead[] = {"model",           "n",
                                 "max_tokens",      "logprobs",
                                 "stream",          "stream_options",
                                 "response_format", "guided_json",
                                 "json_schema",     "grammar",
                                 "guided_grammar",  "guided_regex",
                                 "guided_choice",   "structured_outputs"};
constexpr const char* kChatRead[] = {"messages",
                                     "tools",
                                     "tool_choice",
                                     "parallel_tool_calls",
                                     "max_completion_tokens",
                                     "top_logprobs",
                                     "watch",
                                     "reasoning_effort",
                                     "enable_thinking",
                                     "chat_template_kwargs",
                                     "continue_final_message",
                                     "add_generation_prompt",
                                     "modalities",
                                     "verbosity"};
constexpr const char* kTextRead[] = {"prompt", "echo", "best_of", "suffix"};

constexpr int64_t kMostAnswers = 16;

// Numbers that are added to the logits of tokens: {"TOKEN ID": BIAS}.
void read_biases(const Json& body, Task& task) {
  const Json* given = object_field(body, "logit_bias");
  constexpr size_t kMost = 1024;  // thimble_session_set_bias
  const auto refuse = [] {
    throw Refusal(
        400,
        "\"logit_bias\" must be an object of at most 1024 numbers from -100 to 100, with ids of tokens "
        "as names");
  };
  if (!given) return;
  if (given->size() > kMost) refuse();
  for (const auto& entry : given->items()) {
    const std::string& id = entry.key();
    const Json& bias = entry.value();
    const bool digits = !id.empty() && id.size() < 10 && id.find_first_not_of("0123456789") == id.npos;
    if (!digits || !bias.is_number() || std::abs(bias.get<double>()) > 100) refuse();
    task.biased.push_back(std::stoi(id));
    task.biases.push_back(bias.get<float>());
  }
}

void read_stop_ids(const Json& body, Task& task) {
  const Json* given = array_field(body, "stop_token_ids");
  if (!given) return;
  constexpr size_t kMost = 256;
  const auto is_id = [](const Json& id) {
    return id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() <= INT32_MAX;
  };
  if (given->size() > kMost || !std::all_of(given->begin(), given->end(), is_id))
    throw Refusal(400, "\"stop_token_ids\" must be an array of at most 256 ids of tokens");
  for (const Json& id : *given) task.stop_ids.push_back(id.get<int32_t>());
}

}  // namespace

void read_sampling(const Json& body, Task& task) {
  constexpr int64_t kMostPenalised = 4096;  // thimble.h: repeat_last
  constexpr double kLeastPenalty = 0.01, kMostPenalty = 100;
  task.temperature = number_field(body, "temperature", 0, 2);
  task.top_p = number_field(body, "top_p", 0, 1);
  task.min_p = number_field(body, "min_p", 0, 1);
  for (const char* name : {"repetition_penalty", "repeat_penalty"})  // the first one is vLLM's
    if (const auto penalty = number_field(body, name, kLeastPenalty, kMostPenalty))
      task.repeat_penalty = penalty;
  if (const auto top_k = integer_field(body, "top_k", -1, INT32_MAX))  // -1 and 0: all tokens
    task.top_k = static_cast<uint32_t>(std::max<int64_t>(*top_k, 0));
  if (const auto last = integer_field(body, "repeat_last_n", 0, kMostPenalised))
    task.repeat_last = static_cast<uint32_t>(*last);
  // The bits of a negative number are used as the seed.
  if (const auto seed = integer_field(body, "seed", INT64_MIN, INT64_MAX))
    task.seed = static_cast<uint64_t>(*seed);
  task.stops = stops_field(body, "stop");
  constexpr double kMostSubtracted = 2;
  task.presence_penalty = number_field(body, "presence_penalty", -kMostSubtracted, kMostSubtracted);
  task.frequency_penalty = number_field(body, "frequency_penalty", -kMostSubtracted, kMostSubtracted);
  read_biases(body, task);
  task.ignores_end = bool_field(body, "ignore_eos").value_or(false);
  read_stop_ids(body, task);
}

void check_end(const Task& task) {
  if (task.ignores_end && !task.max_tokens)
    throw Refusal(400, "\"ignore_eos\" needs a number of tokens, \"max_tokens\"");
}

Json template_variables(const Json& body, const std::string* effort) {
  Json variables = Json::object();
  if (effort) variables = {{"reasoning_effort", *effort}, {"enable_thinking", *effort != "none"}};
  if (const auto thinks = bool_field(body, "enable_thinking")) variables["enable_thinking"] = *thinks;
  if (const Json* given = object_field(body, "chat_template_kwargs")) {
    for (const char* name : {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}) {
      if (given->contains(name))
        throw Refusal(400, "\"chat_template_kwargs\" cannot set \"" + std::string(name) + "\"");
    }
    variables.update(*given);
  }
  return variables.empty() ? Json() : variables;
}

Json template_call(const std::string& name, const Json* given, const std::string* id) {
  Json arguments = Json::object();
  if (given) {
    arguments = *given;
    if (given->is_string()) try {
        const std::string_view text = stripped(given->get_ref<const std::string&>());
        arguments = text.empty() ? Json() : parse_bounded(text);
      } catch (const Refusal&) {  // templates then get the text
      }
    if (arguments.is_null()) arguments = Json::object();
  }
  Json out = {{"type", "function"}, {"function", {{"name", name}, {"arguments", arguments}}}};
  if (id) out["id"] = *id;
  return out;
}

void read_streaming(const Json& body, Asked& asked) {
  asked.stream = bool_field(body, "stream").value_or(false);
  const Json* options = object_field(body, "stream_options");
  if (!options) return;
  constexpr const char* kKnown[] = {"include_usage", "include_obfuscation"};  // the latter is only padding
  refuse_unknown(*options, {kKnown});
  asked.stream_usage = bool_field(*options, "include_usage").value_or(false);
}

namespace {

// The name in {"type": "function", "function": {"name": NAME}}, or without the inner object, as responses
// have it.
const std::string* chosen_name(const Json& choice) {
  const Json* function = choice.is_object() ? object_field(choice, "function") : nullptr;
  return choice.is_object() ? text_field(function ? *function : choice, "name") : nullptr;
}

// Leaves only the tools that are allowed.
void allow_tools(const Json& allowed, Json& tools) {
  Json left = Json::array();
  for (const Json& tool : tools)
    for (const Json& one : allowed)
      if (const std::string* name = chosen_name(one); name && tool["function"]["name"] == *name)
        left.push_back(tool);
  tools = std::move(left);
}

}  // namespace

void check_must_call(const Task& task) {
  if (!task.must_call) return;
  if (task.tools.empty()) throw Refusal(400, "a tool must be called, but there are no \"tools\"");
  const auto is_it = [&](const Json& tool) { return tool["function"]["name"] == task.only_tool; };
  if (!task.only_tool.empty() && std::none_of(task.tools.begin(), task.tools.end(), is_it))
    throw Refusal(400, "\"tool_choice\" names a tool that is not in \"tools\"");
}

void read_tools(const Json& body, Json tools, Task& task) {
  task.one_call = !bool_field(body, "parallel_tool_calls").value_or(true);
  const Json* choice = find_field(body, "tool_choice");
  bool none = false;
  if (choice && choice->is_object() && choice->value("type", Json()) == "allowed_tools") {
    const Json* inner = object_field(*choice, "allowed_tools");  // which responses leave out
    const Json& allowed = inner ? *inner : *choice;
    const Json* names = array_field(allowed, "tools");
    const std::string* mode = text_field(allowed, "mode");
    if (!names || !mode || (*mode != "auto" && *mode != "required"))
      throw Refusal(400, "\"allowed_tools\" must have \"tools\" and a \"mode\", \"auto\" or \"required\"");
    allow_tools(*names, tools);
    task.must_call = *mode == "required";
  } else if (choice) {
    const std::string* name = chosen_name(*choice);
    none = *choice == "none";
    task.must_call = name || *choice == "required";
    if (name) task.only_tool = *name;
    if (!none && !task.must_call && *choice != "auto")
      throw Refusal(400, "\"tool_choice\" must be \"auto\", \"none\", \"required\", or the function to call");
  }
  if (!none && !tools.empty()) task.tools = std::move(tools);
  check_must_call(task);
}

Form format_form(const Json& format, const Json& holder) {
  const std::string* type = text_field(format, "type");
  const Json* schema = find_field(holder, "schema");
  if (type && *type == "text") return {};
  if (type && *type == "json_object")  // some servers take a schema here, too
    return schema ? schema_form(*schema, "schema") : Form{Form::Kind::kSchema, R"({"type":"object"})"};
  if (!type || *type != "json_schema" || !schema)
    throw Refusal(
        400,
        "the format of an answer must be of type \"text\", \"json_object\", or \"json_schema\" with a "
        "\"schema\"");
  return schema_form(*schema, "schema");
}

namespace {

// Converts a message to the form that chat templates expect.
Json template_message(const Json& message) {
  const std::string* role = message.is_object() ? text_field(message, "role") : nullptr;
  if (!role || role->empty()) throw Refusal(400, "each message must be an object with a \"role\"");
  const Json* content = find_field(message, "content");
  Json out = {{"role", *role == "developer" ? "system" : *role},
              {"content", content ? content_text(*content) : ""}};
  for (const char* name : {"name", "tool_call_id"}) {
    if (const std::string* text = text_field(message, name)) out[name] = *text;
  }
  for (const char* name : {"thinking", "reasoning", "reasoning_content"}) {
    if (const std::string* text = text_field(message, name)) set_thoughts(out, *text);
  }
  const Json* calls = array_field(message, "tool_calls");
  if (calls && !calls->empty()) {
    out["tool_calls"] = Json::array();
    for (const Json& call : *calls) {
      const Json* function = call.is_object() ? object_field(call, "function") : nullptr;
      const std::string* name = function ? text_field(*function, "name") : nullptr;
      if (!name) throw Refusal(400, "each of \"tool_calls\" must have a \"function\" with a \"name\"");
      out["tool_calls"].push_back(
          template_call(*name, find_field(*function, "arguments"), text_field(call, "id")));
    }
  }
  return out;
}

// The grammar of texts of which one is the answer.
Form choice_form(const Json& texts) {
  if (texts.empty()) throw Refusal(400, "an answer needs at least one choice");
  std::string rule = "root ::= ";
  for (const Json& text : texts) {
    if (!text.is_string()) throw Refusal(400, "the choices of an answer must be texts");
    rule += (&text == &texts.front() ? "" : " | ") + write_json(text);
  }
  return {Form::Kind::kGbnf, rule};
}

// The forms under the names that an object has for them: vLLM's, once with a prefix and once inside an
// object.
void read_forms(const Json& object, const std::string& prefix, const std::function<void(Form)>& take) {
  const std::string json = prefix + "json", regex = prefix + "regex", choice = prefix + "choice",
                    grammar = prefix + "grammar";
  if (const Json* schema = find_field(object, json.c_str())) take(schema_form(*schema, json.c_str()));
  if (const std::string* text = text_field(object, regex.c_str())) take({Form::Kind::kRegex, *text});
  if (const Json* texts = array_field(object, choice.c_str())) take(choice_form(*texts));
  if (const std::string* text = text_field(object, grammar.c_str())) take({Form::Kind::kGbnf, *text});
}

// Reads what the answer must be. Other servers have names of their own for it.
void read_form(const Json& body, Task& task) {
  size_t given = 0;
  const auto take = [&](Form form) {
    if (form.kind == Form::Kind::kAny) return;
    task.form = std::move(form);
    if (++given > 1) throw Refusal(400, "an answer can have only one format, schema or grammar");
  };
  if (const Json* format = object_field(body, "response_format")) {
    const Json* holder = object_field(*format, "json_schema");
    take(format_form(*format, holder ? *holder : *format));
  }
  if (const Json* schema = find_field(body, "json_schema")) take(schema_form(*schema, "json_schema"));
  if (const std::string* grammar = text_field(body, "grammar")) take({Form::Kind::kGbnf, *grammar});
  read_forms(body, "guided_", take);
  if (const Json* forms = object_field(body, "structured_outputs")) {
    constexpr const char* kForms[] = {"json", "regex", "choice", "grammar"};
    refuse_unknown(*forms, {kForms});
    read_forms(*forms, "", take);
  }
}

// The tools of a chat completion; null if there are none.
Json chat_tools(const Json& body) {
  const Json* tools = array_field(body, "tools");
  if (!tools) return nullptr;
  for (const Json& tool : *tools) {
    const Json* function = tool.is_object() ? object_field(tool, "function") : nullptr;
    if (!function || !text_field(*function, "name"))
      throw Refusal(400, "each of \"tools\" must be {\"type\": \"function\", \"function\": {\"name\": ...}}");
  }
  return *tools;
}

// Reads a prompt, which is a text or token ids, directly or as the only element of an array.
void read_prompt(const Json& given, Task& task) {
  const Json* prompt = &given;
  if (prompt->is_array() && prompt->size() == 1 && !prompt->front().is_number()) prompt = &prompt->front();
  if (prompt->is_string()) {
    task.prompt = prompt->get<std::string>();
    if (!task.prompt.empty()) return;
  } else if (prompt->is_array()) {
    for (const Json& id : *prompt) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX) break;
      task.ids.push_back(id.get<int32_t>());
    }
    if (!prompt->empty() && task.ids.size() == prompt->size()) return;
  }
  throw Refusal(400, "\"prompt\" must be one text or one array of token ids, not empty");
}

Json usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt},
          {"completion_tokens", usage.generated},
          {"total_tokens", usage.prompt + usage.generated},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached}}}};
}

std::string sse(const Json& event) { return "data: " + write_json(event) + "\n\n"; }

Json bytes_json(const std::string& bytes) {
  Json numbers = Json::array();
  for (const char c : bytes) numbers.push_back(static_cast<unsigned char>(c));
  return numbers;
}

// The number of code points that begin in these bytes.
size_t characters(const std::string& bytes) {
  return static_cast<size_t>(
      std::count_if(bytes.begin(), bytes.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

Json logprob_json(const std::string& bytes, double logprob) {
  return {{"token", bytes}, {"logprob", logprob}, {"bytes", bytes_json(bytes)}};
}

// The common part of both kinds of completions: the object, a choice, usage, the end of a stream.
class Completion : public AnswerWriter {
 public:
  Completion(const Identity& who, const Asked& asked, const char* prefix, const char* object)
      : stream_(asked.stream),
        stream_usage_(asked.stream && asked.stream_usage),
        logprobs_(asked.task.logprobs),
        id_(prefix + who.id),
        created_(who.created),
        model_(who.model),
        object_(object) {}

  std::string failure(const Refusal& refusal) override { return "data: " + openai_error(refusal) + "\n\n"; }

 protected:
  // An object with one choice, or with none.
  Json whole(const Json& choices) const {
    Json out = beginning();
    out["choices"] = choices;
    if (stream_usage_) out["usage"] = nullptr;
    return out;
  }
  // The last events of a stream.
  std::string stream_end(const Usage& usage) const {
    std::string out;
    if (stream_usage_) {
      Json last = whole(Json::array());
      last["usage"] = usage_json(usage);
      out += sse(last);
    }
    return out + "data: [DONE]\n\n";
  }
  // Adds a choice, whose words are the member `name`, to the body. `logprobs` are text, because a Json of
  // them takes ten times the bytes.
  void add_choice(const std::string& name, const Json& words, const std::string& logprobs,
                  const std::string& reason) {
    choices_ += (choices_.empty() ? "" : ",") + ("{\"index\":" + std::to_string(index_));
    choices_ += ",\"" + name + "\":" + write_json(words);
    choices_ += ",\"logprobs\":" + (logprobs_ ? logprobs : "null");
    choices_ += ",\"finish_reason\":" + write_json(reason) + "}";
  }
  // The whole answer.
  std::string body(const Usage& usage) const {
    std::string text = write_json(beginning());
    text.back() = ',';
    return text + "\"choices\":[" + choices_ + "],\"usage\":" + write_json(usage_json(usage)) + "}";
  }

  const bool stream_, stream_usage_, logprobs_;
  const std::string id_;
  size_t index_ = 0;     // of the choice that is being written
  std::string choices_;  // the complete choices of an answer that is not streamed

 private:
  Json beginning() const {
    return {{"id", id_}, {"object", object_}, {"created", created_}, {"model", model_}};
  }

  const int64_t created_;
  const std::string model_, object_;
};

class ChatCompletion : public Completion {
 public:
  ChatCompletion(const Identity& who, const Asked& asked)
      : Completion(who, asked, "chatcmpl-", asked.stream ? "chat.completion.chunk" : "chat.completion"),
        who_(who),
        one_call_(asked.task.one_call),
        fresh_(asked.task.opening, asked.task.tools) {
    answer_.emplace(fresh_);
  }

  std::string begin(const Usage&) override {
    return stream_ ? sse(whole(Json::array({delta({{"role", "assistant"}, {"content", ""}})}))) : "";
  }

  std::string piece(const Piece& piece) override {
    for (const TokenLogprob& t : piece.logprobs) {
      Json token = logprob_json(t.bytes, t.logprob);
      token["top_logprobs"] = Json::array();
      for (const auto& [bytes, logprob] : t.top)
        token["top_logprobs"].push_back(logprob_json(bytes, logprob));
      if (stream_)
        answer_->tokens.push_back(token);
      else
        answer_->logprobs += (answer_->logprobs.empty() ? "" : ",") + write_json(token);
    }
    return add(answer_->filter.push(piece.text));
  }

  std::string next(Ending ending) override {
    std::string out = end_choice(ending);
    answer_.emplace(fresh_);
    ++index_;
    return out + begin({});
  }

  std::string end(Ending ending, const std::string&, const Usage& usage) override {
    const std::string last = end_choice(ending);
    return stream_ ? last + stream_end(usage) : body(usage);
  }

  size_t kept_bytes() const override { return answer_->logprobs.size() + choices_.size(); }

 private:
  // The answer that is being written.
  struct Answer {
    explicit Answer(const AnswerFilter& fresh) : filter(fresh) {}
    AnswerFilter filter;
    std::string text, thoughts, logprobs;
    Json calls = Json::array();
    Json tokens = Json::array();  // tokens of a stream, with their probabilities, that were not sent yet
  };

  std::string end_choice(Ending ending) {
    std::string out = add(answer_->filter.finish());
    const char* reason = !answer_->calls.empty()     ? "tool_calls"
                         : ending == Ending::kLength ? "length"
                                                     : "stop";
    if (stream_) {
      Json last = delta(Json::object());
      last["finish_reason"] = reason;
      return out + sse(whole(Json::array({last})));
    }
    Json message = {{"role", "assistant"}, {"content", answer_->text}};
    if (!answer_->thoughts.empty()) message["reasoning_content"] = answer_->thoughts;
    if (!answer_->calls.empty()) {
      message["tool_calls"] = answer_->calls;
      if (answer_->text.empty()) message["content"] = nullptr;
    }
    add_choice("message", message, "{\"content\":[" + answer_->logprobs + "]}", reason);
    return out;
  }

  // Makes a choice with a delta and the tokens that came since the last one.
  Json delta(const Json& delta) {
    const Json tokens = std::exchange(answer_->tokens, Json::array());
    return {{"index", index_},
            {"delta", delta},
            {"logprobs", tokens.empty() ? Json() : Json{{"content", tokens}}},
            {"finish_reason", nullptr}};
  }

  std::string add(const std::vector<Part>& parts) {
    std::string out;
    for (const Part& part : parts) {
      Json fields;
      if (part.is_call()) {
        if (one_call_ && !answer_->calls.empty()) continue;
        Json call = {{"id", call_id(who_, calls_++)},
                     {"type", "function"},
                     {"function", {{"name", part.name}, {"arguments", part.arguments}}}};
        Json indexed = {{"index", answer_->calls.size()}};
        indexed.update(call);
        answer_->calls.push_back(std::move(call));
        fields = {{"tool_calls", Json::array({indexed})}};
      } else {
        const bool thought = part.kind == Part::Kind::kThought;
        (thought ? answer_->thoughts : answer_->text) += part.text;
        fields = {{thought ? "reasoning_content" : "content", part.text}};
      }
      if (stream_) out += sse(whole(Json::array({delta(fields)})));
    }
    return out;
  }

  const Identity who_;
  const bool one_call_;
  const AnswerFilter fresh_;  // which each answer begins with
  std::optional<Answer> answer_;
  size_t calls_ = 0;  // of all answers
};

class TextCompletion : public Completion {
 public:
  TextCompletion(const Identity& who, const Asked& asked)
      : Completion(who, asked, "cmpl-", "text_completion") {}

  std::string begin(const Usage&) override { return ""; }

  std::string piece(const Piece& piece) override {
    Json logprobs = empty_logprobs();
    for (const TokenLogprob& t : piece.logprobs) {
      Json top = Json::object();
      for (const auto& [bytes, logprob] : t.top) top[bytes] = logprob;
      const Json values[] = {t.bytes, t.logprob, top, answer_.offset};
      for (size_t i = 0; i < std::size(kLists); ++i) {
        std::string& list = answer_.logprobs[i];
        if (stream_)
          logprobs[kLists[i]].push_back(values[i]);
        else
          list += (list.empty() ? "" : ",") + write_json(values[i]);
      }
      answer_.offset += characters(t.bytes);
    }
    answer_.text += piece.text;
    if (!stream_ || (piece.text.empty() && piece.logprobs.empty())) return "";
    return sse(whole(Json::array({choice(piece.text, logprobs, nullptr)})));
  }

  std::string next(Ending ending) override {
    std::string out = end_choice(ending);
    answer_ = {};
    ++index_;
    return out;
  }

  std::string end(Ending ending, const std::string&, const Usage& usage) override {
    const std::string last = end_choice(ending);
    return stream_ ? last + stream_end(usage) : body(usage);
  }

  size_t kept_bytes() const override {
    size_t bytes = choices_.size();
    for (const std::string& list : answer_.logprobs) bytes += list.size();
    return bytes;
  }

 private:
  static constexpr const char* kLists[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
  // The answer that is being written.
  struct Answer {
    std::string text, logprobs[std::size(kLists)];
    size_t offset = 0;  // in characters
  };

  std::string end_choice(Ending ending) {
    const char* reason = ending == Ending::kLength ? "length" : "stop";
    if (stream_) return sse(whole(Json::array({choice("", nullptr, reason)})));
    std::string lists;
    for (size_t i = 0; i < std::size(kLists); ++i)
      lists += std::string(i ? ",\"" : "{\"") + kLists[i] + "\":[" + answer_.logprobs[i] + "]";
    add_choice("text", answer_.text, lists + "}", reason);
    return "";
  }
  static Json empty_logprobs() {
    Json lists = Json::object();
    for (const char* name : kLists) lists[name] = Json::array();
    return lists;
  }
  Json choice(const std::string& text, const Json& logprobs, const Json& reason) const {
    return {{"index", index_},
            {"text", text},
            {"logprobs", logprobs_ ? logprobs : Json()},
            {"finish_reason", reason}};
  }

  Answer answer_;
};

}  // namespace

Asked read_chat_completion(const Json& body) {
  refuse_unknown(body, {kRead, kSamplingFields, kChatRead, kHarmlessFields});
  Asked asked;
  Task& task = asked.task;
  task.messages = Json::array();
  for (const Json& message : messages_field(body)) task.messages.push_back(template_message(message));
  read_tools(body, chat_tools(body), task);
  read_sampling(body, task);
  task.max_tokens = integer_field(body, "max_completion_tokens", 1, kMostTokens);
  if (!task.max_tokens) task.max_tokens = integer_field(body, "max_tokens", 1, kMostTokens);
  task.logprobs = bool_field(body, "logprobs").value_or(false);
  task.top_logprobs = static_cast<uint32_t>(integer_field(body, "top_logprobs", 0, kMostTop).value_or(0));
  if (task.top_logprobs && !task.logprobs) throw Refusal(400, "\"top_logprobs\" needs \"logprobs\": true");
  task.watch = bool_field(body, "watch").value_or(false);
  task.variables = template_variables(body, text_field(body, "reasoning_effort"));
  read_form(body, task);
  refuse_unless_neutral(body, "modalities", Json::array({"text"}));
  refuse_unless_neutral(body, "verbosity", "medium");
  const bool goes_on = bool_field(body, "continue_final_message").value_or(false);
  if (bool_field(body, "add_generation_prompt").value_or(!goes_on) == goes_on)
    throw Refusal(400,
                  "either \"add_generation_prompt\" or \"continue_final_message\" must be true, not both");
  if (goes_on) go_on_with_last(task);
  check_end(task);
  task.answers = static_cast<uint32_t>(integer_field(body, "n", 1, kMostAnswers).value_or(1));
  read_streaming(body, asked);
  return asked;
}

Asked read_completion(const Json& body) {
  refuse_unknown(body, {kRead, kSamplingFields, kTextRead, kHarmlessFields});
  Asked asked;
  Task& task = asked.task;
  const Json* prompt = find_field(body, "prompt");
  if (!prompt) throw Refusal(400, "\"prompt\" is missing; it is one text or one array of token ids");
  read_prompt(*prompt, task);
  read_sampling(body, task);
  task.max_tokens = integer_field(body, "max_tokens", 1, kMostTokens);
  const auto top = integer_field(body, "logprobs", 0, kMostTop);
  task.logprobs = top.has_value();
  task.top_logprobs = static_cast<uint32_t>(top.value_or(0));
  read_form(body, task);
  refuse_unless_neutral(body, "echo", false);
  check_end(task);
  task.answers = static_cast<uint32_t>(integer_field(body, "n", 1, kMostAnswers).value_or(1));
  refuse_unless_neutral(body, "best_of", task.answers);
  refuse_unless_neutral(body, "suffix", "");
  read_streaming(body, asked);
  return asked;
}

std::unique_ptr<AnswerWriter> write_chat_completion(const Identity& who, const Asked& asked) {
  return std::make_unique<ChatCompletion>(who, asked);
}

std::unique_ptr<AnswerWriter> write_completion(const Identity& who, const Asked& asked) {
  return std::make_unique<TextCompletion>(who, asked);
}

std::string openai_error(const Refusal& refusal) {
  const int status = refusal.status;
  const char* type = status == 401   ? "authentication_error"
                     : status == 403 ? "permission_error"
                     : status == 429 ? "rate_limit_error"
                     : status >= 500 ? "server_error"
                                     : "invalid_request_error";
  Json error = {{"message", refusal.what()}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!refusal.code.empty()) error["code"] = refusal.code;
  return write_json({{"error", error}});
}

}  // namespace app::serve
