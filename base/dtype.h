// Tensor element types, numbered as in GGUF, and the size of their rows.
#pragma once

#include <cstdint>

#include "base/dtype_list.h"

namespace thimble {

enum class DType : uint32_t {
#define X(name, number, block, bytes) k##name = number,
  THIMBLE_DTYPES(X)
#undef X
};

// Block sizes of a type, for code that is compiled for one type.
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
  const char* name;      // the name for users: "q4_K"
  uint32_t block;        // elements per block; a row holds whole blocks
  uint32_t block_bytes;  // bytes per block
};

// The table row of a supported type, or nullptr for a type that this library cannot read.
const DTypeInfo* find_dtype(uint32_t gguf_type);
// The table row of a supported type.
const DTypeInfo& dtype_info(DType type);
// The name of any GGUF type, including those that this library cannot read; "unknown" for ids without a name.
const char* gguf_type_name(uint32_t gguf_type);

// Size in bytes of n elements of a type; n is a multiple of the block size.
inline uint64_t dtype_bytes(DType type, uint64_t n) {
  const DTypeInfo& info = dtype_info(type);
  return n / info.block * info.block_bytes;
}

}  // namespace thimble
