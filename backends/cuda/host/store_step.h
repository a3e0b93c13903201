// What is done to a card before ops run: finding out what it can run, and giving a step its values.
#pragma once

#include <span>

#include "backends/cuda/launch.h"

namespace thimble::cuda {

// Puts the step's values where the kernels behind it on the stream read them; `to` is aligned to 16 bytes and
// has room for whole pieces of 16.
cudaError_t store_step(cudaStream_t, std::span<const std::byte> values, std::byte* to);

// Whether this build has kernels for the current card. What they were compiled for bounds what the card is
// used for: code for an older card, which the driver translates, has none of the newer one's instructions.
cudaError_t find_kernels(Card&);

}  // namespace thimble::cuda
