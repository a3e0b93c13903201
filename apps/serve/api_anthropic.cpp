// Anthropic's wire format (see api_anthropic.h).
#include "apps/serve/api_anthropic.h"

#include "apps/serve/answer.h"
#include "apps/serve/json.h"
#include "apps/serve/openai_fields.h"

namespace app::serve {

namespace {

const std::string& needed_text(const Json& object, const char* name) {
  const std::string* text = text_field(object, name);
  if (!text) throw Refusal(400, "\"" + std::string(name) + "\" is missing");
  return *text;
}

constexpr const char* kMessageRead[] = {
    "model",       "messages", "max_tokens",     "system",        "temperature",
    "top_p",       "top_k",    "stop_sequences", "stream",        "tools",
    "tool_choice", "thinking", "output_config",  "output_format", "context_management"};
constexpr const char* kMessageHarmless[] = {"metadata",    "service_tier", "inference_geo",  "cache_control",
                                            "diagnostics", "speed",        "user_profile_id"};
constexpr const char* kConfigRead[] = {"effort", "format"};
constexpr const char* kThinkingRead[] = {"type", "budget_tokens", "display"};
constexpr const char* kChoiceRead[] = {"type", "name", "disable_parallel_tool_use"};

// Adds a block to a message. Texts and thoughts are appended to those of the message, a call to its calls.
// The result of a tool becomes a new message.
void add_block(const Json& block, Json& message, Json& messages) {
  if (!block.is_object()) throw Refusal(400, "a block of \"content\" must be an object");
  const std::string& type = needed_text(block, "type");
  if (type == "text") {
    message["content"].get_ref<std::string&>() += needed_text(block, "text");
  } else if (type == "tool_use") {
    const Json* input = object_field(block, "input");
    message["tool_calls"].push_back(
        {{"type", "function"},
         {"function", {{"name", needed_text(block, "name")}, {"arguments", input ? *input : Json::object()}}},
         {"id", needed_text(block, "id")}});
  } else if (type == "tool_result") {
    const Json* content = find_field(block, "content");
    std::string text = content ? content_text(*content) : "";
    // Chat templates have no other place for the error flag.
    if (bool_field(block, "is_error").value_or(false)) text = text.empty() ? "Error" : "Error: " + text;
    messages.push_back(
        {{"role", "tool"}, {"content", text}, {"tool_call_id", needed_text(block, "tool_use_id")}});
  } else if (type == "thinking") {
    const std::string* before = text_field(message, "reasoning_content");
    set_thoughts(message, (before ? *before + "\n\n" : "") + needed_text(block, "thinking"));
  } else if (type != "redacted_thinking") {  // only its writer can read this type
    throw Refusal(
        400,
        "a block of \"content\" must be a text, a thinking, a tool_use or a tool_result; nothing else "
        "is read");
  }
}

// Whether the client expects that other requests begin with everything up to this block.
bool is_marked(const Json& block) { return block.is_object() && find_field(block, "cache_control"); }

size_t content_bytes(const Json& message) { return message["content"].get_ref<const std::string&>().size(); }

void add_message(const Json& given, Task& task) {
  Json& messages = task.messages;
  if (!given.is_object()) throw Refusal(400, "each message must be an object");
  const std::string& role = needed_text(given, "role");
  if (role != "user" && role != "assistant")
    throw Refusal(400, "a message's \"role\" must be \"user\" or \"assistant\"");
  Json message = {{"role", role}, {"content", ""}};
  const Json* content = find_field(given, "content");
  bool says = true;
  std::vector<size_t> marked;  // bytes of the message's content up to each mark
  if (content && content->is_array()) {
    const size_t before = messages.size();
    for (const Json& block : *content) {
      const size_t results = messages.size();
      add_block(block, message, messages);
      if (!is_marked(block)) continue;
      if (messages.size() > results)
        task.marks.push_back({messages.size(), content_bytes(messages.back())});
      else
        marked.push_back(content_bytes(message));  // results that follow come before the message
    }
    const bool results = messages.size() > before;
    says = !results || !message["content"].get_ref<const std::string&>().empty() ||
           message.contains("tool_calls");
  } else {
    message["content"] = content ? content_text(*content) : "";
  }
  if (!says) return;
  messages.push_back(std::move(message));
  for (const size_t bytes : marked) task.marks.push_back({messages.size(), bytes});
}

Json function_tool(const Json& tool) {
  if (!tool.is_object()) throw Refusal(400, "each of \"tools\" must be an object");
  const std::string* type = text_field(tool, "type");
  if (type && *type != "custom")
    throw Refusal(400,
                  "a tool of type \"" + *type + "\" is not supported; each must have an \"input_schema\"");
  Json function = {{"name", needed_text(tool, "name")}};
  if (const std::string* description = text_field(tool, "description"))
    function["description"] = *description;
  const Json* schema = object_field(tool, "input_schema");
  function["parameters"] = schema ? *schema : Json::object();
  if (const auto strict = bool_field(tool, "strict")) function["strict"] = *strict;
  return {{"type", "function"}, {"function", function}};
}

void read_message_tools(const Json& body, Task& task) {
  const Json* choice = object_field(body, "tool_choice");
  const std::string kind = choice ? needed_text(*choice, "type") : "auto";
  if (kind != "auto" && kind != "none" && kind != "any" && kind != "tool")
    throw Refusal(400, "\"tool_choice\" must be of type \"auto\", \"none\", \"any\" or \"tool\"");
  task.must_call = kind == "any" || kind == "tool";
  if (kind == "tool")
    task.only_tool = needed_text(*choice, "name");
  else if (choice && find_field(*choice, "name"))
    throw Refusal(400, "\"tool_choice\" has a \"name\" only if its type is \"tool\"");
  if (choice) {
    refuse_unknown(*choice, {kChoiceRead});
    task.one_call = bool_field(*choice, "disable_parallel_tool_use").value_or(false);
  }
  const Json* tools = array_field(body, "tools");
  if (tools && !tools->empty() && kind != "none") {
    task.tools = Json::array();
    for (const Json& tool : *tools) task.tools.push_back(function_tool(tool));
  }
  check_must_call(task);
}

// The variables that tell chat templates how much the model is to think.
Json message_variables(const Json& body) {
  Json variables = Json::object();
  if (const Json* thinking = object_field(body, "thinking")) {
    refuse_unknown(*thinking, {kThinkingRead});
    refuse_unless_neutral(*thinking, "display", "summarized");
    const std::string& type = needed_text(*thinking, "type");
    if (type != "enabled" && type != "disabled" && type != "adaptive")
      throw Refusal(400, "\"thinking\" must be of type \"enabled\", \"adaptive\" or \"disabled\"");
    variables["enable_thinking"] = type != "disabled";
  }
  if (const Json* config = object_field(body, "output_config")) {
    refuse_unknown(*config, {kConfigRead});
    if (const std::string* effort = text_field(*config, "effort")) variables["reasoning_effort"] = *effort;
  }
  return variables.empty() ? Json() : variables;
}

// The format of the answer, of which there are two places: the older one is "output_format".
Form message_form(const Json& body) {
  const Json* config = object_field(body, "output_config");
  const Json* format = config ? object_field(*config, "format") : nullptr;
  if (!format) format = object_field(body, "output_format");
  if (!format) return {};
  const std::string* type = text_field(*format, "type");
  const Json* schema = find_field(*format, "schema");
  if (!type || *type != "json_schema" || !schema)
    throw Refusal(400, "the format of an answer must be of type \"json_schema\" with a \"schema\"");
  return schema_form(*schema, "schema");
}

// The only supported edit is to clear thoughts of earlier turns, which the chat template may drop anyway.
// Nothing else of a conversation is dropped.
void check_context_management(const Json& body) {
  const Json* management = object_field(body, "context_management");
  const Json* edits = management ? array_field(*management, "edits") : nullptr;
  for (const Json& edit : edits ? *edits : Json::array()) {
    const std::string* type = edit.is_object() ? text_field(edit, "type") : nullptr;
    if (!type || type->rfind("clear_thinking", 0) != 0)
      throw Refusal(400, "an edit of \"context_management\" is not supported unless it clears thinking");
  }
}

// The three kinds of input tokens add up to the prompt.
Json message_usage(const Usage& usage) {
  return {{"input_tokens", usage.prompt - usage.cached - usage.saved},
          {"cache_creation_input_tokens", usage.saved},
          {"cache_read_input_tokens", usage.cached},
          {"output_tokens", usage.generated}};
}

class Message : public AnswerWriter {
 public:
  Message(const Identity& who, const Asked& asked)
      : stream_(asked.stream),
        who_(who),
        one_call_(asked.task.one_call),
        filter_(asked.task.opening, asked.task.tools) {}

