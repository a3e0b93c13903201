#include "runtime/sampler/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <numeric>

namespace {
uint64_t allocated = 0;  // total bytes that operator new has returned
}

void* operator new(size_t size) {
  allocated += size;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace thimble {
namespace {

constexpr uint32_t kRewindable = 200;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Options that filter nothing.
SamplerOptions plain(float temperature) {
  SamplerOptions o;
  o.temperature = temperature;
  o.top_k = 0;
  o.top_p = 1;
  o.min_p = 0;
  return o;
}

Sampler make(uint32_t vocab, const SamplerOptions& options) {
  Sampler sampler(vocab, kRewindable);
  const Status set = sampler.set(options);
  EXPECT_TRUE(set.ok()) << set.message();
  return sampler;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  for (float x : logits) p.push_back(std::exp(static_cast<double>(x) / temperature));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

// Draws many tokens and compares each token's count with a binomial distribution. The tolerance is five
// standard deviations: a correct sampler fails with probability 6e-7 per token for a random seed, and the
// seed is fixed.
void expect_distribution(Sampler sampler, const std::vector<float>& logits, const std::vector<double>& p,
                         uint64_t position = 0) {
  constexpr int kDraws = 100'000;
  std::vector<int> counts(p.size());
  for (int i = 0; i < kDraws; ++i)
    ++counts[static_cast<size_t>(sampler.sample(logits.data(), nullptr, position))];
  for (size_t id = 0; id < p.size(); ++id) {
    const double tolerance = 5 * std::sqrt(kDraws * p[id] * (1 - p[id]));
    EXPECT_NEAR(counts[id], kDraws * p[id], tolerance) << "token " << id;
  }
}

// Probabilities with all but `kept` set to 0, renormalised.
std::vector<double> only(std::vector<double> p, const std::vector<size_t>& kept) {
  std::vector<double> out(p.size());
  double sum = 0;
  for (size_t id : kept) sum += p[id];
  for (size_t id : kept) out[id] = p[id] / sum;
  return out;
}

const std::vector<float> kLogits = {0.5f, 2.0f, -1.0f, 1.5f, 0.0f, 1.0f};  // in order: 1 3 5 0 4 2

TEST(Sampler, DrawsByTheSoftmaxOfTheLogits) {
  for (float t : {0.5f, 1.0f, 2.0f}) expect_distribution(make(6, plain(t)), kLogits, softmax(kLogits, t));
}

TEST(Sampler, TopKKeepsTheMostLikely) {
  SamplerOptions o = plain(1);
  o.top_k = 3;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 1), {1, 3, 5}));
}

TEST(Sampler, TopPKeepsTheFewestThatReachTheShare) {
  // The sorted probabilities of kLogits are 0.410 0.249 0.151 0.092 0.056 0.020...: the second exceeds 0.6,
  // the third 0.8.
  SamplerOptions o = plain(1);
  o.top_p = 0.6f;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 1), {1, 3}));
  o.top_p = 0.8f;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 1), {1, 3, 5}));
  o.top_p = 0;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 1), {1}));
}

TEST(Sampler, MinPDropsWhatIsFarBelowTheBest) {
  SamplerOptions o = plain(1);
  o.min_p = 0.3f;  // e^-1 = 0.37 of the best stays, e^-1.5 = 0.22 goes
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 1), {1, 3, 5}));
}

TEST(Sampler, FiltersBeforeItAppliesTheTemperature) {
  // At temperature 10, the filters would keep more tokens, so they must use the probabilities without
  // temperature.
  SamplerOptions o = plain(10);
  o.min_p = 0.3f;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 10), {1, 3, 5}));
  o = plain(10);
  o.top_p = 0.75f;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 10), {1, 3, 5}));
}

TEST(Sampler, TopPSeesWhatTopKLeft) {
  // Of the best two, token 1 has 0.62. So top-p 0.6 keeps only this token, although over all six tokens it
  // would keep two.
  SamplerOptions o = plain(1);
  o.top_k = 2;
  o.top_p = 0.6f;
  expect_distribution(make(6, o), kLogits, only(softmax(kLogits, 1), {1}));
}

TEST(Sampler, TemperatureZeroIsTheBestWithTiesToTheLowerId) {
  Sampler s = make(5, {});
  EXPECT_EQ(s.sample(std::vector<float>{1, 3, 2, 3, 3}.data()), 1);
  EXPECT_EQ(s.sample(std::vector<float>{kNan, -kInf, -5, kNan, -5}.data()), 2);
  EXPECT_EQ(s.sample(std::vector<float>{1, kInf, 2, kInf, kNan}.data()), 1);
  EXPECT_EQ(s.sample(std::vector<float>(5, kNan).data()), 0);
}

