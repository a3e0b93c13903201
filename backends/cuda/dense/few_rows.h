// Products of few rows that read W once, as it lies (few_rows.cu). Host side.
#pragma once

#include "backends/cuda/dense/dense.h"

namespace thimble::cuda {

inline constexpr uint32_t kMostFewRows = 64;

// Whether they can take a matrix of this type in this program.
bool can_multiply_few(const Launch&, DType);
// Of x as scale_rows left it in the operands' place.
void multiply_few(const Launch&, const Operands&, const Linear&);
void multiply_few(const Launch&, const Operands&, const Glu&);

}  // namespace thimble::cuda
