// OpenAI's wire format for responses (see api_responses.h).
#include "apps/serve/api_responses.h"

#include "apps/serve/answer.h"
#include "apps/serve/api_openai.h"
#include "apps/serve/json.h"
#include "apps/serve/openai_fields.h"

namespace app::serve {

namespace {

constexpr const char* kResponseRead[] = {"model",
                                         "input",
                                         "instructions",
                                         "tools",
                                         "tool_choice",
                                         "parallel_tool_calls",
                                         "stream",
                                         "stream_options",
                                         "reasoning",
                                         "text",
                                         "max_output_tokens",
                                         "include",
                                         "background",
                                         "truncation",
                                         "enable_thinking",
                                         "chat_template_kwargs",
                                         "previous_response_id",
                                         "conversation"};
constexpr const char* kReasoningRead[] = {"effort", "summary", "generate_summary"};
constexpr const char* kTextFormatRead[] = {"format", "verbosity"};

const std::string& item_text(const Json& item, const char* name) {
  const std::string* text = text_field(item, name);
  if (!text) throw Refusal(400, "an item of \"input\" lacks its \"" + std::string(name) + "\"");
  return *text;
}

// The texts of a message's content or of a tool's output: one text, or an array of parts.
std::string item_words(const Json& content) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) throw Refusal(400, "the content of an item must be a text or an array of parts");
  std::string words;
  for (const Json& part : content) {
    const std::string* type = part.is_object() ? text_field(part, "type") : nullptr;
    const bool refused = type && *type == "refusal";
    const bool known = type && (refused || *type == "input_text" || *type == "output_text" ||
                                *type == "text" || *type == "reasoning_text" || *type == "summary_text");
    const std::string* text = known ? text_field(part, refused ? "refusal" : "text") : nullptr;
    if (!text)
      throw Refusal(
          400, "a part of an item's content must be an input_text or an output_text; nothing else is read");
    words += *text;
  }
  return words;
}

// The messages that a conversation's items mean. An answer comes as several items: its thoughts, its texts,
// and its calls. They are one message.
class Messages {
 public:
  void add(const Json& item) {
    if (!item.is_object()) throw Refusal(400, "each item of \"input\" must be an object");
    const std::string* given = text_field(item, "type");
    const std::string type = given ? *given : "message";
    if (type == "message") {
      add_message(item);
    } else if (type == "reasoning") {
      add_thoughts(item);
    } else if (type == "function_call") {
      Json& calls = answer()["tool_calls"];
      calls.push_back(
          template_call(item_text(item, "name"), find_field(item, "arguments"), text_field(item, "call_id")));
    } else if (type == "function_call_output") {
      const Json* output = find_field(item, "output");
      messages_.push_back({{"role", "tool"},
                           {"content", output ? item_words(*output) : ""},
                           {"tool_call_id", item_text(item, "call_id")}});
    } else {
      throw Refusal(400, "an item of type \"" + type.substr(0, 100) +
                             "\" is not read; an item must be a message, a reasoning, a function_call or a "
                             "function_call_output");
    }
  }
  Json take() { return std::move(messages_); }

 private:
  // The assistant's message to which items are added.
  Json& answer() {
    if (messages_.empty() || messages_.back()["role"] != "assistant")
      messages_.push_back({{"role", "assistant"}, {"content", ""}});
    return messages_.back();
  }
  void add_message(const Json& item) {
    const std::string& role = item_text(item, "role");
    const Json* content = find_field(item, "content");
    const std::string words = content ? item_words(*content) : "";
    if (role == "assistant")
      answer()["content"].get_ref<std::string&>() += words;
    else if (role == "user" || role == "system" || role == "developer")
      messages_.push_back({{"role", role == "developer" ? "system" : role}, {"content", words}});
    else
      throw Refusal(400, "a message's \"role\" must be \"user\", \"assistant\", \"system\" or \"developer\"");
  }
  void add_thoughts(const Json& item) {
    std::string thoughts;
    for (const char* name : {"summary", "content"}) {
      const Json* parts = array_field(item, name);
      if (parts && !parts->empty()) thoughts = item_words(*parts);
    }
    if (thoughts.empty()) return;
    const std::string* before = text_field(answer(), "reasoning_content");
    set_thoughts(answer(), (before ? *before + "\n\n" : "") + thoughts);
  }

  Json messages_ = Json::array();
};

Json response_tools(const Json& tools) {
  Json out = Json::array();
  for (const Json& tool : tools) {
    const std::string* type = tool.is_object() ? text_field(tool, "type") : nullptr;
    const std::string* name = type && *type == "function" ? text_field(tool, "name") : nullptr;
    if (!name)
      throw Refusal(
          400,
          "each of \"tools\" must be {\"type\": \"function\", \"name\": ...}; this server runs no tools");
    Json function = {{"name", *name}};
    for (const char* field : {"description", "parameters", "strict"})
      if (const Json* value = find_field(tool, field)) function[field] = *value;
    out.push_back({{"type", "function"}, {"function", function}});
  }
  return out;
}