TEST(Sampler, NeverDrawsWhatIsSuppressed) {
  const std::vector<int32_t> suppressed = {1, 3};
  Sampler s(5, kRewindable, suppressed);
  const std::vector<float> logits = {1, 9, 2, 8, 2};
  EXPECT_EQ(s.sample(logits.data()), 2);
  EXPECT_FALSE(s.samples_best(1));
  EXPECT_TRUE(s.samples_best(2));
  ASSERT_TRUE(s.set(plain(1)).ok());
  EXPECT_FALSE(s.samples_best(2));
  expect_distribution(s, {0, 9, 0, 8, -kInf}, {0.5, 0, 0.5, 0, 0});
}

TEST(Sampler, AddsBiasesToTheLogits) {
  const std::vector<float> logits = {1, 3, 2, 0};
  const std::vector<int32_t> tokens = {3, 1};
  const std::vector<float> biases = {2.5f, -100};
  Sampler sampler = make(4, plain(0));
  EXPECT_TRUE(sampler.samples_best(1));
  ASSERT_TRUE(sampler.set_bias(tokens, biases).ok());
  EXPECT_FALSE(sampler.samples_best(1));
  EXPECT_EQ(sampler.sample(logits.data()), 3);
  Sampler copy = sampler;
  EXPECT_EQ(copy, sampler);
  EXPECT_EQ(copy.sample(logits.data()), 3);
  sampler.reset();
  EXPECT_EQ(sampler.sample(logits.data()), 3);
  for (const auto& [wrong, by] : std::vector<std::pair<std::vector<int32_t>, std::vector<float>>>{
           {{4}, {1}},
           {{-1}, {1}},
           {{0}, {kNan}},
           {{0}, {-kInf}},
           {{0, 1, 0}, {1, 1, 1}},
           {std::vector<int32_t>(Sampler::kMostBiased + 1), std::vector<float>(Sampler::kMostBiased + 1)}}) {
    EXPECT_FALSE(sampler.set_bias(wrong, by).ok());
    EXPECT_EQ(copy, sampler);  // nothing changed
  }
  ASSERT_TRUE(sampler.set_bias({}, {}).ok());
  EXPECT_FALSE(copy == sampler);
  EXPECT_EQ(sampler.sample(logits.data()), 1);
  const std::vector<float> biased = {1, -97, 2, 2.5f};
  copy = make(4, plain(1));
  ASSERT_TRUE(copy.set_bias(tokens, biases).ok());
  expect_distribution(copy, logits, softmax(biased, 1));
}

TEST(Sampler, NeverDrawsWhatIsNotANumber) {
  const std::vector<float> logits = {kNan, 0, -kInf, 0, kNan, -kInf};
  expect_distribution(make(6, plain(1)), logits, {0, 0.5, 0, 0.5, 0, 0});
  expect_distribution(make(6, plain(1)), {0, kInf, 0, kInf, 0, 0}, {0, 0.5, 0, 0.5, 0, 0});
  Sampler s = make(6, plain(1));
  EXPECT_EQ(s.sample(std::vector<float>(6, -kInf).data()), 0);
}

TEST(Sampler, PenaltyWeakensRecentTokensOnceEach) {
  SamplerOptions o = plain(1);
  o.repeat_penalty = 2;
  o.repeat_last = 3;
  Sampler s = make(6, o);
  uint64_t position = 10;
  for (int token : {3, 1, 2, 1}) s.accept(token, position++);  // 3 is no longer among the last three
  // Positive logits are halved and negative ones doubled; token 1 is penalised once, although it came twice.
  const std::vector<float> expected = {0.5f, 1.0f, -2.0f, 1.5f, 0.0f, 1.0f};
  expect_distribution(s, kLogits, softmax(expected, 1), position);
  // After a prompt, another answer begins, whatever came before it.
  expect_distribution(s, kLogits, softmax(kLogits, 1), position + 1);
  s.accept(1, position + 1);
  expect_distribution(s, kLogits, softmax({0.5f, 1.0f, -1.0f, 1.5f, 0.0f, 1.0f}, 1), position + 2);
  s.rewind(position);  // back into the first answer
  expect_distribution(s, kLogits, softmax(expected, 1), position);
  s.reset();
  expect_distribution(s, kLogits, softmax(kLogits, 1));
}

