// The options of a session. Zero and kDefault mean that resolve() in plan/planner.h decides.
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
  uint32_t pool = 0;  // b: entries that each head keeps, on average
  // The share of the pool of each head, [layer][kv head], 1 on average. Null: all heads get the same. The
  // policy takes the shares from the retainer's file.
  std::shared_ptr<const std::vector<float>> shares;
  // The number of entries that each head keeps, [layer][kv head]. Empty: each head keeps `pool`. Values of
  // windowed layers are not used.
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
  uint32_t select_prefill = kDefault;  // 1: also in prefill
  uint32_t select_page = 0;            // entries of a page
  uint32_t dense_layers = kDefault;    // first layers, which attend to every entry

  Positions positions = Positions::kList;
  uint32_t context = 0;
  uint32_t seed = 0;
  uint32_t rebuild = 0;        // evicted tokens that one step reads again
  uint32_t rebuild_every = 0;  // steps between two steps that read tokens again
  bool watch = false;          // store what is needed to report the attention of the last token
};

}  // namespace thimble
