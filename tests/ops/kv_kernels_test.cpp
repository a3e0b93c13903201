// The inner loops of the KV ops for every instruction set, compared with the same loops in double precision.
#include "backends/cpu/kv_kernels.h"

#include <cmath>

#include "backends/cpu/kernels.h"
#include "tests/ops/kv_blocks.h"

namespace thimble::test {
namespace {

using cpu::kTileKeys;

template <typename T>
const std::byte* bytes(const T* row) {
  return reinterpret_cast<const std::byte*>(row);
}

class KvKernelSets : public ::testing::TestWithParam<uint32_t> {
 protected:
  const cpu::KvKernels& kernels = cpu::kv_kernel_set(GetParam());
  const cpu::KvFormat& f16 = kernels.formats[0];
  const cpu::KvFormat& f32 = kernels.formats[1];
  Random random;
};

std::vector<uint32_t> sets() {
  const cpu::Kernels* all[4];
  std::vector<uint32_t> s(cpu::kernel_sets(all));
  std::iota(s.begin(), s.end(), 0u);
  return s;
}
INSTANTIATE_TEST_SUITE_P(Set, KvKernelSets, ::testing::ValuesIn(sets()));

TEST_P(KvKernelSets, HalvesConvertBothWaysWhateverTheirNumber) {
  std::vector<uint16_t> all(65536);
  std::iota(all.begin(), all.end(), uint16_t{0});
  for (const uint32_t n : {1u, 3u, 17u, 31u, 65536u}) {
    std::vector<float> wide(n + 1, -1.0f);
    std::vector<uint16_t> narrow(n + 1, 0xabcd);
    f16.load_row(bytes(all.data()), wide.data(), n);
    kernels.narrow(wide.data(), narrow.data(), n);
    for (uint32_t i = 0; i < n; ++i) {
      if ((i & 0x7fff) > 0x7c00) {
        ASSERT_TRUE(std::isnan(wide[i]));
        continue;
      }
      ASSERT_EQ(wide[i], f16_to_f32(all[i]));
      ASSERT_EQ(narrow[i], all[i]);
    }
    EXPECT_EQ(wide[n], -1.0f);
    EXPECT_EQ(narrow[n], 0xabcd);
  }
  const auto values = random.floats(1000, -100, 100);
  std::vector<uint16_t> narrow(1000);
  kernels.narrow(values.data(), narrow.data(), 1000);
  EXPECT_EQ(narrow, halves(values));
}

TEST_P(KvKernelSets, HalvesSaturateAndAreCounted) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  const float odd[] = {65504, 65505, -65519, 65520, -1e30f, infinity, -infinity, nan, 0, -65504};
  for (const uint32_t n : {1u, 3u, 15u, 16u, 17u, 31u, 1000u}) {
    auto values = random.floats(n, -60000, 60000);
    for (uint32_t i = 0; i < n; i += 1 + random.below(4)) values[i] = odd[random.below(10)];
    std::vector<uint16_t> got(n + 1, 0xabcd);
    const uint32_t count = f16.store_row(values.data(), reinterpret_cast<std::byte*>(got.data()), n);
    uint32_t beyond = 0;
    for (uint32_t i = 0; i < n; ++i) {
      if (std::isnan(values[i])) {
        ASSERT_TRUE(std::isnan(f16_to_f32(got[i])));
        continue;
      }
      beyond += std::fabs(values[i]) > 65504;
      ASSERT_EQ(got[i], f32_to_f16(std::clamp(values[i], -65504.0f, 65504.0f))) << values[i];
    }
    EXPECT_EQ(count, beyond) << n << " values";
    EXPECT_EQ(got[n], 0xabcd);
  }
}

TEST_P(KvKernelSets, TilesAreTransposedAndRotatedKeyByKey) {
  for (const uint32_t n : {1u, 15u, 31u, 64u})
    for (const uint32_t cols : {64u, 80u, 6u, 40u}) {
      const auto values = random.floats(n * cols);
      const auto h = halves(values);
      const std::byte *rows[kTileKeys], *rows16[kTileKeys];
      for (uint32_t j = 0; j < n; ++j) rows[j] = bytes(&values[j * cols]), rows16[j] = bytes(&h[j * cols]);
      std::vector<float> tile(cols * kTileKeys + 1, -9.0f), tile16 = tile;
      f32.load_tile(rows, n, cols, tile.data());
      f16.load_tile(rows16, n, cols, tile16.data());
      for (uint32_t c = 0; c < cols; ++c)
        for (uint32_t j = 0; j < kTileKeys; ++j) {
          ASSERT_EQ(tile[c * kTileKeys + j], j < n ? values[j * cols + c] : 0.0f)
              << "n " << n << " cols " << cols;
          ASSERT_EQ(tile16[c * kTileKeys + j], j < n ? f16_to_f32(h[j * cols + c]) : 0.0f);
        }
      EXPECT_EQ(tile.back(), -9.0f);
      EXPECT_EQ(tile16.back(), -9.0f);

      const auto table = random.floats(4 * kTileKeys);  // two pairs: channels 0 and 2, 1 and 3
      const auto before = tile;
      kernels.rotate_tile(tile.data(), table.data(), 2, 2, 1);
      for (uint32_t p = 0; p < 2; ++p)
        for (uint32_t j = 0; j < kTileKeys; ++j) {
          const double x = before[p * kTileKeys + j], y = before[(p + 2) * kTileKeys + j];
          const double cos = table[2 * p * kTileKeys + j], sin = table[(2 * p + 1) * kTileKeys + j];
          // Two products of numbers below 1, and their sum: three roundings.
          ASSERT_NEAR(tile[p * kTileKeys + j], x * cos - y * sin, 3 * 0x1p-24);
          ASSERT_NEAR(tile[(p + 2) * kTileKeys + j], x * sin + y * cos, 3 * 0x1p-24);
        }
      for (size_t i = 4 * kTileKeys; i < before.size(); ++i) ASSERT_EQ(tile[i], before[i]);
    }
}

TEST_P(KvKernelSets, ProductsAgreeForEveryNumberOfRows) {
  for (uint32_t m = 1; m <= 13; ++m)
    for (const uint32_t k : {1u, 40u, 64u}) {
      const auto a = random.floats(m * kTileKeys), tile = random.floats(k * kTileKeys);
      std::vector<float> c(m * kTileKeys + 1, 5.0f);
      kernels.multiply_tile(m, k, a.data(), kTileKeys, tile.data(), c.data());
      for (uint32_t r = 0; r < m; ++r)
        for (uint32_t j = 0; j < kTileKeys; ++j) {
          double want = 0;
          for (uint32_t i = 0; i < k; ++i)
            want += double(a[r * kTileKeys + i]) * double(tile[i * kTileKeys + j]);
          ASSERT_NEAR(c[r * kTileKeys + j], want, k * k * 0x1p-24) << "m " << m << " k " << k;
        }
      EXPECT_EQ(c.back(), 5.0f);
      for (const uint32_t cols : {64u, 80u, 40u, 128u}) {
        const uint32_t ldc = (cols + 15) / 16 * 16;
        const auto b = random.floats(k * cols);
        const auto b16 = halves(b);
        const std::byte *rows[kTileKeys], *rows16[kTileKeys];
        for (uint32_t i = 0; i < k; ++i) rows[i] = bytes(&b[i * cols]), rows16[i] = bytes(&b16[i * cols]);
        auto y = random.floats(m * ldc), y16 = y, before = y;
        f32.add_rows(m, k, a.data(), rows, cols, y.data(), ldc);
        f16.add_rows(m, k, a.data(), rows16, cols, y16.data(), ldc);
        for (uint32_t r = 0; r < m; ++r)
          for (uint32_t j = 0; j < cols; ++j) {
            double want = before[r * ldc + j], want16 = want;
            for (uint32_t i = 0; i < k; ++i) {
              want += double(a[r * kTileKeys + i]) * double(b[i * cols + j]);
              want16 += double(a[r * kTileKeys + i]) * double(f16_to_f32(b16[i * cols + j]));
            }
            ASSERT_NEAR(y[r * ldc + j], want, (k + 1) * (k + 1) * 0x1p-24)
                << "m " << m << " k " << k << " cols " << cols;
            ASSERT_NEAR(y16[r * ldc + j], want16, (k + 1) * (k + 1) * 0x1p-24);
          }
      }
    }
}

// Rows with channels of any size, of which some are much larger than the others.
std::vector<float> uneven(Random& random, uint32_t n) {
  std::vector<float> x = random.floats(n);
  for (float& v : x) v *= std::exp2(static_cast<float>(random.below(16)) - 8);
  x[random.below(n)] *= 100;
  return x;
}

const cpu::KvFormat& format_of(const cpu::KvKernels& kernels, DType type) {
  return *std::find_if(kernels.formats, kernels.formats + kernels.n_formats,
                       [&](const cpu::KvFormat& f) { return f.type == type; });
}

TEST_P(KvKernelSets, BlocksStoreTheNearestCodesOfTheirTransform) {
  for (const DType type : kBlockFormats)
    for (const uint32_t n : {32u, 64u, 96u, 128u, 256u, 1024u}) {
      const cpu::KvFormat& format = format_of(kernels, type);
      const std::vector<float> x = uneven(random, n);
      std::vector<std::byte> row(kv_bytes(type, n) + 1, std::byte{0xab}), same = row;
      EXPECT_EQ(format.store_row(x.data(), row.data(), n), 0u);
      EXPECT_EQ(row.back(), std::byte{0xab});
      const std::vector<StoredBlock> blocks = stored_blocks(type, row.data(), n);
      for (uint32_t b = 0; b < blocks.size(); ++b) {
        const std::vector<double> v = transformed(&x[b * kBlockChannels]);
        double largest = 0, sum = 0;
        for (uint32_t i = 0; i < v.size(); ++i) {
          largest = std::fabs(v[i]) > std::fabs(largest) ? v[i] : largest;
          sum += std::fabs(x[b * kBlockChannels + i]);
        }
        // Five additions round sums that are at most `sum`, so the transform errs by this at most.
        const double rounding = 5 * 0x1p-24 * sum / 8;
        // Of two that differ by rounding only, either may be the largest.
        const double scale = blocks[b].scale, want = std::fabs(largest / lowest_code(type));
        EXPECT_NEAR(std::fabs(scale), want, want * (0x1p-11 + 0x1p-22) + rounding) << n;
        for (uint32_t i = 0; i < v.size(); ++i) {
          const int code = blocks[b].codes[i];
          const double off = std::fabs(v[i] - scale * code);
          ASSERT_TRUE(lowest_code(type) <= code && code <= highest_code(type)) << code;
          // No neighbour is nearer. The quotient has two roundings, of at most 127 steps.
          for (const int other : {code - 1, code + 1}) {
            if (other < lowest_code(type) || other > highest_code(type)) continue;
            ASSERT_LE(off,
                      std::fabs(v[i] - scale * other) + 2 * (rounding + 127 * 0x1p-23 * std::fabs(scale)));
          }
        }
      }
      format_of(cpu::kv_kernel_set(0), type).store_row(x.data(), same.data(), n);
      EXPECT_EQ(row, same) << "every instruction set stores the same bits";

      // Codes are small integers, so only the last product rounds.
      const std::vector<double> want = stored_row(type, row.data(), n);
      std::vector<float> got(n + 1, -9.0f);
      format.load_row(row.data(), got.data(), n);
      for (uint32_t c = 0; c < n; ++c) ASSERT_EQ(got[c], static_cast<float>(want[c])) << c;
      EXPECT_EQ(got.back(), -9.0f);
    }
}

TEST_P(KvKernelSets, TilesAndSumsOfBlocksAreThoseOfTheirRows) {
  for (const DType type : kBlockFormats)
    for (const uint32_t n : {1u, 15u, 31u, 64u})
      for (const uint32_t cols : {32u, 64u, 96u, 128u}) {
        const cpu::KvFormat& format = format_of(kernels, type);
        const uint64_t row_bytes = kv_bytes(type, cols);
        std::vector<std::byte> stored(n * row_bytes);
        std::vector<float> wide(n * cols);
        const std::byte *rows[kTileKeys], *wide_rows[kTileKeys];
        for (uint32_t j = 0; j < n; ++j) {
          rows[j] = &stored[j * row_bytes];
          wide_rows[j] = bytes(&wide[j * cols]);
          format.store_row(uneven(random, cols).data(), &stored[j * row_bytes], cols);
          format.load_row(rows[j], &wide[j * cols], cols);
        }
        std::vector<float> tile(cols * kTileKeys + 1, -9.0f), want = tile;
        format.load_tile(rows, n, cols, tile.data());
        f32.load_tile(wide_rows, n, cols, want.data());
        EXPECT_EQ(tile, want);
        for (const uint32_t m : {1u, 5u, 7u, 12u}) {
          const auto a = random.floats(m * kTileKeys);
          std::vector<float> y = random.floats(m * cols + 1), of_floats = y;
          format.add_rows(m, n, a.data(), rows, cols, y.data(), cols);
          f32.add_rows(m, n, a.data(), wide_rows, cols, of_floats.data(), cols);
          // Each sum rounds once or twice for every term, whose factor is at most 1.
          for (uint32_t i = 0; i < m * cols; ++i) {
            double terms = 1;
            for (uint32_t j = 0; j < n; ++j) terms += std::fabs(wide[j * cols + i % cols]);
            EXPECT_NEAR(y[i], of_floats[i], 4 * (n + 1) * 0x1p-24 * terms) << m << " rows, element " << i;
          }
          EXPECT_EQ(y.back(), of_floats.back());
        }
      }
}

TEST_P(KvKernelSets, BlocksSaturateAndAreCountedAndSpreadANan) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const DType type : kBlockFormats) {
    const cpu::KvFormat& format = format_of(kernels, type);
    std::vector<float> x(4 * kBlockChannels, 0.0f), bounded = x, got = x;
    x[3] = 1e30f, x[9] = -infinity, x[20] = 65504, x[21] = -65505;
    bounded[3] = bounded[20] = 65504, bounded[9] = bounded[21] = -65504;
    x[40] = nan, x[41] = infinity;
    for (uint32_t c = 96; c < 128; ++c) x[c] = bounded[c] = 1e-9f;  // smaller than the smallest scale
    std::vector<std::byte> row(kv_bytes(type, 128)), other = row;
    EXPECT_EQ(format.store_row(x.data(), row.data(), 128), 4u);
    format.load_row(row.data(), got.data(), 128);
    format.store_row(bounded.data(), other.data(), 128);
    std::vector<float> want(128);
    format.load_row(other.data(), want.data(), 128);
    for (uint32_t c = 0; c < 128; ++c) {
      EXPECT_TRUE(c / kBlockChannels == 1 ? std::isnan(got[c]) : got[c] == want[c]) << c;
      EXPECT_TRUE(std::isfinite(want[c]));
    }
    EXPECT_NEAR(want[3], 65504, 65504 * 0.3);  // the four share the codes of a block
    for (uint32_t c = 64; c < 128; ++c) EXPECT_EQ(got[c], 0.0f);
  }
}