TEST(Sampler, PenaltiesOfAllKindsAddUp) {
  SamplerOptions o = plain(1);
  o.repeat_penalty = 2;
  o.repeat_last = 1;
  Sampler s = make(6, o);
  ASSERT_TRUE(s.set_penalties({.presence = 0.5f, .frequency = 0.25f}).ok());
  s.accept(2, 0);
  s.accept(1, 1);
  // The repeat penalty comes first, and applies to the last token alone.
  expect_distribution(s, kLogits, softmax({0.5f, 0.25f, -1.75f, 1.5f, 0.0f, 1.0f}, 1), 2);
}

TEST(Sampler, PenalisesTheTokensOfTheAnswer) {
  Sampler s = make(6, plain(1));
  ASSERT_TRUE(s.set_penalties({.presence = 0.5f, .frequency = 0.25f}).ok());
  const auto expect_next = [&](uint64_t position, const std::vector<float>& logits) {
    Sampler without = make(6, plain(1));
    for (int i = 0; i < 200; ++i) {
      const int32_t token = s.sample(kLogits.data(), nullptr, position);
      ASSERT_EQ(token, without.sample(logits.data())) << i;
    }
  };
  std::vector<float> expected = kLogits;
  ASSERT_TRUE(s.set(plain(1)).ok());
  expect_next(10, expected);
  for (uint64_t i = 0; i < 3; ++i) s.accept(i == 1 ? 4 : 2, 10 + i);  // 2, 4, 2
  expected[2] -= 0.5f + 2 * 0.25f;
  expected[4] -= 0.5f + 0.25f;
  ASSERT_TRUE(s.set(plain(1)).ok());
  expect_next(13, expected);
  ASSERT_TRUE(s.set(plain(1)).ok());
  expect_next(20, kLogits);  // a prompt was read since, so another answer begins
  s.accept(1, 20);
  s.rewind(12);  // back into the first answer
  expected[2] += 0.25f;
  ASSERT_TRUE(s.set(plain(1)).ok());
  expect_next(12, expected);
  // The most likely token is no shortcut.
  ASSERT_TRUE(s.set(plain(0)).ok());
  EXPECT_FALSE(s.samples_best(1));
  for (float bad : {kNan, kInf}) {
    EXPECT_EQ(s.set_penalties({.presence = bad}).code(), Code::kInvalidArgument);
    EXPECT_EQ(s.set_penalties({.frequency = bad}).code(), Code::kInvalidArgument);
  }
  ASSERT_TRUE(s.set_penalties({}).ok());
  EXPECT_TRUE(s.samples_best(1));
}

TEST(Sampler, HistoryFollowsANewLengthAndItsRingTurns) {
  SamplerOptions o = plain(0);
  o.repeat_penalty = 2;
  o.repeat_last = 1;
  Sampler s = make(6, o);
  uint64_t position = 0;
  const auto accept = [&](int32_t token) { s.accept(token, position++); };
  const auto next = [&] { return s.sample(kLogits.data(), nullptr, position); };
  accept(1);
  accept(3);
  EXPECT_EQ(next(), 1);
  o.repeat_last = 2;
  ASSERT_TRUE(s.set(o).ok());
  EXPECT_EQ(next(), 1);  // 1, 3 and 5 now have 1.0, 0.75 and 1.0
  accept(1);
  accept(1);
  EXPECT_EQ(next(), 3);

  o.repeat_last = Sampler::kLongestHistory;
  ASSERT_TRUE(s.set(o).ok());
  accept(1);
  for (uint32_t i = 1; i < Sampler::kLongestHistory; ++i) accept(2);
  EXPECT_EQ(next(), 3);  // 1 is still remembered, 3 is forgotten
  accept(2);
  EXPECT_EQ(next(), 1);
}

TEST(Sampler, IgnoresTokensOutsideItsVocabulary) {
  Sampler s = make(6, {});
  s.accept(-1, 0);
  s.accept(6, 0);
  EXPECT_EQ(s.sample(kLogits.data()), 1);
}

TEST(Sampler, DrawsTheSameOnEveryPlatformForASeed) {
  // SplitMix64 of seed 0 begins with e220a8397b1dcdaf, 6e789e6aa1b965f4, 06c45d188009454f, f88bb8a8724c81ec
  // (published test vector). So the first draws of 16 equal tokens are the upper four bits of these.
  Sampler s = make(16, plain(1));
  const std::vector<float> equal(16, 0);
  for (int32_t expected : {0xe, 0x6, 0x0, 0xf}) EXPECT_EQ(s.sample(equal.data()), expected);
  s.reset();
  EXPECT_EQ(s.sample(equal.data()), 0xe);
}

