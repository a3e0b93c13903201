// Measures the peak rates of a card. Speeds are reported as shares of these.
#pragma once

#include "backends/cuda/host/card_state.h"

namespace thimble::cuda {

// Measures the given card, which must be the current one. Takes less than a second and up to 2 GiB of its
// memory, which are freed afterwards. OutOfMemory if there is not enough memory.
Result<Rates> measure_rates(const CardState&);

}  // namespace thimble::cuda