TEST_P(KvKernelSets, BoundsAreTheLargestPossibleProducts) {
  for (uint32_t m = 1; m <= 13; ++m)
    for (const uint32_t k : {1u, 40u, 64u}) {
      const auto a = random.floats(m * (k + 3)), one = random.floats(k * kTileKeys),
                 other = random.floats(k * kTileKeys);
      std::vector<float> low(one.size()), high(one.size()), c(m * kTileKeys + 1, 5.0f);
      for (size_t i = 0; i < one.size(); ++i) {
        low[i] = std::min(one[i], other[i]);
        high[i] = std::max(one[i], other[i]);
      }
      kernels.bound_tile(m, k, a.data(), k + 3, low.data(), high.data(), c.data());
      for (uint32_t r = 0; r < m; ++r)
        for (uint32_t j = 0; j < kTileKeys; ++j) {
          double want = 0;
          for (uint32_t i = 0; i < k; ++i)
            want += std::max(double(a[r * (k + 3) + i]) * double(low[i * kTileKeys + j]),
                             double(a[r * (k + 3) + i]) * double(high[i * kTileKeys + j]));
          ASSERT_NEAR(c[r * kTileKeys + j], want, k * k * 0x1p-24) << "m " << m << " k " << k;
        }
      EXPECT_EQ(c.back(), 5.0f);
    }
}

