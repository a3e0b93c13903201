// The file of a saved session (docs/sessions.md): written from front to back, and read with nothing in it
// trusted.
//
// A head says what the session was made of and where it stands; a body holds the arrays, and only what of
// them is held, so that its size follows from the head. All numbers are little-endian.
//
//   SavedHead        fixed
//   settings         text, "name value\n" each, in the order in which they are compared
//   runs             SavedRun of every head, [layer][kv head]
//   waiting          int32: tokens that were fed and not read
//   unscored         int32: tokens that will be read again
//   accepted         Sampler::Accepted: what the sampler remembers, oldest first
//   note             bytes of the caller's
//   checksum         uint64 of all this
//   body             by layer and head the keys, values, positions and scores of the entries held;
//                    the logits; what the policies carry
//   checksum         uint64 of all that is in front of it
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "runtime/model/cost.h"
#include "runtime/sampler/sampler.h"

namespace thimble {

// Where the stream stands: what Session says of these.
struct SavedStream {
  uint64_t read = 0, last_eviction = 0, evicted = 0, saturated = 0;
  uint32_t unscored = 0, generation = 0, has_logits = 0;
  int32_t arg_max = -1;  // of the logits
  // Of its statistics.
  uint64_t evictions = 0, generated = 0, prefill_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  Cost prefill, decode, selecting;
  // The sampler.
  float temperature = 0, top_p = 0, min_p = 0, repeat_penalty = 0;
  uint32_t top_k = 0, repeat_last = 0;
  uint64_t seed = 0, random = 0;
  char held_text[8] = {};  // of an answer, the beginning of a code point; zeros behind it
};

struct SavedRun {
  uint32_t entries = 0, keep = 0, capacity = 0;
};

struct NamedSetting {
  std::string name, value;  // no spaces in the name, no line end in either
};

// All but the body.
struct SavedSession {
  SavedStream stream;
  std::vector<NamedSetting> settings;
  std::vector<SavedRun> runs;
  std::vector<int32_t> waiting, unscored;
  std::vector<Sampler::Accepted> accepted;
};

// Takes the next bytes of a file that is being written.
using WriteBytes = std::function<Status(const void* data, size_t bytes)>;

// Writes a whole file; `write_body` writes its `body_bytes`.
Status write_session_file(const SavedSession&, std::span<const std::byte> note, uint64_t body_bytes,
                          const std::function<Status(const WriteBytes&)>& write_body,
                          const WriteBytes& write);

struct SessionFile : SavedSession {
  // Reads a head; the body is as its length says, and otherwise unchecked. `name` is how errors call the
  // file. Format where it is damaged, or of another version.
  static Result<SessionFile> open(MappedFile file, std::string name);
  // Whether the body is as it was written; reads all of it.
  Status check_body() const;
  // What it says of itself, a JSON object.
  std::string info() const;
  // The error of a file that is not as it was written: `what` is.
  Status damaged(const char* what) const;

  MappedFile file;
  std::string name;
  std::span<const std::byte> note, body;
};

}  // namespace thimble
