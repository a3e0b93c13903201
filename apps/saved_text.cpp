// Implements saved_text.h.
#include "apps/saved_text.h"

#include <algorithm>
#include <cstdio>
#include <span>
#include <vector>

#include "apps/fnv1a.h"
#include "apps/generation.h"
#include "apps/sizes.h"

namespace app {

namespace {

// The note in a session file about the tokens that the session has read or queued. It has the last tokens
// themselves, and for each earlier block the hash of this block and all blocks before it. So the size of a
// file does not grow with the text, and the first difference is found exactly in the range in which the
// session may be taken back.
struct TokenNote {
  static constexpr size_t kBlock = 1 << 16;  // tokens
  std::vector<uint64_t> blocks;
  std::vector<int32_t> last;  // fewer than two blocks of tokens

  uint64_t size() const { return blocks.size() * kBlock + last.size(); }
  void add(std::span<const int32_t> ids) {
    for (const int32_t id : ids) {
      last.push_back(id);
      if (last.size() < 2 * kBlock) continue;
      uint64_t hash = blocks.empty() ? kFnv1aBasis : blocks.back();
      for (size_t i = 0; i < kBlock; ++i) hash = fnv1a(hash, static_cast<uint32_t>(last[i]));
      blocks.push_back(hash);
      last.erase(last.begin(), last.begin() + kBlock);
    }
  }
  // The number of leading tokens that are certainly the same.
  uint64_t common(const TokenNote& other) const {
    const auto apart = std::mismatch(blocks.begin(), blocks.end(), other.blocks.begin(), other.blocks.end());
    const auto same = static_cast<uint64_t>(apart.first - blocks.begin());
    if (same < blocks.size() || same < other.blocks.size()) return same * kBlock;
    const auto end = std::mismatch(last.begin(), last.end(), other.last.begin(), other.last.end()).first;
    return same * kBlock + static_cast<uint64_t>(end - last.begin());
  }
};

// The note of the first `count` tokens of a prompt, or of all tokens if it has fewer.
TokenNote note_of(const Prompt& prompt, uint64_t count) {
  TokenNote note;
  prompt.each(0, [&](std::span<const int32_t> ids) {
    note.add(ids.first(std::min<uint64_t>(ids.size(), count - note.size())));
    return note.size() < count;
  });
  return note;
}

TokenNote saved_note(const std::string& path) {
  const Json json = Json::parse(session_note(path), nullptr, false);
  const auto numbers = [&](const char* name) {
    return json[name].is_array() && std::all_of(json[name].begin(), json[name].end(), [](const Json& number) {
             return number.is_number_integer();
           });
  };
  if (!json.is_object() || !json.contains("tokens") || !numbers("tokens") ||
      (json.contains("blocks") && !numbers("blocks")))
    throw Failure(THIMBLE_FORMAT, path + " was not saved by 'thimble run --session'; name another file");
  TokenNote note;
  if (json.contains("blocks")) note.blocks = json["blocks"].get<std::vector<uint64_t>>();
  note.add(json["tokens"].get<std::vector<int32_t>>());
  return note;
}

}  // namespace

uint64_t take_up(const Session& session, const std::string& path, const Prompt& prompt, uint64_t count) {
  const TokenNote saved = saved_note(path);
  restore_session(session, path);
  uint64_t same = std::min(saved.common(note_of(prompt, saved.size())), count);
  if (same < saved.size()) {  // for example, the end of an earlier question: it is taken back if that is
                              // still possible
    same = std::min(same, prompt.size() - 1);
    if (thimble_session_rewind(session.get(), same, nullptr) != THIMBLE_OK)
      throw Failure(THIMBLE_MISMATCH,
                    path + " holds another text: it differs from token " + std::to_string(same) +
                        " on, and what stood there is no longer held; give the text that it was saved with, "
                        "to which you may append, or name another file");
  }
  std::fprintf(stderr, "thimble: %s holds %s tokens of the text, %s are left to read\n", path.c_str(),
               format_count(same).c_str(), format_count(count - same).c_str());
  return same;
}

void save_text(const Session& session, const std::string& path, const Prompt& prompt) {
  const TokenNote note = note_of(prompt, stats(session).position);
  Json json = {{"tokens", note.last}};
  if (!note.blocks.empty()) json["blocks"] = note.blocks;
  save_session(session, path, json.dump());
}

}  // namespace app
