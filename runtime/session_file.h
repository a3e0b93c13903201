// The file of a saved session (docs/sessions.md). It is written from front to back. The reader checks
// everything and trusts nothing in it.
//
// The head says with which settings the session was made, and what its state is. The body holds the contents
// of the arrays, without unused entries, so the head determines its size. All numbers are little-endian.
//
//   SavedHead        fixed
//   settings         text, "name value\n" each, in the order in which they are compared
//   runs             SavedRun of every head, [layer][kv head]
//   waiting          int32: tokens that were fed and are not read yet
//   unscored         int32: tokens that will be read again
//   states           of recurrent models (version 2): SavedStates, SavedSnapshot of every snapshot
//                    and int32: the tokens that were read since the latest eviction
//   store            with a store of evicted entries (versions 3 and 4): SavedStore, SavedRecall of heads
//   accepted         Sampler::Accepted: the sampler's history, oldest first
//   note             bytes that the caller chose
//   checksum         uint64 of everything before it
//   body             by layer and head the keys, values, positions and scores of the entries held;
//                    by layer the states of recurrent models, the current ones and then the snapshots';
//                    the queries that call back entries; the logits; the policies' arrays; the store's pages
//   checksum         uint64 of everything before it
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
  std::string name, value;  // the name has no spaces; neither has line ends
};

// The number of entries that a head keeps, and for which it has room.
struct SavedPool {
  uint32_t keep = 0, capacity = 0;
};

// The contents of a session file without the body.
struct SavedSession {
  SequenceFields sequence;
  Sampler::Saved sampler;
  char held_text[8] = {};  // an incomplete code point at the end of the answer, padded with zeros
  std::vector<NamedSetting> settings;
  std::vector<SavedPool> pools;       // of every head
  std::vector<uint32_t> store_pages;  // of every head; empty without a store of evicted entries
};

// Writes the next bytes of a file.
using WriteBytes = std::function<Status(const void* data, size_t bytes)>;

// Writes a whole file. `write_body` writes the body, which has `body_bytes` bytes.
Status write_session_file(const SavedSession&, std::span<const std::byte> note, uint64_t body_bytes,
                          const std::function<Status(const WriteBytes&)>& write_body,
                          const WriteBytes& write);
// The size of the file that it writes with an empty note.
uint64_t session_file_bytes(const SavedSession& session, uint64_t body_bytes);

struct SessionFile : SavedSession {
  // Reads a head. The body's length is checked, but not its contents. Error messages call the file `name`.
  // Format: the file is damaged, or has another version.
  static Result<SessionFile> open(MappedFile file, std::string name);
  // Reads the whole body and checks that it is as it was written.
  Status check_body() const;
  // Describes the file as a JSON object.
  std::string info() const;
  // The error for a damaged file. `what` names the damaged part.
  Status damaged(const char* what) const;

  MappedFile file;
  std::string name;
  std::span<const std::byte> note, body;
};

}  // namespace thimble
