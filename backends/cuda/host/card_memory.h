// Reads a card's free memory from the driver's management library. Unlike cudaMemGetInfo it needs no context,
// so it can measure the memory that a context needs.
#pragma once

#include <cstdint>
#include <optional>

namespace thimble::cuda {

// Free bytes on card `index` (numbered as in cudaGetDeviceCount). Empty if the library is missing.
std::optional<uint64_t> free_card_bytes(int index);

}  // namespace thimble::cuda
