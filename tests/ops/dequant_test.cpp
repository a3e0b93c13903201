// The block formats as floats, compared with values that tests/reference/dequant.py computed with numpy.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "backends/codebooks.h"
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

// Where a block stores its minimum m, and the largest factor that m is multiplied with; 0: no minimum.
struct Minimum {
  size_t at;
  float most;
};
Minimum minimum_of(DType type) {
  switch (type) {
    case DType::kQ4_1:
    case DType::kQ5_1:
      return {2, 1};
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {2, 63};
    case DType::kQ2_K:
      return {82, 15};
    default:
      return {0, 0};
  }
}

// The rounding error. Without a minimum, an element is a product of a half (11 bits), a scale (at most 6) and
// a number (at most 7), which is exact. With a minimum, two exact terms are added, each at most `top`: at
// most an ulp.
float tolerance(const Sample& s, size_t i) {
  const DTypeInfo& info = dtype_info(s.type);
  const Minimum minimum = minimum_of(s.type);
  if (!minimum.most) return 0;
  const size_t first = i / info.block * info.block;
  float top = 0;
  for (size_t j = first; j < first + info.block; ++j) top = std::max(top, std::fabs(s.values[j]));
  uint16_t m;
  std::memcpy(&m, s.blocks.data() + i / info.block * info.block_bytes + minimum.at, sizeof m);
  return (top + minimum.most * std::fabs(f16_to_f32(m))) * 0x1p-23f;
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
#define X(name, number, block, bytes) EXPECT_EQ(seen.count(DType::k##name), 1u) << #name;
  THIMBLE_DTYPES(X)
#undef X
}

// Rows that the reference implementation encoded and decoded.
TEST(Dequant, AgreesWithTheReferenceOnItsOwnRows) {
  const std::string folder = shared_file("data/golden/types/");
  THIMBLE_NEEDS(folder);
  const auto read = [&](const std::string& name) {
    std::ifstream file(folder + name, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::vector<std::byte> copy(bytes.size());
    std::transform(bytes.begin(), bytes.end(), copy.begin(), [](char c) { return std::byte(c); });
    return copy;
  };
  const auto check = [&](DType type, const std::string& name) {
    const std::vector<std::byte> blocks = read(name + ".bin"), floats = read(name + ".f32");
    std::vector<float> expected(floats.size() / sizeof(float)), got(expected.size());
    ASSERT_EQ(expected.size(), 2048u) << name;
    ASSERT_EQ(blocks.size(), dtype_bytes(type, expected.size())) << name;
    std::memcpy(expected.data(), floats.data(), floats.size());
    const Sample sample{type, blocks, expected};
    for (const Kernels* k : all_sets()) {
      k->dequantize(type, blocks.data(), 2048, got.data());
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_NEAR(got[i], expected[i], tolerance(sample, i)) << name << " element " << i << ", " << k->name;
    }
  };
#define X(name, number, block, bytes) \
  if (DType::k##name != DType::kF32 && DType::k##name != DType::kF16) check(DType::k##name, #name);
  THIMBLE_DTYPES(X)
#undef X
}

// FNV-1a-64 of a book as it is published, one byte per element.
uint64_t fingerprint(std::initializer_list<uint32_t> entries, uint32_t bits, std::vector<int> values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint32_t entry : entries)
    for (uint32_t i = 0; i < 16; i += bits) {
      const size_t place = entry >> i & ((1u << bits) - 1);
      EXPECT_LT(place, values.size());
      hash = (hash ^ static_cast<uint8_t>(values[place])) * 0x100000001b3;
    }
  return hash;
}

// Computed from the books that ggml publishes.
TEST(Dequant, HasThePublishedCodeBooks) {
  const std::vector<int> iq2 = {THIMBLE_IQ2_VALUES};
  EXPECT_EQ(fingerprint({THIMBLE_IQ2_XXS_GRID}, 2, iq2), 0xbb4ee025b5ac6e8e);
  EXPECT_EQ(fingerprint({THIMBLE_IQ2_XS_GRID}, 2, iq2), 0xc9b1ee61e79909bd);
  EXPECT_EQ(fingerprint({THIMBLE_IQ2_S_GRID}, 2, iq2), 0x123edd38a3b62b90);
  EXPECT_EQ(fingerprint({THIMBLE_IQ3_XXS_GRID}, 4, {THIMBLE_IQ3_XXS_VALUES}), 0xdfa5dc83d6a155d5);
  EXPECT_EQ(fingerprint({THIMBLE_IQ3_S_GRID}, 4, {THIMBLE_IQ3_S_VALUES}), 0xfa37020c25b44829);
  EXPECT_EQ(fingerprint({THIMBLE_IQ1_GRID}, 2, {-1, 0, 1}), 0x6703ed863501ae2e);
}

TEST(Dequant, GivesEveryHalfExactly) {
  std::vector<uint16_t> halves(65536);
  for (uint32_t i = 0; i < 65536; ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> got(65536);
  for (const Kernels* k : all_sets()) {
    k->dequantize(DType::kF16, reinterpret_cast<const std::byte*>(halves.data()), 65536, got.data());
    for (uint32_t i = 0; i < 65536; ++i) {
      const float exact = f16_to_f32(halves[i]);
      if (std::isnan(exact))  // regardless of the other bits
        ASSERT_TRUE(std::isnan(got[i])) << i << ", " << k->name;
      else
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(exact)) << i << ", " << k->name;
    }
  }
}

// The dot product of a row of W with rows of x does not depend on whether W is expanded first.
TEST(Dequant, FusedDotsAgreeWithExpandedOnes) {
  for (const Sample& s : read_samples()) {
    if (s.type == DType::kF16 || s.type == DType::kBF16 || s.type == DType::kMXFP4)
      continue;  // infinities, 1e30, 2^122: covered by the op tests
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
