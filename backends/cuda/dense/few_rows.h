// Products of few rows that read W once, as stored (few_rows.cu). Host side.
#pragma once

#include "backends/cuda/dense/dense.h"

namespace thimble::cuda {

inline constexpr uint32_t kMostFewRows = 64;

// Whether multiply_few supports a matrix of this type in this program.
bool can_multiply_few(const Launch&, DType);
// Multiplies x as scale_rows left it in the operands.
void multiply_few(const Launch&, const Operands&, const Linear&);
void multiply_few(const Launch&, const Operands&, const Glu&);

}  // namespace thimble::cuda
