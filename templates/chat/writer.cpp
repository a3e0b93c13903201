#include "templates/chat/writer.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <utility>

#include "templates/chat/adapt.h"
#include "templates/jinja/json.h"
#include "text/tokenizer.h"

namespace thimble {
namespace {

using jinja::Dict;
using jinja::Heap;
using jinja::List;
using jinja::None;
using jinja::Value;

jinja::Text name_of(std::string_view text) { return std::make_shared<const std::string>(text); }

Result<Value> message_value(Heap& heap, std::string_view role, std::string_view content) {
  THIMBLE_LET(message, heap.dict());
  THIMBLE_LET(role_text, heap.text(std::string(role)));
  THIMBLE_LET(content_text, heap.text(std::string(content)));
  THIMBLE_TRY(heap.set(*message, name_of("role"), role_text));
  THIMBLE_TRY(heap.set(*message, name_of("content"), content_text));
  return Value(message);
}

// The messages as templates read them: a list of dicts.
Result<List*> message_list(Heap& heap, const Conversation& c) {
  if (c.messages_json.empty()) {
    THIMBLE_LET(all, heap.list());
    for (const ChatMessage& m : c.messages) {
      THIMBLE_LET(message, message_value(heap, m.role, m.content));
      THIMBLE_TRY(heap.append(*all, message));
    }
    return all;
  }
  THIMBLE_LET(read, jinja::read_json(heap, c.messages_json, "the messages' JSON"));
  List* const* all = jinja::as<List*>(read);
  const bool objects = all && std::all_of((*all)->items.begin(), (*all)->items.end(),
                                          [](const Value& item) { return jinja::is<Dict*>(item); });
  if (!objects)
    return error(
        Code::kInvalidArgument,
        "the messages' JSON is not an array of objects; write [{\"role\": \"user\", \"content\": \"...\"}]");
  return *all;
}

Status add_variables(Heap& heap, const Conversation& c, Dict& to) {
  if (c.variables_json.empty()) return {};
  THIMBLE_LET(read, jinja::read_json(heap, c.variables_json, "the variables' JSON"));
  Dict* const* variables = jinja::as<Dict*>(read);
  if (!variables)
    return error(Code::kInvalidArgument,
                 "the variables' JSON is not an object; write {\"enable_thinking\": false} for example");
  for (const auto& [key, value] : (*variables)->items) THIMBLE_TRY(heap.set(to, key, value));
  return {};
}

// Guards every spelled control token in all texts of a value. Members named "role" are left out, because
// templates write control tokens with them.
Status guard_texts(Heap& heap, const Tokenizer& tokenizer, bool but_marks, Value& value) {
  if (const std::string* text = jinja::as_text(value)) {
    if (auto guarded = tokenizer.guard(*text, but_marks)) {
      THIMBLE_LET(made, heap.text(std::move(*guarded)));
      value = made;
    }
  } else if (List* const* list = jinja::as<List*>(value)) {
    for (Value& item : (*list)->items) THIMBLE_TRY(guard_texts(heap, tokenizer, but_marks, item));
  } else if (Dict* const* dict = jinja::as<Dict*>(value)) {
    for (auto& [key, item] : (*dict)->items)
      if (*key != "role") THIMBLE_TRY(guard_texts(heap, tokenizer, but_marks, item));
  }
  return {};
}

bool is_answer(std::string_view role) { return role == "assistant"; }

// Guards the values that do not come from the template: messages, and also tools and documents, which may
// come from third parties.
Status guard_content(Heap& heap, const Tokenizer& tokenizer, List& messages, Dict& variables) {
  for (Value& message : messages.items) {
    const Value* role = (*jinja::as<Dict*>(message))->find("role");
    const std::string* name = role ? jinja::as_text(*role) : nullptr;
    // The marks between the parts of an answer are part of its text and must become tokens again.
    THIMBLE_TRY(guard_texts(heap, tokenizer, name && is_answer(*name), message));
  }
  for (const char* key : {"tools", "documents"})
    if (Value* value = variables.find(key)) THIMBLE_TRY(guard_texts(heap, tokenizer, false, *value));
  return {};
}

std::string_view token_text(const Tokenizer& tokenizer, int32_t id) {
  return id < 0 ? "" : tokenizer.text(id);
}

// A template works on copies of its input, so its limits grow with the input.
jinja::Limits limits_for(const Conversation& c) {
  uint64_t given = c.messages_json.size() + c.variables_json.size();
  for (const ChatMessage& m : c.messages) given += m.content.size();
  jinja::Limits limits;
  limits.steps += 16 * given;
  limits.bytes += 64 * given;
  limits.output += 16 * given;
  return limits;
}

// Runs a writer's template over the messages of a conversation.
class Run {
 public:
  Run(const jinja::Template& chat, const Conversation& c, const Tokenizer& tokenizer)
      : chat_(chat), c_(c), tokenizer_(tokenizer) {}

