// A matrix larger than the 128 MiB that every device can bind, with rows that begin in the middle of words:
// ops process it in parts.
#include <algorithm>
#include <cmath>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

constexpr uint32_t kCols = 2080, kRows = 61000, kBlock = 32, kBlockBytes = 34;
constexpr uint64_t kRowBytes = kCols / kBlock * kBlockBytes;
static_assert(kRowBytes % 4 == 2 && kRows * kRowBytes > 128 << 20);

class LargeMatrix : public OpTest {
 protected:
  void SetUp() override {
    OpTest::SetUp();
    model.vocab = kRows;
    bytes_.resize(kRows * kRowBytes);
    for (size_t i = 0; i < bytes_.size() / 8; ++i) {
      const uint64_t bits = random_.next();
      std::memcpy(&bytes_[8 * i], &bits, 8);
    }
    for (size_t block = 0; block < bytes_.size(); block += kBlockBytes) {
      const uint16_t scale = f32_to_f16(random_.uniform(-0.02f, 0.02f));
      std::memcpy(&bytes_[block], &scale, 2);
    }
    matrix_ = weight(DType::kQ8_0, kRows, kCols, bytes_);
  }

  float value(uint32_t row, uint32_t col) const {
    const std::byte* block = &bytes_[row * kRowBytes + col / kBlock * kBlockBytes];
    uint16_t scale;
    std::memcpy(&scale, block, 2);
    return f16_to_f32(scale) * static_cast<float>(static_cast<int8_t>(block[2 + col % kBlock]));
  }

  Random random_;
  std::vector<std::byte> bytes_;
  Weight matrix_;
};
THIMBLE_OP_TESTS(LargeMatrix);

TEST_P(LargeMatrix, EmbedsTokensFromAllParts) {
  std::vector<int32_t> tokens = {0, kRows - 1, 1, 30000};
  for (int32_t t = 60720; t < 60740; ++t) tokens.push_back(t);  // row 60731 crosses 128 MiB
  const uint32_t rows = static_cast<uint32_t>(tokens.size());
  const View x = output<float>(rows * kCols);
  const Embed op{input(tokens), matrix_, x, {.cols = kCols}};
  run({.n_rows = rows}, rows, [&](Recorder& r) { r.record(op); });
  const std::vector<float> got = get<float>(x);
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < kCols; ++c)
      ASSERT_EQ(got[r * kCols + c], value(static_cast<uint32_t>(tokens[r]), c)) << tokens[r] << ", " << c;
}

TEST_P(LargeMatrix, IsMultipliedCompletely) {
  const std::vector<float> x = random_.floats(kCols), bias = random_.floats(kRows);
  const View in = input(x), y = output<float>(kRows), h = output<float>(kRows);
  const Linear linear{
      in,
      matrix_,
      input(bias),
      y,
      {.in_cols = kCols, .out_cols = kRows, .x_stride = kCols, .y_stride = kRows, .rows = kStepRows}};
  const Glu glu{in, matrix_, matrix_, h, {.in_cols = kCols, .out_cols = kRows, .act = kActSilu}};
  run({.n_rows = 1}, 1, [&](Recorder& r) {
    r.record(linear);
    r.record(glu);
  });
  const std::vector<float> product = get<float>(y), activated = get<float>(h);
  for (uint32_t r = 0; r < kRows; ++r) {
    double sum = 0, magnitude = 0;
    for (uint32_t c = 0; c < kCols; ++c) {
      const double term = double{value(r, c)} * double{x[c]};
      sum += term;
      magnitude += std::fabs(term);
    }
    // As in dense_ops_test. The slope of silu stays below 1.13, and its own error is 8 + 4 |sum| half ulps.
    const double tolerance = (2 * kCols + 3) * 0x1p-24 * magnitude;
    ASSERT_NEAR(product[r], sum + double{bias[r]}, tolerance + 0x1p-23) << "row " << r;
    const double exact = sum / (1 + std::exp(-sum)) * sum;
    ASSERT_NEAR(activated[r], exact,
                2.13 * tolerance * (std::fabs(sum) + tolerance) +
                    std::fabs(exact) * (8 + 4 * std::fabs(sum)) * 0x1p-24)
        << "row " << r;
  }
}

}  // namespace
}  // namespace thimble::test
