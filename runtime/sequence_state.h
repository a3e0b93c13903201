// The state of one sequence, as a plain value. A session consists of a SequenceState and an Engine.
//
// The value is copied, compared, emptied and stored in files as a whole, so a new field is one line here. A
// new number also changes the session file, whose version must then be increased (session_file.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/policy/policy.h"
#include "runtime/sampler/constraint.h"
#include "runtime/sampler/sampler.h"

namespace thimble {

// The numbers of a sequence. A session file stores this struct as it is in memory.
struct SequenceNumbers {
  uint64_t read = 0;           // tokens that are or were in the pool
  uint64_t last_eviction = 0;  // `read` at the latest eviction
  uint64_t evicted = 0;        // evicted entries, summed over all heads
  uint64_t saturated = 0;      // keys and values beyond f16 range; save() reads the device's count
  uint32_t unscored = 0;       // most recent entries, whose retention scores are not computed yet
  uint32_t generation = 0;     // changes whenever pool entries move or a prompt is read
  uint32_t has_logits = 0;     // 1: the device holds logits of the next token
  int32_t arg_max = -1;        // the most likely next token; -1: no logits, or the logits are not finite
  // Statistics.
  uint64_t evictions = 0, generated = 0, prefill_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  Cost prefill, decode;
  Cost selecting;  // the cost if every generated token had made a selection of its own

  bool operator==(const SequenceNumbers&) const = default;
};

// Which entries the latest token attended to.
enum class Attended { kUnknown, kEverything, kList };

// The state of a sequence without its sampler.
struct SequenceFields : SequenceNumbers {
  std::vector<int32_t> waiting;          // tokens that were fed and are not read yet
  std::vector<int32_t> unscored_tokens;  // the tokens that `unscored` counts, if they are read again
  std::vector<uint32_t> entries;         // entries that each head holds
  std::vector<uint32_t> recalled;        // those of `entries` that came back from the store
  uint32_t asking = 0;  // the latest tokens whose queries are kept, so that they can call back entries
  uint32_t ahead = 0;   // the first waiting tokens, whose queries are kept instead: they were read ahead
  // Of models with recurrent layers only. The snapshots have ascending positions from the latest eviction on.
  // A rewind restores one, and reads the recent tokens after it again. The beginning of the text needs none.
  std::vector<Snapshot> snapshots;
  std::vector<int32_t> recent;     // the tokens that were read since the latest eviction
  uint32_t state_slot = kNoState;  // the slot with the states after `read` tokens. Files number slots anew.
  // The fields below are not stored in files.
  uint32_t division = 0;  // index into Dimensions::divisions: how many entries heads keep
  uint32_t placed = 0;    // the division in which the runs are stored; equals `division` after an eviction
  Attended attended = Attended::kUnknown;

  bool operator==(const SequenceFields&) const = default;

  // The number of tokens in the stream, read or waiting.
  uint64_t position() const { return read + waiting.size(); }
  // The earliest position that a rewind can reach.
  uint64_t earliest() const;
  uint32_t most_entries() const;
  // The entries of a head that did not come back from the store.
  uint32_t own(size_t head) const { return entries[head] - recalled[head]; }
  void forget_logits();
  // A slot that holds neither the current states nor a snapshot.
  uint32_t free_slot() const;
  // The slots that hold states, first the current ones.
  std::vector<uint32_t> used_slots() const;
  // Numbers the slots as used_slots() lists them. At most `most` snapshots get a slot; the others have
  // kNoState.
  void number_slots(size_t most);
  // Forgets the snapshots without a slot.
  void forget_snapshots_without_slot();
  // Makes a snapshot of the current states if a prompt ends here, or if many tokens were read since the last
  // snapshot. There are at most `most` snapshots.
  void keep_states(bool ends_prompt, size_t most);
  // The last `rows` tokens gave logits that are not finite. The states before them, which are still the
  // current ones, become a snapshot, so that a rewind to there need not read anything again.
  void keep_states_before(uint32_t rows, size_t most);
  // The number of tokens that can be read before keep_states() makes one although no prompt ends, at least 1.
  uint64_t until_snapshot() const;
  // The current states become the only snapshot, since no earlier position can be reached.
  void drop_snapshots();
  // Adds a snapshot after the others. If there are then more than `most`, the least useful one goes.
  void add_snapshot(const Snapshot&, size_t most);
  // Why the fields of recurrent layers are not valid.
  const char* fault_of_states(const Dimensions&) const;
  // Why these fields are not a valid state of a session with this setting and these runs. Null: they are
  // valid. The sizes of the lists of heads must agree.
  const char* fault(const Setting&, std::span<const HeadRun> runs) const;
};

struct SequenceState : SequenceFields {
  Sampler sampler;
  Constraint constraint;  // not stored in files

  SequenceState(size_t heads, Sampler);
  bool operator==(const SequenceState&) const = default;

  // Empties the state. The sampler keeps its options, the constraint its grammar, and the lists keep their
  // memory.
  void reset();
  // Forgets the tokens from this position on, and the waiting tokens. `position` is less than `read` and at
  // least earliest(). In models with recurrent layers, tokens that must be read again become waiting tokens.
  void rewind(uint64_t position);
  // Continues from fields and a sampler that were checked.
  void restore(const SequenceFields&, const Sampler::Saved&);
  void rewind_states(uint64_t position);
  void drop_to(uint64_t position);
  // The host memory of the lists and the sampler, in bytes.
  uint64_t host_bytes() const;
};

}  // namespace thimble