  // Writes the messages; adapts them first if the template does not accept them as they are.
  Result<std::string> write();

 private:
  // Writes the messages, and adapts their calls if the template refuses them.
  Result<std::string> adapted();
  Result<std::string> once() const {
    return c_.continues || c_.held ? continuation() : render({}, 0, c_.add_assistant);
  }
  // The text after the last answer that is in the context.
  Result<std::string> continuation() const;
  bool drops_system() const;
  bool needs_none() const;
  ThoughtPlace thought_place() const;
  bool gives_calls() const { return c_.messages_json.find("\"tool_call") != std::string_view::npos; }
  // The text of the first `count` messages (0: of all). The last answer that is in the context is replaced by
  // `mark`.
  Result<std::string> render(std::string_view mark, uint64_t count, bool add_assistant) const;
  Status replace_answer(Heap& heap, List& messages, std::string_view mark) const;
  uint64_t held() const { return c_.continues ? 2 : c_.held; }
  // The end of the end-of-turn token in the text after an answer; 0 if there is none.
  size_t end_of_turn(std::string_view after) const;

  const jinja::Template& chat_;
  const Conversation& c_;
  const Tokenizer& tokenizer_;
  bool fold_system_ = false, drop_empty_content_ = false, shorten_ids_ = false, join_thoughts_ = false,
       write_arguments_ = false;
  ThoughtPlace thoughts_ = ThoughtPlace::kFields;
};

// Whether the template refuses or omits system messages, found out with a small conversation.
bool Run::drops_system() const {
  constexpr std::string_view kMark = "the system";
  const auto small = [&](std::vector<ChatMessage> messages) {
    Conversation c;
    c.messages = std::move(messages);
    c.add_assistant = true;
    c.now = c_.now;
    return Run(chat_, c, tokenizer_).render({}, 0, true);
  };
  const auto with = small({{"system", kMark}, {"user", "?"}});
  if (with.ok() && with->find(kMark) != std::string::npos) return false;
  return small({{"user", "?"}}).ok();  // otherwise the template needs variables, and the answer is unknown
}

// Whether the template omits calls next to an empty content and writes them next to none.
bool Run::needs_none() const {
  Conversation c;
  c.messages_json =
      R"([{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "the_call", "arguments": {}}}]}])";
  c.now = c_.now;
  for (const bool none : {false, true}) {
    Run run(chat_, c, tokenizer_);
    run.drop_empty_content_ = none;
    const auto text = run.adapted();
    if (text.ok() && text->find("the_call") != std::string::npos) return none;
  }
  return false;
}

// Finds out with a small conversation where the template reads thoughts. If it drops them: in fields.
ThoughtPlace Run::thought_place() const {
  constexpr std::string_view kMark = "the thought";
  Conversation c;
  c.messages_json =
      R"([{"role": "user", "content": "?"}, {"role": "assistant", "content": "the answer",
        "reasoning_content": "the thought", "reasoning": "the thought", "thinking": "the thought"}])";
  c.now = c_.now;
  for (const ThoughtPlace place : {ThoughtPlace::kFields, ThoughtPlace::kChunks, ThoughtPlace::kBlocks}) {
    Run run(chat_, c, tokenizer_);
    run.thoughts_ = place;
    const auto text = run.once();
    const size_t at = text.ok() ? text->find(kMark) : std::string::npos;
    // A template that knows no parts writes the list itself, with quotes around its texts.
    const bool quoted =
        at != std::string::npos && at > 0 && ((*text)[at - 1] == '\'' || (*text)[at - 1] == '"');
    if (at != std::string::npos && !quoted) return place;
  }
  return ThoughtPlace::kFields;
}

Result<std::string> Run::write() {
  const bool system = c_.messages_json.find("\"system\"") != std::string_view::npos ||
                      std::any_of(c_.messages.begin(), c_.messages.end(),
                                  [](const ChatMessage& m) { return m.role == "system"; });
  fold_system_ = system && drops_system();
  drop_empty_content_ = gives_calls() && needs_none();
  if (c_.messages_json.find("\"thinking\"") != std::string_view::npos) thoughts_ = thought_place();
  return adapted();
}

Result<std::string> Run::adapted() {
  auto text = once();
  for (bool Run::*adapts : {&Run::shorten_ids_, &Run::join_thoughts_, &Run::write_arguments_}) {
    if (text.ok() || text.status().code() != Code::kInvalidArgument || !gives_calls()) break;
    this->*adapts = true;
    if (auto again = once(); again.ok()) return again;
  }
  return text;
}

