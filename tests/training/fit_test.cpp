// Tests the fit: its loss, its gradients, and that it learns.
#include "training/fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/support/random.h"
#include "tests/support/sessions.h"
#include "training/sink.h"

namespace thimble::test {
namespace {

// Runs with random states, and labels computed by a network from these states.
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

FitOptions of_kind(Retainer::Kind kind) {
  FitOptions o{.kind = kind, .act = kActGeluErf, .hidden = 8, .steps = 10, .runs = 2};
  if (kind == Retainer::Kind::kSink) {
    o.group = 2;
    o.hidden = SinkShape{.heads = 2, .group = 2, .tokens = 0}.channels();
  }
  return o;
}

// Methods 2.3, invariant 16.
TEST(Loss, IsThatOfTheGoldenVector) {
  const float scores[] = {0, 1, 3}, labels[] = {0, 0, 0};
  const uint8_t best[] = {0, 0, 0};
  const float* of_run[] = {labels};
  const uint8_t* best_of_run[] = {best};
  float gradient[3] = {};
  const double loss = loss_of_layer({.heads = 1, .runs = 1, .tokens = 3, .mean = 0, .weighs_best = false}, 3,
                                    scores, of_run, best_of_run, gradient);
  EXPECT_NEAR(loss, 1.00625, 1e-7);
  // The derivative by s of the mean of d^2 / 2 or |d|, and of 0.0025 times the mean of the squared steps 1
  // and 2.
  EXPECT_NEAR(gradient[0], -0.0025, 1e-8);
  EXPECT_NEAR(gradient[1], 1.0 / 3 - 0.0025, 1e-7);
  EXPECT_NEAR(gradient[2], 1.0 / 3 + 0.005, 1e-7);
}

TEST(Loss, CountsTheBestSixteenTimesAndLabelsWithoutTheirMean) {
  const float scores[] = {2, 2}, labels[] = {5, 4};  // errors of 0 and 1
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

// Invariant 16: Locret's learning rates. While the rate rises, ours is one step ahead, 5e-4 / 2000; the rest
// is rounding.
TEST(Rate, IsThatOfTheGoldens) {
  const Schedule locret{.peak = 5e-4f, .rise = 2.0f / 3, .fall = 1.0f / 3};
  const double step = 5e-4 / 2000, rounding = 1e-9;
  EXPECT_NEAR(rate_at(locret, 0, 3000), 0 + step, rounding);
  EXPECT_NEAR(rate_at(locret, 1000, 3000), 2.5e-4 + step, rounding);
  EXPECT_NEAR(rate_at(locret, 2000, 3000), 5e-4, rounding);
  EXPECT_NEAR(rate_at(locret, 2500, 3000), 2.5e-4, rounding);
}

TEST(Rate, RisesThroughThreeTenthsAndFallsThroughTheLastHalf) {
  const auto rate = [](uint32_t step) { return rate_at(Schedule(), step, 300); };
  EXPECT_NEAR(rate(0), 1e-3 / 90, 1e-9);
  EXPECT_NEAR(rate(44), 0.5e-3, 1e-9);
  EXPECT_NEAR(rate(89), 1e-3, 1e-9);
  EXPECT_NEAR(rate(150), 1e-3, 1e-9);
  EXPECT_NEAR(rate(225), 0.5e-3, 1e-9);
  EXPECT_NEAR(rate(299), 1e-3 / 150, 1e-9);
}

// The gate of Fast KVzip, for labels that are shares of 1.
TEST(Loss, OfSinksIsTheCrossEntropyOfTheirShares) {
  const SinkShape s{.heads = 2, .group = 3, .tokens = 5};
  Random random{4};
  const std::vector<float> projected = random.floats(size_t(s.channels()) * s.tokens, -2, 2),
                           q_bias = random.floats(s.queries() * kSinkRank),
                           q_norm = random.floats(kSinkRank, -2, 2), k_norm = random.floats(kSinkRank, -2, 2),
                           sinks = random.floats(s.heads * kSinkCount * kSinkRank, -2, 2),
                           bias = random.floats(s.queries(), -1, 3),
                           labels = random.floats(s.heads * s.tokens, 0, 1);
  const auto vector = [&](uint32_t number, uint32_t t, const std::vector<float>& norm, bool biased) {
    std::vector<double> x(kSinkRank);
    double squares = 0;
    for (uint32_t c = 0; c < kSinkRank; ++c) {
      x[c] = double{projected[(number * kSinkRank + c) * s.tokens + t]};
      if (biased) x[c] += double{q_bias[number * kSinkRank + c]};
      squares += x[c] * x[c];
    }
    for (uint32_t c = 0; c < kSinkRank; ++c) x[c] *= double{norm[c]} / std::sqrt(squares / kSinkRank + 1e-6);
    return x;
  };
  double expected = 0;
  for (uint32_t head = 0; head < s.heads; ++head)
    for (uint32_t t = 0; t < s.tokens; ++t) {
      const std::vector<double> k = vector(s.queries() + head, t, k_norm, false);
      double score = 0;
      for (uint32_t i = head * s.group; i < (head + 1) * s.group; ++i) {
        const std::vector<double> q = vector(i, t, q_norm, true);
        const double logit = std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / 4 + double{bias[i]};
        double others = 0;
        for (uint32_t sink = 0; sink < kSinkCount; ++sink)
          others += std::exp(
              std::inner_product(q.begin(), q.end(), &sinks[(head * kSinkCount + sink) * kSinkRank], 0.0) /
                  4 -
              logit);
        score += 1 / (1 + others) / s.group;
      }
      const double label = double{labels[head * s.tokens + t]};
      expected -= (label * std::log(score) + (1 - label) * std::log(1 - score)) / s.tokens;
    }
  std::vector<float> by_projected(projected.size()), unused(sinks.size());  // the largest part
  const SinkParameters<float> ignored{unused.data(), unused.data(), unused.data(), unused.data(),
                                      unused.data()};
  ThreadPool threads(2);
  EXPECT_NEAR(loss_of_sinks(s, {q_bias.data(), q_norm.data(), k_norm.data(), sinks.data(), bias.data()},
                            projected.data(), labels.data(), by_projected.data(), ignored, threads),
              expected, 1e-12 * expected);
}

// Compares the change of the loss along random directions. For steps of h in both directions it is 2 h times
// the slope g d, up to a term with the third derivative (h^2 of it, below 1 / 200 of the slope here) and the
// rounding of scores: 2^-22 of a loss of about 1, divided by 2 h.
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
    // Tests each kind of parameters separately, with directions that leave all others unchanged.
    const size_t first = 8 * 24, parts[] = {0, first, first + (kind == Retainer::Kind::kMlp ? 8 : 0),
                                            at.size() / 2, at.size()};
    for (size_t part = 0; part + 1 < std::size(parts); ++part) {
      if (parts[part] == parts[part + 1]) continue;
      std::vector<float> direction(at.size());
      double slope = 0;
      for (size_t i = parts[part]; i < parts[part + 1]; ++i) {
        // The direction has the signs of the gradient, so that the slope is far from 0.
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

// The same for the parameters of sinks: matrices of queries and keys, biases, norms, sinks. The losses of 2
// layers and 2 heads, about 1 each, are summed.
TEST(Fit, OfSinksFollowsTheSlopeOfTheLoss) {
  const Samples samples = some_samples(3, 24, false, 5);
  const SinkShape shape{.heads = 2, .group = 2, .tokens = 0};
  auto fit = must(Fit::start(cpu(), samples, of_kind(Retainer::Kind::kSink)));
  std::vector<float> gradient, unused;
  double loss, ahead, behind;
  must(fit->gradients(0, gradient, loss));
  const std::vector<float> at(fit->parameters().begin(), fit->parameters().end());
  ASSERT_EQ(gradient.size(), at.size());
  const size_t queries = shape.queries() * kSinkRank,
               sizes[] = {queries * 24, 2 * kSinkRank * 24,         queries,        kSinkRank,
                          kSinkRank,    2 * kSinkCount * kSinkRank, shape.queries()};
  Random random{9};
  size_t first = 0;
  for (const size_t size : sizes) {
    std::vector<float> direction(at.size());
    double slope = 0;
    for (size_t i = first; i < first + size; ++i) {
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
    EXPECT_NE(slope, 0);
    EXPECT_NEAR((ahead - behind) / (2 * double{kStep}), slope, slope / 100 + 4 * 0x1p-22 / double{kStep})
        << "parameters from " << first;
    first += size;
  }
  EXPECT_EQ(first * 2, at.size());  // both layers have the same number
}

// The excess of the cross-entropy over the labels' own entropy falls to a half; at the start, scores are the
// labels' mean.
TEST(Fit, OfSinksLearnsWhatLabelsDependOn) {
  const Samples samples = some_samples(8, 16, true, 6);
  double entropy = 0;
  for (uint32_t run = 0; run < 8; ++run)
    for (uint32_t i = 0; i < samples.shape().label_elements(); ++i) {
      const double share = std::exp(std::min(0.0, double{samples.labels(run, 0)[i]}));
      if (share < 1)
        entropy -= (share * std::log(share) + (1 - share) * std::log(1 - share)) / (8.0 * kRunTokens);
    }
  FitOptions options = of_kind(Retainer::Kind::kSink);
  options.steps = 300;
  options.runs = 4;
  auto fit = must(Fit::start(cpu(), samples, options));
  ASSERT_TRUE(must(fit->step()));
  const double first = fit->loss();
  while (must(fit->step())) {
  }
  EXPECT_LT(fit->loss() - entropy, (first - entropy) / 2);
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

// A good state is stored every 50 steps. The result is the state of step 50, to the bit, and not that of the
// start or of the previous step.
TEST(Fit, StopsWithTheLastGoodStateIfTheLossIsNotANumber) {
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kMlp, Retainer::Kind::kSink}) {
    Samples samples = some_samples(2, 16, false, 8);
    FitOptions options = of_kind(kind);
    options.steps = 90;
    auto good = must(Fit::start(cpu(), samples, options)), fit = must(Fit::start(cpu(), samples, options));
    const auto parameters = [](Fit& of) {
      return std::vector<float>(of.parameters().begin(), of.parameters().end());
    };
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(must(good->step()));
    for (int i = 0; i < 53; ++i) ASSERT_TRUE(must(fit->step()));
    EXPECT_NE(parameters(*fit), parameters(*good));
    for (uint32_t run = 0; run < 2; ++run) samples.labels(run, 0)[3] = NAN;
    EXPECT_FALSE(must(fit->step()));
    EXPECT_TRUE(fit->diverged());
    EXPECT_EQ(parameters(*fit), parameters(*good));
    EXPECT_FALSE(must(fit->step()));
    EXPECT_EQ(fit->steps_done(), 53u);
    EXPECT_EQ(fit->good_step(), 50u);
  }
}

TEST(Fit, HasNoGoodStateButTheFirstBeforeOneIsKept) {
  for (const uint32_t steps : {0u, 1u, 50u, 51u}) {
    Samples samples = some_samples(2, 16, false, 8);
    FitOptions options = of_kind(Retainer::Kind::kMlp);
    options.steps = 90;
    auto fit = must(Fit::start(cpu(), samples, options));
    for (uint32_t i = 0; i < steps; ++i) ASSERT_TRUE(must(fit->step()));
    for (uint32_t run = 0; run < 2; ++run) samples.labels(run, 0)[3] = NAN;
    EXPECT_FALSE(must(fit->step()));
    EXPECT_EQ(fit->good_step(), steps == 51 ? 50u : 0u) << steps;
  }
}

// No later loss reveals an invalid last step: its momentum is NaN, while the loss of that step is still a
// number.
TEST(Fit, StopsWithTheLastGoodStateIfTheLastStepGivesNaN) {
  const Samples samples = some_samples(2, 16, false, 8);
  FitOptions options = of_kind(Retainer::Kind::kMlp);
  options.steps = 60;
  auto fit = must(Fit::start(cpu(), samples, options));
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(must(fit->step()));
  const std::vector<float> good(fit->parameters().begin(), fit->parameters().end());
  for (int i = 50; i < 59; ++i) ASSERT_TRUE(must(fit->step()));
  std::vector<std::byte> state = fit->save();
  const float no_number = NAN;  // placed after the steps, the loss and the parameters
  std::memcpy(&state[sizeof(uint32_t) + sizeof(double) + good.size() * sizeof(float)], &no_number,
              sizeof no_number);
  must(fit->load(state));
  EXPECT_FALSE(must(fit->step()));
  EXPECT_TRUE(std::isfinite(fit->loss()));
  EXPECT_TRUE(fit->diverged());
  EXPECT_EQ(std::vector<float>(fit->parameters().begin(), fit->parameters().end()), good);
}

TEST(Fit, RefusesStatesThatAreNaN) {
  Samples samples = some_samples(2, 16, false, 8);
  samples.states(1, 1)[5] = f32_to_f16(NAN);
  const auto refused = Fit::start(cpu(), samples, of_kind(Retainer::Kind::kMlp));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kNotFinite);
}

TEST(Fit, GoesOnFromASavedStateAsIfItHadNotStopped) {
  const Samples samples = some_samples(4, 16, false, 10);
  for (const Retainer::Kind kind : {Retainer::Kind::kMlp, Retainer::Kind::kSink}) {
    const FitOptions options = of_kind(kind);
    auto whole = must(Fit::start(cpu(), samples, options)),
         before = must(Fit::start(cpu(), samples, options));
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
