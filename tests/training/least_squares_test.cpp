// Tests linear retainers, which are fitted by sums over texts, against other solutions of the least squares.
#include "training/least_squares.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/support/random.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

// A text: the states of every layer as [layer][tokens][cols], and labels as [layer][heads][tokens].
struct Text {
  uint32_t tokens;
  std::vector<float> states, labels;

  const float* state(const SampleShape& s, uint32_t layer, uint32_t t) const {
    return &states[(uint64_t(layer) * tokens + t) * s.cols];
  }
  float& label(const SampleShape& s, uint32_t layer, uint32_t head, uint32_t t) {
    return labels[(uint64_t(layer) * s.heads + head) * tokens + t];
  }
};

// Random states with a different scale for each channel, which halves represent exactly, and labels that
// depend on them in part.
Text some_text(const SampleShape& s, uint32_t tokens, uint64_t seed) {
  Random random{seed};
  Text text{tokens, random.floats(size_t(s.layers) * tokens * s.cols, -2, 3),
            random.floats(size_t(s.layers) * s.heads * tokens, -9, 0)};
  for (uint64_t i = 0; i < text.states.size(); ++i)
    text.states[i] = f16_to_f32(f32_to_f16(text.states[i] * float(1 + i % s.cols % 3)));
  for (uint32_t layer = 0; layer < s.layers; ++layer)
    for (uint32_t head = 0; head < s.heads; ++head)
      for (uint32_t t = 0; t < tokens; ++t)
        text.label(s, layer, head, t) += text.state(s, layer, t)[head] - text.state(s, layer, t)[head + 2];
  return text;
}

void add(LeastSquares& to, const SampleShape& s, const Text& text) {
  const uint64_t of_layer = uint64_t(text.tokens) * s.cols;
  for (uint32_t layer = 0; layer < s.layers; ++layer) {
    const float* from = &text.states[layer * of_layer];
    std::transform(from, from + of_layer, to.states(layer), f32_to_f16);
    must(to.add(layer, text.tokens, &text.labels[uint64_t(layer) * s.heads * text.tokens]));
  }
  to.end_text(text.tokens);
}

std::unique_ptr<LeastSquares> solved(const SampleShape& s, const std::vector<Text>& texts,
                                     uint32_t threads = 2) {
  uint32_t longest = 0;
  for (const Text& text : texts) longest = std::max(longest, text.tokens);
  auto made = must(LeastSquares::make(cpu(), s, longest, threads));
  for (const Text& text : texts) add(*made, s, text);
  while (must(made->step())) {
  }
  return made;
}

