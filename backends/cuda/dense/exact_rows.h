// Products of many rows without rounding x or W.
#pragma once

#include <span>

#include "backends/cuda/ops.h"

namespace thimble::cuda {

// y = W x + bias, or y += that, in f32, for siblings with the same x. It needs no scratch. It is made for few
// columns of y.
void multiply_exactly(const Launch&, std::span<const Linear> siblings);

}  // namespace thimble::cuda
