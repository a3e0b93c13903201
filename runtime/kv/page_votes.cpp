#include "runtime/kv/page_votes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/bits.h"

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

PageVotes::PageVotes(const RopeScheme& rope, const Limits& l)
    : rope_(size_t(rope_table_rows(l.positions)) * rope.n_rot),
      queries_(size_t(kAskingTokens) * l.group * columns(l.head_dim)),
      scores_(size_t(kAskingTokens) * l.group * l.pages),
      sums_(size_t(kAskingTokens) * l.group),
      scratch_(size_t(l.threads) * 2 * Host::kMostRows * columns(l.head_dim)) {
  fill_rope_table(rope, l.positions, l.context, rope_.data());
}

uint64_t PageVotes::bytes(const RopeScheme& rope, const Limits& l) {
  const uint64_t row = columns(l.head_dim), queries = uint64_t(kAskingTokens) * l.group;
  return (uint64_t(rope_table_rows(l.positions)) * rope.n_rot + queries * (row + l.pages + 1) +
          uint64_t(l.threads) * 2 * Host::kMostRows * row) *
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

// Under list positions, both channels of a pair have the mean of their variances, so they share a column.
static uint32_t paired(const RopeParams& p) { return p.mode == kRopeList ? p.n_rot : 0; }
static uint32_t used_columns(const RopeParams& p, uint32_t head_dim) {
  return 2 * head_dim - paired(p) / 2 + 1;
}

void PageVotes::read_query(const Queries& q, uint32_t age, uint32_t head, const RopeParams& rope,
                           Positions own) {
  const uint64_t position = q.read - 1 - age, listed = own.size() + q.ahead;
  float* row = &queries_[(size_t(head) * q.count + age) * used_];
  std::copy_n(q.ring + position % kAskingTokens * q.stride + head * q.head_dim, q.head_dim, row);
  rotate(row, rope.mode == kRopeList ? listed - std::min<uint64_t>(listed, 1 + age) : position, rope);
  for (uint32_t c = 0; c < q.head_dim; ++c) row[c] *= q.scale;
  float* column = row + q.head_dim;
  for (uint32_t i = 0; i < paired(rope) / 2; ++i) {
    const auto [a, b] = pair_of(rope, i);
    *column++ = (row[a] * row[a] + row[b] * row[b]) / 2;
  }
  for (uint32_t c = paired(rope); c < q.head_dim; ++c) *column++ = row[c] * row[c] / 2;
  *column = 1;
}

void PageVotes::read_page(const RecallStore& store, size_t run, uint32_t i, const RopeParams& rope,
                          Positions own, float* row) const {
  const RecallStore::Page& page = store.page(run, i);
  const auto entries = static_cast<float>(std::popcount(page.held));
  const std::span<const float> means = store.means(run, i), squares = store.squares(run, i);
  float* column = std::copy(means.begin(), means.end(), row);
  if (rope.mode == kRopeList) {
    const auto middle = static_cast<int32_t>(page.number * kRecallPage + kRecallPage / 2);
    const auto place = std::lower_bound(own.begin(), own.end(), middle) - own.begin();
    rotate(row, static_cast<uint64_t>(place), rope);
  }
  for (uint32_t r = 0; r < paired(rope) / 2; ++r) {
    const auto [a, b] = pair_of(rope, r);
    *column++ = (squares[a] + squares[b]) / (2 * entries);
  }
  for (uint32_t c = paired(rope); c < squares.size(); ++c) *column++ = squares[c] / entries;
  *column = std::log(entries);
}

// Estimates the attention that all queries would pay to some pages.
void PageVotes::estimate(const RecallStore& store, size_t run, uint32_t first, uint32_t count,
                         const RopeParams& rope, Positions own, Host& host, uint32_t worker) {
  const size_t room = size_t(Host::kMostRows) * used_;
  float *const pages = &scratch_[worker * 2 * room], *const panels = pages + room;
  for (uint32_t i = 0; i < count; ++i) read_page(store, run, first + i, rope, own, pages + size_t(i) * used_);
  host.multiply(queries_.data(), n_queries_, pages, count, used_, &scores_[first], n_pages_, panels);
}

void PageVotes::add(const RecallStore& store, size_t run, const Queries& q, const RopeParams& rope,
                    Positions own, Host& host, std::span<float> votes) {
  constexpr uint32_t kPages = 32, kQueries = 8;  // at once
  static_assert(kPages <= Host::kMostRows);
  used_ = used_columns(rope, q.head_dim);
  n_queries_ = q.count * q.group;
  n_pages_ = store.count(run);
  if (!n_pages_) return;
  for (uint32_t head = 0; head < q.group; ++head)
    for (uint32_t age = 0; age < q.count; ++age) read_query(q, age, head, rope, own);
  const auto blocks = static_cast<uint32_t>(ceil_div(n_pages_, kPages));
  const auto pages_of = [&](uint32_t block) { return std::min(kPages, n_pages_ - block * kPages); };
  host.run(blocks, [&](uint32_t block, uint32_t worker) {
    estimate(store, run, block * kPages, pages_of(block), rope, own, host, worker);
  });
  host.run(static_cast<uint32_t>(ceil_div(n_queries_, kQueries)), [&](uint32_t some, uint32_t) {
    for (uint32_t v = some * kQueries; v < std::min(n_queries_, (some + 1) * kQueries); ++v) {
      const float* const scores = &scores_[size_t(v) * n_pages_];
      const float most = *std::max_element(scores, scores + n_pages_);
      sums_[v] = most + static_cast<float>(std::log(host.sum_exp(scores, n_pages_, most)));
    }
  });
  host.run(blocks, [&](uint32_t block, uint32_t) {
    for (uint32_t head = 0; head < q.group; ++head) {
      float most[kPages];
      std::fill_n(most, kPages, -std::numeric_limits<float>::infinity());
      for (uint32_t v = head * q.count; v < (head + 1) * q.count; ++v)
        for (uint32_t i = 0; i < pages_of(block); ++i)  // a NaN counts as -inf
          most[i] = std::max(most[i], scores_[size_t(v) * n_pages_ + block * kPages + i] - sums_[v]);
      for (uint32_t i = 0; i < pages_of(block); ++i) votes[block * kPages + i] += std::exp(most[i]);
    }
  });
}

}  // namespace thimble
