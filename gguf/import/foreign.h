// A tensor from another program's file, as the readers in this folder return it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace thimble {

struct ForeignTensor {
  std::string name;                 // nested values are named by their path: "module.0.b"
  const char* type = "unknown";     // for messages: "float64"
  std::optional<DType> dtype;       // empty for a type that Thimble does not compute with
  std::vector<uint64_t> shape;      // as in the file, slowest-varying first
  const std::byte* data = nullptr;  // row-major, in the file's memory, at any alignment
  uint64_t bytes = 0;
};

// The product of a shape, or nullopt if it overflows.
inline std::optional<uint64_t> elements_of(const std::vector<uint64_t>& shape) {
  uint64_t product = 1;
  for (const uint64_t extent : shape) {
    if (extent != 0 && product > UINT64_MAX / extent) return std::nullopt;
    product *= extent;
  }
  return product;
}

}  // namespace thimble