Status Run::replace_answer(Heap& heap, List& messages, std::string_view mark) const {
  if (c_.continues) {  // an example exchange stands for the messages that are not given
    THIMBLE_LET(question, message_value(heap, "user", "?"));
    THIMBLE_LET(answer, message_value(heap, "assistant", ""));
    messages.items.insert(messages.items.begin(), {question, answer});
  }
  if (messages.items.size() < held())
    return error(Code::kInvalidArgument,
                 "there are %zu messages, fewer than the number that is said to be in the context",
                 messages.items.size());
  Dict& answer = **jinja::as<Dict*>(messages.items[held() - 1]);
  const Value* role = answer.find("role");
  if (!role || !jinja::as_text(*role) || *jinja::as_text(*role) != "assistant")
    return error(Code::kInvalidArgument, "the last message that is in the context must be the assistant's");
  for (const char* name : {"reasoning_content", "reasoning", "thinking"})  // thoughts precede the content
    if (Value* thoughts = answer.find(name)) *thoughts = jinja::make_text("");
  THIMBLE_LET(content, heap.text(std::string(mark)));
  return heap.set(answer, name_of("content"), content);
}

Result<std::string> Run::render(std::string_view mark, uint64_t count, bool add_assistant) const {
  Heap heap(limits_for(c_));
  THIMBLE_LET(variables, heap.dict());
  THIMBLE_LET(messages, message_list(heap, c_));
  if (!mark.empty()) THIMBLE_TRY(replace_answer(heap, *messages, mark));
  if (count) messages->items.resize(count);
  if (fold_system_) THIMBLE_TRY(thimble::fold_system(heap, *messages));
  if (drop_empty_content_) THIMBLE_TRY(thimble::drop_empty_content(heap, *messages));
  if (shorten_ids_) THIMBLE_TRY(thimble::shorten_ids(heap, *messages));
  if (join_thoughts_) THIMBLE_TRY(thimble::join_thoughts(heap, *messages));
  if (write_arguments_) THIMBLE_TRY(thimble::write_arguments(heap, *messages));
  THIMBLE_TRY(thimble::place_thoughts(heap, *messages, thoughts_));
  const Value bos = jinja::make_text(token_text(tokenizer_, tokenizer_.bos()));
  const Value eos = jinja::make_text(token_text(tokenizer_, tokenizer_.eos()));
  THIMBLE_TRY(heap.set(*variables, name_of("messages"), messages));
  THIMBLE_TRY(heap.set(*variables, name_of("bos_token"), bos));
  THIMBLE_TRY(heap.set(*variables, name_of("eos_token"), eos));
  // Published templates expect these names to be defined even without values.
  THIMBLE_TRY(heap.set(*variables, name_of("tools"), None()));
  THIMBLE_TRY(heap.set(*variables, name_of("documents"), None()));
  THIMBLE_TRY(heap.set(*variables, name_of("add_generation_prompt"), add_assistant));
  THIMBLE_TRY(add_variables(heap, c_, *variables));
  if (!c_.parses_content) THIMBLE_TRY(guard_content(heap, tokenizer_, *messages, *variables));
  auto text = chat_.render(heap, *variables, c_.now);
  THIMBLE_TRY(text);
  const std::string& beginning = *jinja::as_text(bos);
  if (tokenizer_.adds_bos() && text->starts_with(beginning)) text->erase(0, beginning.size());
  return text;
}

size_t Run::end_of_turn(std::string_view after) const {
  for (const Token& token : tokenizer_.tokenize(after, false, true))
    if (tokenizer_.ends_generation(token.id)) return token.offset + tokenizer_.text(token.id).size();
  return 0;
}

Result<std::string> Run::continuation() const {
  // Templates treat earlier turns differently: some drop their thoughts, some write them in another way when
  // they are not last. So we render twice, with the answer replaced by two different texts. The common end of
  // both renderings is the text after the answer, whatever precedes it.
  constexpr std::string_view kOne = "one", kTwo = "two words";
  THIMBLE_LET(one, render(kOne, 0, c_.add_assistant));
  THIMBLE_LET(two, render(kTwo, 0, c_.add_assistant));
  const auto differs = std::mismatch(one.rbegin(), one.rend(), two.rbegin(), two.rend()).first;
  const auto length = static_cast<size_t>(differs - one.rbegin());
  const std::string_view before = std::string_view(one).substr(0, one.size() - length);
  const std::string after = one.substr(one.size() - length);
  // What the template writes after a final answer. The end-of-turn token at its start is generated by the
  // model.
  THIMBLE_LET(alone, render(kOne, held(), false));
  const size_t answer = alone.rfind(kOne);
  if (answer == std::string::npos || !before.ends_with(kOne))
    return error(
        Code::kUnsupported,
        "the chat template writes the whole conversation anew after each answer, so nothing that could "
        "follow the context is known; begin afresh with all messages");
  const std::string_view closing = std::string_view(alone).substr(answer + kOne.size());
  const auto apart = std::mismatch(closing.begin(), closing.end(), after.begin(), after.end()).first;
  const size_t shared = static_cast<size_t>(apart - closing.begin());
  return after.substr(end_of_turn(closing.substr(0, shared)));
}

