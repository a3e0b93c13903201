// Products of weight matrices and single vectors: what decode is made of. linear and glu use them for few
// rows.
#pragma once

#include <span>

#include "backends/cuda/ops.h"

namespace thimble::cuda {

// The ops for up to most_rows() rows of x, each of which reads all weights; their types may differ. Weights
// lie at multiples of 16 bytes; up to 15 bytes beside them are read. No scratch; one launch, but several
// where a type has no format in matvec_formats.cuh or a gate's is not its up's. Where x is the result of
// `norm`, this makes it: of one vector a row, with the same stride and rows, whose x nobody writes.
void multiply_vectors(const Launch&, std::span<const Linear> siblings,  // same x, x_stride, in_cols and rows
                      const RmsNorm* norm);
void multiply_vectors(const Launch&, const Glu&, const RmsNorm* norm);

// The same of one matrix of few rows of floats, of one row, where multiplies_by_rows() holds.
bool multiplies_by_rows(const Launch&, const Linear&);
void multiply_by_rows(const Launch&, const Linear&, const RmsNorm* norm);

// The experts' ops of one row, where multiplies_vectors() holds. A route, if not null, is one for which
// chooses_experts() holds. The glu's launch makes it; the linear, the next launch behind that, makes it once
// more for itself.
bool multiplies_vectors(const Launch&, const ExpertGlu&);
bool multiplies_vectors(const Launch&, const ExpertLinear&);
bool chooses_experts(const Route&);
void multiply_vectors(const Launch&, const ExpertGlu&, const Route*);
void multiply_vectors(const Launch&, const ExpertLinear&, const Route*);

}  // namespace thimble::cuda
