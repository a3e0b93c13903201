// Answers what a session takes before anything is allocated, and the inverse: the largest pool for a budget.
#pragma once

#include "runtime/policy/policy.h"

namespace thimble {

struct MemoryPlan {
  SessionOptions asked;    // as they were given
  SessionOptions options;  // resolved: every default decided
  Dimensions dimensions;
  uint32_t capacity = 0;
  uint64_t weights = 0;  // placed on the device; read from the mapping they cost nothing
  uint64_t shared = 0;   // of which other sessions placed; not in the total
  uint64_t pool = 0, view = 0, workspace = 0, io = 0, fixed = 0, total = 0;
  uint64_t released = 0;          // of the pool as it was laid out, given back since; in no other number
  uint64_t programs = 0;          // part of fixed: the session's own, which a clone takes again
  uint64_t backend_scratch = 0;   // part of workspace
  uint32_t largest_position = 0;  // the largest rotary position used; UINT32_MAX: grows with the text
  bool selection_pays = false;    // selecting reads fewer bytes than attending to the full pool (methods 6.2)
};

// Decides every default but the pool's under a budget, and refuses what contradicts itself, with the reason.
Result<SessionOptions> resolve(const Model&, const SessionOptions&);

// Counts what a session with these policies takes, under no budget. `labels`: it also runs the op `label`.
Result<MemoryPlan> count_plan(const Model&, const Device&, const SessionOptions& resolved, Policies&,
                              bool labels = false);

// The plan of a session; refuses with Budget, the missing bytes, and the largest pool that would fit. With a
// budget and no pool it takes the largest that fits.
Result<MemoryPlan> make_plan(const Model&, const Device&, const SessionOptions&);

// Refuses a plan that needs more memory than a card has free now: a driver might take it from others all the
// same. The processor's memory is taken when it is first used, and is not looked at.
Status check_free(const MemoryPlan&, const DeviceInfo&);

// Bytes of a session's own host memory beside the io arena: sampler, waiting tokens, heads and recorded
// programs.
uint64_t host_bytes(const Model&, const MemoryPlan&);

// The largest pool for options.budget, at most what the options can use; options.pool does not matter.
Result<uint32_t> largest_pool(const Model&, const Device&, const SessionOptions&);

}  // namespace thimble
