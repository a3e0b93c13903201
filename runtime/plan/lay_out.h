// Lays a session out: the planner calls it to count, the engine to place.
#pragma once

#include <span>

#include "runtime/policy/policy.h"

namespace thimble {

// Lays a session out in three arenas, the policies' arrays among them. `scratch` is what the backend needs
// for itself.
Layout lay_out(const Setting&, Policies&, const DeviceInfo&, uint64_t scratch, Arena& pool, Arena& workspace,
               Arena& io);
// Fills the tables of positions; `context` chooses longrope's factors.
Status write_rope_tables(Device&, const Setting&, const Layout&, uint32_t context);
// Gives a step its tokens; where the embedding stays on the host, its rows of them, which the step then
// counts.
void set_tokens(const Model&, const Layout&, std::span<const int32_t> tokens);

}  // namespace thimble
