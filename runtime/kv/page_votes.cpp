#include "runtime/kv/page_votes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace thimble {
namespace {

// The channels of pair i.
struct Pair {
  uint32_t a, b;
};
Pair pair_of(const RopeParams& p, uint32_t i) {
  return p.pairing == kRopeAdjacent ? Pair{2 * i, 2 * i + 1} : Pair{i, i + p.n_rot / 2};
}

}  // namespace

PageVotes::PageVotes(const RopeScheme& rope, uint32_t positions, uint32_t context, uint32_t group,
                     uint32_t head_dim, uint32_t pages)
    : rope_(size_t(rope_table_rows(positions)) * rope.n_rot),
      q_(size_t(head_dim) * group * kAskingTokens),
      q2_(q_.size()),
      scores_(size_t(pages) * group * kAskingTokens),
      most_(size_t(group) * kAskingTokens),
      sum_(most_.size()),
      mean_(head_dim),
      variance_(head_dim),
      query_(head_dim) {
  fill_rope_table(rope, positions, context, rope_.data());
}

uint64_t PageVotes::bytes(const RopeScheme& rope, uint32_t positions, uint32_t group, uint32_t head_dim,
                          uint32_t pages) {
  const uint64_t queries = uint64_t(group) * kAskingTokens;
  return (uint64_t(rope_table_rows(positions)) * rope.n_rot + (2 * head_dim + pages + 2) * queries +
          3 * head_dim) *
         sizeof(float);
}

void PageVotes::rotate(float* x, uint64_t position, const RopeParams& p) const {
  constexpr uint32_t kLow = 64;  // positions in the first part of the table
  const float* const low = rope_.data() + position % kLow * p.n_rot;
  const float* const high = rope_.data() + (kLow + position / kLow) * p.n_rot;
  for (uint32_t i = 0; i < p.n_rot / 2; ++i) {
    const float c = high[2 * i] * low[2 * i] - high[2 * i + 1] * low[2 * i + 1],
                s = high[2 * i] * low[2 * i + 1] + high[2 * i + 1] * low[2 * i];
    const auto [a, b] = pair_of(p, i);
    const float xa = x[a], xb = x[b];
    x[a] = xa * c - xb * s;
    x[b] = xa * s + xb * c;
  }
}

void PageVotes::read_queries(const Queries& q, const RopeParams& rope, Positions own) {
  const bool by_list = rope.mode == kRopeList;
  const uint32_t n = q.count * q.group;
  const uint64_t listed = own.size() + q.ahead;
  for (uint32_t age = 0; age < q.count; ++age) {
    const uint64_t position = q.read - 1 - age;
    const float* const row = q.ring + position % kAskingTokens * q.stride;
    for (uint32_t head = 0; head < q.group; ++head) {
      std::copy_n(row + head * q.head_dim, q.head_dim, query_.data());
      rotate(query_.data(), by_list ? listed - std::min<uint64_t>(listed, 1 + age) : position, rope);
      for (uint32_t c = 0; c < q.head_dim; ++c) {
        const float x = query_[c] * q.scale;
        q_[c * n + age * q.group + head] = x;
        q2_[c * n + age * q.group + head] = x * x / 2;
      }
    }
  }
}

void PageVotes::estimate(const RecallStore& store, size_t run, const Queries& q, const RopeParams& rope,
                         Positions own) {
  const uint32_t n = q.count * q.group;
  for (uint32_t i = 0; i < store.count(run); ++i) {
    const RecallStore::Page& page = store.page(run, i);
    const auto entries = static_cast<float>(std::popcount(page.held));
    const std::span<const float> means = store.means(run, i), squares = store.squares(run, i);
    std::copy(means.begin(), means.end(), mean_.begin());
    for (uint32_t c = 0; c < q.head_dim; ++c) variance_[c] = squares[c] / entries;
    if (rope.mode == kRopeList) {
      const auto middle = static_cast<int32_t>(page.number * kRecallPage + kRecallPage / 2);
      rotate(mean_.data(),
             static_cast<uint64_t>(std::lower_bound(own.begin(), own.end(), middle) - own.begin()), rope);
      for (uint32_t r = 0; r < rope.n_rot / 2; ++r) {
        const auto [a, b] = pair_of(rope, r);
        variance_[a] = variance_[b] = (variance_[a] + variance_[b]) / 2;
      }
    }
    float* const scores = &scores_[size_t(i) * n];
    std::fill_n(scores, n, std::log(entries));
    for (uint32_t c = 0; c < q.head_dim; ++c) {
      const float mean = mean_[c], variance = variance_[c];
      const float *const x = &q_[size_t(c) * n], *const x2 = &q2_[size_t(c) * n];
      for (uint32_t v = 0; v < n; ++v) scores[v] += mean * x[v] + variance * x2[v];
    }
  }
}

void PageVotes::add(const RecallStore& store, size_t run, const Queries& q, const RopeParams& rope,
                    Positions own, std::span<float> votes) {
  const uint32_t n = q.count * q.group, pages = store.count(run);
  read_queries(q, rope, own);
  estimate(store, run, q, rope, own);
  std::fill_n(most_.begin(), n, -std::numeric_limits<float>::infinity());
  std::fill_n(sum_.begin(), n, 0.0f);
  const auto for_scores = [&](const auto& use) {
    for (uint32_t i = 0; i < pages; ++i)
      for (uint32_t v = 0; v < n; ++v) use(i, v, scores_[size_t(i) * n + v]);
  };
  for_scores([&](uint32_t, uint32_t v, float s) { most_[v] = std::max(most_[v], s); });
  for_scores([&](uint32_t, uint32_t v, float& s) { sum_[v] += s = std::exp(s - most_[v]); });
  for (uint32_t i = 0; i < pages; ++i)
    for (uint32_t head = 0; head < q.group; ++head) {
      float most = 0;
      for (uint32_t v = head; v < n; v += q.group)
        most = std::max(most, scores_[size_t(i) * n + v] / sum_[v]);  // 0 rather than NaN
      votes[i] += most;
    }
}

}  // namespace thimble
