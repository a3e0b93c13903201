// What a session is asked to be. Zero and kDefault mean "decide"; resolve() in plan/planner.h decides.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/model/model.h"
#include "runtime/policy/names.h"

namespace thimble {

inline constexpr uint32_t kDefault = UINT32_MAX;

enum class RetainScope : uint32_t { kPerHead, kLayer };
enum class VoteScope : uint32_t { kAuto, kLayer, kGroup };
enum class Positions : uint32_t { kList, kOriginal };

struct SessionOptions {
  std::shared_ptr<const Retainer> retainer;
  uint64_t budget = 0;  // bytes; 0: no limit

  Retention retention = Retention::kNone;
  RetainScope retain_scope = RetainScope::kPerHead;
  uint32_t pool = 0;  // b: entries that a head keeps, on average
  // How heads share the pool, [layer][kv head], 1 on average; null: equally. The policy takes them from the
  // retainer's file.
  std::shared_ptr<const std::vector<float>> shares;
  // Entries that each head keeps, [layer][kv head]; empty: `pool` each. What it says of layers with a
  // window is not used.
  std::vector<uint32_t> keeps;
  uint32_t chunk = 0;
  uint32_t stabilizers = kDefault;
  uint32_t local = kDefault;
  uint32_t protect_init = kDefault;
  uint32_t max_new = 0;

  Selection selection = Selection::kDense;
  uint32_t select_k = 0, select_init = kDefault, select_local = 0;
  float select_theta = 1.0f;
  VoteScope vote = VoteScope::kAuto;
  bool vote_scaled = false;
  uint32_t vote_window = 0;
  uint32_t select_prefill = kDefault;  // 1: while reading, too
  uint32_t select_page = 0;            // entries of a page
  uint32_t dense_layers = kDefault;    // first layers that attend to everything

  Positions positions = Positions::kList;
  uint32_t context = 0;
  uint32_t seed = 0;
  uint32_t rebuild = 0;        // released tokens that a step reads again
  uint32_t rebuild_every = 0;  // steps from one that does to the next
  bool watch = false;          // keep what the attention of the last token is told by
};

}  // namespace thimble