  std::string begin(const Usage& usage) override {
    if (!stream_) return "";
    return event("message_start", {{"message", whole(nullptr, nullptr, usage)}});
  }

  std::string piece(const Piece& piece) override { return add(filter_.push(piece.text)); }

  std::string end(Ending ending, const std::string& stop, const Usage& usage) override {
    std::string out = add(filter_.finish()) + close_block();
    const char* reason = calls_                        ? "tool_use"
                         : ending == Ending::kStopText ? "stop_sequence"
                         : ending == Ending::kLength   ? "max_tokens"
                                                       : "end_turn";
    const Json stopped = ending == Ending::kStopText ? Json(stop) : Json();
    if (!stream_) {
      // Arguments are inserted as they were written, because their numbers may be too large for a Json.
      const std::string kNone = "\"content\":[]";
      std::string message = write_json(whole(reason, stopped, usage)), content = "\"content\":[";
      for (const std::string& block : blocks_) content += (content.back() == '[' ? "" : ",") + block;
      return message.replace(message.find(kNone), kNone.size(), content + "]");
    }
    out += event("message_delta", {{"delta", {{"stop_reason", reason}, {"stop_sequence", stopped}}},
                                   {"usage", message_usage(usage)}});
    return out + event("message_stop", Json::object());
  }

