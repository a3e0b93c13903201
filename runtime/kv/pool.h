// The pool: per layer and KV head one dense, position-ordered run of entries (docs/design.md), each of a
// length of its own.
#pragma once

#include <vector>

#include "backends/backend.h"

namespace thimble {

// One KV head's run in its layer's arrays.
struct HeadRun {
  uint32_t first = 0;                            // entry where it begins
  uint32_t capacity = 0;                         // entries that it has room for
  uint32_t keep = 0;                             // entries that an eviction leaves
  uint32_t protect_first = 0, protect_last = 0;  // of which these stay whatever their score, between chunks
  bool evicts = false;
};

// What each head is given while a text is no longer than `text` tokens; the last one serves longer texts,
// too.
struct Division {
  uint64_t text = 0;
  std::vector<HeadRun> runs;  // [layer][kv head]
};

// Everything that follows from the model and the resolved options before a byte is counted.
struct Dimensions {
  std::vector<HeadRun> runs;  // [layer][kv head]; where there are divisions, of the first
  // Where heads share the pool unequally: first equal parts, so that a pool as large as the text evicts
  // nothing; then, each time that the text has doubled, what the shares say, as far as it can be used. None
  // where runs stay as they are.
  std::vector<Division> divisions;
  uint64_t text = 0;  // where a pool that was divided was made smaller: the texts that `runs` are for
  // Whether runs move when another division is used. Then the heads of a layer may hold unequally many
  // entries even where they keep as many, and the parts of `pool_entries` that layers are given overlap.
  bool moves = false;
  uint64_t pool_entries = 0;            // of all layers, where runs move
  std::vector<uint64_t> layer_first;    // where a layer's part begins in these
  std::vector<uint32_t> layer_entries;  // of a layer's arrays; UINT32_MAX: as many or more
  uint32_t most_layer_entries = 0;
  uint32_t capacity = 0;  // of the longest run
  uint32_t reach = 0;     // entries of the longest run and the chunk that a step can see
  uint32_t view_capacity = 0;
  uint32_t view_passes = 0;     // passes that read what a chunk attends to
  uint32_t rope_positions = 0;  // positions that the rope table serves
  uint32_t largest_list = 0;    // entries that a row attends to at most
  uint32_t qkv_cols = 0;        // (H + 2 Hkv) dh
  bool evicts = false;          // some layer does
  bool full_evict = false;      // those do that attend to everything

  const std::vector<HeadRun>& runs_in(uint32_t division) const {
    return divisions.empty() ? runs : divisions[division].runs;
  }
  // The division for a text of so many tokens, of those from `division` on.
  uint32_t division_for(uint64_t tokens, uint32_t division) const;
  // The runs of the longest texts.
  const std::vector<HeadRun>& last_runs() const { return divisions.empty() ? runs : divisions.back().runs; }
};

// One layer's arrays: [entries of all its heads], each head's in its run.
struct LayerPool {
  KvArray k, v;  // f16 [dh]; k before RoPE, unless positions are original
  View pos;      // int32
  View cis;      // f32, the retention scores; empty where nothing is evicted
};

}  // namespace thimble