TEST_P(KvKernelSets, SoftenIsAnOnlineSoftmax) {
  const uint32_t m = 5, cols = 16;
  const uint32_t visible[2][m] = {{64, 1, 33, 64, 5}, {64, 0, 7, 0, 63}};
  std::vector<float> peak(m, -std::numeric_limits<float>::infinity()), sum(m, 0), o(m * cols, 0);
  std::vector<std::vector<double>> seen(m);
  for (const auto& v : visible) {
    auto s = random.floats(m * kTileKeys, -30, 30);
    s[3 * kTileKeys + 2] = -1e30f;  // its weight is 0
    const auto scores = s;
    kernels.soften(s.data(), m, v, peak.data(), sum.data(), o.data(), cols);
    for (uint32_t r = 0; r < m; ++r) {
      for (uint32_t j = 0; j < v[r]; ++j) seen[r].push_back(scores[r * kTileKeys + j]);
      const double top = *std::max_element(seen[r].begin(), seen[r].end());
      double want = 0;
      for (double x : seen[r]) want += std::exp2(x - top);
      EXPECT_EQ(peak[r], static_cast<float>(top));
      // An exponent below 64 is rounded by 2^-19, its power by 2^-23; 64 of them are added.
      EXPECT_NEAR(sum[r], want, want * 0x1p-17);
      for (uint32_t j = 0; j < kTileKeys; ++j) {
        const double weight = j < v[r] ? std::exp2(scores[r * kTileKeys + j] - top) : 0;
        EXPECT_NEAR(s[r * kTileKeys + j], weight, weight * 0x1p-17 + 1e-38) << "row " << r << " key " << j;
      }
      // Values that were 1 after the first tile have shrunk like the sum
      for (uint32_t c = 0; c < cols; ++c) {
        if (&v != &visible[0]) {
          EXPECT_NEAR(o[r * cols + c], std::exp2(static_cast<double>(o[m * cols + r]) - top), 0x1p-17);
        }
      }
    }
    o.assign(m * cols, 1.0f);
    o.insert(o.end(), peak.begin(), peak.end());
  }
}