  std::string failure(const Refusal& refusal) override {
    return "event: error\ndata: " + anthropic_error(refusal) + "\n\n";
  }

 private:
  static std::string event(const char* type, const Json& fields) {
    Json data = {{"type", type}};
    data.update(fields);
    return "event: " + std::string(type) + "\ndata: " + write_json(data) + "\n\n";
  }

  // The message without its content.
  Json whole(const Json& reason, const Json& stop, const Usage& usage) const {
    return {{"id", "msg_" + who_.id},   {"type", "message"},
            {"role", "assistant"},      {"model", who_.model},
            {"content", Json::array()}, {"stop_reason", reason},
            {"stop_sequence", stop},    {"usage", message_usage(usage)}};
  }

  // Begins a content block, which is sent as `block`.
  std::string open_block(const Json& block) {
    open_ = block;
    return stream_ ? event("content_block_start", {{"index", blocks_.size()}, {"content_block", block}}) : "";
  }
  std::string close_block() {
    if (open_.is_null()) return "";
    const std::string end = stream_ ? event("content_block_stop", {{"index", blocks_.size()}}) : "";
    blocks_.push_back(write_json(open_));
    open_ = nullptr;
    return end;
  }
  std::string delta(const Json& delta) const {
    return stream_ ? event("content_block_delta", {{"index", blocks_.size()}, {"delta", delta}}) : "";
  }

