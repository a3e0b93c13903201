// What a session is asked to be. Zero and kDefault mean "decide"; resolve() in memory/planner.h decides.
#pragma once

#include <cstdint>
#include <memory>

#include "backends/backend.h"
#include "runtime/model/model.h"

namespace thimble {

inline constexpr uint32_t kDefault = UINT32_MAX;

enum class Retention : uint32_t { kNone, kWindow, kRandom, kLocret };
enum class RetainScope : uint32_t { kPerHead, kLayer };
enum class Selection : uint32_t { kDense, kTokenSelect };
enum class VoteScope : uint32_t { kAuto, kLayer, kGroup };
enum class Positions : uint32_t { kList, kOriginal };

struct SessionOptions {
  std::shared_ptr<const RetainingHeads> heads;
  uint64_t budget = 0;  // bytes; 0: no limit

  Retention retention = Retention::kNone;
  RetainScope retain_scope = RetainScope::kPerHead;
  uint32_t pool = 0;  // b: entries that a head keeps
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
  bool select_prefill = false;

  Positions positions = Positions::kList;
  uint32_t context = 0;
  uint32_t seed = 0;
};

}  // namespace thimble
