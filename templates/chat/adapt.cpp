#include "templates/chat/adapt.h"

#include "base/fnv1a.h"
#include "templates/jinja/json.h"

namespace thimble {
namespace {

using jinja::Dict;
using jinja::Heap;
using jinja::List;
using jinja::Value;

// The text of a member; "" if it is missing or not a text.
std::string text_of(Dict& message, std::string_view name) {
  const Value* value = message.find(name);
  const std::string* text = value ? jinja::as_text(*value) : nullptr;
  return text ? *text : "";
}

Status set_text(Heap& heap, Dict& message, std::string_view name, std::string text) {
  THIMBLE_LET(value, heap.text(std::move(text)));
  return heap.set(message, std::make_shared<const std::string>(name), value);
}

// Appends a part of an answer, {"type": TYPE, NAME: TEXT}, unless the text is empty.
Status append_part(Heap& heap, List& parts, std::string_view type, std::string_view name, std::string text) {
  if (text.empty()) return {};
  THIMBLE_LET(part, heap.dict());
  THIMBLE_TRY(set_text(heap, *part, "type", std::string(type)));
  THIMBLE_TRY(set_text(heap, *part, name, std::move(text)));
  return heap.append(parts, part);
}

// The calls of a message; null if it has none.
List* calls_of(Dict& message) {
  const Value* calls = message.find("tool_calls");
  List* const* list = calls ? jinja::as<List*>(*calls) : nullptr;
  return list && !(*list)->items.empty() ? *list : nullptr;
}

constexpr std::string_view kDigits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
constexpr size_t kIdLength = 9;

std::string short_id(const std::string& id) {
  if (id.size() == kIdLength && id.find_first_not_of(kDigits) == std::string::npos) return id;
  uint64_t hash = fnv1a(id);
  std::string out;
  for (; out.size() < kIdLength; hash /= kDigits.size()) out += kDigits[hash % kDigits.size()];
  return out;
}

}  // namespace

Status fold_system(Heap& heap, List& messages) {
  std::vector<Value> folded;
  std::string system;
  std::vector<Value> waiting;  // the messages that `system` was collected from
  for (const Value& item : messages.items) {
    Dict& message = **jinja::as<Dict*>(item);
    const std::string role = text_of(message, "role");
    if (role == "system") {
      system += text_of(message, "content") + "\n\n";
      waiting.push_back(item);
      continue;
    }
    const Value* content = message.find("content");
    if (role == "user" && !waiting.empty() && content && jinja::as_text(*content)) {
      THIMBLE_TRY(set_text(heap, message, "content", system + text_of(message, "content")));
      system.clear();
      waiting.clear();
    }
    folded.push_back(item);
  }
  folded.insert(folded.end(), waiting.begin(), waiting.end());
  messages.items = std::move(folded);
  return {};
}

Status shorten_ids(Heap& heap, List& messages) {
  for (const Value& item : messages.items) {
    Dict& message = **jinja::as<Dict*>(item);
    if (text_of(message, "role") == "tool")
      THIMBLE_TRY(set_text(heap, message, "tool_call_id", short_id(text_of(message, "tool_call_id"))));
    const List* calls = calls_of(message);
    if (!calls) continue;
    for (const Value& call : calls->items) {
      if (Dict* const* fields = jinja::as<Dict*>(call))
        THIMBLE_TRY(set_text(heap, **fields, "id", short_id(text_of(**fields, "id"))));
    }
  }
  return {};
}

Status join_thoughts(Heap& heap, List& messages) {
  for (const Value& item : messages.items) {
    Dict& message = **jinja::as<Dict*>(item);
    const std::string thoughts = text_of(message, "thinking"), content = text_of(message, "content");
    if (!calls_of(message) || thoughts.empty() || content.empty()) continue;
    THIMBLE_TRY(set_text(heap, message, "thinking", thoughts + "\n\n" + content));
    THIMBLE_TRY(set_text(heap, message, "content", ""));
  }
  return {};
}

Status place_thoughts(Heap& heap, List& messages, ThoughtPlace place) {
  const bool blocks = place == ThoughtPlace::kBlocks;
  for (const Value& item : messages.items) {
    Dict& message = **jinja::as<Dict*>(item);
    Value* content = message.find("content");
    const std::string thoughts = text_of(message, "thinking");
    if (text_of(message, "role") != "assistant" || !content || !jinja::as_text(*content)) continue;
    if (place == ThoughtPlace::kFields || (thoughts.empty() && !blocks)) continue;
    THIMBLE_LET(parts, heap.list());
    THIMBLE_TRY(
        append_part(heap, *parts, blocks ? "thoughts" : "thinking", blocks ? "text" : "thinking", thoughts));
    THIMBLE_TRY(append_part(heap, *parts, blocks ? "response" : "text", "text", text_of(message, "content")));
    *content = parts;
    if (!blocks) continue;
    THIMBLE_LET(all, heap.dict());
    THIMBLE_TRY(heap.set(*all, std::make_shared<const std::string>("blocks"), parts));
    *content = all;
  }
  return {};
}

Status drop_empty_content(Heap&, List& messages) {
  for (const Value& item : messages.items) {
    Dict& message = **jinja::as<Dict*>(item);
    Value* content = message.find("content");
    if (calls_of(message) && content && text_of(message, "content").empty()) *content = jinja::None();
  }
  return {};
}

Status write_arguments(Heap& heap, List& messages) {
  for (const Value& item : messages.items) {
    const List* calls = calls_of(**jinja::as<Dict*>(item));
    if (!calls) continue;
    for (const Value& call : calls->items) {
      Dict* const* fields = jinja::as<Dict*>(call);
      const Value* function = fields ? (*fields)->find("function") : nullptr;
      Dict* const* named = function ? jinja::as<Dict*>(*function) : nullptr;
      const Value* arguments = named ? (*named)->find("arguments") : nullptr;
      if (!arguments || !jinja::is<Dict*>(*arguments)) continue;
      THIMBLE_LET(text, jinja::write_json(heap, *arguments));
      THIMBLE_TRY(set_text(heap, **named, "arguments", text));
    }
  }
  return {};
}

}  // namespace thimble