void check_response_fields(const Json& body) {
  for (const char* name : {"previous_response_id", "conversation"})
    if (find_field(body, name))
      throw Refusal(
          400,
          "\"" + std::string(name) +
              "\" is not supported: this server stores no responses; send the earlier items in \"input\"");
  refuse_unless_neutral(body, "background", false);
  refuse_unless_neutral(body, "truncation", "disabled");
  const Json* include = array_field(body, "include");
  for (const Json& what : include ? *include : Json::array()) {
    // Thoughts are not encrypted: they are in the item itself.
    if (what != "reasoning.encrypted_content")
      throw Refusal(400, "\"include\" can name only \"reasoning.encrypted_content\"");
  }
}

// Writes a response, or the events of one. Each thought, text and call of the answer is an item of its own.
class ResponseObject : public AnswerWriter {
 public:
  ResponseObject(const Identity& who, const Asked& asked)
      : stream_(asked.stream),
        who_(who),
        task_(fields(asked.task)),
        one_call_(asked.task.one_call),
        filter_(asked.task.opening, asked.task.tools) {}

  std::string begin(const Usage&) override {
    const std::string response = whole("in_progress", nullptr, nullptr);
    event("response.created", Json::object(), "response", response);
    event("response.in_progress", Json::object(), "response", response);
    return sent();
  }

  std::string piece(const Piece& piece) override {
    if (filter_.thinks()) ++thought_;
    add(filter_.push(piece.text));
    return sent();
  }

  std::string end(Ending ending, const std::string&, const Usage& usage) override {
    add(filter_.finish());
    const bool cut = ending == Ending::kLength;
    const std::string status = cut ? "incomplete" : "completed";
    close(status);
    const Json counts = {{"input_tokens", usage.prompt},
                         {"input_tokens_details", {{"cached_tokens", usage.cached}}},
                         {"output_tokens", usage.generated},
                         {"output_tokens_details", {{"reasoning_tokens", thought_}}},
                         {"total_tokens", usage.prompt + usage.generated}};
    std::string response = whole(status, cut ? Json{{"reason", "max_output_tokens"}} : Json(), counts);
    if (!stream_) return response;
    event("response." + status, Json::object(), "response", response);
    return sent();
  }

  // The events at the end of an item repeat its text, and the last one repeats all items.
  size_t kept_bytes() const override { return text_bytes_; }

  std::string failure(const Refusal& refusal) override {
    Json fields = Json::parse(openai_error(refusal));
    fields.update({{"code", fields["error"]["code"]}, {"message", refusal.what()}, {"param", nullptr}});
    event("error", fields);
    return sent();
  }

 private:
  // The fields of the request that a response repeats.
  static Json fields(const Task& task) {
    const auto number = [](const std::optional<double>& value) { return value ? Json(*value) : Json(); };
    return {{"instructions", nullptr},
            {"max_output_tokens", task.max_tokens ? Json(*task.max_tokens) : Json()},
            {"metadata", Json::object()},
            {"parallel_tool_calls", !task.one_call},
            {"previous_response_id", nullptr},
            {"store", false},
            {"temperature", number(task.temperature)},
            {"text", {{"format", {{"type", "text"}}}}},
            {"tool_choice", "auto"},
            {"tools", Json::array()},
            {"top_p", number(task.top_p)},
            {"truncation", "disabled"}};
  }

  // The response object as text. Its items are inserted as text, because a Json of them would be another
  // copy.
  std::string whole(const std::string& status, const Json& incomplete, const Json& usage) const {
    Json response = {{"id", "resp_" + who_.id},
                     {"object", "response"},
                     {"created_at", who_.created},
                     {"status", status},
                     {"background", false},
                     {"error", nullptr},
                     {"incomplete_details", incomplete},
                     {"model", who_.model}};
    response.update(task_);
    response["usage"] = usage;
    std::string text = write_json(response);
    text.pop_back();
    text += ",\"output\":[";
    for (const std::string& item : items_) text += (text.back() == '[' ? "" : ",") + item;
    return text + "]}";
  }

  // Adds an event with these fields, and one more whose JSON is given as text.
  void event(const std::string& type, const Json& fields, const char* name = nullptr,
             const std::string& json = "") {
    if (!stream_) return;
    Json data = {{"type", type}, {"sequence_number", sequence_++}};
    data.update(fields);
    std::string text = write_json(data);
    if (name) text.replace(text.size() - 1, 1, ",\"" + std::string(name) + "\":" + json + "}");
    out_ += "event: " + type + "\ndata: " + text + "\n\n";
  }
  // The events since the last call.
  std::string sent() { return std::exchange(out_, {}); }

