// The block formats of keys and values, written a second time from their description in double precision.
// They share no code with the backends. A block of 32 channels x is stored as H x / 8, where H is the
// Hadamard matrix, in codes that are multiplied by a scale; so x = H (scale * codes) / 4, because H H = 32.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/ops/kv_reference.h"

namespace thimble::test {

constexpr DType kBlockFormats[] = {DType::kQ8_0, DType::kQ4_0};
constexpr uint32_t kBlockChannels = 32;

inline int lowest_code(DType type) { return type == DType::kQ8_0 ? -127 : -8; }
inline int highest_code(DType type) { return type == DType::kQ8_0 ? 127 : 7; }

// The Hadamard transform of a block, times a factor.
inline std::vector<double> hadamard(const std::vector<double>& x, double factor) {
  std::vector<double> y(x.size());
  for (uint32_t i = 0; i < x.size(); ++i) {
    for (uint32_t j = 0; j < x.size(); ++j) y[i] += std::popcount(i & j) % 2 ? -x[j] : x[j];
    y[i] *= factor;
  }
  return y;
}

struct StoredBlock {
  double scale = 0;
  std::vector<int> codes;
  std::vector<double> values() const {
    std::vector<double> v;
    for (const int code : codes) v.push_back(scale * code);
    return v;
  }
};

// The blocks of a row of `width` channels: the codes of all, then the scales of all. Two zero bytes follow an
// odd number of scales.
inline std::vector<StoredBlock> stored_blocks(DType type, const std::byte* row, uint32_t width) {
  std::vector<StoredBlock> blocks(width / kBlockChannels);
  const std::byte* at = row;
  for (StoredBlock& block : blocks) {
    for (uint32_t i = 0; i < kBlockChannels; ++i) {
      const int byte = static_cast<int>(at[type == DType::kQ8_0 ? i : i / 2]);
      block.codes.push_back(type == DType::kQ8_0 ? byte - (byte > 127 ? 256 : 0)
                                                 : (i % 2 ? byte / 16 : byte % 16) - 8);
    }
    at += type == DType::kQ8_0 ? kBlockChannels : kBlockChannels / 2;
  }
  const auto half = [&] {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    at += sizeof bits;
    return bits;
  };
  for (StoredBlock& block : blocks) block.scale = f16_to_f32(half());
  if (blocks.size() % 2) {
    EXPECT_EQ(half(), 0);
  }
  EXPECT_EQ(static_cast<uint64_t>(at - row), kv_bytes(type, width));
  return blocks;
}

// The channels of a row.
inline std::vector<double> stored_row(DType type, const std::byte* row, uint32_t width) {
  std::vector<double> channels;
  for (const StoredBlock& block : stored_blocks(type, row, width)) {
    const std::vector<double> values = hadamard(block.values(), 0.25);
    channels.insert(channels.end(), values.begin(), values.end());
  }
  return channels;
}

// The transform of a block of channels, of which the format stores multiples of a scale.
inline std::vector<double> transformed(const float* x) {
  return hadamard(std::vector<double>(x, x + kBlockChannels), 0.125);
}

// Numbers that a block format and f16 can hold, in blocks of 32. Their transforms are multiples of a power of
// two, one of which has the largest magnitude that the format has, so that its scale is that power.
inline std::vector<float> exact_blocks(DType type, Random& random, size_t count) {
  // f16 holds the sum of 32 multiples if they are below 2^5 steps
  const int most = type == DType::kQ8_0 ? 15 : 7;
  std::vector<float> numbers;
  while (numbers.size() < count) {
    std::vector<double> values(kBlockChannels);
    for (double& v : values) v = static_cast<int>(random.below(static_cast<uint32_t>(2 * most + 1))) - most;
    values[random.below(kBlockChannels)] = lowest_code(type);
    for (const double x : hadamard(values, 0x1p-9)) numbers.push_back(static_cast<float>(x));
  }
  numbers.resize(count);
  return numbers;
}

// Rows of such numbers as the format stores them.
inline std::vector<std::byte> exact_rows(DType type, const std::vector<float>& numbers, uint32_t width) {
  std::vector<std::byte> rows;
  const auto put = [&](uint16_t half) {
    rows.push_back(static_cast<std::byte>(half & 255));
    rows.push_back(static_cast<std::byte>(half >> 8));
  };
  const auto scale_of = [&](const std::vector<double>& v) {
    double largest = 0;
    for (const double x : v) largest = std::fabs(x) > std::fabs(largest) ? x : largest;
    const double scale = largest / lowest_code(type);
    EXPECT_EQ(f16_to_f32(f32_to_f16(static_cast<float>(scale))), scale) << "not a number of the format";
    return scale;
  };
  for (size_t first = 0; first < numbers.size(); first += width) {
    std::vector<double> scales;
    for (uint32_t c = 0; c < width; c += kBlockChannels) {
      const std::vector<double> block = transformed(&numbers[first + c]);
      const double scale = scale_of(block);
      scales.push_back(scale);
      std::vector<int> codes;
      for (const double x : block) codes.push_back(scale == 0 ? 0 : static_cast<int>(std::lround(x / scale)));
      for (uint32_t i = 0; i < kBlockChannels; i += type == DType::kQ8_0 ? 1 : 2)
        rows.push_back(static_cast<std::byte>(
            type == DType::kQ8_0 ? codes[i] & 255 : (codes[i] + 8) | (codes[i + 1] + 8) << 4));
    }
    for (const double scale : scales) put(f32_to_f16(static_cast<float>(scale)));
    if (scales.size() % 2) put(0);
  }
  return rows;
}

// The same for f16, too.
inline std::vector<std::byte> rows_of(DType type, const std::vector<float>& numbers, uint32_t width) {
  if (type != DType::kF16) return exact_rows(type, numbers, width);
  const std::vector<uint16_t> h = halves(numbers);
  std::vector<std::byte> bytes(h.size() * sizeof h[0]);
  std::memcpy(bytes.data(), h.data(), bytes.size());
  return bytes;
}

}  // namespace thimble::test
