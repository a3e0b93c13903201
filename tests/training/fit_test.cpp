// The fit: its loss, its gradients, and that it learns.
#include "training/fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/support/random.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

// Runs with random states, and labels that a network of these states makes.
Samples some_samples(uint32_t runs, uint32_t cols, bool linear, uint64_t seed) {
  const SampleShape shape{2, 2, cols};
  Samples samples(shape, runs);
  Random random{seed};
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::vector<float> w = random.floats(size_t(shape.heads) * cols);
    for (uint32_t run = 0; run < runs; ++run)
      for (uint32_t t = 0; t < kRunTokens; ++t) {
        const std::vector<float> x = random.floats(cols, -2, 2);
        for (uint32_t c = 0; c < cols; ++c) samples.states(run, layer)[t * cols + c] = f32_to_f16(x[c]);
        for (uint32_t head = 0; head < shape.heads; ++head) {
          const float sum = std::inner_product(x.begin(), x.end(), w.begin() + head * cols, 0.0f);
          samples.labels(run, layer)[head * kRunTokens + t] = linear ? sum - 3 : std::fabs(sum) - 7;
          samples.best(run, layer)[head * kRunTokens + t] = std::fabs(sum) > 3;
        }
      }
  }
  return samples;
}

// methods 2.3, invariant 16.
TEST(Loss, IsThatOfTheGoldenVector) {
  const float scores[] = {0, 1, 3}, labels[] = {0, 0, 0};
  const uint8_t best[] = {0, 0, 0};
  const float* of_run[] = {labels};
  const uint8_t* best_of_run[] = {best};
  float gradient[3] = {};
  const double loss = loss_of_layer({.heads = 1, .runs = 1, .tokens = 3, .mean = 0, .weighs_best = false}, 3,
                                    scores, of_run, best_of_run, gradient);
  EXPECT_NEAR(loss, 1.00625, 1e-7);
  // d/ds of the mean of d^2 / 2 or |d|, and of 0.0025 times the mean of the squared steps 1 and 2.
  EXPECT_NEAR(gradient[0], -0.0025, 1e-8);
  EXPECT_NEAR(gradient[1], 1.0 / 3 - 0.0025, 1e-7);
  EXPECT_NEAR(gradient[2], 1.0 / 3 + 0.005, 1e-7);
}

TEST(Loss, CountsTheBestSixteenTimesAndLabelsWithoutTheirMean) {
  const float scores[] = {2, 2}, labels[] = {5, 4};  // off by 0 and by 1
  const uint8_t best[] = {0, 1};
  const float* of_run[] = {labels};
  const uint8_t* best_of_run[] = {best};
  float gradient[2] = {};
  const double loss = loss_of_layer({.heads = 1, .runs = 1, .tokens = 2, .mean = 3, .weighs_best = true}, 17,
                                    scores, of_run, best_of_run, gradient);
  EXPECT_NEAR(loss, 16 * 0.5 / 17, 1e-7);
  EXPECT_EQ(gradient[0], 0);
  EXPECT_NEAR(gradient[1], 16.0 / 17, 1e-7);
}

// Along random directions: the loss, which is of second order in a step h there and back, changes by 2 h g d
// up to its third derivative (h^2 of it, below 1 / 200 of the slope here) and the rounding of scores: 2^-22
// of a loss of about 1, by 2 h.
TEST(Fit, FollowsTheSlopeOfTheLoss) {
  const Samples samples = some_samples(3, 24, false, 5);
  for (const auto& [kind, act] :
       {std::pair{Retainer::Kind::kLocret, kActSilu}, std::pair{Retainer::Kind::kLocret, kActGelu},
        std::pair{Retainer::Kind::kMlp, kActGeluErf}}) {
    auto fit =
        must(Fit::start(cpu(), samples, {.kind = kind, .act = act, .hidden = 8, .steps = 10, .runs = 2}));
    std::vector<float> gradient, unused;
    double loss, ahead, behind;
    must(fit->gradients(0, gradient, loss));
    ASSERT_EQ(gradient.size(), fit->parameters().size());
    const std::vector<float> at(fit->parameters().begin(), fit->parameters().end());
    Random random{9};
    // The parameters of each kind by themselves: directions that leave all others alone.
    const size_t first = 8 * 24, parts[] = {0, first, first + (kind == Retainer::Kind::kMlp ? 8 : 0),
                                            at.size() / 2, at.size()};
    for (size_t part = 0; part + 1 < std::size(parts); ++part) {
      if (parts[part] == parts[part + 1]) continue;
      std::vector<float> direction(at.size());
      double slope = 0;
      for (size_t i = parts[part]; i < parts[part + 1]; ++i) {
        // With the gradient, so that the slope is far from 0.
        direction[i] = std::copysign(random.uniform(0.5f, 1), gradient[i]);
        slope += double{direction[i]} * double{gradient[i]};
      }
      constexpr float kStep = 0x1p-9f;
      const auto move = [&](float by, double& to) {
        for (size_t i = 0; i < at.size(); ++i) fit->parameters()[i] = at[i] + by * direction[i];
        must(fit->gradients(0, unused, to));
      };
      move(kStep, ahead);
      move(-kStep, behind);
      EXPECT_NEAR((ahead - behind) / (2 * double{kStep}), slope, slope / 100 + 0x1p-22 / double{kStep})
          << "part " << part;
    }
  }
}

