// Splits long segments into parts, so that an interrupt does not have to wait for the end of a segment.
#pragma once

#include <vector>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

// Ops [first, last) of a segment. If it is a single op, `share` may select a part of it.
struct Part {
  uint32_t first = 0, last = 0;
  Share share;
};

// The parts of a segment for so many rows. No part has an estimated time on one core above `seconds`, except
// for ops that cannot be divided.
std::vector<Part> parts_of(const std::vector<Op>& ops, uint32_t rows, double seconds);

}  // namespace thimble::cpu
