// Anthropic's wire format (see api_anthropic.h).
#include "apps/serve/api_anthropic.h"

#include "apps/serve/filters.h"
#include "apps/serve/json.h"

namespace app::serve {

namespace {

const std::string& needed_text(const Json& object, const char* name) {
  const std::string* text = text_field(object, name);
  if (!text) throw Refusal(400, "\"" + std::string(name) + "\" is missing");
  return *text;
}

// A block of a message: text joins the message's, a call joins its calls, a result becomes a message.
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
    messages.push_back({{"role", "tool"},
                        {"content", content ? content_text(*content) : ""},
                        {"tool_call_id", needed_text(block, "tool_use_id")}});
  } else {
    throw Refusal(400,
                  "a block of \"content\" must be a text, a tool_use or a tool_result; nothing else is read");
  }
}

void add_message(const Json& given, Json& messages) {
  if (!given.is_object()) throw Refusal(400, "each message must be an object");
  const std::string& role = needed_text(given, "role");
  if (role != "user" && role != "assistant")
    throw Refusal(400, "a message's \"role\" must be \"user\" or \"assistant\"");
  Json message = {{"role", role}, {"content", ""}};
  const Json* content = find_field(given, "content");
  bool says = true;
  if (content && content->is_array()) {
    const size_t before = messages.size();
    for (const Json& block : *content) add_block(block, message, messages);
    const bool results = messages.size() > before;
    says = !results || !message["content"].get_ref<const std::string&>().empty() ||
           message.contains("tool_calls");
  } else {
    message["content"] = content ? content_text(*content) : "";
  }
  if (says) messages.push_back(std::move(message));
}

Json function_tool(const Json& tool) {
  if (!tool.is_object()) throw Refusal(400, "each of \"tools\" must be an object");
  Json function = {{"name", needed_text(tool, "name")}};
  if (const std::string* description = text_field(tool, "description"))
    function["description"] = *description;
  const Json* schema = object_field(tool, "input_schema");
  function["parameters"] = schema ? *schema : Json::object();
  return {{"type", "function"}, {"function", function}};
}

void read_message_tools(const Json& body, Task& task) {
  const Json* choice = object_field(body, "tool_choice");
  const std::string kind = choice ? needed_text(*choice, "type") : "auto";
  if (kind != "auto" && kind != "none")
    throw Refusal(
        400, "\"tool_choice\" must be of type \"auto\" or \"none\"; nothing can make the model call a tool");
  const Json* tools = array_field(body, "tools");
  if (!tools || tools->empty() || kind == "none") return;
  task.tools = Json::array();
  for (const Json& tool : *tools) task.tools.push_back(function_tool(tool));
}

class Message : public AnswerWriter {
 public:
  Message(const Identity& who, const Asked& asked)
      : stream_(asked.stream), finds_calls_(!asked.task.tools.is_null()), id_(who.id), model_(who.model) {}

  std::string begin(const Usage& usage) override {
    if (!stream_) return "";
    return event("message_start", {{"message", whole(Json::array(), nullptr, nullptr, usage)}});
  }

  std::string piece(const Piece& piece) override {
    return add(finds_calls_ ? calls_.push(piece.text) : std::vector<Part>{{piece.text, "", ""}});
  }

  std::string end(Ending ending, const std::string& stop, const Usage& usage) override {
    std::string out = add(calls_.finish()) + close_block();
    const char* reason = called_                       ? "tool_use"
                         : ending == Ending::kStopText ? "stop_sequence"
                         : ending == Ending::kLength   ? "max_tokens"
                                                       : "end_turn";
    const Json stopped = ending == Ending::kStopText ? Json(stop) : Json();
    if (!stream_) return write_json(whole(blocks_, reason, stopped, usage));
    out += event("message_delta", {{"delta", {{"stop_reason", reason}, {"stop_sequence", stopped}}},
                                   {"usage", {{"output_tokens", usage.generated}}}});
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

  Json whole(const Json& content, const Json& reason, const Json& stop, const Usage& usage) const {
    return {{"id", "msg_" + id_},
            {"type", "message"},
            {"role", "assistant"},
            {"model", model_},
            {"content", content},
            {"stop_reason", reason},
            {"stop_sequence", stop},
            {"usage",
             {{"input_tokens", usage.prompt - usage.cached},
              {"cache_creation_input_tokens", 0},
              {"cache_read_input_tokens", usage.cached},
              {"output_tokens", usage.generated}}}};
  }

  // `block` as it is shown when it begins.
  std::string open_block(const Json& block) {
    open_ = true;
    return stream_ ? event("content_block_start", {{"index", blocks_.size() - 1}, {"content_block", block}})
                   : "";
  }
  std::string close_block() {
    const bool was_open = std::exchange(open_, false);
    return stream_ && was_open ? event("content_block_stop", {{"index", blocks_.size() - 1}}) : "";
  }
  std::string delta(const Json& delta) const {
    return stream_ ? event("content_block_delta", {{"index", blocks_.size() - 1}, {"delta", delta}}) : "";
  }

  std::string add(const std::vector<Part>& parts) {
    std::string out;
    for (const Part& part : parts) {
      if (part.is_call())
        out += add_call(part);
      else if (!part.text.empty())
        out += add_text(part.text);
    }
    return out;
  }

  std::string add_text(const std::string& text) {
    std::string out;
    if (!open_) {
      blocks_.push_back({{"type", "text"}, {"text", ""}});
      out = open_block(blocks_.back());
    }
    blocks_.back()["text"].get_ref<std::string&>() += text;
    return out + delta({{"type", "text_delta"}, {"text", text}});
  }

  std::string add_call(const Part& part) {
    called_ = true;
    std::string out = close_block();
    Json block = {{"type", "tool_use"},
                  {"id", "toolu_" + id_ + "_" + std::to_string(blocks_.size())},
                  {"name", part.name},
                  {"input", Json::object()}};
    blocks_.push_back(block);
    blocks_.back()["input"] = Json::parse(part.arguments);
    out += open_block(block) + delta({{"type", "input_json_delta"}, {"partial_json", part.arguments}});
    return out + close_block();
  }

  const bool stream_, finds_calls_;
  const std::string id_, model_;
  ToolCallFilter calls_;
  Json blocks_ = Json::array();
  bool open_ = false, called_ = false;
};

}  // namespace

Asked read_message(const Json& body) {
  Asked asked;
  Task& task = asked.task;
  const Json& messages = messages_field(body);
  task.messages = Json::array();
  if (const Json* system = find_field(body, "system"))
    task.messages.push_back({{"role", "system"}, {"content", content_text(*system)}});
  for (const Json& message : messages) add_message(message, task.messages);
  task.max_tokens = integer_field(body, "max_tokens", 1, int64_t{1} << 30);
  if (!task.max_tokens) throw Refusal(400, "\"max_tokens\" is missing");
  read_message_tools(body, task);
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
