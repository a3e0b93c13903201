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
#include "runtime/sequence_state.h"

namespace thimble {

struct NamedSetting {
  std::string name, value;  // no spaces in the name, no line end in either
};

// How many entries a head keeps, and has room for.
struct SavedPool {
  uint32_t keep = 0, capacity = 0;
};

// All but the body.
struct SavedSession {
  SequenceFields sequence;
  Sampler::Saved sampler;
  char held_text[8] = {};  // of an answer, the beginning of a code point; zeros after it
  std::vector<NamedSetting> settings;
  std::vector<SavedPool> pools;  // of every head
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
