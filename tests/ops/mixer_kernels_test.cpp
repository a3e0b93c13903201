// Every set of kernels of the recurrent mixers that this processor supports. The tests of the ops run the
// fastest set only.
#include "backends/cpu/mixer_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "backends/cpu/kernels.h"
#include "tests/support/random.h"

namespace thimble::test {
namespace {

class MixerKernelSets : public ::testing::TestWithParam<uint32_t> {
 protected:
  const cpu::MixerKernels& kernels = cpu::mixer_kernel_set(GetParam());
};
std::vector<uint32_t> sets() {
  const cpu::Kernels* all[4];
  std::vector<uint32_t> s(cpu::kernel_sets(all));
  std::iota(s.begin(), s.end(), 0u);
  return s;
}
INSTANTIATE_TEST_SUITE_P(Set, MixerKernelSets, ::testing::ValuesIn(sets()));

TEST_P(MixerKernelSets, TakeRowsOfSsmByStepsAndByChunks) {
  for (const uint32_t width : {16u, 48u, 64u, 80u, 128u})
    for (const uint32_t rows : {1u, 5u, 32u})
      for (const bool from_zeros : {false, true}) {
        SCOPED_TRACE(std::to_string(width) + " wide, rows: " + std::to_string(rows));
        constexpr uint32_t kState = 48;
        const uint32_t stride = width + 2 * kState + 3;
        Random random{width};
        const std::vector<float> xbc = random.floats(size_t{rows} * stride, -1, 1),
                                 delta = random.floats(rows, 0, 2), decay = random.floats(rows, -1, 0),
                                 start = random.floats(size_t{kState} * width, -1, 1);
        std::vector<float> scratch(cpu::kSsmScratch), y(size_t{rows} * width), s(start.size());
        const cpu::SsmRows r{.rows = rows,
                             .width = width,
                             .state = kState,
                             .x = xbc.data(),
                             .b = xbc.data() + width,
                             .c = xbc.data() + width + kState,
                             .stride = stride,
                             .delta = delta.data(),
                             .decay = decay.data(),
                             .d = 0.5f,
                             .before = from_zeros ? nullptr : start.data(),
                             .s = s.data(),
                             .y = y.data(),
                             .y_stride = width,
                             .scratch = scratch.data()};
        for (const bool chunk : {false, true}) {
          if (chunk) kernels.ssm_products(r);
          (chunk ? kernels.ssm_chunk : kernels.ssm_steps)(r);
          std::vector<double> want(start.size());
          for (size_t i = 0; i < want.size() && !from_zeros; ++i) want[i] = double{start[i]};
          for (uint32_t row = 0; row < rows; ++row)
            for (uint32_t c = 0; c < width; ++c) {
              const float* const x = &xbc[size_t{row} * stride];
              double sum = 0.5 * double{x[c]};
              for (uint32_t i = 0; i < kState; ++i) {
                double& of = want[size_t{i} * width + c];
                of = std::exp(double{decay[row]}) * of +
                     double{x[width + i]} * double{delta[row]} * double{x[c]};
                sum += of * double{x[width + kState + i]};
              }
              // The state's absolute values stay below 1 + 2 * 32, and each of the sums has fewer than 128
              // terms.
              ASSERT_NEAR(double{y[size_t{row} * width + c]}, sum, 128 * kState * 65 * 0x1p-24)
                  << (chunk ? "chunk" : "steps") << ", row " << row << ", column " << c;
            }
          for (size_t i = 0; i < want.size(); ++i)
            ASSERT_NEAR(double{s[i]}, want[i], 128 * 65 * 0x1p-24) << (chunk ? "chunk" : "steps") << " " << i;
        }
      }
}

}  // namespace
}  // namespace thimble::test
