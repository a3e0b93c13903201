// The pool: per layer and KV head one dense, position-ordered run of entries (docs/design.md).
#pragma once

#include <vector>

#include "runtime/memory/arena.h"
#include "runtime/session_options.h"

namespace thimble {

// Decoded tokens whose q, k, v wait for the retaining head: one batch reads its weights once for all
// (methods 2.7).
inline constexpr uint32_t kRingRows = 64;

// Everything that follows from the model and the resolved options before a byte is counted.
struct Dimensions {
  uint32_t capacity = 0;  // entries that every head has room for
  uint32_t reach = 0;     // entries of pool and chunk that a step can see
  uint32_t view_capacity = 0;
  uint32_t view_passes = 0;     // passes that read `reach` entries
  uint32_t select_list = 0;     // uints of one head's selection list, the count first; 0: no selection
  uint32_t votes = 0;           // entries of the vote buffer
  uint32_t vote_capacity = 0;   // bound on positions (layer) or entries (group)
  uint32_t rope_positions = 0;  // positions that the rope table serves
  uint32_t qkv_cols = 0;        // (H + 2 Hkv) dh
};
Dimensions dimensions(const Model&, const SessionOptions& resolved);

// One layer; every array has [kv head][capacity].
struct LayerPool {
  View k, v;   // f16 [dh]; k before RoPE, unless positions are original
  View pos;    // int32
  View cis;    // f32; empty without retention
  View ring;   // f32 [kRingRows][qkv_cols]; locret only
  View gate;   // GateState; this and the next two: selection only
  View query;  // f32 [H dh], the query of the cached selection
  View list;   // [kv head][select_list]
};

std::vector<LayerPool> place_pool(const Model&, const SessionOptions& resolved, const Dimensions&, Arena&);

}  // namespace thimble
