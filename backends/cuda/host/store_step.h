// Prepares a card before ops run: checks which kernels it can run, and writes the values of a step.
#pragma once

#include <span>

#include "backends/cuda/launch.h"

namespace thimble::cuda {

// Copies the step's values to memory that later kernels on the stream read. `to` must be aligned to 16 bytes
// and have room for the values rounded up to a multiple of 16 bytes.
cudaError_t store_step(cudaStream_t, std::span<const std::byte> values, std::byte* to);

// Whether this build has kernels for the current card. The architecture that they were compiled for limits
// which features are used: code for an older card, which the driver translates, has no instructions of the
// newer card.
cudaError_t find_kernels(Card&);

}  // namespace thimble::cuda