TEST_P(KvKernelSets, ExponentialsSkipNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const uint32_t n : {1u, 15u, 33u, 64u}) {
    auto s = random.floats(kTileKeys, -40, 40);
    if (n > 20) s[20] = nan, s[7] = -infinity;
    const std::vector<float> before = s;
    float peak = 0, top = -infinity;
    for (uint32_t i = 0; i < n; ++i) top = std::fmax(top, before[i]);
    const float sum = kernels.exponentials(s.data(), n, &peak);
    EXPECT_EQ(peak, top);
    double expected = 0;
    for (uint32_t i = 0; i < kTileKeys; ++i) {
      const double e = i < n && !std::isnan(before[i]) ? std::exp(double(before[i]) - double(top)) : 0;
      EXPECT_NEAR(s[i], e, 0x1p-17 * e) << i;  // differences of numbers below 64
      expected += e;
    }
    EXPECT_NEAR(sum, expected, 0x1p-17 * expected);
  }
  for (const float nothing : {nan, -infinity, infinity}) {
    std::vector<float> s(kTileKeys, nothing);
    float peak = 0;
    EXPECT_EQ(kernels.exponentials(s.data(), 3, &peak), 0);
    EXPECT_EQ(peak, nothing == infinity ? infinity : -infinity);
    EXPECT_EQ(s, std::vector<float>(kTileKeys, 0));
  }
}

