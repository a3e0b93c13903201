// Where one sequence stands: a plain value. A session is this and an engine.
//
// The value is copied, compared, emptied and stored in files as a whole, so a new field is one line here. A
// new number also changes the session file, whose version must then rise (session_file.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/policy/policy.h"
#include "runtime/sampler/sampler.h"

namespace thimble {

// The numbers of a sequence. A session file stores them as they are in memory.
struct SequenceNumbers {
  uint64_t read = 0;           // tokens that are in the pool, or were
  uint64_t last_eviction = 0;  // `read` when entries were last dropped
  uint64_t evicted = 0;        // entries that were dropped, of all heads
  uint64_t saturated = 0;      // keys and values beyond f16's range; the device counts, save() asks it
  uint32_t unscored = 0;       // last entries whose retention scores are still to come
  uint32_t generation = 0;     // changes whenever pool entries move or a prompt is read
  uint32_t has_logits = 0;     // 1: the device holds logits of the next token
  int32_t arg_max = -1;        // the most likely next token; -1: no logits, or they are not finite
  // Statistics.
  uint64_t evictions = 0, generated = 0, prefill_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  Cost prefill, decode;
  Cost selecting;  // had every generated token made a selection of its own

  bool operator==(const SequenceNumbers&) const = default;
};

// What the last token read attended to.
enum class Attended { kUnknown, kEverything, kList };

// All of a sequence but its sampler.
struct SequenceFields : SequenceNumbers {
  std::vector<int32_t> waiting;          // tokens that were fed and not read
  std::vector<int32_t> unscored_tokens;  // the tokens of `unscored`, where they are read again
  std::vector<uint32_t> entries;         // that each head holds, [layer][kv head]
  // Not in a file.
  uint32_t division = 0;  // of the pool (Dimensions::divisions), by which heads keep entries
  uint32_t placed = 0;    // the division in which the runs are stored; `division` again after an eviction
  Attended attended = Attended::kUnknown;

  bool operator==(const SequenceFields&) const = default;

  // Tokens of the stream, read or waiting.
  uint64_t position() const { return read + waiting.size(); }
  uint32_t most_entries() const;
  void forget_logits();
  // Why a sequence in a session of this setting, whose pool is divided into these runs, cannot be like this;
  // null where it can. Sizes of the lists of heads must agree.
  const char* fault(const Setting&, const Policies&, std::span<const HeadRun> runs) const;
};

struct SequenceState : SequenceFields {
  Sampler sampler;

  SequenceState(size_t heads, Sampler);
  bool operator==(const SequenceState&) const = default;

  // Holds nothing again; the sampler keeps its options, the lists keep their room.
  void reset();
  // Forgets the tokens that were read from this position on, which is before `read`, and those that wait.
  void rewind(uint64_t position);
  // Goes on from fields and a sampler that were checked.
  void restore(const SequenceFields&, const Sampler::Saved&);
  // Host memory of the lists and the sampler.
  uint64_t host_bytes() const;
};

}  // namespace thimble
