// Segments that take long are run in parts, so that an interrupt need not wait for their end.
#pragma once

#include <vector>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

// Ops [first, last) of a segment; of a single one a share, or all.
struct Part {
  uint32_t first = 0, last = 0;
  Share share;
};

// The parts of a segment of a program for so many rows, none of which is estimated to take one core longer
// than `seconds`, but for ops that cannot be shared out.
std::vector<Part> parts_of(const std::vector<Op>& ops, uint32_t rows, double seconds);

}  // namespace thimble::cpu
