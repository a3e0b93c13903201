// The pool: per layer and KV head one dense, position-ordered run of entries (docs/design.md), each of a
// length of its own.
#pragma once

#include <vector>

#include "runtime/memory/arena.h"
#include "runtime/session_options.h"

namespace thimble {

struct Policies;

// One KV head's run in its layer's arrays.
struct HeadRun {
  uint32_t first = 0;                            // entry where it begins
  uint32_t capacity = 0;                         // entries that it has room for
  uint32_t keep = 0;                             // entries that an eviction leaves
  uint32_t protect_first = 0, protect_last = 0;  // of which these stay whatever their score, between chunks
  bool evicts = false;
};

// Everything that follows from the model and the resolved options before a byte is counted.
struct Dimensions {
  std::vector<HeadRun> runs;            // [layer][kv head]
  std::vector<uint32_t> layer_entries;  // of all heads, by layer; UINT32_MAX: as many or more
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
};
Dimensions dimensions(const Model&, const SessionOptions& resolved, const Policies&);

// One layer's arrays: [entries of all its heads], each head's in its run.
struct LayerPool {
  KvArray k, v;  // f16 [dh]; k before RoPE, unless positions are original
  View pos;      // int32
  View cis;      // f32, the retention scores; empty where nothing is evicted
};

std::vector<LayerPool> place_pool(const Model&, const Dimensions&, Arena&);

}  // namespace thimble
