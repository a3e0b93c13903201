// Random weights of any type, as stored in a file.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "base/bits.h"
#include "base/dtype.h"
#include "tests/support/random.h"

namespace thimble::test {

// Offsets of the halves in a type's block: the scale, then the minimum. iq1_m's scale is in four parts,
// mxfp4's is an exponent, and nvfp4 has four of 8 bits.
inline std::vector<size_t> halves_of(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kMXFP4:
    case DType::kNVFP4:
    case DType::kIQ1_M:
      return {};
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 2};
    case DType::kQ2_K:
      return {80, 82};
    case DType::kQ3_K:
    case DType::kQ6_K:
    case DType::kTQ1_0:
    case DType::kTQ2_0:
      return {dtype_info(type).block_bytes - 2};
    default:
      return {0};
  }
}
inline void put_half(std::byte* at, float f) {
  const uint16_t h = f32_to_f16(f);
  std::memcpy(at, &h, sizeof h);
}
// iq1_m stores a quarter of the scale in the top bits of each of four words.
inline void put_iq1_m_scale(std::byte* block, float f) {
  const uint32_t h = f32_to_f16(f);
  for (uint32_t i = 0; i < 4; ++i) {
    std::byte& top = block[49 + 2 * i];
    top = (top & std::byte{15}) | static_cast<std::byte>((h >> 4 * i & 15) << 4);
  }
}

// n elements with scales of at most 0.02, or of 1 if the type has no scales.
inline std::vector<std::byte> random_blocks(Random& random, DType type, size_t n) {
  std::vector<std::byte> bytes(dtype_bytes(type, n));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.below(256));
  for (size_t block = 0; block < bytes.size(); block += dtype_info(type).block_bytes) {
    std::byte* at = &bytes[block];
    for (size_t half : halves_of(type)) put_half(at + half, random.uniform(-0.02f, 0.02f));
    const float f = random.uniform(-1, 1);
    if (type == DType::kF32) std::memcpy(at, &f, sizeof f);
    if (type == DType::kBF16) std::memcpy(at, reinterpret_cast<const std::byte*>(&f) + 2, 2);
    if (type == DType::kMXFP4) at[0] = static_cast<std::byte>(118 + random.below(8));
    if (type == DType::kNVFP4)  // 0 to 15 / 64; those below 1 / 64 are subnormal
      for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(random.below(32));
    if (type == DType::kIQ1_M) put_iq1_m_scale(at, 0.02f * f);
  }
  return bytes;
}

}  // namespace thimble::test
