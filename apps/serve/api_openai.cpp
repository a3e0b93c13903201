// OpenAI's wire format (see api_openai.h).
#include "apps/serve/api_openai.h"

#include <algorithm>

#include "apps/serve/answer.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

constexpr int64_t kMostTokens = int64_t{1} << 30, kMostTop = 20;
constexpr int64_t kMostPenalised = 4096;  // thimble.h: repeat_last
constexpr double kLeastPenalty = 0.01, kMostPenalty = 100;

// Fields that are read, and fields that do not change the answer. All others are refused.
constexpr const char* kRead[] = {"model",
                                 "temperature",
                                 "top_p",
                                 "top_k",
                                 "min_p",
                                 "repeat_penalty",
                                 "repeat_last_n",
                                 "seed",
                                 "stop",
                                 "n",
                                 "max_tokens",
                                 "logprobs",
                                 "stream",
                                 "stream_options",
                                 "frequency_penalty",
                                 "presence_penalty",
                                 "logit_bias",
                                 "ignore_eos",
                                 "stop_token_ids"};
constexpr const char* kChatRead[] = {"messages",
                                     "tools",
                                     "tool_choice",
                                     "parallel_tool_calls",
                                     "max_completion_tokens",
                                     "top_logprobs",
                                     "response_format",
                                     "watch",
                                     "reasoning_effort",
                                     "enable_thinking",
                                     "chat_template_kwargs",
                                     "continue_final_message",
                                     "add_generation_prompt",
                                     "modalities",
                                     "verbosity"};
constexpr const char* kTextRead[] = {"prompt", "echo", "best_of", "suffix"};
constexpr const char* kHarmless[] = {"user",
                                     "safety_identifier",
                                     "metadata",
                                     "store",
                                     "service_tier",
                                     "prompt_cache_key",
                                     "prompt_cache_options",
                                     "prompt_cache_retention",
                                     "cache_prompt",
                                     "prediction"};

void read_sampling(const Json& body, Task& task) {
  task.temperature = number_field(body, "temperature", 0, 2);
  task.top_p = number_field(body, "top_p", 0, 1);
  task.min_p = number_field(body, "min_p", 0, 1);
  task.repeat_penalty = number_field(body, "repeat_penalty", kLeastPenalty, kMostPenalty);
  if (const auto top_k = integer_field(body, "top_k", -1, INT32_MAX))  // -1 and 0: all tokens
    task.top_k = static_cast<uint32_t>(std::max<int64_t>(*top_k, 0));
  if (const auto last = integer_field(body, "repeat_last_n", 0, kMostPenalised))
    task.repeat_last = static_cast<uint32_t>(*last);
  // The bits of a negative number are used as the seed.
  if (const auto seed = integer_field(body, "seed", INT64_MIN, INT64_MAX))
    task.seed = static_cast<uint64_t>(*seed);
  task.stops = stops_field(body, "stop");
  if (integer_field(body, "n", 1, 1 << 30).value_or(1) != 1)
    throw Refusal(400, "\"n\" must be 1; send the request again for another answer");
  refuse_unless_neutral(body, "frequency_penalty", 0);
  refuse_unless_neutral(body, "presence_penalty", 0);
  refuse_unless_neutral(body, "logit_bias", Json::object());
  refuse_unless_neutral(body, "ignore_eos", false);
  refuse_unless_neutral(body, "stop_token_ids", Json::array());
}

// The variables of the chat template besides the messages: how much the model is to think, and those that the
// request names.
Json template_variables(const Json& body) {
  Json variables = Json::object();
  if (const std::string* effort = text_field(body, "reasoning_effort"))
    variables = {{"reasoning_effort", *effort}, {"enable_thinking", *effort != "none"}};
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

void read_streaming(const Json& body, Asked& asked) {
  asked.stream = bool_field(body, "stream").value_or(false);
  const Json* options = object_field(body, "stream_options");
  if (options) asked.stream_usage = bool_field(*options, "include_usage").value_or(false);
}

// Converts a call: its arguments are JSON as text in the wire format, and an object for chat templates.
Json template_call(const Json& call) {
  const Json* function = call.is_object() ? object_field(call, "function") : nullptr;
  const std::string* name = function ? text_field(*function, "name") : nullptr;
  if (!name) throw Refusal(400, "each of \"tool_calls\" must have a \"function\" with a \"name\"");
  Json arguments = Json::object();
  if (const Json* given = find_field(*function, "arguments")) {
    arguments = *given;
    if (given->is_string()) try {
        const std::string& text = given->get_ref<const std::string&>();
        const bool none = text.find_first_not_of(" \t\r\n") == std::string::npos;
        arguments = none ? Json() : parse_bounded(text);
      } catch (const Refusal&) {  // templates then get the text
      }
    if (arguments.is_null()) arguments = Json::object();
  }
  Json out = {{"type", "function"}, {"function", {{"name", *name}, {"arguments", arguments}}}};
  if (const std::string* id = text_field(call, "id")) out["id"] = *id;
  return out;
}

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
    for (const Json& call : *calls) out["tool_calls"].push_back(template_call(call));
  }
  return out;
}

