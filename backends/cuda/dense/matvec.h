// Products of weight matrices and single vectors, which dominate decode. linear and glu use them for few
// rows.
#pragma once

#include <span>

#include "backends/cuda/ops.h"
#include "backends/fusion.h"

namespace thimble::cuda {

// The ops for up to most_rows() rows of x. Each row reads all weights; their types may differ. Weights are at
// multiples of 16 bytes, and up to 15 bytes around them are read. They need no scratch. There is one launch,
// but several if a type has no format in matvec_formats.cuh or gate and up have different types. If x is the
// result of `norm`, these functions compute it: the norm has one vector per row, with the same stride and
// rows, and nothing else writes its x.
void multiply_vectors(const Launch&, std::span<const Linear> siblings,  // same x, x_stride, in_cols and rows
                      const RmsNorm* norm);
void multiply_vectors(const Launch&, const Glu&, const RmsNorm* norm);

// The same for matrices of few rows of floats and a single row of x, if multiplies_by_rows() holds.
bool multiplies_by_rows(const Launch&, std::span<const Linear> siblings);
void multiply_by_rows(const Launch&, std::span<const Linear> siblings, const RmsNorm* norm);

// The experts' ops of a single row, if multiplies_vectors() holds. A non-null route is one for which
// chooses_experts() holds. The glu's launch computes it; the linear, which is the next launch, computes it
// again for itself. A shared expert for which
// multiplies_shared() holds is one more slot of both.
bool multiplies_vectors(const Launch&, const ExpertGlu&);
bool multiplies_vectors(const Launch&, const ExpertLinear&);
bool multiplies_shared(const ExpertGlu&, const ExpertLinear&, const SharedExpert&);
bool chooses_experts(const Route&);
void multiply_vectors(const Launch&, const ExpertGlu&, const Route*, const SharedExpert& = {});
void multiply_vectors(const Launch&, const ExpertLinear&, const Route*, const SharedExpert& = {});

}  // namespace thimble::cuda