TEST(Sampler, ACopyGoesOnFromTheSameState) {
  SamplerOptions o = plain(1);
  o.repeat_penalty = 1.5f;
  o.seed = 7;
  Sampler s = make(6, o);
  uint64_t position = 0;
  for (; position < 10; ++position) s.accept(s.sample(kLogits.data(), nullptr, position), position);
  Sampler copy = s;
  for (; position < 60; ++position) {
    const int32_t token = s.sample(kLogits.data(), nullptr, position);
    ASSERT_EQ(copy.sample(kLogits.data(), nullptr, position), token);
    s.accept(token, position);
    copy.accept(token, position);
  }
}

// The sampler can go back to any position that it was told of. Positions may have gaps, from prompts.
TEST(Sampler, GoesBackToTheHistoryAndTheRandomNumbersOfAPosition) {
  SamplerOptions o = plain(1);
  o.repeat_penalty = 2;
  o.repeat_last = 3;
  o.seed = 7;
  Sampler s = make(6, o);
  const auto draw = [&](uint64_t position) {
    const int32_t token = s.sample(kLogits.data(), nullptr, position);
    s.accept(token, position);
    return token;
  };
  std::vector<int32_t> tokens;
  const auto position = [](uint64_t i) { return i < 10 ? 50 + i : 150 + i; };
  for (uint64_t i = 0; i < kRewindable; ++i) tokens.push_back(draw(position(i)));
  for (const uint64_t back : {kRewindable - 1, 100u, 13u, 10u, 9u, 1u, 0u}) {
    s.rewind(position(back));
    for (uint64_t i = back; i < kRewindable; ++i) ASSERT_EQ(draw(position(i)), tokens[i]) << back << " " << i;
  }
  s.rewind(100);                     // in the gap: the first ten stay
  EXPECT_EQ(draw(100), tokens[10]);  // no answer has begun there either
  s.rewind(0);
  EXPECT_EQ(draw(50), tokens[0]);
}

TEST(Sampler, GoesBackAfterTheHistoryIsFull) {
  SamplerOptions o = plain(1);
  o.repeat_penalty = 2;
  o.repeat_last = Sampler::kLongestHistory;
  Sampler s = make(6, o);
  std::vector<int32_t> tokens;
  for (uint32_t i = 0; i < Sampler::kLongestHistory + 2 * kRewindable; ++i) {
    tokens.push_back(s.sample(kLogits.data(), nullptr, i));
    s.accept(tokens.back(), i);
  }
  const size_t back = tokens.size() - kRewindable;
  s.rewind(back);
  for (size_t i = back; i < tokens.size(); ++i) {
    ASSERT_EQ(s.sample(kLogits.data(), nullptr, i), tokens[i]);
    s.accept(tokens[i], i);
  }
}

TEST(Sampler, AllocatesWhatItSaysAndNothingAfterItsConstruction) {
  constexpr uint32_t kVocab = 1000;
  const std::vector<float> logits(kVocab, 0);
  SamplerOptions o;
  o.temperature = 1;
  o.repeat_penalty = 1.1f;
  uint64_t before = allocated;
  Sampler s(kVocab, kRewindable);
  EXPECT_EQ(allocated - before, Sampler::bytes(kVocab, kRewindable));
  Sampler copy = s;
  EXPECT_EQ(allocated - before, 2 * Sampler::bytes(kVocab, kRewindable));
  before = allocated;
  for (Sampler* either : {&s, &copy}) {
    for (uint32_t top_k : {0u, 40u, 2000u}) {
      o.top_k = top_k;
      ASSERT_TRUE(either->set(o).ok());
      for (int i = 0; i < 100; ++i) either->accept(either->sample(logits.data()), 0);
      either->reset();
    }
  }
  EXPECT_EQ(allocated, before);
}

TEST(Sampler, RefusesOptionsWithoutMeaningAndKeepsTheOldOnes) {
  Sampler s = make(6, plain(0));
  const auto refused = [&](auto change) {
    SamplerOptions o = plain(1);
    change(o);
    const Status set = s.set(o);
    EXPECT_EQ(set.code(), Code::kInvalidArgument);
    EXPECT_FALSE(set.message().empty());
  };
  for (float bad : {-1.0f, kNan, kInf}) refused([&](SamplerOptions& o) { o.temperature = bad; });
  for (float bad : {-0.1f, 1.1f, kNan}) refused([&](SamplerOptions& o) { o.top_p = bad; });
  for (float bad : {-0.1f, 1.1f, kNan}) refused([&](SamplerOptions& o) { o.min_p = bad; });
  for (float bad : {0.0f, -1.0f, kNan, kInf}) refused([&](SamplerOptions& o) { o.repeat_penalty = bad; });
  refused([](SamplerOptions& o) { o.repeat_last = Sampler::kLongestHistory + 1; });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(s.sample(kLogits.data()), 1);
}

}  // namespace
}  // namespace thimble
