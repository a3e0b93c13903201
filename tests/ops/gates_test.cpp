// gated_norm and gate on every device, against their definitions in double.
#include <cmath>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class Gates : public OpTest {};
THIMBLE_OP_TESTS(Gates);

TEST_P(Gates, NormBeforeOrAfterTheGate) {
  struct Shape {
    uint32_t cols, groups;
  };
  constexpr uint32_t kRows = 5, kMaxRows = 7;
  for (const Shape s : {Shape{1, 3}, {15, 2}, {16, 1}, {17, 4}, {64, 6}, {128, 32}, {1000, 2}, {4096, 1}})
    for (const uint32_t order : {kNormThenGate, kGateThenNorm, kGateOnly})
      for (const uint32_t act : {kActSilu, kActSigmoid})
        for (const uint32_t weights : {0u, 1u, 2u})  // none, for all groups, for each group
          for (const bool in_place : {false, true}) {
            if (order == kGateOnly && weights) continue;
            SCOPED_TRACE(::testing::Message() << s.groups << " x " << s.cols << ", order " << order
                                              << ", act " << act << ", weights " << weights);
            clear();
            Random random{s.cols};
            const uint32_t all = s.groups * s.cols;
            const GatedNormParams p{.cols = s.cols,
                                    .groups = s.groups,
                                    .row_stride = all + 3,
                                    .z_stride = all + 6,
                                    .z_column = 4,
                                    .eps = 1e-3f,
                                    .order = order,
                                    .act = act,
                                    .weight_per_group = weights == 2};
            // The columns after a row's belong to someone else.
            const std::vector<float> x = random.floats(size_t{kRows} * p.row_stride, -2, 2),
                                     z = random.floats(size_t{kRows} * p.z_stride, -30, 30),
                                     w = random.floats(weights == 2 ? all : s.cols, -2, 2);
            const std::vector<float> padded = padded_rows(x, size_t{kMaxRows} * p.row_stride);
            const View in = in_place ? inout(padded) : input(padded);
            const View y = in_place ? in : output<float>(padded.size());
            const GatedNorm op{in, input(padded_rows(z, size_t{kMaxRows} * p.z_stride)),
                               weights ? input(w) : View(), y, p};
            run({.n_rows = kRows}, kMaxRows, [&](Recorder& r) { r.record(op); });
            const std::vector<float> got = get<float>(y);
            for (uint32_t row = 0; row < kRows; ++row)
              for (uint32_t group = 0; group < s.groups; ++group) {
                const size_t at = size_t{row} * p.row_stride + size_t{group} * s.cols;
                const auto gate = [&](uint32_t c) {
                  const double of = double{z[size_t{row} * p.z_stride + p.z_column + group * s.cols + c]};
                  return act == kActSilu ? of * sigmoid(of) : sigmoid(of);
                };
                double squares = 0;
                for (uint32_t c = 0; c < s.cols; ++c)
                  squares += std::pow(double{x[at + c]} * (order == kGateThenNorm ? gate(c) : 1), 2);
                const double norm = order == kGateOnly ? 1 : 1 / std::sqrt(squares / s.cols + double{p.eps});
                for (uint32_t c = 0; c < s.cols; ++c) {
                  const double weight = weights == 0 ? 1 : double{w[weights == 2 ? group * s.cols + c : c]};
                  const double want = double{x[at + c]} * gate(c) * norm * weight;
                  // All terms of the sum are positive, so it is off by at most `cols` roundings, and its root
                  // by half of that. The exponential is off by 2^-22, and there are at most 12 other
                  // roundings.
                  ASSERT_NEAR(double{got[at + c]}, want, std::fabs(want) * (s.cols / 2.0 + 4 + 12) * 0x1p-24)
                      << "row " << row << ", group " << group << ", column " << c;
                }
              }
            for (uint32_t row = 0; row < kMaxRows; ++row) {
              const size_t end = size_t{row} * p.row_stride + (row < kRows ? all : 0);
              const size_t count = size_t{row + 1} * p.row_stride - end;
              if (in_place)
                EXPECT_EQ(std::memcmp(&got[end], &padded[end], count * sizeof(float)), 0);
              else
                EXPECT_TRUE(is_poison(got, end, count));
            }
          }
}

TEST_P(Gates, MultiplyBySigmoids) {
  constexpr uint32_t kRows = 5, kMaxRows = 7;
  for (const uint32_t cols : {1u, 15u, 16u, 33u, 256u, 2560u})
    for (const uint32_t groups : {1u, 3u})
      for (const uint32_t g_cols : {cols, 1u}) {
        SCOPED_TRACE(::testing::Message() << groups << " x " << cols << " by " << g_cols);
        clear();
        Random random{cols};
        const GateParams p{.cols = cols,
                           .groups = groups,
                           .x_stride = groups * cols + 3,
                           .g_stride = 2 * groups * cols + 9,
                           .g_column = cols,
                           .g_group_stride = 2 * cols,
                           .g_cols = g_cols};
        const std::vector<float> x = random.floats(size_t{kRows} * p.x_stride, -2, 2),
                                 g = random.floats(size_t{kRows} * p.g_stride, -30, 30);
        const std::vector<float> padded = padded_rows(x, size_t{kMaxRows} * p.x_stride);
        const View out = inout(padded), gates = input(padded_rows(g, size_t{kMaxRows} * p.g_stride));
        run({.n_rows = kRows}, kMaxRows, [&](Recorder& r) { r.record(Gate{gates, out, p}); });
        const std::vector<float> got = get<float>(out);
        for (uint32_t row = 0; row < kRows; ++row)
          for (uint32_t i = 0; i < groups * cols; ++i) {
            const size_t at = size_t{row} * p.x_stride + i;
            const size_t of = size_t{row} * p.g_stride + p.g_column + size_t{i / cols} * p.g_group_stride +
                              (g_cols == 1 ? 0 : i % cols);
            const double want = double{x[at]} * sigmoid(double{g[of]});
            // The exponential is off by 2^-22, and a quotient by 2.5 ulp, as Vulkan allows. A sum and a
            // product are rounded.
            ASSERT_NEAR(double{got[at]}, want, std::fabs(want) * (4 + 5 + 2) * 0x1p-24)
                << "row " << row << ", " << i;
          }
        for (uint32_t row = 0; row < kMaxRows; ++row) {
          const size_t end = size_t{row} * p.x_stride + (row < kRows ? groups * cols : 0);
          EXPECT_EQ(std::memcmp(&got[end], &padded[end], (size_t{row + 1} * p.x_stride - end) * 4), 0);
        }
      }
}

}  // namespace
}  // namespace thimble::test
