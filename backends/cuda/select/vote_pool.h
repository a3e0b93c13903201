// The max-pool of a vote, applied to finished votes. Host side.
#pragma once

#include "backends/cuda/launch.h"

namespace thimble::cuda {

void pool_votes(const Launch&, const Vote&);
uint64_t vote_pool_scratch(uint64_t votes);

}  // namespace thimble::cuda
