#include "training/least_squares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/bits.h"
#include "base/system.h"
#include "training/cholesky.h"
#include "training/transpose.h"

namespace thimble {
namespace {

constexpr double kRidge = 1, kRidgeGrowth = 16;
// Tokens whose products the device adds up in one run, in f32. The error of such a sum is at most 4096 *
// 2^-24 of the sum of its terms' magnitudes. Smaller blocks are more exact, but each run returns a matrix
// [cols][cols].
constexpr uint32_t kBlockTokens = 4096;

uint64_t triangle(uint64_t rows) { return rows * (rows + 1) / 2; }

}  // namespace

LeastSquares::LeastSquares(const SampleShape& shape, uint32_t text_tokens, uint32_t threads)
    : shape_(shape), text_tokens_(text_tokens), threads_(threads ? threads : core_count()) {}

Result<std::unique_ptr<LeastSquares>> LeastSquares::make(std::shared_ptr<Device> device,
                                                         const SampleShape& shape, uint32_t text_tokens,
                                                         uint32_t threads) {
  std::unique_ptr<LeastSquares> made(new LeastSquares(shape, text_tokens, threads));
  THIMBLE_LET(product, Product::make(device, shape.cols, made->block_tokens(), shape.cols, DType::kF16));
  made->product_ = std::move(product);
  made->states_.resize(uint64_t(shape.layers) * text_tokens * shape.cols);
  const uint64_t n = shape.cols, heads = shape.heads;
  for (uint32_t layer = 0; layer < shape.layers; ++layer)
    made->sums_.push_back({std::vector<double>(triangle(n)), std::vector<double>(n),
                           std::vector<double>(heads * n), std::vector<double>(heads),
                           std::vector<double>(heads)});
  return made;
}

// Counts the sums, the states, the product and the labels that it uses, the factor of the layer being solved,
// and the solved layers.
Result<uint64_t> LeastSquares::bytes(const Device& device, const SampleShape& s, uint32_t text_tokens) {
  const uint64_t n = s.cols, layers = s.layers, block = block_tokens(text_tokens);
  THIMBLE_LET(product, Product::bytes(device, s.cols, block_tokens(text_tokens), s.cols, DType::kF16));
  return product + layers * text_tokens * n * sizeof(uint16_t) +
         (layers * (triangle(n) + n + s.heads * (n + 2)) + n * n + block * s.heads) * sizeof(double) +
         layers * s.heads * (n + 1) * sizeof(float);
}

uint32_t LeastSquares::block_tokens(uint32_t text_tokens) {
  return std::min(kBlockTokens, static_cast<uint32_t>(round_up(text_tokens, kRunTokens)));
}

// ---- sums ----

Status LeastSquares::add(uint32_t layer, uint32_t tokens, const float* labels) {
  const uint32_t heads = shape_.heads;
  Sums& s = sums_[layer];
  std::vector<double> of_block;  // [tokens][heads]
  for (uint32_t first = 0; first < tokens; first += block_tokens()) {
    const uint32_t count = std::min(block_tokens(), tokens - first);
    of_block.resize(uint64_t(count) * heads);
    for (uint32_t head = 0; head < heads; ++head) {
      const float* label = labels + uint64_t(head) * tokens + first;
      for (uint32_t t = 0; t < count; ++t) of_block[uint64_t(t) * heads + head] = label[t];
      s.y[head] = std::accumulate(label, label + count, s.y[head]);
      for (uint32_t t = 0; t < count; ++t) s.yy[head] += double{label[t]} * double{label[t]};
    }
    THIMBLE_TRY(add_block(layer, first, count, of_block));
  }
  return {};
}

void LeastSquares::end_text(uint32_t tokens) {
  ++count_.texts;
  count_.tokens += tokens;
}

// Transposes the operand to one row per channel, with zeros after the end of the text.
void LeastSquares::transpose_block(const uint16_t* states, uint32_t tokens) {
  const uint32_t block = block_tokens();
  auto* columns = static_cast<uint16_t*>(product_->w());
  threads_.run(block / kRunTokens, [&](uint32_t run, uint32_t) {
    const uint32_t first = run * kRunTokens, rows = std::min(kRunTokens, tokens - std::min(tokens, first));
    transpose(states + uint64_t(first) * shape_.cols, rows, shape_.cols, columns + first, block);
    for (uint64_t c = 0; rows < kRunTokens && c < shape_.cols; ++c)
      std::fill_n(columns + c * block + first + rows, kRunTokens - rows, uint16_t{0});
  });
}

// Adds sums of one block to the total in double; products within a block are summed in f32. The operands are
// f16 already, so no device rounds them.
Status LeastSquares::add_block(uint32_t layer, uint32_t first, uint32_t tokens,
                               std::span<const double> labels) {
  const uint64_t n = shape_.cols, heads = shape_.heads, block = block_tokens();
  Sums& s = sums_[layer];
  transpose_block(states(layer) + first * n, tokens);
  threads_.run(shape_.cols, [&](uint32_t c, uint32_t) {
    const uint16_t* column = static_cast<const uint16_t*>(product_->w()) + c * block;
    float* x = product_->x() + c * block;
    std::transform(column, column + block, x, f16_to_f32);
    double sum = 0;
    std::vector<double> by_labels(heads);
    for (uint32_t t = 0; t < tokens; ++t) {
      const double value = x[t];
      sum += value;
      for (uint64_t head = 0; head < heads; ++head) by_labels[head] += value * labels[t * heads + head];
    }
    s.x[c] += sum;
    for (uint64_t head = 0; head < heads; ++head) s.xy[head * n + c] += by_labels[head];
  });
  THIMBLE_TRY(product_->run());
  threads_.run(shape_.cols, [&](uint32_t i, uint32_t) {
    const float* products = product_->y() + i * n;
    double* row = &s.xx[triangle(i)];
    for (uint64_t j = 0; j <= i; ++j) row[j] += products[j];
  });
  return {};
}

std::vector<std::span<std::byte>> LeastSquares::state() {
  std::vector<std::span<std::byte>> parts = {std::as_writable_bytes(std::span(&count_, 1))};
  for (Sums& s : sums_)
    for (auto* sums : {&s.xx, &s.x, &s.xy, &s.y, &s.yy})
      parts.push_back(std::as_writable_bytes(std::span(*sums)));
  return parts;
}

void LeastSquares::clear() {
  for (const std::span<std::byte> part : state()) std::fill(part.begin(), part.end(), std::byte{0});
}

// ---- solving ----

Result<LeastSquares::Factor> LeastSquares::factorise_layer(const Sums& s) {
  const uint64_t n = shape_.cols;
  const auto tokens = static_cast<double>(count_.tokens);
  double square = 0;  // mean square of a channel
  for (uint64_t c = 0; c < n; ++c) square += s.xx[triangle(c) + c] / (tokens * static_cast<double>(n));
  const double scale = square > 0 ? 1 / std::sqrt(square) : 1;
  Factor factor{scale, kRidge, std::vector<double>(n * n)};
  // If the states span fewer dimensions than they have, the other dimensions contain only the rounding errors
  // of the sums, which may be negative. In layer 0 the states span only as many dimensions as there are
  // distinct tokens.
  for (;; factor.ridge *= kRidgeGrowth) {
    threads_.run(shape_.cols, [&](uint32_t i, uint32_t) {
      double* row = &factor.of[i * n];
      for (uint64_t j = 0; j <= i; ++j)
        row[j] = (s.xx[triangle(i) + j] - s.x[i] * s.x[j] / tokens) * scale * scale;
      row[i] += factor.ridge;
    });
    for (uint64_t i = 0; i < n; ++i)
      if (!std::isfinite(factor.of[i * n + i]))
        return error(Code::kNotFinite,
                     "the model gives NaN or infinite states; train for another file of it");
    if (factorise(factor.of, shape_.cols, threads_)) return factor;
  }
}

double LeastSquares::solve_head(const Sums& s, const Factor& factor, uint32_t head, double mean,
                                FittedLayer& to) const {
  const uint64_t n = shape_.cols;
  const auto tokens = static_cast<double>(count_.tokens);
  std::vector<double> by_label(n);
  for (uint64_t c = 0; c < n; ++c)
    by_label[c] = (s.xy[head * n + c] - s.x[c] * s.y[head] / tokens) * factor.scale;
  std::vector<double> w = by_label;
  solve(factor.of, shape_.cols, w.data());
  double bias = s.y[head] / tokens - mean;
  for (uint64_t c = 0; c < n; ++c) {
    bias -= w[c] * factor.scale * s.x[c] / tokens;
    to.second[head * n + c] = static_cast<float>(w[c] * factor.scale);
  }
  to.second_bias[head] = static_cast<float>(bias);
  // |y - x w|^2 = yy - 2 w xy + w xx w, and (xx + ridge) w = xy. Rounding may make it negative.
  const double squares = s.yy[head] - s.y[head] * s.y[head] / tokens -
                         std::inner_product(w.begin(), w.end(), by_label.begin(), 0.0) -
                         factor.ridge * std::inner_product(w.begin(), w.end(), w.begin(), 0.0);
  return std::max(squares, 0.0);
}

Result<bool> LeastSquares::step() {
  if (steps_done() == steps()) return false;
  const uint32_t heads = shape_.heads;
  const Sums& s = sums_[steps_done()];
  double mean = 0;  // of the labels of all layers
  for (const Sums& of_layer : sums_) mean = std::accumulate(of_layer.y.begin(), of_layer.y.end(), mean);
  mean /= static_cast<double>(count_.tokens) * heads * shape_.layers;
  THIMBLE_LET(factor, factorise_layer(s));
  FittedLayer fitted;
  fitted.second.resize(uint64_t(heads) * shape_.cols);
  fitted.second_bias.resize(heads);
  std::vector<double> squares(heads);
  threads_.run(heads,
               [&](uint32_t head, uint32_t) { squares[head] = solve_head(s, factor, head, mean, fitted); });
  loss_ = std::accumulate(squares.begin(), squares.end(), 0.0) / (static_cast<double>(count_.tokens) * heads);
  if (!std::isfinite(loss_) || !std::isfinite(mean))
    return error(Code::kNotFinite, "the model gives NaN or infinite labels; train for another file of it");
  solved_.push_back(std::move(fitted));
  return true;
}

}  // namespace thimble