  // The place of the open item, and of its only part.
  Json place(bool part) const {
    Json fields = {{"item_id", id_}, {"output_index", items_.size()}};
    if (part) fields["content_index"] = 0;
    return fields;
  }
  static Json with(Json fields, const char* name, const Json& value) {
    fields[name] = value;
    return fields;
  }
  bool is_thought() const { return kind_ == Part::Kind::kThought; }
  std::string part_type() const { return is_thought() ? "reasoning_text" : "output_text"; }
  Json part() const {
    Json part = {{"type", part_type()}, {"text", words_}};
    if (!is_thought()) part.update({{"annotations", Json::array()}, {"logprobs", Json::array()}});
    return part;
  }
  Json item(const std::string& status) const {
    const Json content = status == "in_progress" ? Json::array() : Json::array({part()});
    if (is_thought())
      return {{"id", id_},          {"type", "reasoning"},
              {"status", status},   {"summary", Json::array()},
              {"content", content}, {"encrypted_content", nullptr}};
    return {
        {"id", id_}, {"type", "message"}, {"status", status}, {"role", "assistant"}, {"content", content}};
  }

  void open(Part::Kind kind) {
    kind_ = kind;
    open_ = true;
    id_ = (is_thought() ? "rs_" : "msg_") + who_.id + "_" + std::to_string(items_.size());
    event("response.output_item.added", {{"output_index", items_.size()}, {"item", item("in_progress")}});
    event("response.content_part.added", with(place(true), "part", part()));
  }
  // Ends the open item, if there is one.
  void close(const std::string& status) {
    if (!std::exchange(open_, false)) return;
    std::string json = write_json(item(status));
    Json done = with(place(true), "text", words_);
    if (!is_thought()) done["logprobs"] = Json::array();
    event("response." + part_type() + ".done", done);
    event("response.content_part.done", with(place(true), "part", part()));
    event("response.output_item.done", {{"output_index", items_.size()}}, "item", json);
    words_.clear();
    items_.push_back(std::move(json));
  }

  void add(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      text_bytes_ += part.text.size() + part.arguments.size();
      if (part.is_call()) {
        add_call(part);
        continue;
      }
      if (!open_ || kind_ != part.kind) {
        close("completed");
        open(part.kind);
      }
      words_ += part.text;
      Json delta = with(place(true), "delta", part.text);
      if (!is_thought()) delta["logprobs"] = Json::array();
      event("response." + part_type() + ".delta", delta);
    }
  }

  void add_call(const Part& part) {
    if (one_call_ && calls_) return;
    close("completed");
    const auto call = [&](const char* status, const std::string& arguments) -> Json {
      return {{"id", id_},         {"type", "function_call"},
              {"status", status},  {"call_id", call_id(who_, calls_)},
              {"name", part.name}, {"arguments", arguments}};
    };
    id_ = "fc_" + who_.id + "_" + std::to_string(items_.size());
    const Json done = call("completed", part.arguments), index = {{"output_index", items_.size()}};
    event("response.output_item.added", with(index, "item", call("in_progress", "")));
    event("response.function_call_arguments.delta", with(place(false), "delta", part.arguments));
    event("response.function_call_arguments.done",
          with(with(place(false), "name", part.name), "arguments", part.arguments));
    event("response.output_item.done", with(index, "item", done));
    items_.push_back(write_json(done));
    ++calls_;
  }

  const bool stream_;
  const Identity who_;
  const Json task_;
  const bool one_call_;
  AnswerFilter filter_;
  std::vector<std::string> items_;  // the complete items
  // The open item.
  bool open_ = false;
  Part::Kind kind_ = Part::Kind::kText;
  std::string id_, words_;
  std::string out_;  // events that were not sent yet
  size_t calls_ = 0, sequence_ = 0, text_bytes_ = 0;
  uint64_t thought_ = 0;  // tokens of thoughts
};

}  // namespace

Asked read_response(const Json& body) {
  refuse_unknown(body, {kResponseRead, kSamplingFields, kHarmlessFields});
  check_response_fields(body);
  Asked asked;
  Task& task = asked.task;
  const Json* input = find_field(body, "input");
  Messages messages;
  const std::string* instructions = text_field(body, "instructions");
  if (instructions && !instructions->empty()) messages.add({{"role", "system"}, {"content", *instructions}});
  if (input && input->is_string())
    messages.add({{"role", "user"}, {"content", *input}});
  else if (input && input->is_array() && !input->empty())
    for (const Json& item : *input) messages.add(item);
  else
    throw Refusal(400, "\"input\" must be a text or an array of at least one item");
  task.messages = messages.take();
  const Json* tools = array_field(body, "tools");
  read_tools(body, tools ? response_tools(*tools) : Json(), task);
  read_sampling(body, task);
  task.max_tokens = integer_field(body, "max_output_tokens", 1, kMostTokens);
  check_end(task);
  const Json* reasoning = object_field(body, "reasoning");
  if (reasoning) refuse_unknown(*reasoning, {kReasoningRead});
  task.variables = template_variables(body, reasoning ? text_field(*reasoning, "effort") : nullptr);
  if (const Json* text = object_field(body, "text")) {
    refuse_unknown(*text, {kTextFormatRead});
    if (const Json* format = object_field(*text, "format")) task.form = format_form(*format, *format);
    refuse_unless_neutral(*text, "verbosity", "medium");
  }
  read_streaming(body, asked);
  return asked;
}

std::unique_ptr<AnswerWriter> write_response(const Identity& who, const Asked& asked) {
  return std::make_unique<ResponseObject>(who, asked);
}

}  // namespace app::serve
