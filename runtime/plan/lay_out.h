// Places the arrays of a session in its arenas. The planner calls it to count bytes, the engine to place
// arrays.
#pragma once

#include <span>

#include "runtime/kv/recall_choice.h"
#include "runtime/policy/policy.h"

namespace thimble {

// Places all arrays of a session in three arenas, including those of the policies. `scratch`: bytes that the
// backend needs for itself.
Layout lay_out(const Setting&, Policies&, const DeviceInfo&, uint64_t scratch, WeightWindow&, Arena& pool,
               Arena& workspace, Arena& io);
// The shape of the store of evicted entries that the options ask for, with as many pages as its memory has.
RecallStore::Shape recall_shape(const Model&, const SessionOptions&);
// Whether the device votes for the pages that come back from the store (see page_vote).
bool votes_on_device(const SessionOptions&, const DeviceInfo&);
// Fills the RoPE tables. `context` decides which factors longrope uses.
Status write_rope_tables(Device&, const Setting&, const Layout&, uint32_t context);
// Gives a step its tokens. Of an embedding that stays on the host, the step gets the rows of these tokens.
void set_tokens(const Model&, const Layout&, std::span<const int32_t> tokens);

}  // namespace thimble
