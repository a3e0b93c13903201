// Tensors of other programs' files, as the readers in this folder find them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace thimble {

struct ForeignTensor {
  std::string name;                 // of what is nested the path: "module.0.b"
  const char* type = "unknown";     // for messages: "float64"
  std::optional<DType> dtype;       // nothing where it is no type that Thimble computes with
  std::vector<uint64_t> shape;      // as the file has it, slowest first
  const std::byte* data = nullptr;  // row by row in the file's memory, at any address
  uint64_t bytes = 0;
};

// The product of a shape, or nothing where it overflows.
inline std::optional<uint64_t> elements_of(const std::vector<uint64_t>& shape) {
  uint64_t product = 1;
  for (const uint64_t extent : shape) {
    if (extent != 0 && product > UINT64_MAX / extent) return std::nullopt;
    product *= extent;
  }
  return product;
}

}  // namespace thimble
