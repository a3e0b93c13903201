// Solves symmetric positive definite systems of equations, in double.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"

namespace thimble {

// Replaces the lower triangle of a [n][n] with its Cholesky factor. Only the lower triangle is read, and the
// contents above the diagonal are undefined afterwards. Returns false if a is not positive definite. The
// result does not depend on the number of threads.
bool factorise(std::span<double> a, uint32_t n, ThreadPool&);

// Solves (factor factor') x = b, and overwrites b [n] with x.
void solve(std::span<const double> factor, uint32_t n, double* b);

}  // namespace thimble
