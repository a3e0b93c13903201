// Tensor element types, numbered as in GGUF, and what a row of them costs.
#pragma once

#include <cstdint>

#include "base/dtype_list.h"

namespace thimble {

enum class DType : uint32_t {
#define X(name, number, block, bytes) k##name = number,
  THIMBLE_DTYPES(X)
#undef X
};

// What a block of a type is, for code that is made for one.
template <DType type>
struct BlockOf;
#define X(name, number, elements, bytes)                         \
  template <>                                                    \
  struct BlockOf<DType::k##name> {                               \
    static constexpr DType kType = DType::k##name;               \
    static constexpr uint32_t kBlock = elements, kBytes = bytes; \
  };
THIMBLE_DTYPES(X)
#undef X

struct DTypeInfo {
  DType type;
  const char* name;      // as users know it: "q4_K"
  uint32_t block;        // elements in a block; a row holds whole blocks
  uint32_t block_bytes;  // bytes of a block
};

// The row of a supported type, or nullptr for a type this library cannot read.
const DTypeInfo* find_dtype(uint32_t gguf_type);
// The row of a supported type.
const DTypeInfo& dtype_info(DType type);
// The name of any GGUF type, also of one this library cannot read; "unknown" past the known ids.
const char* gguf_type_name(uint32_t gguf_type);

// Bytes of n elements of a type; n is a multiple of the block size.
inline uint64_t dtype_bytes(DType type, uint64_t n) {
  const DTypeInfo& info = dtype_info(type);
  return n / info.block * info.block_bytes;
}

}  // namespace thimble
