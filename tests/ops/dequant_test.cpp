// The block formats as floats, against values that tests/reference/dequant.py computed with numpy.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "backends/cpu/kernels.h"
#include "base/bits.h"
#include "tests/support/data.h"

namespace thimble::cpu {
namespace {

struct Sample {
  DType type;
  std::vector<std::byte> blocks;
  std::vector<float> values;
};

std::vector<Sample> read_samples() {
  std::ifstream file(project_file("tests/reference/dequant.bin"), std::ios::binary);
  std::vector<Sample> samples;
  uint32_t head[3];
  while (file.read(reinterpret_cast<char*>(head), sizeof head)) {
    Sample s{static_cast<DType>(head[0]), std::vector<std::byte>(head[2]), std::vector<float>(head[1])};
    file.read(reinterpret_cast<char*>(s.blocks.data()), head[2]);
    file.read(reinterpret_cast<char*>(s.values.data()), std::streamsize{4} * head[1]);
    samples.push_back(std::move(s));
  }
  return samples;
}

std::vector<const Kernels*> all_sets() {
  const Kernels* sets[4];
  const uint32_t n = kernel_sets(sets);
  return {sets, sets + n};
}

// The largest d * scale * q and m * min of a block, which bounds what rounding can do: at most three
// roundings of numbers no larger than `top`, half an ulp each, and twice that where one side rounds once (a
// fused multiply-add).
float tolerance(const Sample& s, size_t i) {
  const size_t block = dtype_info(s.type).block;
  float top = 0;
  for (size_t j = i / block * block; j < (i / block + 1) * block; ++j)
    top = std::max(top, std::fabs(s.values[j]));
  // Both terms of a difference may be larger than it, up to the largest offset, |m * 63|: 2 bytes at 2.
  if (block > 1 && (s.type == DType::kQ4_1 || s.type == DType::kQ5_1 || s.type == DType::kQ4_K ||
                    s.type == DType::kQ5_K)) {
    uint16_t m;
    std::memcpy(&m, s.blocks.data() + i / block * dtype_info(s.type).block_bytes + 2, sizeof m);
    top += 2 * 63 * std::fabs(f16_to_f32(m));
  }
  return block == 1 ? 0 : 3 * top * 0x1p-24f;
}

TEST(Dequant, FollowsThePublishedLayoutOfEveryType) {
  std::set<DType> seen;
  for (const Sample& s : read_samples()) {
    seen.insert(s.type);
    ASSERT_EQ(dtype_bytes(s.type, s.values.size()), s.blocks.size());
    for (const Kernels* k : all_sets()) {
      std::vector<float> got(s.values.size() + 1, -7.0f);
      k->dequantize(s.type, s.blocks.data(), static_cast<uint32_t>(s.values.size()), got.data());
      for (size_t i = 0; i < s.values.size(); ++i) {
        if (std::isinf(s.values[i]))
          ASSERT_EQ(got[i], s.values[i]) << dtype_info(s.type).name << " element " << i << ", " << k->name;
        else
          ASSERT_NEAR(got[i], s.values[i], tolerance(s, i))
              << dtype_info(s.type).name << " element " << i << ", " << k->name;
      }
      ASSERT_EQ(got.back(), -7.0f) << dtype_info(s.type).name << " wrote too much, " << k->name;
    }
  }
  EXPECT_EQ(seen.size(), 11u);
}

TEST(Dequant, GivesEveryHalfExactly) {
  std::vector<uint16_t> halves(65536);
  for (uint32_t i = 0; i < 65536; ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> got(65536);
  for (const Kernels* k : all_sets()) {
    k->dequantize(DType::kF16, reinterpret_cast<const std::byte*>(halves.data()), 65536, got.data());
    for (uint32_t i = 0; i < 65536; ++i) {
      const float exact = f16_to_f32(halves[i]);
      if (std::isnan(exact))  // whatever its other bits
        ASSERT_TRUE(std::isnan(got[i])) << i << ", " << k->name;
      else
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(exact)) << i << ", " << k->name;
    }
  }
}

// A dot of a row of W with rows of x is the same whether W is expanded beforehand or inside.
TEST(Dequant, FusedDotsAgreeWithExpandedOnes) {
  for (const Sample& s : read_samples()) {
    if (s.type == DType::kF16 || s.type == DType::kBF16)
      continue;  // infinities, 1e30: the op tests have them
    const uint32_t n = static_cast<uint32_t>(s.values.size());
    std::vector<float> x(kMaxDotRows * (n + 3));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 37) % 101) / 50 - 1;
    for (const Kernels* k : all_sets())
      for (uint32_t rows = 1; rows <= kMaxDotRows; ++rows) {
        float got[kMaxDotRows];
        k->dot(s.type, s.blocks.data(), n, x.data(), n + 3, rows, got);
        for (uint32_t r = 0; r < rows; ++r) {
          double sum = 0, magnitude = 0, expansion = 0;
          for (uint32_t i = 0; i < n; ++i) {
            const double product = double{s.values[i]} * double{x[r * (n + 3) + i]};
            sum += product;
            magnitude += std::fabs(product);
            expansion += double{tolerance(s, i)} * std::fabs(double{x[r * (n + 3) + i]});
          }
          // n products and n additions, each off by at most half an ulp of the sum of magnitudes.
          ASSERT_NEAR(got[r], sum, 2 * n * 0x1p-24 * magnitude + expansion)
              << dtype_info(s.type).name << ", " << k->name;
        }
      }
  }
}

}  // namespace
}  // namespace thimble::cpu