  std::string add(const std::vector<Part>& parts) {
    std::string out;
    for (const Part& part : parts) {
      if (part.is_call())
        out += add_call(part);
      else if (part.kind == Part::Kind::kThought)
        out += add_words(part.text, "thinking", {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      else
        out += add_words(part.text, "text", {{"type", "text"}, {"text", ""}});
    }
    return out;
  }

  // Adds words to a block of this type. A new block begins as `empty`.
  std::string add_words(const std::string& words, const char* type, const Json& empty) {
    std::string out;
    if (open_.is_null() || open_["type"] != type) {
      out = close_block();
      out += open_block(empty);
    }
    open_[type].get_ref<std::string&>() += words;
    return out + delta({{"type", type + std::string("_delta")}, {type, words}});
  }

  std::string add_call(const Part& part) {
    if (one_call_ && calls_) return "";
    std::string out = close_block();
    out += open_block({{"type", "tool_use"},
                       {"id", call_id(who_, calls_++)},
                       {"name", part.name},
                       {"input", Json::object()}});
    out += delta({{"type", "input_json_delta"}, {"partial_json", part.arguments}});
    out += close_block();
    std::string& block = blocks_.back();
    block.replace(block.size() - 3, 2, part.arguments);  // replaces the {} of {..., "input": {}}
    return out;
  }

  const bool stream_;
  const Identity who_;
  const bool one_call_;
  AnswerFilter filter_;
  std::vector<std::string> blocks_;  // the complete blocks
  Json open_;                        // the incomplete block; null: none
  size_t calls_ = 0;
};

}  // namespace

Asked read_message_to_count(const Json& body) {
  refuse_unknown(body, {kMessageRead, kMessageHarmless});
  Asked asked;
  Task& task = asked.task;
  const Json& messages = messages_field(body);
  task.messages = Json::array();
  if (const Json* system = find_field(body, "system")) {
    task.messages.push_back({{"role", "system"}, {"content", content_text(*system)}});
    size_t bytes = 0;
    for (const Json& block : system->is_array() ? *system : Json::array()) {
      bytes += needed_text(block, "text").size();
      if (is_marked(block)) task.marks.push_back({1, bytes});
    }
  }
  for (const Json& message : messages) add_message(message, task);
  constexpr size_t kMostMarks = 4;  // as in Anthropic's API
  if (task.marks.size() > kMostMarks) task.marks.erase(task.marks.begin(), task.marks.end() - kMostMarks);
  if (task.messages.back()["role"] == "assistant") go_on_with_last(task);
  read_message_tools(body, task);
  task.variables = message_variables(body);
  task.form = message_form(body);
  check_context_management(body);
  return asked;
}

Asked read_message(const Json& body) {
  Asked asked = read_message_to_count(body);
  Task& task = asked.task;
  task.max_tokens = integer_field(body, "max_tokens", 1, int64_t{1} << 30);
  if (!task.max_tokens) throw Refusal(400, "\"max_tokens\" is missing");
  task.temperature = number_field(body, "temperature", 0, 1);
  task.top_p = number_field(body, "top_p", 0, 1);
  if (const auto top_k = integer_field(body, "top_k", 0, INT32_MAX))
    task.top_k = static_cast<uint32_t>(*top_k);
  task.stops = stops_field(body, "stop_sequences");
  asked.stream = bool_field(body, "stream").value_or(false);
  return asked;
}

std::unique_ptr<AnswerWriter> write_message(const Identity& who, const Asked& asked) {
  return std::make_unique<Message>(who, asked);
}

std::string anthropic_error(const Refusal& refusal) {
  const int status = refusal.status;
  const char* type = status == 401                    ? "authentication_error"
                     : status == 403                  ? "permission_error"
                     : status == 404                  ? "not_found_error"
                     : status == 413                  ? "request_too_large"
                     : status == 429                  ? "rate_limit_error"
                     : status == 503 || status == 529 ? "overloaded_error"
                     : status >= 500                  ? "api_error"
                                                      : "invalid_request_error";
  return write_json({{"type", "error"}, {"error", {{"type", type}, {"message", refusal.what()}}}});
}

}  // namespace app::serve
