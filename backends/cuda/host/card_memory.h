// How much of a card's memory is free, asked of the driver's management library: unlike cudaMemGetInfo it
// needs no context, so it can tell what a context costs.
#pragma once

#include <cstdint>
#include <optional>

namespace thimble::cuda {

// Bytes that are free on card `index` (as cudaGetDeviceCount counts); empty where the library is missing.
std::optional<uint64_t> free_card_bytes(int index);

}  // namespace thimble::cuda
