// Slices of rows: a block moves one slice of all entries of a head. Host and device side.
#pragma once

#include <initializer_list>

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// The smallest unit of memory transfers.
inline constexpr uint32_t kSliceBytes = 32;

// The rows of keys and of values in bytes, and in slices.
struct SlicedRows {
  uint32_t k_bytes, v_bytes, k_slices, v_slices;

  // `v`: empty if values are channels of the keys.
  SlicedRows(const KvArray& k, const KvArray& v, uint32_t head_dim)
      : k_bytes(static_cast<uint32_t>(kv_bytes(k.type, head_dim))),
        v_bytes(v ? static_cast<uint32_t>(kv_bytes(v.type, head_dim)) : 0),
        k_slices(static_cast<uint32_t>(ceil_div(k_bytes, kSliceBytes))),
        v_slices(static_cast<uint32_t>(ceil_div(v_bytes, kSliceBytes))) {}
};

// Calls call(unit) with the largest type of which all rows at these addresses consist.
template <typename Call>
void with_unit(const SlicedRows& rows, std::initializer_list<const void*> addresses, const Call& call) {
  uint64_t alignment = rows.k_bytes | rows.v_bytes;
  for (const void* address : addresses) alignment |= reinterpret_cast<uint64_t>(address);
  if (alignment % sizeof(uint4) == 0) return call(uint4{});
  if (alignment % sizeof(uint2) == 0) return call(uint2{});
  if (alignment % sizeof(uint32_t) == 0) return call(uint32_t{});
  call(uint16_t{});
}

}  // namespace thimble::cuda