TEST(Fit, LearnsWhatLabelsDependOn) {
  const Samples samples = some_samples(8, 16, false, 6);
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kMlp}) {
    auto fit = must(Fit::start(cpu(), samples,
                               {.kind = kind, .act = kActGeluErf, .hidden = 64, .steps = 300, .runs = 4}));
    ASSERT_TRUE(must(fit->step()));
    const double first = fit->loss();
    while (must(fit->step())) {
    }
    EXPECT_EQ(fit->steps_done(), 300u);
    EXPECT_LT(fit->loss(), first / 4);
  }
}

// Labels are a product of the states with a bias: least squares finds it but for the ridge, 1 beside a sum of
// 2048 squares of 4 / 3 on average, and the halves that the states are rounded to, which the labels were not.
TEST(Fit, OfALinearOneFindsTheProduct) {
  const Samples samples = some_samples(8, 16, true, 7);
  auto fit = must(Fit::start(cpu(), samples, {.kind = Retainer::Kind::kLinear}));
  while (must(fit->step())) {
  }
  EXPECT_EQ(fit->steps_done(), 2u);
  double mean = 0;
  for (uint32_t run = 0; run < 8; ++run)
    for (uint32_t layer = 0; layer < 2; ++layer)
      for (uint32_t i = 0; i < 2 * kRunTokens; ++i)
        mean += samples.labels(run, layer)[i] / (8.0 * 2 * 2 * kRunTokens);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const FittedLayer fitted = fit->layer(layer);
    ASSERT_EQ(fitted.second.size(), 2u * 16);
    for (uint32_t t = 0; t < kRunTokens; ++t) {
      double score = fitted.second_bias[1];
      for (uint32_t c = 0; c < 16; ++c)
        score += double{fitted.second[16 + c]} * f16_to_f32(samples.states(3, layer)[t * 16 + c]);
      EXPECT_NEAR(score + mean, samples.labels(3, layer)[kRunTokens + t], 0.02);
    }
  }
}

TEST(Fit, StopsWithTheLastGoodStateWhereTheLossIsNoNumber) {
  Samples samples = some_samples(2, 16, false, 8);
  auto fit = must(Fit::start(cpu(), samples, {.hidden = 8, .steps = 10, .runs = 2}));
  ASSERT_TRUE(must(fit->step()));
  samples.labels(0, 0)[3] = samples.labels(1, 0)[3] = NAN;
  EXPECT_FALSE(must(fit->step()));
  EXPECT_TRUE(fit->diverged());
  for (const float x : fit->layer(1).first) EXPECT_TRUE(std::isfinite(x));
}

TEST(Fit, GoesOnFromASavedStateAsIfItHadNotStopped) {
  const Samples samples = some_samples(4, 16, false, 10);
  const FitOptions options{
      .kind = Retainer::Kind::kMlp, .act = kActGeluErf, .hidden = 8, .steps = 9, .runs = 2};
  auto whole = must(Fit::start(cpu(), samples, options)), before = must(Fit::start(cpu(), samples, options));
  while (must(whole->step())) {
  }
  for (int i = 0; i < 4; ++i) must(before->step());
  const std::vector<std::byte> state = before->save();
  auto after = must(Fit::start(cpu(), samples, options));
  must(after->load(state));
  while (must(after->step())) {
  }
  EXPECT_EQ(after->save(), whole->save());
  EXPECT_EQ(after->load(std::span(state).first(state.size() - 1)).code(), Code::kFormat);
}

TEST(Fit, IsTheSameWithAnyNumberOfThreads) {
  const Samples samples = some_samples(4, 40, false, 11);
  const FitOptions options{.hidden = 70, .steps = 5, .runs = 4};
  std::vector<std::vector<std::byte>> states;
  for (const uint32_t threads : {1u, 3u}) {
    auto fit = must(Fit::start(must(open_device("cpu", {.threads = threads})), samples, options));
    while (must(fit->step())) {
    }
    states.push_back(fit->save());
  }
  EXPECT_EQ(states[0], states[1]);
}

}  // namespace
}  // namespace thimble::test