TEST_P(KvKernelSets, VotesAndLogSumsSkipNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const uint32_t n : {1u, 15u, 31u, 33u, 1000u}) {
    auto s = random.floats(3 * n, -40, 40);
    if (n > 20) s[20] = nan, s[n + 20] = nan, s[2 * n + 20] = nan, s[7] = -infinity, s[n + 9] = nan;
    std::vector<float> lse(3), y(n + 1, 8.0f);
    for (uint32_t h = 0; h < 3; ++h) {
      double sum = 0;
      for (uint32_t i = 0; i < n; ++i)
        if (!std::isnan(s[h * n + i])) sum += std::exp(double(s[h * n + i]));
      lse[h] = kernels.log_sum_exp(&s[h * n], n);
      // Rounding of a number below 64, and of its logarithm and exponentials.
      EXPECT_NEAR(lse[h], std::log(sum), 0x1p-18);
    }
    kernels.vote(s.data(), n, 3, lse.data(), n, y.data());
    for (uint32_t i = 0; i < n; ++i) {
      double sum = 0;
      for (uint32_t h = 0; h < 3; ++h)
        if (!std::isnan(s[h * n + i])) sum += std::exp(double(s[h * n + i]) - double(lse[h]));
      if (sum == 0)
        EXPECT_EQ(y[i], -infinity);
      else  // differences of numbers below 64
        EXPECT_NEAR(y[i], std::log(sum), 0x1p-17);
    }
    EXPECT_EQ(y[n], 8.0f);
  }
  const std::vector<float> none = {nan, -infinity};
  EXPECT_EQ(kernels.log_sum_exp(none.data(), 2), -infinity);
}

}  // namespace
}  // namespace thimble::test
