// sink_score on every device, compared with the formula in double.
#include <cmath>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

struct Shape {
  uint32_t heads, group, width, sinks;
};

class SinkScores : public OpTest {
 protected:
  // Runs `rows` rows in a program for two more; `large` makes products of hundreds.
  void expect_scores(const Shape& s, uint32_t rows, bool large) {
    SCOPED_TRACE(::testing::Message()
                 << s.heads << " heads, group " << s.group << ", width " << s.width << ", " << s.sinks
                 << " sinks, " << rows << " rows" << (large ? ", large" : ""));
    clear();
    Random random{s.heads + s.group + s.width + s.sinks + rows};
    const uint32_t most_rows = rows + 2, queries = s.heads * s.group;
    const float size = large ? 30 : 1;
    const std::vector<float> q = random.floats(size_t(rows) * queries * s.width, -3, 3),
                             k = random.floats(size_t(rows) * s.heads * s.width, -3, 3),
                             q_norm = random.floats(s.width, -size, size),
                             k_norm = random.floats(s.width, -2, 2),
                             sinks = random.floats(size_t(s.heads) * s.sinks * s.width, -2, 2),
                             bias = random.floats(queries, -2 * size, 2 * size);
    const View score = output<float>(size_t(most_rows) * s.heads);
    const SinkScore op{input(padded_rows(q, size_t(most_rows) * queries * s.width)),
                       input(padded_rows(k, size_t(most_rows) * s.heads * s.width)),
                       input(q_norm),
                       input(k_norm),
                       input(sinks),
                       input(bias),
                       score,
                       {.heads = s.heads,
                        .group = s.group,
                        .width = s.width,
                        .sinks = s.sinks,
                        .eps = 1e-6f,
                        .scale = 1 / std::sqrt(float(s.width))}};
    run({.n_rows = rows}, most_rows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(score);

    const auto norm = [&](const float* x) {
      double squares = 0;
      for (uint32_t c = 0; c < s.width; ++c) squares += double{x[c]} * double{x[c]};
      return 1 / std::sqrt(squares / s.width + 1e-6);
    };
    for (uint32_t row = 0; row < rows; ++row)
      for (uint32_t head = 0; head < s.heads; ++head) {
        const float* key = &k[(size_t(row) * s.heads + head) * s.width];
        double sum = 0, tolerance = 0;
        for (uint32_t i = 0; i < s.group; ++i) {
          const float* query = &q[((size_t(row) * s.heads + head) * s.group + i) * s.width];
          double largest = 0;  // largest sum of the magnitudes of a product's terms
          const auto product = [&](const auto& y, double factor) {
            double dot = 0, magnitudes = 0;
            const double scale = norm(query) / std::sqrt(double(s.width)) * factor;
            for (uint32_t c = 0; c < s.width; ++c) {
              const double term = double{query[c]} * double{q_norm[c]} * y(c) * scale;
              dot += term;
              magnitudes += std::fabs(term);
            }
            largest = std::max(largest, magnitudes);
            return dot;
          };
          const float added = bias[head * s.group + i];
          const double own =
              product([&](uint32_t c) { return double{key[c]} * double{k_norm[c]}; }, norm(key)) +
              double{added};
          double others = 0;
          for (uint32_t sink = 0; sink < s.sinks; ++sink) {
            const float* of_sink = &sinks[(size_t(head) * s.sinks + sink) * s.width];
            others += std::exp(product([&](uint32_t c) { return double{of_sink[c]}; }, 1) - own);
          }
          const double weight = 1 / (1 + others);
          sum += weight;
          // A product is off by width + 3 roundings of its terms, width / 2 + 4 for each norm, and 4 more;
          // the bias and the peak by one rounding of the sum of both. If two of these are off, a weight
          // changes relatively by less than its distance to 0 or 1 times as much. Then the exponentials,
          // their sum, quotient and mean: 2 ulp and a rounding for each sink and query.
          const double logit = (largest * (2 * s.width + 15) + 2 * std::fabs(double{added})) * 0x1p-24;
          tolerance += 2 * logit * weight * (1 - weight) * std::exp(2 * logit) +
                       weight * (s.sinks + s.group + 12) * 0x1p-24;
        }
        ASSERT_NEAR(got[size_t(row) * s.heads + head], sum / s.group, tolerance / s.group + 0x1p-120)
            << "row " << row << ", head " << head;
      }
    if (GetParam() == "cpu") {
      ASSERT_TRUE(is_poison(got, size_t(rows) * s.heads, size_t(2) * s.heads));
    }
  }
};
THIMBLE_OP_TESTS(SinkScores);

TEST_P(SinkScores, AreMeanWeightsAmongSinks) {
  for (const Shape s : {Shape{1, 1, 16, 16}, Shape{2, 4, 16, 16}, Shape{8, 7, 16, 16}, Shape{3, 2, 16, 1},
                        Shape{3, 5, 6, 35}, Shape{2, 3, 33, 129}, Shape{5, 1, 40, 7}})
    for (const uint32_t rows : {1u, 2u, 9u, 63u})
      if (rows * s.sinks < 2000) expect_scores(s, rows, false);
}

// Products beyond e^88 in both directions: nothing overflows, and weights that are not exactly 0 or 1 are
// right.
TEST_P(SinkScores, StayFiniteForLargeProducts) {
  expect_scores({4, 4, 16, 16}, 50, true);
  expect_scores({3, 5, 6, 35}, 20, true);
}

// Their norms divide by the epsilon alone.
TEST_P(SinkScores, OfZerosAreThoseOfTheBiasAlone) {
  const std::vector<float> zeros(16 * 2, 0.0f), ones(16, 1.0f), bias = {0, -200};
  const View score = output<float>(1);
  const SinkScore op{input(zeros),
                     input(std::vector<float>(16)),
                     input(ones),
                     input(ones),
                     input(std::vector<float>(3 * 16, 5.0f)),
                     input(bias),
                     score,
                     {.heads = 1, .group = 2, .width = 16, .sinks = 3, .eps = 1e-6f, .scale = 0.25f}};
  run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(op); });
  EXPECT_EQ(get<float>(score)[0], 0.125f);  // 1 / 4 of the equal ones, and e^-200, which underflows
}

}  // namespace
}  // namespace thimble::test
