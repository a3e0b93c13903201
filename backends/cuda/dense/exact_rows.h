// Products of many rows without rounding x or W.
#pragma once

#include "backends/cuda/ops.h"

namespace thimble::cuda {

// y = W x + bias, or y += that, in f32. It needs no scratch. It is made for few columns of y.
void multiply_exactly(const Launch&, const Linear&);

}  // namespace thimble::cuda
