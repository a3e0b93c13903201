// A folder of saved states (see prefix_cache.h).
#include "apps/serve/prefix_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "apps/sizes.h"

namespace app::serve {

namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'t', 'h', 'i', 'm', 'b', 'l', 'e', 'P'};
const std::string kState = ".session", kTemporary = ".part";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Closes a descriptor.
struct Descriptor {
  explicit Descriptor(int of) : number(of) {}
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int number;
};

[[noreturn]] void refuse(const std::string& folder, const char* what) {
  throw std::runtime_error("the folder of --cache-dir, '" + folder + "', " + what + ": " +
                           std::strerror(errno));
}

}  // namespace

uint64_t add_hash(uint64_t hash, const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = fnv1a(hash, at[i]);
  return hash;
}

// ---- notes ----

std::string StateNote::write() const {
  const uint64_t head[2] = {settings, keys.size()};
  std::string bytes(kMagic, sizeof kMagic);
  bytes.append(reinterpret_cast<const char*>(head), sizeof head);
  bytes.append(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(StateKey));
  return bytes + rest;
}

bool StateNote::read(std::string_view bytes) {
  uint64_t head[2];
  constexpr size_t kHead = sizeof kMagic + sizeof head;
  if (bytes.size() < kHead || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) return false;
  std::memcpy(head, bytes.data() + sizeof kMagic, sizeof head);
  bytes.remove_prefix(kHead);
  if (head[1] > std::min<uint64_t>(bytes.size() / sizeof(StateKey), PrefixCache::kMostKeys)) return false;
  settings = head[0];
  keys.resize(static_cast<size_t>(head[1]));
  if (!keys.empty()) std::memcpy(keys.data(), bytes.data(), keys.size() * sizeof(StateKey));
  rest = bytes.substr(keys.size() * sizeof(StateKey));
  return true;
}

// ---- the folder ----

// Opens a file that only one server at a time has open: the one that counts the files and makes room. The
// system releases the lock of a server that is killed. Returns -1 if it cannot be locked.
int PrefixCache::lock() const {
  const int file = ::open(path_of("lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  while (file >= 0 && ::flock(file, LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int why = errno;
    ::close(file);
    errno = why;
    return -1;
  }
  return file;
}

PrefixCache::PrefixCache(const std::string& folder, uint64_t most_bytes, ReadNote read_note, Log log)
    : folder_(folder), most_bytes_(most_bytes), read_note_(std::move(read_note)), log_(std::move(log)) {
  // States contain the texts of clients, so only this user may read them.
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) refuse(folder, "cannot be made");
  const Descriptor locked(lock());
  if (locked.number < 0) refuse(folder, "cannot be written");
  remove_abandoned();
  scan();
  uint64_t ignored = 0;
  for (const auto& [name, state] : states_) ignored += state.keys.empty();
  if (ignored)
    log_(std::to_string(ignored) + " files in " + folder +
         " are damaged or of another version, and are ignored");
  make_room(0, 0);
}

