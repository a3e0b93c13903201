// The pool has one run of entries for each layer and KV head (docs/design.md). A run is dense and ordered by
// position. Runs may have different lengths.
#pragma once

#include <vector>

#include "backends/backend.h"

namespace thimble {

// The states of the recurrent layers at an earlier position, to which a rewind can return.
struct Snapshot {
  uint64_t position = 0;
  uint32_t slot = 0;
  uint32_t ends_prompt = 0;
  bool operator==(const Snapshot&) const = default;
};
// The most snapshots of one sequence.
inline constexpr uint32_t kMostSnapshots = 16;

// The run of one KV head in its layer's arrays.
struct HeadRun {
  uint32_t first = 0;                            // index of its first entry
  uint32_t capacity = 0;                         // entries for which it has room
  uint32_t keep = 0;                             // entries that an eviction keeps
  uint32_t recall = 0;                           // part of the capacity for entries from the store
  uint32_t protect_first = 0, protect_last = 0;  // stay whatever their scores, between chunks
  bool evicts = false;
};

// The runs of all heads while the text has at most `text` tokens. The last division also serves longer texts.
struct Division {
  uint64_t text = 0;
  std::vector<HeadRun> runs;  // in the order of Model::layer_of_run
};

// The sizes that follow from the model and the resolved options. They are computed before bytes are counted.
struct Dimensions {
  std::vector<HeadRun>
      runs;  // in the order of Model::layer_of_run; if there are divisions, those of the first
  // The divisions of a pool that heads share unequally. In the first one, all heads get equal parts, so a
  // pool as large as the text evicts nothing. Each time the text has doubled, the next one divides the pool
  // by the shares, as far as heads can use them. Empty: the runs never change.
  std::vector<Division> divisions;
  // If a divided pool was made smaller: the length of the texts for which `runs` was made.
  uint64_t text = 0;
  // Whether runs move when another division is used. If so, the heads of a layer may hold different numbers
  // of entries even where they keep equally many, and the layers' parts of `pool_entries` overlap.
  bool moves = false;
  uint64_t pool_entries = 0;            // entries of all layers without a window, if runs move
  std::vector<uint64_t> layer_first;    // index in these of each layer's first entry; 0 with a window
  std::vector<uint32_t> layer_entries;  // entries of each layer's arrays; UINT32_MAX: as many or more
  uint32_t most_layer_entries = 0;
  uint32_t capacity = 0;  // entries of the longest run
  uint32_t reach = 0;     // entries of the longest run and the chunk that a step can see
  uint32_t view_capacity = 0;
  uint32_t view_passes = 0;  // passes in which a chunk reads the entries that it attends to
  // Chunks of at least so many rows attend to keys and values of every head that they make from latent ones,
  // so many entries at once; 0: none do.
  uint32_t lifting_rows = 0, lifted_capacity = 0;
  uint32_t stored = 0;          // most entries of a head's store that a row attends to, where they are
  uint32_t rope_positions = 0;  // positions that the rope table serves
  uint32_t largest_list = 0;    // most entries that a row attends to
  uint32_t qkv_cols =
      0;  // the stride of rows of queries, keys and values: (H + 2 Hkv) dh of the widest layer
  // The columns of the widest mixer: of the rows that it computes first, of those in between, and of the rows
  // that it returns.
  uint32_t mixer_cols = 0, middle_cols = 0, mixed_cols = 0;
  uint32_t kv_cols = 0;      // the columns of keys of the widest layer: Hkv dh
  uint32_t state_slots = 0;  // slots for the states of recurrent layers; 0: the model has none
  // The most tokens that may wait. The most that may have been read since the latest eviction, if the model
  // is recurrent: after a rewind, some of them wait again.
  uint64_t most_waiting = 0, most_recent = 0;
  bool evicts = false;      // at least one layer evicts
  bool full_evict = false;  // layers that attend to every entry evict

  uint32_t lifted_passes() const {
    return lifting_rows ? (view_passes * view_capacity + lifted_capacity - 1) / lifted_capacity : 0;
  }
  const std::vector<HeadRun>& runs_in(uint32_t division) const {
    return divisions.empty() ? runs : divisions[division].runs;
  }
  // The division for a text of `tokens` tokens, not before `division`.
  uint32_t division_for(uint64_t tokens, uint32_t division) const;
  // The runs for the longest texts.
  const std::vector<HeadRun>& last_runs() const { return divisions.empty() ? runs : divisions.back().runs; }
};

// The arrays of one layer. Each has the entries of all heads, and each head's entries are in its run.
struct LayerPool {
  KvArray k, v;  // [dh]; k before RoPE, unless positions are original
  View pos;      // int32
  View cis;      // f32 retention scores; empty if nothing is evicted
};

}  // namespace thimble
