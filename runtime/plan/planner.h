// The planner computes the memory of a session before anything is allocated. It also does the inverse: it
// finds the largest pool for a budget.
#pragma once

#include "runtime/kv/recall_choice.h"
#include "runtime/policy/policy.h"

namespace thimble {

struct MemoryPlan {
  SessionOptions asked;    // as they were given
  SessionOptions options;  // resolved: every default decided
  Dimensions dimensions;
  uint32_t capacity = 0;
  uint32_t finer_layers = 0;  // layers whose keys or values have more bits than the options say (kv_types.h)
  uint64_t weights = 0;       // bytes on the device; 0 if the device reads the mapped file
  uint64_t shared = 0;        // part of weights that other sessions placed; not in total
  uint64_t pool = 0, view = 0, workspace = 0, io = 0, fixed = 0, total = 0;
  uint64_t store = 0;         // host memory for evicted entries, without a file; in no other number
  uint64_t store_file = 0;    // bytes of a file for evicted entries; its index is part of io
  uint32_t store_pages = 0;   // of each head
  uint32_t host_threads = 1;  // that choose among them
  bool host_votes = true;     // whether these vote for them, too, and not the device
  uint64_t recall_bytes = 0;  // what a generated token reads of a full store, if everything is recalled
  uint64_t states = 0;        // part of pool: the states of recurrent layers, in all slots
  uint64_t released = 0;      // part of the original pool that was given back; in no other number
  // The bytes of the session of a draft model or block, without the device's fixed part; and the part of them
  // that clones share.
  uint64_t draft = 0, draft_weights = 0;
  uint64_t programs = 0;          // part of fixed: the session's own programs, which a clone allocates again
  uint64_t backend_scratch = 0;   // part of workspace
  uint32_t largest_position = 0;  // largest rotary position; UINT32_MAX: grows with the text
  std::vector<uint32_t> paged_layers;  // which every step reads from the file again
  uint32_t host_groups = 0;            // of weights that a card reads in the host's memory (host_weights.h)
  uint32_t window_copies = 0;          // of these, how many tensors a step copies to a window on the card
  bool selection_pays = false;  // selection reads fewer bytes than attending to the full pool (methods 6.2)
};

// Decides every default, except the pool if there is a budget. Refuses contradictory options with the reason.
Result<SessionOptions> resolve(const Model&, const SessionOptions&);

// The model that drafts, which may be a layer of the model itself. Null: none does.
const Model* drafter_of(const Model&, const SessionOptions&);
// The options of its own session, which reads a window of the text.
SessionOptions draft_options(const Model& drafter, const SessionOptions& resolved);

// Counts the memory of a session with these policies, without a budget. `labels`: the session also runs the
// op `label`. `host_groups`: as in the plan.
Result<MemoryPlan> count_plan(const Model&, const Device&, const SessionOptions& resolved, Policies&,
                              bool labels = false, uint32_t host_groups = 0);

// Makes the plan of a session. With a budget and no pool, it takes the largest pool that fits. If no pool
// fits next to all weights on a card, as few as possible stay in the host's memory. If the plan does not fit,
// it refuses with Budget, the missing bytes, and the largest pool that would fit.
Result<MemoryPlan> make_plan(const Model&, const Device&, const SessionOptions&);

// Refuses a plan that needs more memory than a GPU has free now, because some drivers would allocate it
// anyway and take it from other programs. The CPU's memory is not checked, since it is allocated at first
// use.
Status check_free(const MemoryPlan&, const DeviceInfo&);

// The bytes of the session's own host memory besides the io arena: sampler, waiting tokens, heads and
// recorded programs.
uint64_t host_bytes(const Model&, const MemoryPlan&);

// What the choice of entries that come back from the store must have room for.
RecallChoice::Limits recall_limits(const MemoryPlan&);

// The largest pool for options.budget, but not more than the options can use. options.pool is ignored.
Result<uint32_t> largest_pool(const Model&, const Device&, const SessionOptions&);

}  // namespace thimble
