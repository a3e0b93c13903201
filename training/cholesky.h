// Symmetric positive systems of equations, in double.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"

namespace thimble {

// a [n][n], of which the lower triangle is read, becomes its Cholesky factor there; what is above the
// diagonal is left as anything. False where a is not positive. Threads do not change a bit of it.
bool factorise(std::span<double> a, uint32_t n, ThreadPool&);

// Solves (factor factor') x = b: b [n] becomes x.
void solve(std::span<const double> factor, uint32_t n, double* b);

}  // namespace thimble
