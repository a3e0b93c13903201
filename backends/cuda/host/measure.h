// What a card can do at most: the rates that speeds are given as shares of.
#pragma once

#include "backends/cuda/host/card_state.h"

namespace thimble::cuda {

// Measures the current card, which must be this one: under a second, and up to 2 GiB of its memory, which are
// free again afterwards. OutOfMemory where there is no room.
Result<Rates> measure_rates(const CardState&);

}  // namespace thimble::cuda
