// A folder of saved states, found again by what was read.
//
// A file holds one state: a saved session, whose note begins with the keys of the state. A key is a hash of
// the tokens before a position, or of the messages, so a request that begins in the same way has the same
// key. A hash only proposes a file: the caller compares the tokens before it uses the state.
//
// Several servers may use one folder. A file is written under a temporary name and renamed, so a file is
// always whole, unless the machine stopped; the checksums of sessions detect that. A file that another server
// deleted is a miss. The size of all files, also of those that are being written, stays below a limit: the
// size of a new file is known before it is written, and files that were not used for longest are deleted
// first. The time at which a file was changed last is the time of its last use.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "apps/fnv1a.h"

namespace app::serve {

// A place in the text of a state.
struct StateKey {
  uint64_t hash = 0;      // of the tokens or messages before it
  uint64_t position = 0;  // in tokens
  // 0: entries were evicted since, so that the state cannot return to this position. Such keys only explain
  // why more was not reused.
  uint64_t usable = 1;
  bool operator==(const StateKey&) const = default;
};

// The hash of these bytes after those that gave `hash`. The hash of no bytes is kFnv1aBasis.
uint64_t add_hash(uint64_t hash, const void* data, size_t bytes);

// A note: the settings that the state belongs to, its keys, and what the caller needs to continue.
struct StateNote {
  uint64_t settings = 0;
  std::vector<StateKey> keys;
  std::string rest;

  std::string write() const;
  // Returns false if the bytes are not a note.
  bool read(std::string_view bytes);
};

class PrefixCache {
 public:
  // Reads the note of a saved session. Throws a std::exception if the file is not a saved session.
  using ReadNote = std::function<std::string(const std::string& path)>;
  using Log = std::function<void(const std::string& sentence)>;

  // Makes the folder if it is missing, removes the temporary files of servers that were killed, and reads
  // which states there are. Throws a std::runtime_error if the folder cannot be used.
  PrefixCache(const std::string& folder, uint64_t most_bytes, ReadNote read_note, Log log);

  struct Match {
    std::string path;
    uint64_t position;  // tokens that need not be read
    uint64_t bytes;
  };
  struct Found {
    std::vector<Match> matches;  // those that hold most of the prompt first
    uint64_t evicted = 0;        // tokens that the prompt shares with states that cannot return to them
  };
  Found find(std::span<const uint64_t> hashes);
  void note_use(const std::string& path);
  // Deletes a file that cannot be used, and logs why.
  void drop(const std::string& path, const std::string& why);

  // Whether there is a state for each of these keys that is usable.
  bool holds(const std::vector<StateKey>& keys);
  // Writes a state of `bytes` bytes. `write` writes them to the open file. Older states that this one
  // replaces are deleted. Returns false if the state was not saved, and logs why, but not twice in a row. If
  // `write` throws, the file is removed, and anything but a std::exception is thrown on.
  bool save(const StateNote& note, uint64_t bytes, const std::function<void(int descriptor)>& write);

  // Whether the last state could not be written, so that the next one may not be either.
  bool fails() const { return failed_; }

  struct Size {
    uint64_t states = 0, bytes = 0, limit = 0;
  };
  Size size();
  // The number of states that belong to these settings.
  uint64_t count(uint64_t settings);
  const std::string& folder() const { return folder_; }

  // The keys of all states that are remembered, at most. A key takes about 80 bytes of memory.
  static constexpr uint64_t kMostKeys = 32768;

 private:
  using Time = std::filesystem::file_time_type;
  struct State {
    uint64_t bytes = 0;
    Time used;
    uint64_t settings = 0;
    std::vector<StateKey> keys;  // empty if the file was not written by this version
  };
  using States = std::map<std::string, State>;  // by the file's name

  std::string path_of(const std::string& name) const { return folder_ + "/" + name; }
  int lock() const;
  void scan();
  void index(const std::string& name, State& state);
  void forget(States::iterator state);
  void remove(States::iterator state);
  bool make_room(uint64_t bytes, uint64_t keys);
  void remove_abandoned() const;
  void replace_older(const std::string& name);

  const std::string folder_;
  const uint64_t most_bytes_;
  const ReadNote read_note_;
  const Log log_;
  std::mutex mutex_;
  States states_;
  struct Place {
    const std::string* name;
    uint64_t position;
    bool usable;
  };
  std::unordered_multimap<uint64_t, Place> places_;
  uint64_t being_written_ = 0;  // bytes of the temporary files of all servers, at the last scan
  Time scanned_{};              // the folder's time at the last scan
  uint64_t written_ = 0;        // numbers the temporary files
  std::atomic<bool> failed_ = false;
};

}  // namespace app::serve
