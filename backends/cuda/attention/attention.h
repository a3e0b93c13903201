// The two implementations of attention, and the scratch that each needs. Host side.
#pragma once

#include "backends/cuda/launch.h"

namespace thimble::cuda {

// kFromView: causal attention of a step's rows to the view that kv_view made. head_dim is at most 256, or
// 512.
void attend_view(const Launch&, const Attention&);
uint64_t attend_view_scratch(const ModelShape&, const SessionShape&, const Card&);

// kFromPool: attention of a single row to the pool itself; keys are gathered and rotated on the fly.
void attend_pool(const Launch&, const Attention&);
uint64_t attend_pool_scratch(const ModelShape&, const SessionShape&, const Card&);

// The same if values are channels of the keys (latent_tiles.cuh), and takes_latent() holds.
void attend_pool_latent(const Launch&, const Attention&);
uint64_t attend_pool_latent_scratch(const ModelShape&, const SessionShape&, const Card&);

}  // namespace thimble::cuda