void read_tools(const Json& body, Task& task) {
  const Json* choice = find_field(body, "tool_choice");
  const bool none = choice && *choice == "none";
  if (choice && !none && *choice != "auto")
    throw Refusal(400,
                  "\"tool_choice\" must be \"auto\" or \"none\"; nothing can make the model call a tool");
  task.one_call = !bool_field(body, "parallel_tool_calls").value_or(true);
  const Json* tools = array_field(body, "tools");
  if (!tools || tools->empty()) return;
  for (const Json& tool : *tools) {
    const Json* function = tool.is_object() ? object_field(tool, "function") : nullptr;
    if (!function || !text_field(*function, "name"))
      throw Refusal(400, "each of \"tools\" must be {\"type\": \"function\", \"function\": {\"name\": ...}}");
  }
  if (!none) task.tools = *tools;
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
  std::string stream_end(const Json& last_choice, const Usage& usage) const {
    std::string out = sse(whole(Json::array({last_choice})));
    if (stream_usage_) {
      Json last = whole(Json::array());
      last["usage"] = usage_json(usage);
      out += sse(last);
    }
    return out + "data: [DONE]\n\n";
  }
  // The whole answer with one choice, whose words are the member `name`. `logprobs` are text, because a Json
  // of them takes ten times the bytes.
  std::string body(const std::string& name, const Json& words, const std::string& logprobs,
                   const std::string& reason, const Usage& usage) const {
    std::string text = write_json(beginning());
    text.back() = ',';
    text += "\"choices\":[{\"index\":0,\"" + name + "\":" + write_json(words);
    text += ",\"logprobs\":" + (logprobs_ ? logprobs : "null");
    text +=
        ",\"finish_reason\":" + write_json(reason) + "}],\"usage\":" + write_json(usage_json(usage)) + "}";
    return text;
  }

  const bool stream_, stream_usage_, logprobs_;
  const std::string id_;

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
        filter_(asked.task.opening, asked.task.tools) {}

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
        tokens_.push_back(token);
      else
        all_logprobs_ += (all_logprobs_.empty() ? "" : ",") + write_json(token);
    }
    return add(filter_.push(piece.text));
  }

  std::string end(Ending ending, const std::string&, const Usage& usage) override {
    std::string out = add(filter_.finish());
    const char* reason = !calls_.empty() ? "tool_calls" : ending == Ending::kLength ? "length" : "stop";
    if (stream_) {
      Json last = delta(Json::object());
      last["finish_reason"] = reason;
      return out + stream_end(last, usage);
    }
    Json message = {{"role", "assistant"}, {"content", text_}};
    if (!thoughts_.empty()) message["reasoning_content"] = thoughts_;
    if (!calls_.empty()) {
      message["tool_calls"] = calls_;
      if (text_.empty()) message["content"] = nullptr;
    }
    return body("message", message, "{\"content\":[" + all_logprobs_ + "]}", reason, usage);
  }

  size_t kept_bytes() const override { return all_logprobs_.size(); }

 private:
  // Makes a choice with a delta and the tokens that came since the last one.
  Json delta(const Json& delta) {
    const Json tokens = std::exchange(tokens_, Json::array());
    return {{"index", 0},
            {"delta", delta},
            {"logprobs", tokens.empty() ? Json() : Json{{"content", tokens}}},
            {"finish_reason", nullptr}};
  }

  std::string add(const std::vector<Part>& parts) {
    std::string out;
    for (const Part& part : parts) {
      Json fields;
      if (part.is_call()) {
        if (one_call_ && !calls_.empty()) continue;
        Json call = {{"id", call_id(who_, calls_.size())},
                     {"type", "function"},
                     {"function", {{"name", part.name}, {"arguments", part.arguments}}}};
        Json indexed = {{"index", calls_.size()}};
        indexed.update(call);
        calls_.push_back(std::move(call));
        fields = {{"tool_calls", Json::array({indexed})}};
      } else {
        const bool thought = part.kind == Part::Kind::kThought;
        (thought ? thoughts_ : text_) += part.text;
        fields = {{thought ? "reasoning_content" : "content", part.text}};
      }
      if (stream_) out += sse(whole(Json::array({delta(fields)})));
    }
    return out;
  }

  const Identity who_;
  const bool one_call_;
  AnswerFilter filter_;
  std::string text_, thoughts_, all_logprobs_;
  Json calls_ = Json::array();
  Json tokens_ = Json::array();  // tokens of a stream, with their probabilities, that were not sent yet
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
      const Json values[] = {t.bytes, t.logprob, top, offset_};
      for (size_t i = 0; i < std::size(kLists); ++i) {
        if (stream_)
          logprobs[kLists[i]].push_back(values[i]);
        else
          all_logprobs_[i] += (all_logprobs_[i].empty() ? "" : ",") + write_json(values[i]);
      }
      offset_ += characters(t.bytes);
    }
    text_ += piece.text;
    if (!stream_ || (piece.text.empty() && piece.logprobs.empty())) return "";
    return sse(whole(Json::array({choice(piece.text, logprobs, nullptr)})));
  }

  std::string end(Ending ending, const std::string&, const Usage& usage) override {
    const char* reason = ending == Ending::kLength ? "length" : "stop";
    if (stream_) return stream_end(choice("", nullptr, reason), usage);
    std::string lists;
    for (size_t i = 0; i < std::size(kLists); ++i)
      lists += std::string(i ? ",\"" : "{\"") + kLists[i] + "\":[" + all_logprobs_[i] + "]";
    return body("text", text_, lists + "}", reason, usage);
  }

  size_t kept_bytes() const override {
    size_t bytes = 0;
    for (const std::string& list : all_logprobs_) bytes += list.size();
    return bytes;
  }

 private:
  static constexpr const char* kLists[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};

  static Json empty_logprobs() {
    Json lists = Json::object();
    for (const char* name : kLists) lists[name] = Json::array();
    return lists;
  }
  Json choice(const std::string& text, const Json& logprobs, const Json& reason) const {
    return {
        {"index", 0}, {"text", text}, {"logprobs", logprobs_ ? logprobs : Json()}, {"finish_reason", reason}};
  }

  std::string text_, all_logprobs_[std::size(kLists)];
  size_t offset_ = 0;  // in characters
};

}  // namespace

