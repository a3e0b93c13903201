// Copies of rows of keys and values, to the same format or to another one. Device side.
#pragma once

#include <type_traits>

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

// Where a warp converts a row. Rows are in host memory on one side, which is slow to access in small pieces.
struct RowBuffer {
  uint32_t words[kMostHeadDim * sizeof(uint16_t) / sizeof(uint32_t)];
};

template <typename Format>
__device__ uint32_t row_words(uint32_t head_dim) {
  return Format::row_units(head_dim) * sizeof(typename Format::Unit) / sizeof(uint32_t);
}

// The warp copies words, one after the other.
__device__ inline void copy_words(const void* from, void* to, uint32_t words) {
  for (uint32_t i = threadIdx.x % kWarp; i < words; i += kWarp)
    static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
}

// The warp converts a row.
template <typename From, typename To>
__device__ void convert_row(const void* from, void* to, uint32_t head_dim) {
  uint32_t beyond = 0;  // not counted: a row had its numbers bounded when it was appended
  for (uint32_t c = threadIdx.x % kWarp; c < head_dim; c += kWarp)
    To::store(static_cast<typename To::Unit*>(to), head_dim, c,
              From::load(static_cast<const typename From::Unit*>(from), head_dim, c), beyond);
}

// The warp copies a row from device to host memory.
template <typename From, typename To>
__device__ void copy_row_to_host(const void* from, void* to, uint32_t head_dim, RowBuffer& buffer) {
  if constexpr (std::is_same_v<From, To>) {
    copy_words(from, to, row_words<To>(head_dim));
  } else {
    __syncwarp();  // the buffer's last row was copied
    convert_row<From, To>(from, buffer.words, head_dim);
    __syncwarp();
    copy_words(buffer.words, to, row_words<To>(head_dim));
  }
}

// The same from host to device memory.
template <typename From, typename To>
__device__ void copy_row_to_device(const void* from, void* to, uint32_t head_dim, RowBuffer& buffer) {
  if constexpr (std::is_same_v<From, To>) {
    copy_words(from, to, row_words<To>(head_dim));
  } else {
    __syncwarp();  // the buffer's last row was converted
    copy_words(from, buffer.words, row_words<From>(head_dim));
    __syncwarp();
    convert_row<From, To>(buffer.words, to, head_dim);
  }
}

}  // namespace thimble::cuda
