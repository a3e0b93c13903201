// The two ways of attending that attention() chooses from, and the scratch that each takes. Host side.
#pragma once

#include "backends/cuda/launch.h"

namespace thimble::cuda {

// kFromView: a step's rows, causal, against what kv_view shows. head_dim is at most 256.
void attend_view(const Launch&, const Attention&);
uint64_t attend_view_scratch(const ModelShape&, const SessionShape&, const Card&);

// kFromPool: the only row against the pool itself, gathered and rotated on the way.
void attend_pool(const Launch&, const Attention&);
uint64_t attend_pool_scratch(const ModelShape&, const SessionShape&, const Card&);

}  // namespace thimble::cuda