// Solves least squares with a ridge by conjugate gradients on the tokens themselves, without summing their
// products: w of (X' X + ridge) w = X' y, for rows X minus their mean, scaled before that to a root mean
// square of 1.
struct Tokens {
  std::vector<std::vector<double>> x;
  std::vector<double> y;
};
std::vector<double> conjugate_gradients(const Tokens& of, double ridge) {
  const size_t n = of.x[0].size();
  const auto dot = [](const auto& a, const auto& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  std::vector<double> w(n), rest(n);
  for (size_t t = 0; t < of.x.size(); ++t)
    for (size_t c = 0; c < n; ++c) rest[c] += of.x[t][c] * of.y[t];
  std::vector<double> direction = rest;
  const double first = dot(rest, rest);
  for (double squares = first; squares > 1e-28 * first;) {
    std::vector<double> image(n);
    for (size_t c = 0; c < n; ++c) image[c] = ridge * direction[c];
    for (const auto& row : of.x) {
      const double along = dot(row, direction);
      for (size_t c = 0; c < n; ++c) image[c] += along * row[c];
    }
    const double step = squares / dot(direction, image);
    for (size_t c = 0; c < n; ++c) w[c] += step * direction[c];
    for (size_t c = 0; c < n; ++c) rest[c] -= step * image[c];
    const double next = dot(rest, rest);
    for (size_t c = 0; c < n; ++c) direction[c] = rest[c] + next / squares * direction[c];
    squares = next;
  }
  return w;
}

// Texts of more and of less than a block of 4,096 tokens, none of which consists of whole runs. f32 sums of
// that many terms, which round up as often as down, are off by 64 * 2^-24 relative to themselves. The
// smallest eigenvalues of the sums are about a tenth of the largest, so weights, which are up to 1, are off
// by ten times as much. The same applies to the loss, about 7.
TEST(LeastSquares, AreThoseOfConjugateGradients) {
  const SampleShape s{2, 2, 20};
  std::vector<Text> texts = {some_text(s, 5001, 1), some_text(s, 300, 2), some_text(s, 4096, 3)};
  constexpr double kTolerance = 10 * 0x1p-18;
  const auto found = solved(s, texts);
  ASSERT_EQ(found->steps_done(), 2u);
  double mean = 0, tokens = 0;
  for (const Text& text : texts) {
    mean = std::accumulate(text.labels.begin(), text.labels.end(), mean);
    tokens += text.tokens;
  }
  mean /= tokens * s.layers * s.heads;
  for (uint32_t layer = 0; layer < s.layers; ++layer) {
    double loss = 0;
    for (uint32_t head = 0; head < s.heads; ++head) {
      Tokens all;
      std::vector<double> means(s.cols);
      double square = 0, of_labels = 0;
      for (Text& text : texts)
        for (uint32_t t = 0; t < text.tokens; ++t) {
          const float* x = text.state(s, layer, t);
          all.x.emplace_back(x, x + s.cols);
          all.y.push_back(double{text.label(s, layer, head, t)});
          of_labels += all.y.back() / tokens;
          for (uint32_t c = 0; c < s.cols; ++c) {
            means[c] += double{x[c]} / tokens;
            square += double{x[c]} * double{x[c]} / (tokens * s.cols);
          }
        }
      const double scale = 1 / std::sqrt(square);
      Tokens centred = all;
      for (auto& row : centred.x)
        for (uint32_t c = 0; c < s.cols; ++c) row[c] = (row[c] - means[c]) * scale;
      for (double& y : centred.y) y -= of_labels;
      std::vector<double> w = conjugate_gradients(centred, 1);
      double bias = of_labels - mean;
      for (uint32_t c = 0; c < s.cols; ++c) {
        w[c] *= scale;
        bias -= w[c] * means[c];
        EXPECT_NEAR(found->layer(layer).second[head * s.cols + c], w[c], kTolerance) << c;
      }
      EXPECT_NEAR(found->layer(layer).second_bias[head], bias, 10 * kTolerance);
      for (size_t t = 0; t < all.x.size(); ++t) {
        const double d = std::inner_product(w.begin(), w.end(), all.x[t].begin(), bias) - (all.y[t] - mean);
        loss += d * d / (tokens * s.heads);
      }
    }
    if (layer + 1 < s.layers) continue;  // found->loss() is of the last layer
    EXPECT_NEAR(found->loss(), loss, loss * kTolerance);
  }
}

// States of 24 repeated tokens in 256 dimensions, like those of a model's first layer, with two channels that
// are large and constant, as in real models. In most dimensions, the sums of products have only rounding
// errors of f32, here below -1. There are as many free scores as tokens, so least squares gives each token
// the mean of its labels, except for the ridge. The ridge is at most 256, compared with sums of about 2^16 /
// 24 squares of 254 states of 29 (50 / sqrt(3)) divided by 113, the root mean square: 45,000, and half of it
// in the smallest direction. Labels are up to 3 from their mean, so the tolerance is 256 / 22,000 * 3.
TEST(LeastSquares, FindTheMeansOfTokensThatRepeat) {
  constexpr uint32_t kDistinct = 24, kCols = 256;
  const SampleShape s{1, 1, kCols};
  Random random{12};
  std::vector<std::vector<float>> states(kDistinct);
  for (auto& state : states) {
    state = random.floats(kCols);
    for (uint32_t c = 0; c < kCols; ++c) state[c] = c < 2 ? 1000.5f + 431 * float(c) : 50 * state[c];
    for (float& x : state) x = f16_to_f32(f32_to_f16(x));
  }
  std::vector<double> sums(kDistinct), counts(kDistinct);
  std::vector<Text> texts(16, {4096, {}, {}});
  for (Text& text : texts)
    for (uint32_t t = 0; t < text.tokens; ++t) {
      const uint32_t token = random.below(kDistinct);
      text.states.insert(text.states.end(), states[token].begin(), states[token].end());
      text.labels.push_back(float(token % 5) + random.uniform(-1, 1));
      sums[token] += double{text.labels.back()};
      ++counts[token];
    }
  const auto found = solved(s, texts);
  const double mean = std::accumulate(sums.begin(), sums.end(), 0.0) / 0x1p16;
  for (uint32_t token = 0; token < kDistinct; ++token) {
    double score = double{found->layer(0).second_bias[0]} + mean;
    for (uint32_t c = 0; c < kCols; ++c)
      score += double{found->layer(0).second[c]} * double{states[token][c]};
    EXPECT_NEAR(score, sums[token] / counts[token], 0.035) << token;
  }
}

TEST(LeastSquares, AreRefusedIfANumberIsNotFinite) {
  const SampleShape s{2, 2, 16};
  for (const char* of : {"states", "labels"}) {
    Text text = some_text(s, 512, 8);
    if (*of == 's')
      text.states[700] = NAN;
    else
      text.label(s, 0, 1, 3) = NAN;
    auto made = must(LeastSquares::make(cpu(), s, 512, 2));
    add(*made, s, text);
    const Result<bool> refused = made->step();
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kNotFinite);
    EXPECT_NE(refused.status().message().find(of), std::string::npos) << refused.status().message();
  }
}

TEST(LeastSquares, AreTheSameWithAnyNumberOfThreads) {
  const SampleShape s{2, 3, 70};
  const std::vector<Text> texts = {some_text(s, 700, 4), some_text(s, 256, 5)};
  const auto one = solved(s, texts, 1), three = solved(s, texts, 3);
  EXPECT_EQ(one->loss(), three->loss());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(one->layer(layer).second, three->layer(layer).second);
    EXPECT_EQ(one->layer(layer).second_bias, three->layer(layer).second_bias);
  }
}

}  // namespace
}  // namespace thimble::test