// For known formats: roles and contents of messages given as JSON, without thoughts. The texts belong to the
// heap.
Result<std::vector<ChatMessage>> plain_messages(Heap& heap, const Conversation& c) {
  if (c.messages_json.empty()) return c.messages;
  THIMBLE_LET(all, message_list(heap, c));
  std::vector<ChatMessage> messages;
  for (const Value& item : all->items) {
    Dict& message = **jinja::as<Dict*>(item);
    const Value *role = message.find("role"), *content = message.find("content");
    const auto known = static_cast<
        size_t>(std::count_if(message.items.begin(), message.items.end(), [](const auto& field) {
      constexpr std::string_view kKnown[] = {"role", "content", "reasoning_content", "reasoning", "thinking"};
      return std::find(std::begin(kKnown), std::end(kKnown), *field.first) != std::end(kKnown);
    }));
    if (message.items.size() != known || !role || !content || !jinja::as_text(*role) ||
        !jinja::as_text(*content))
      return error(
          Code::kInvalidArgument,
          "a known chat format takes messages with only \"role\" and \"content\", both of them texts");
    messages.push_back({*jinja::as_text(*role), *jinja::as_text(*content)});
  }
  return messages;
}

Result<std::string> write_format(ChatFormat format, const Conversation& c, const Tokenizer& tokenizer) {
  if (!c.variables_json.empty())
    return error(Code::kInvalidArgument,
                 "the chat format %s takes no variables; only a template that is run does",
                 chat_format_name(format));
  Heap heap(limits_for(c));
  THIMBLE_LET(messages, plain_messages(heap, c));
  if (messages.size() < c.held)
    return error(Code::kInvalidArgument,
                 "there are %zu messages, fewer than the number that is said to be in the context",
                 messages.size());
  messages.erase(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(c.held));
  std::deque<std::string> guarded;
  for (ChatMessage& m : messages) {
    if (c.parses_content) break;
    if (auto text = tokenizer.guard(m.content, is_answer(m.role)))
      m.content = guarded.emplace_back(std::move(*text));
  }
  return format_chat(format, messages, c.add_assistant, !c.continues && c.held == 0);
}

}  // namespace

ChatWriter ChatWriter::choose(std::string_view source) {
  ChatWriter writer;
  if (source.empty()) {
    writer.problem_ = "the model's file has no chat template";
    return writer;
  }
  auto parsed = jinja::Template::parse(source);
  if (parsed.ok()) {
    writer.template_ = *parsed;
    return writer;
  }
  writer.problem_ = "the model's chat template cannot be run: " + parsed.status().message();
  if (const auto known = recognise_chat_format(source); known.ok()) writer.format_ = *known;
  return writer;
}

Result<ChatWriter> ChatWriter::from_source(std::string_view source) {
  auto parsed = jinja::Template::parse(source);
  if (!parsed.ok())
    return error(parsed.status().code(), "the chat template cannot be run: %s",
                 parsed.status().message().c_str());
  ChatWriter writer;
  writer.template_ = *parsed;
  return writer;
}

Result<ChatWriter> ChatWriter::from_name(std::string_view name) {
  THIMBLE_LET(format, find_chat_format(name));
  ChatWriter writer;
  writer.format_ = format;
  return writer;
}

const char* ChatWriter::format_name() const {
  return template_ ? "jinja" : format_ ? chat_format_name(*format_) : "";
}

Result<std::string> ChatWriter::write(const Conversation& c, const Tokenizer& tokenizer) const {
  if (c.continues && c.held)
    return error(Code::kInvalidArgument,
                 "earlier messages are in the context or the first of the given ones are, not both");
  if (template_) {
    return Run(*template_, c, tokenizer).write();
  }
  if (format_) return write_format(*format_, c, tokenizer);
  std::string names;
  for (const char* name : chat_format_names()) names += (names.empty() ? "" : ", ") + std::string(name);
  return error(Code::kUnsupported, "%s; name a format (%s) or a file of Jinja with --chat-template",
               problem_.c_str(), names.c_str());
}

}  // namespace thimble
