#include "training/sink.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "base/bits.h"

namespace thimble {
namespace {

using Channels = std::array<double, kSinkRank>;

constexpr double kEpsilon = 1e-6;      // of the norms, as in the op
constexpr double kScale = 0.25;        // 1 / sqrt(kSinkRank)
constexpr double kLeastShare = 1e-12;  // scores closer to 0 or 1 are treated as this far away
static_assert(kSinkRank == 16);

double dot(const Channels& a, const Channels& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// A vector divided by its root mean square, and the same times the norm's weights.
struct Normed {
  double factor;
  Channels unit, weighed;

  Normed(const Channels& x, const float* weights) : factor(1 / std::sqrt(dot(x, x) / kSinkRank + kEpsilon)) {
    for (uint32_t c = 0; c < kSinkRank; ++c) {
      unit[c] = x[c] * factor;
      weighed[c] = unit[c] * double{weights[c]};
    }
  }
  // Given the gradient of `weighed`, adds the gradient of the weights, and returns the gradient of x.
  Channels back(const Channels& by_weighed, const float* weights, double* by_weights) const {
    Channels by_x;
    for (uint32_t c = 0; c < kSinkRank; ++c) {
      by_weights[c] += by_weighed[c] * unit[c];
      by_x[c] = by_weighed[c] * double{weights[c]};
    }
    const double along = dot(by_x, unit) / kSinkRank;
    for (uint32_t c = 0; c < kSinkRank; ++c) by_x[c] = factor * (by_x[c] - unit[c] * along);
    return by_x;
  }
};

// The softmax weights of a query's products with the token's key and with the sinks.
struct Weights {
  double own = 0, others = 0;  // own + others = 1; each is computed without subtracting the other from 1
  std::array<double, kSinkCount> of_sink;

  Weights(double own_logit, const std::array<double, kSinkCount>& logits) {
    const double most = std::max(own_logit, *std::max_element(logits.begin(), logits.end()));
    double sum = own = std::exp(own_logit - most);
    for (uint32_t s = 0; s < kSinkCount; ++s) sum += of_sink[s] = std::exp(logits[s] - most);
    own /= sum;
    for (double& weight : of_sink) others += weight /= sum;
  }
};

// Tokens per partial sum.
constexpr uint32_t kBlock = 256;

// Gradients of the parameters are summed in double.
struct Sums {
  double loss = 0;
  std::vector<double> q_bias, q_norm, k_norm, sinks, bias;
  explicit Sums(const SinkShape& s)
      : q_bias(s.queries() * kSinkRank),
        q_norm(kSinkRank),
        k_norm(kSinkRank),
        sinks(s.heads * kSinkCount * kSinkRank),
        bias(s.queries()) {}

  void add(const Sums& other) {
    loss += other.loss;
    for (auto part : {&Sums::q_bias, &Sums::q_norm, &Sums::k_norm, &Sums::sinks, &Sums::bias})
      std::transform((this->*part).begin(), (this->*part).end(), (other.*part).begin(), (this->*part).begin(),
                     std::plus<>());
  }
};

// The score and the gradients of one token in one KV head.
class Token {
 public:
  Token(const SinkShape& s, const SinkParameters<const float>& p, const float* projected, uint32_t head,
        uint32_t token)
      : s_(s), p_(p), head_(head), token_(token), key_(read(projected, s.queries() + head), p.k_norm) {
    queries_.reserve(s.group);
    weights_.reserve(s.group);
    for (uint32_t i = 0; i < s.group; ++i) {
      const uint32_t query = head * s.group + i;
      Channels q = read(projected, query);
      for (uint32_t c = 0; c < kSinkRank; ++c) q[c] += double{p.q_bias[query * kSinkRank + c]};
      queries_.emplace_back(q, p.q_norm);
      std::array<double, kSinkCount> logits;
      for (uint32_t sink = 0; sink < kSinkCount; ++sink)
        logits[sink] = kScale * dot(queries_[i].weighed, key_of(sink));
      weights_.emplace_back(kScale * dot(queries_[i].weighed, key_.weighed) + double{p.bias[query]}, logits);
      score_ += weights_[i].own / s.group;
      rest_ += weights_[i].others / s.group;
    }
    score_ = std::max(score_, kLeastShare);
    rest_ = std::max(rest_, kLeastShare);
  }

  double loss(double label) const { return -label * std::log(score_) - (1 - label) * std::log(rest_); }

  // Adds the gradients of the loss times `part`.
  void back(double label, double part, float* by_projected, Sums& sums) const {
    const double by_score = part * (score_ * (1 - label) - rest_ * label) / (score_ * rest_) / s_.group;
    Channels by_key{};
    for (uint32_t i = 0; i < s_.group; ++i) {
      const uint32_t query = head_ * s_.group + i;
      const Weights& w = weights_[i];
      const double by_own = by_score * w.own * w.others;
      sums.bias[query] += by_own;
      Channels by_query;
      for (uint32_t c = 0; c < kSinkRank; ++c) {
        by_query[c] = kScale * by_own * key_.weighed[c];
        by_key[c] += kScale * by_own * queries_[i].weighed[c];
      }
      for (uint32_t sink = 0; sink < kSinkCount; ++sink) {
        const double by_logit = -by_score * w.own * w.of_sink[sink] * kScale;
        const Channels other = key_of(sink);
        double* by_sink = &sums.sinks[(head_ * kSinkCount + sink) * kSinkRank];
        for (uint32_t c = 0; c < kSinkRank; ++c) {
          by_query[c] += by_logit * other[c];
          by_sink[c] += by_logit * queries_[i].weighed[c];
        }
      }
      const Channels by_q = queries_[i].back(by_query, p_.q_norm, sums.q_norm.data());
      for (uint32_t c = 0; c < kSinkRank; ++c) sums.q_bias[query * kSinkRank + c] += by_q[c];
      write(by_projected, query, by_q);
    }
    write(by_projected, s_.queries() + head_, key_.back(by_key, p_.k_norm, sums.k_norm.data()));
  }

 private:
  uint64_t at(uint32_t vector, uint32_t c) const {
    return (uint64_t(vector) * kSinkRank + c) * s_.tokens + token_;
  }
  Channels read(const float* projected, uint32_t vector) const {
    Channels x;
    for (uint32_t c = 0; c < kSinkRank; ++c) x[c] = double{projected[at(vector, c)]};
    return x;
  }
  void write(float* to, uint32_t vector, const Channels& x) const {
    for (uint32_t c = 0; c < kSinkRank; ++c) to[at(vector, c)] = static_cast<float>(x[c]);
  }
  Channels key_of(uint32_t sink) const {
    Channels x;
    std::copy_n(p_.sinks + (head_ * kSinkCount + sink) * kSinkRank, kSinkRank, x.begin());
    return x;
  }

  const SinkShape& s_;
  const SinkParameters<const float>& p_;
  const uint32_t head_, token_;
  const Normed key_;
  std::vector<Normed> queries_;   // query heads of the KV head
  std::vector<Weights> weights_;  // one for each of queries_
  double score_ = 0, rest_ = 0;
};

}  // namespace

double loss_of_sinks(const SinkShape& s, const SinkParameters<const float>& p, const float* projected,
                     const float* labels, float* by_projected, const SinkParameters<float>& by_parameters,
                     ThreadPool& threads) {
  const auto blocks = static_cast<uint32_t>(ceil_div(s.tokens, kBlock));
  std::vector<Sums> parts(blocks, Sums(s));
  threads.run(blocks, [&](uint32_t block, uint32_t) {
    Sums& part = parts[block];
    for (uint32_t head = 0; head < s.heads; ++head)
      for (uint32_t t = block * kBlock; t < std::min((block + 1) * kBlock, s.tokens); ++t) {
        const Token token(s, p, projected, head, t);
        const double label = double{labels[uint64_t(head) * s.tokens + t]};
        part.loss += token.loss(label) / s.tokens;
        token.back(label, 1.0 / s.tokens, by_projected, part);
      }
  });
  Sums sums(s);
  for (const Sums& part : parts) sums.add(part);
  const auto give = [](const std::vector<double>& from, float* to) {
    std::transform(from.begin(), from.end(), to, [](double x) { return static_cast<float>(x); });
  };
  give(sums.q_bias, by_parameters.q_bias);
  give(sums.q_norm, by_parameters.q_norm);
  give(sums.k_norm, by_parameters.k_norm);
  give(sums.sinks, by_parameters.sinks);
  give(sums.bias, by_parameters.bias);
  return sums.loss;
}

}  // namespace thimble
