// What a slot's session has read (see history.h).
#include "apps/serve/history.h"

#include <algorithm>
#include <string_view>

#include "apps/serve/json.h"

namespace app::serve {

namespace {

std::string_view text_of(const Json& message, const char* name) {
  const auto found = message.find(name);
  return found != message.end() && found->is_string() ? std::string_view(found->get_ref<const std::string&>())
                                                      : "";
}

// The functions and arguments of a message's calls, without the ids, which belong to the wire format.
Json calls_of(const Json& message) {
  Json calls = Json::array();
  const auto found = message.find("tool_calls");
  if (found == message.end()) return calls;
  for (const Json& call : *found) calls.push_back(call.value("function", Json()));
  return calls;
}

// Whether the client returned a message unchanged.
bool same_message(const Json& held, const Json& given) {
  if (text_of(held, "role") != "assistant") return held == given;
  return text_of(given, "role") == "assistant" &&
         // A client may remove the white space around a text.
         stripped(text_of(held, "content")) == stripped(text_of(given, "content")) &&
         calls_of(held) == calls_of(given);
}

}  // namespace

size_t bytes_of(const Json& value) {
  // kBlock: overhead of an allocation; kShort: bytes of a text that fit inside its object.
  constexpr size_t kBlock = 16, kShort = 15;
  const auto outside = [](const std::string& text) {
    return text.size() > kShort ? text.size() + kBlock : 0;
  };
  size_t bytes = sizeof(Json);
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    bytes += kBlock + sizeof text + outside(text);
  } else if (value.is_binary()) {
    bytes += kBlock + sizeof(Json::binary_t) + kBlock + value.get_binary().size();
  } else if (value.is_array()) {
    bytes += 2 * kBlock + sizeof(Json::array_t);
    for (const Json& part : value) bytes += bytes_of(part);
  } else if (value.is_object()) {
    bytes += 2 * kBlock + sizeof(Json::object_t);
    for (const auto& [name, part] : value.items()) bytes += sizeof name + outside(name) + bytes_of(part);
  }
  return bytes;
}

// The last end of a chunk in a prompt of `prompt` tokens that does not depend on where the prompt ends.
uint64_t History::last_border(uint64_t prompt) const {
  return prompt > local_ ? (prompt - local_ - 1) / chunk_ * chunk_ : 0;
}

Reuse History::find(const Prompt& prompt) const {
  Reuse best;
  const auto apart = std::mismatch(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(first_prompt_),
                                   prompt.ids.begin(), prompt.ids.end())
                         .first;
  const auto common = static_cast<uint64_t>(apart - ids_.begin());
  const uint64_t border =
      std::min({common / chunk_ * chunk_, last_border(first_prompt_), last_border(prompt.ids.size())});
  if (border >= floor_) best.position = border;

  if (!prompt.messages.is_array() || prompt.variables != variables_) return best;
  const size_t most = std::min(conversation_.size(), prompt.messages.size());
  size_t same = 0;
  while (same < most && same_message(conversation_[same], prompt.messages[same])) ++same;
  for (const Turn& turn : turns_) {
    if (turn.messages <= same && turn.messages < prompt.messages.size() && turn.position >= floor_)
      best = {turn.position, turn.messages, turn.cut};
  }
  return best;
}

void History::rewind(const Reuse& reuse) {
  ids_.resize(reuse.position);
  answer_ = SIZE_MAX;
  if (!reuse.messages) conversation_ = Json::array();
  first_prompt_ = std::min(first_prompt_, reuse.position);
  while (!turns_.empty() && turns_.back().messages > reuse.messages) turns_.pop_back();
  if (reuse.position == 0) floor_ = 0;
}

void History::add_prompt(const int32_t* ids, size_t count) {
  if (ids_.size() == first_prompt_) first_prompt_ += count;
  ids_.insert(ids_.end(), ids, ids + count);
}

std::vector<std::pair<uint64_t, uint64_t>> History::answers() const {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const Turn& turn : turns_) all.emplace_back(turn.answer, turn.position);
  if (answer_ <= ids_.size() && (all.empty() || all.back().first != answer_))
    all.emplace_back(answer_, ids_.size());
  return all;
}

size_t History::bytes() const {
  return bytes_of(conversation_) + variables_.size() + ids_.size() * sizeof(int32_t) +
         turns_.size() * sizeof(Turn);
}

void History::add_turn(const Prompt& prompt, Json answer, bool cut) {
  if (!prompt.messages.is_array()) return;
  conversation_ = prompt.messages;
  conversation_.push_back(std::move(answer));
  variables_ = prompt.variables;
  turns_.push_back({conversation_.size(), answer_, ids_.size(), cut});
}

}  // namespace app::serve