Asked read_chat_completion(const Json& body) {
  refuse_unknown(body, {kRead, kChatRead, kHarmless});
  Asked asked;
  Task& task = asked.task;
  task.messages = Json::array();
  for (const Json& message : messages_field(body)) task.messages.push_back(template_message(message));
  read_tools(body, task);
  read_sampling(body, task);
  task.max_tokens = integer_field(body, "max_completion_tokens", 1, kMostTokens);
  if (!task.max_tokens) task.max_tokens = integer_field(body, "max_tokens", 1, kMostTokens);
  task.logprobs = bool_field(body, "logprobs").value_or(false);
  task.top_logprobs = static_cast<uint32_t>(integer_field(body, "top_logprobs", 0, kMostTop).value_or(0));
  if (task.top_logprobs && !task.logprobs) throw Refusal(400, "\"top_logprobs\" needs \"logprobs\": true");
  task.watch = bool_field(body, "watch").value_or(false);
  task.variables = template_variables(body);
  refuse_unless_neutral(body, "response_format", {{"type", "text"}});
  refuse_unless_neutral(body, "modalities", Json::array({"text"}));
  refuse_unless_neutral(body, "verbosity", "medium");
  const bool goes_on = bool_field(body, "continue_final_message").value_or(false);
  if (bool_field(body, "add_generation_prompt").value_or(!goes_on) == goes_on)
    throw Refusal(400,
                  "either \"add_generation_prompt\" or \"continue_final_message\" must be true, not both");
  if (goes_on) go_on_with_last(task);
  read_streaming(body, asked);
  return asked;
}

Asked read_completion(const Json& body) {
  refuse_unknown(body, {kRead, kTextRead, kHarmless});
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
  refuse_unless_neutral(body, "echo", false);
  refuse_unless_neutral(body, "best_of", 1);
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
