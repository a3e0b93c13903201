// What a slot's session has read (see history.h).
#include "apps/serve/history.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "apps/serve/json.h"

namespace app::serve {

namespace {

std::string_view text_of(const Json& message, const char* name) {
  const auto found = message.find(name);
  return found != message.end() && found->is_string() ? std::string_view(found->get_ref<const std::string&>())
                                                      : "";
}

// The functions and arguments of a message's calls, without the ids, which belong to the wire format. Members
// of objects are sorted, because agents return arguments in the order of the tool's schema.
Json calls_of(const Json& message) {
  Json calls = Json::array();
  const auto found = message.find("tool_calls");
  if (found == message.end()) return calls;
  for (const Json& call : *found) calls.push_back(Json(nlohmann::json(call.value("function", Json()))));
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

// The hash of a message after those that gave `hash`: the same for all messages that same_message() takes for
// the same.
uint64_t add_message(uint64_t hash, const Json& message) {
  const bool answer = text_of(message, "role") == "assistant";
  const std::string text =
      answer ? std::string(stripped(text_of(message, "content"))) + write_json(calls_of(message))
             : write_json(message);
  return add_hash(hash, text.data(), text.size() + 1);  // with the zero at its end
}

// A conversation's hashes begin with the hash of the settings and variables, which tells them from hashes of
// tokens.
uint64_t conversation_hash(uint64_t settings, const std::string& variables) {
  return add_hash(add_hash(kFnv1aBasis, &settings, sizeof settings), variables.c_str(), variables.size() + 1);
}

// Numbers at the beginning of the bytes of a history.
struct Saved {
  uint64_t ids, turns, first_prompt, floor;
};
struct SavedTurn {
  uint64_t messages, answer, position, cut;
};

template <typename T>
bool take(std::string_view& bytes, T* values, uint64_t count) {
  if (count > bytes.size() / sizeof(T)) return false;
  if (count) std::memcpy(values, bytes.data(), count * sizeof(T));
  bytes.remove_prefix(count * sizeof(T));
  return true;
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

// Adds the ends of chunks up to `last`.
void History::add_borders(const std::vector<int32_t>& ids, uint64_t last, uint64_t settings,
                          std::vector<StateKey>& keys) const {
  uint64_t hash = add_hash(kFnv1aBasis, &settings, sizeof settings);
  for (uint64_t border = chunk_; border <= last; border += chunk_) {
    hash = add_hash(hash, &ids[border - chunk_], chunk_ * sizeof(int32_t));
    keys.push_back({hash, border, border >= floor_});
  }
}

std::vector<StateKey> History::keys(uint64_t settings) const {
  std::vector<StateKey> keys;
  add_borders(ids_, last_border(first_prompt_), settings, keys);
  uint64_t hash = conversation_hash(settings, variables_);
  size_t message = 0;
  for (const Turn& turn : turns_) {
    while (message < turn.messages) hash = add_message(hash, conversation_[message++]);
    keys.push_back({hash, turn.position, turn.position >= floor_});
  }
  return keys;
}

uint64_t History::reach() const {
  const uint64_t border = last_border(first_prompt_), turn = turns_.empty() ? 0 : turns_.back().position;
  const uint64_t last = std::max(border, turn);
  return last >= floor_ ? last : 0;
}

std::vector<uint64_t> History::hashes(const Prompt& prompt, uint64_t settings) const {
  std::vector<StateKey> borders;
  add_borders(prompt.ids, last_border(prompt.ids.size()), settings, borders);
  std::vector<uint64_t> hashes;
  for (const StateKey& border : borders) hashes.push_back(border.hash);
  if (!prompt.messages.is_array()) return hashes;
  uint64_t hash = conversation_hash(settings, prompt.variables);
  for (size_t i = 0; i + 1 < prompt.messages.size(); ++i) {
    hash = add_message(hash, prompt.messages[i]);
    if (text_of(prompt.messages[i], "role") == "assistant") hashes.push_back(hash);
  }
  return hashes;
}

std::string History::write() const {
  std::string bytes;
  const auto put = [&bytes](const void* data, size_t count) {
    bytes.append(static_cast<const char*>(data), count);
  };
  const Saved saved{ids_.size(), turns_.size(), first_prompt_, floor_};
  put(&saved, sizeof saved);
  put(ids_.data(), ids_.size() * sizeof(int32_t));
  for (const Turn& turn : turns_) {
    const SavedTurn one{turn.messages, turn.answer, turn.position, turn.cut};
    put(&one, sizeof one);
  }
  return bytes + write_json({{"messages", conversation_}, {"variables", variables_}});
}

bool History::read(std::string_view bytes) {
  Saved saved;
  if (!take(bytes, &saved, 1) || saved.ids > bytes.size() / sizeof(int32_t)) return false;
  std::vector<int32_t> ids(saved.ids);
  if (!take(bytes, ids.data(), saved.ids) || saved.turns > bytes.size() / sizeof(SavedTurn)) return false;
  std::vector<SavedTurn> turns(saved.turns);
  if (!take(bytes, turns.data(), saved.turns)) return false;
  Json texts = parse_or_null(bytes);
  if (saved.first_prompt > saved.ids || saved.floor > saved.ids || !texts.is_object() ||
      !texts["messages"].is_array() || !texts["variables"].is_string())
    return false;
  uint64_t messages = 0;
  for (const SavedTurn& turn : turns) {
    if (turn.messages <= messages || turn.messages > texts["messages"].size() || turn.position > saved.ids ||
        turn.answer > turn.position)
      return false;
    messages = turn.messages;
  }
  for (const Json& message : texts["messages"])
    if (const auto calls = message.find("tool_calls"); calls != message.end())
      for (const Json& call : *calls)
        if (!call.is_object()) return false;
  ids_ = std::move(ids);
  first_prompt_ = saved.first_prompt;
  floor_ = saved.floor;
  answer_ = SIZE_MAX;
  conversation_ = std::move(texts["messages"]);
  variables_ = texts["variables"].get<std::string>();
  turns_.clear();
  for (const SavedTurn& turn : turns)
    turns_.push_back({static_cast<size_t>(turn.messages), turn.answer, turn.position, turn.cut != 0});
  return true;
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
