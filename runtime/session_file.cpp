#include "runtime/session_file.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <type_traits>

#include "base/byte_reader.h"
#include "base/checksum.h"
#include "text/json.h"

namespace thimble {
namespace {

constexpr char kMagic[8] = {'t', 'h', 'i', 'm', 'b', 'l', 'e', 'S'};
// A version is 1 plus the sum of what the file has in addition: states of recurrent models (SavedStates and
// its lists), and a store of evicted entries (SavedStore and SavedRecall).
constexpr uint32_t kVersion = 1, kWithStates = 1, kWithStore = 2, kNewestVersion = 4;
uint32_t version_of(const SavedSession& s) {
  return kVersion + (s.sequence.state_slot != kNoState ? kWithStates : 0) +
         (s.store_pages.empty() ? 0 : kWithStore);
}
bool has(uint32_t version, uint32_t part) { return ((version - kVersion) & part) != 0; }

struct SavedHead {
  char magic[8];
  uint32_t version, runs;
  uint64_t settings_bytes, waiting, unscored, accepted, note_bytes, body_bytes;
  SequenceNumbers numbers;
  SamplerOptions sampler;
  uint64_t random;
  char held_text[8];
};
struct SavedStates {
  uint64_t snapshots, recent;
};
struct SavedSnapshot {
  uint64_t position, ends_prompt;
};
struct SavedStore {
  uint32_t asking, ahead;
};
struct SavedRecall {
  uint32_t recalled, pages;
};
struct SavedRun {
  uint32_t entries, keep, capacity;
};
// These structs are written as they are in memory. If a size changes, the version must be increased.
static_assert(std::has_unique_object_representations_v<SavedRun> &&
              std::has_unique_object_representations_v<SavedRecall> &&
              std::has_unique_object_representations_v<SavedSnapshot> &&
              std::has_unique_object_representations_v<Sampler::Accepted>);
static_assert(sizeof(SequenceNumbers) == 136 && sizeof(SamplerOptions) == 32 && sizeof(SavedHead) == 248);

template <typename T>
void put(std::string& out, const T* values, size_t count) {
  out.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

// Reads `count` values, if the file has that many.
template <typename T>
bool read_values(ByteReader& in, uint64_t count, std::vector<T>& values) {
  if (count > in.left() / sizeof(T)) return false;
  values.resize(static_cast<size_t>(count));
  if (count) std::memcpy(values.data(), in.at(), values.size() * sizeof(T));
  return in.skip(count * sizeof(T));
}

bool read_states(ByteReader& in, SequenceFields& sequence) {
  SavedStates counts;
  std::vector<SavedSnapshot> snapshots;
  if (!in.read(counts) || !read_values(in, counts.snapshots, snapshots) ||
      !read_values(in, counts.recent, sequence.recent))
    return false;
  for (const SavedSnapshot& s : snapshots)
    sequence.snapshots.push_back(
        {s.position, 0, static_cast<uint32_t>(std::min<uint64_t>(s.ends_prompt, 2))});
  sequence.state_slot = 0;
  return true;
}

bool read_store(ByteReader& in, uint32_t runs, SessionFile& file) {
  SavedStore store;
  std::vector<SavedRecall> all;
  if (!in.read(store) || !read_values(in, runs, all)) return false;
  file.sequence.recalled.resize(all.size());
  file.sequence.asking = store.asking;
  file.sequence.ahead = store.ahead;
  for (size_t i = 0; i < all.size(); ++i) {
    file.sequence.recalled[i] = all[i].recalled;
    file.store_pages.push_back(all[i].pages);
  }
  return true;
}

bool read_settings(std::string_view text, std::vector<NamedSetting>& settings) {
  while (!text.empty()) {
    const size_t end = text.find('\n'), space = text.find(' ');
    if (end == text.npos || space > end) return false;
    settings.push_back(
        {std::string(text.substr(0, space)), std::string(text.substr(space + 1, end - space - 1))});
    text.remove_prefix(end + 1);
  }
  return true;
}

std::string head_of(const SavedSession& s, std::span<const std::byte> note, uint64_t body_bytes) {
  std::string settings;
  for (const NamedSetting& setting : s.settings) settings += setting.name + " " + setting.value + "\n";
  SavedHead head{};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  head.version = version_of(s);
  head.runs = static_cast<uint32_t>(s.pools.size());
  head.settings_bytes = settings.size();
  head.waiting = s.sequence.waiting.size();
  head.unscored = s.sequence.unscored_tokens.size();
  head.accepted = s.sampler.accepted.size();
  head.note_bytes = note.size();
  head.body_bytes = body_bytes;
  head.numbers = s.sequence;
  head.sampler = s.sampler.options;
  head.random = s.sampler.random;
  std::memcpy(head.held_text, s.held_text, sizeof head.held_text);
  std::string bytes;
  put(bytes, &head, 1);
  bytes += settings;
  for (size_t i = 0; i < s.pools.size(); ++i) {
    const SavedRun run{s.sequence.entries[i], s.pools[i].keep, s.pools[i].capacity};
    put(bytes, &run, 1);
  }
  put(bytes, s.sequence.waiting.data(), s.sequence.waiting.size());
  put(bytes, s.sequence.unscored_tokens.data(), s.sequence.unscored_tokens.size());
  if (has(head.version, kWithStates)) {
    const SavedStates counts{s.sequence.snapshots.size(), s.sequence.recent.size()};
    put(bytes, &counts, 1);
    for (const Snapshot& snapshot : s.sequence.snapshots) {
      const SavedSnapshot saved{snapshot.position, snapshot.ends_prompt};
      put(bytes, &saved, 1);
    }
    put(bytes, s.sequence.recent.data(), s.sequence.recent.size());
  }
  if (has(head.version, kWithStore)) {
    const SavedStore store{s.sequence.asking, s.sequence.ahead};
    put(bytes, &store, 1);
    for (size_t i = 0; i < s.store_pages.size(); ++i) {
      const SavedRecall recall{s.sequence.recalled[i], s.store_pages[i]};
      put(bytes, &recall, 1);
    }
  }
  put(bytes, s.sampler.accepted.data(), s.sampler.accepted.size());
  put(bytes, note.data(), note.size());
  const uint64_t sum = checksum(bytes.data(), bytes.size());
  put(bytes, &sum, 1);
  return bytes;
}

}  // namespace

Status write_session_file(const SavedSession& session, std::span<const std::byte> note, uint64_t body_bytes,
                          const std::function<Status(const WriteBytes&)>& write_body,
                          const WriteBytes& write) {
  Checksum all;
  const WriteBytes summed = [&](const void* data, size_t bytes) {
    all.add(data, bytes);
    return write(data, bytes);
  };
  const std::string head = head_of(session, note, body_bytes);
  THIMBLE_TRY(summed(head.data(), head.size()));
  THIMBLE_TRY(write_body(summed));
  const uint64_t sum = all.value();
  return write(&sum, sizeof sum);
}

uint64_t session_file_bytes(const SavedSession& session, uint64_t body_bytes) {
  return head_of(session, {}, body_bytes).size() + body_bytes + sizeof(uint64_t);
}

Status SessionFile::damaged(const char* what) const {
  return error(Code::kFormat, "%s is damaged: %s; save the session again", name.c_str(), what);
}

Result<SessionFile> SessionFile::open(MappedFile file, std::string name) {
  SessionFile s;
  s.name = std::move(name);
  const std::span<const std::byte> bytes = file.bytes();
  ByteReader in(bytes);
  SavedHead head;
  if (!in.read(head) || std::memcmp(head.magic, kMagic, sizeof kMagic) != 0)
    return error(Code::kFormat, "%s is not a saved session", s.name.c_str());
  if (head.version < kVersion || head.version > kNewestVersion)
    return error(Code::kFormat,
                 "%s is a saved session of version %u, and this library reads up to version %u",
                 s.name.c_str(), head.version, kNewestVersion);
  static_cast<SequenceNumbers&>(s.sequence) = head.numbers;
  s.sampler.options = head.sampler;
  s.sampler.random = head.random;
  std::memcpy(s.held_text, head.held_text, sizeof s.held_text);
  std::string_view settings, note;
  std::vector<SavedRun> runs;
  uint64_t head_sum, body_sum;
  const bool whole = in.take(head.settings_bytes, settings) && read_values(in, head.runs, runs) &&
                     read_values(in, head.waiting, s.sequence.waiting) &&
                     read_values(in, head.unscored, s.sequence.unscored_tokens) &&
                     (!has(head.version, kWithStates) || read_states(in, s.sequence)) &&
                     (!has(head.version, kWithStore) || read_store(in, head.runs, s)) &&
                     read_values(in, head.accepted, s.sampler.accepted) && in.take(head.note_bytes, note);
  s.sequence.recalled.resize(runs.size());
  for (const SavedRun& run : runs) {
    s.sequence.entries.push_back(run.entries);
    s.pools.push_back({run.keep, run.capacity});
  }
  const uint64_t head_bytes = in.position();
  if (!whole || !in.read(head_sum) || head.body_bytes > in.left())
    return s.damaged("it is shorter than its head says");
  if (checksum(bytes.data(), head_bytes) != head_sum) return s.damaged("the checksum of its head differs");
  s.body = bytes.subspan(in.position(), head.body_bytes);
  if (!in.skip(head.body_bytes) || !in.read(body_sum) || in.left())
    return s.damaged("it is not as long as its head says");
  if (!read_settings(settings, s.settings)) return s.damaged("its settings cannot be read");
  s.note = std::as_bytes(std::span(note));
  s.file = std::move(file);
  return s;
}

Status SessionFile::check_body() const {
  const uint64_t bytes = file.size() - sizeof(uint64_t);
  uint64_t sum;
  std::memcpy(&sum, file.data() + bytes, sizeof sum);
  return checksum(file.data(), bytes) == sum ? Status() : damaged("its checksum differs");
}

std::string SessionFile::info() const {
  uint64_t entries = 0;
  uint32_t most = 0;
  for (const uint32_t count : sequence.entries) {
    entries += count;
    most = std::max(most, count);
  }
  JsonWriter json;
  json.number("version", version_of(*this));
  json.number("bytes", file.size());
  json.number("position", sequence.position());
  json.number("read", sequence.read);
  json.number("waiting", sequence.waiting.size());
  json.number("generated", sequence.generated);
  json.number("entries", most);
  json.number("entries_of_all_heads", entries);
  json.number("heads", pools.size());
  json.number("note_bytes", note.size());
  JsonWriter named;
  for (const NamedSetting& setting : settings) named.text(setting.name, setting.value);
  json.raw("settings", named.object());
  return json.object();
}

}  // namespace thimble