// Removes temporary files that no server has locked.
void PrefixCache::remove_abandoned() const {
  std::error_code error;
  for (fs::directory_iterator file(folder_, error), end; !error && file != end; file.increment(error)) {
    const std::string path = file->path().string();
    if (!ends_with(path, kTemporary)) continue;
    const Descriptor open(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (open.number >= 0 && ::flock(open.number, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  }
}

// Notes which files there are, and reads the notes of those that are new.
void PrefixCache::scan() {
  std::error_code error;
  scanned_ = fs::last_write_time(folder_, error);
  States seen;
  being_written_ = 0;
  for (fs::directory_iterator file(folder_, error), end; !error && file != end; file.increment(error)) {
    const std::string name = file->path().filename().string();
    if (!ends_with(name, kState) && !ends_with(name, kTemporary)) continue;
    std::error_code gone;
    const uint64_t bytes = file->file_size(gone);
    const Time used = file->last_write_time(gone);
    if (gone) continue;
    if (ends_with(name, kTemporary))
      being_written_ += bytes;
    else
      seen[name] = {bytes, used, 0, {}};
  }
  for (auto state = states_.begin(); state != states_.end();) {
    const auto now = state++;
    const auto same = seen.find(now->first);
    if (same == seen.end() || same->second.bytes != now->second.bytes) {
      forget(now);
    } else {
      now->second.used = same->second.used;
      seen.erase(same);
    }
  }
  std::vector<States::iterator> fresh;
  for (auto state = seen.begin(); state != seen.end(); ++state) fresh.push_back(state);
  std::sort(fresh.begin(), fresh.end(),
            [](const auto& a, const auto& b) { return a->second.used > b->second.used; });
  for (const auto& state : fresh) {
    StateNote note;
    try {
      if (note.read(read_note_(path_of(state->first)))) {
        state->second.keys = std::move(note.keys);
        state->second.settings = note.settings;
      }
    } catch (const std::exception&) {  // damaged, of another version, or just deleted
    }
    index(state->first, state->second);
  }
}

void PrefixCache::index(const std::string& name, State& state) {
  if (places_.size() + state.keys.size() > kMostKeys) state.keys.clear();
  const auto at = states_.insert_or_assign(name, state).first;
  for (const StateKey& key : state.keys)
    places_.emplace(key.hash, Place{&at->first, key.position, key.usable != 0});
}

void PrefixCache::forget(States::iterator state) {
  for (const StateKey& key : state->second.keys) {
    const auto range = places_.equal_range(key.hash);
    for (auto place = range.first; place != range.second;)
      place = place->second.name == &state->first ? places_.erase(place) : std::next(place);
  }
  states_.erase(state);
}

void PrefixCache::remove(States::iterator state) {
  ::unlink(path_of(state->first).c_str());
  forget(state);
}

// Deletes the states that were not used for longest until a new one fits.
bool PrefixCache::make_room(uint64_t bytes, uint64_t keys) {
  if (bytes > most_bytes_ || keys > kMostKeys) return false;
  uint64_t all = being_written_;
  for (const auto& [name, state] : states_) all += state.bytes;
  while (all + bytes > most_bytes_ || places_.size() + keys > kMostKeys) {
    const auto oldest = std::min_element(states_.begin(), states_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    });
    if (oldest == states_.end()) return false;  // other servers are writing
    all -= oldest->second.bytes;
    remove(oldest);
  }
  return true;
}

// ---- finding ----

PrefixCache::Found PrefixCache::find(std::span<const uint64_t> hashes) {
  const std::lock_guard guard(mutex_);
  // Another server may have changed the folder. Its time may stay the same for changes in quick succession,
  // so it says nothing while it is recent.
  std::error_code error;
  const Time changed = fs::last_write_time(folder_, error);
  if (error || changed != scanned_ || Time::clock::now() - changed < std::chrono::seconds(2)) scan();
  Found found;
  for (const uint64_t hash : hashes) {
    const auto range = places_.equal_range(hash);
    for (auto place = range.first; place != range.second; ++place) {
      const auto& [name, position, usable] = place->second;
      if (usable)
        found.matches.push_back({path_of(*name), position, states_.at(*name).bytes});
      else
        found.evicted = std::max(found.evicted, position);
    }
  }
  std::sort(found.matches.begin(), found.matches.end(), [](const Match& a, const Match& b) {
    return a.position != b.position ? a.position > b.position : a.bytes < b.bytes;
  });
  return found;
}

void PrefixCache::note_use(const std::string& path) {
  std::error_code gone;
  fs::last_write_time(path, Time::clock::now(), gone);
}

void PrefixCache::drop(const std::string& path, const std::string& why) {
  const std::lock_guard guard(mutex_);
  const auto state = states_.find(fs::path(path).filename().string());
  if (state != states_.end()) remove(state);
  log_("a saved state is not used: " + why);
}

// ---- saving ----

bool PrefixCache::holds(const std::vector<StateKey>& keys) {
  const std::lock_guard guard(mutex_);
  return std::all_of(keys.begin(), keys.end(), [&](const StateKey& key) {
    const auto range = places_.equal_range(key.hash);
    return !key.usable ||
           std::any_of(range.first, range.second, [](const auto& place) { return place.second.usable; });
  });
}

// Deletes the states whose keys are all keys of this one: a conversation grew by a turn.
void PrefixCache::replace_older(const std::string& name) {
  const std::vector<StateKey>& keys = states_.at(name).keys;
  for (auto state = states_.begin(); state != states_.end();) {
    const auto now = state++;
    const std::vector<StateKey>& theirs = now->second.keys;
    const bool replaced = !theirs.empty() && now->first != name &&
                          std::all_of(theirs.begin(), theirs.end(), [&](const StateKey& key) {
                            return std::find(keys.begin(), keys.end(), key) != keys.end();
                          });
    if (replaced) remove(now);
  }
}

bool PrefixCache::save(const StateNote& note, uint64_t bytes, const std::function<void(int)>& write) {
  const auto last = std::max_element(note.keys.begin(), note.keys.end(), [](const auto& a, const auto& b) {
    return std::pair(a.usable, a.position) < std::pair(b.usable, b.position);
  });
  if (last == note.keys.end()) return false;
  char name[40];
  std::snprintf(name, sizeof name, "%016" PRIx64, last->hash);
  const std::string whole = name + kState;
  std::string part;
  int opened = -1;
  const auto fail = [&](const std::string& why) {
    if (!failed_.exchange(true)) log_("states are not saved: " + why);
    return false;
  };
  {
    const std::lock_guard guard(mutex_);
    const Descriptor locked(lock());
    if (locked.number < 0) return fail(path_of("lock") + ": " + std::strerror(errno));
    remove_abandoned();
    scan();
    if (!make_room(bytes, note.keys.size()))
      return fail("one of " + format_size(bytes) + " does not fit in --cache-size " +
                  format_size(most_bytes_));
    part = path_of(name + ("." + std::to_string(::getpid())) + "-" + std::to_string(written_++) + kTemporary);
    opened = ::open(part.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    // The file has its size from the start, so that other servers count it.
    if (opened < 0 || ::flock(opened, LOCK_EX) != 0 || ::ftruncate(opened, static_cast<off_t>(bytes)) != 0) {
      const std::string why = part + ": " + std::strerror(errno);
      if (opened >= 0) ::close(opened), ::unlink(part.c_str());
      return fail(why);
    }
  }
  const Descriptor file(opened);
  try {
    write(file.number);
  } catch (const std::exception& error) {
    ::unlink(part.c_str());
    return fail(error.what());
  } catch (...) {  // the client left
    ::unlink(part.c_str());
    throw;
  }
  const std::lock_guard guard(mutex_);
  if (::rename(part.c_str(), path_of(whole).c_str()) != 0) {
    const std::string why = part + ": " + std::strerror(errno);
    ::unlink(part.c_str());
    return fail(why);
  }
  failed_ = false;
  if (const auto before = states_.find(whole); before != states_.end()) forget(before);
  State state{bytes, Time::clock::now(), note.settings, note.keys};
  index(whole, state);
  replace_older(whole);
  return true;
}

PrefixCache::Size PrefixCache::size() {
  const std::lock_guard guard(mutex_);
  Size size{states_.size(), being_written_, most_bytes_};
  for (const auto& [name, state] : states_) size.bytes += state.bytes;
  return size;
}

uint64_t PrefixCache::count(uint64_t settings) {
  const std::lock_guard guard(mutex_);
  return static_cast<uint64_t>(std::count_if(states_.begin(), states_.end(), [&](const auto& state) {
    return !state.second.keys.empty() && state.second.settings == settings;
  }));
}

}  // namespace app::serve
