#include "runtime/kv/page_votes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

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
      shares_(l.pages),
      pages_(l.pages),
      of_thread_(size_t(Host::kMostRows) * (2 * columns(l.head_dim) + kAskingTokens * l.group)),
      scratch_(l.threads * of_thread_) {
  fill_rope_table(rope, l.positions, l.context, rope_.data());
}

uint64_t PageVotes::bytes(const RopeScheme& rope, const Limits& l) {
  constexpr uint64_t kWord = 4;
  const uint64_t row = columns(l.head_dim), queries = uint64_t(kAskingTokens) * l.group;
  return (uint64_t(rope_table_rows(l.positions)) * rope.n_rot + queries * (row + l.pages + 1) +
          2 * uint64_t(l.pages) + uint64_t(l.threads) * Host::kMostRows * (2 * row + queries)) *
         kWord;
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

// Where the page is among the run's own entries.
uint64_t PageVotes::Asked::place_of(const RecallStore::Page& page) const {
  const auto middle = static_cast<int32_t>(page.number * kRecallPage + kRecallPage / 2);
  return static_cast<uint64_t>(std::lower_bound(own.begin(), own.end(), middle) - own.begin());
}

void PageVotes::read_query(const Asked& a, uint32_t age, uint32_t head, bool to_estimate) {
  const Queries& q = a.queries;
  const uint64_t position = q.read - 1 - age, listed = a.own.size() + q.ahead;
  float* row = &queries_[(size_t(head) * q.count + age) * used_];
  std::copy_n(q.ring + position % kAskingTokens * q.stride + head * q.head_dim, q.head_dim, row);
  rotate(row, a.rope.mode == kRopeList ? listed - std::min<uint64_t>(listed, 1 + age) : position, a.rope);
  for (uint32_t c = 0; c < q.head_dim; ++c) row[c] *= q.scale;
  if (!to_estimate) return;
  float* column = row + q.head_dim;
  for (uint32_t i = 0; i < paired(a.rope) / 2; ++i) {
    const auto [first, second] = pair_of(a.rope, i);
    *column++ = (row[first] * row[first] + row[second] * row[second]) / 2;
  }
  for (uint32_t c = paired(a.rope); c < q.head_dim; ++c) *column++ = row[c] * row[c] / 2;
  *column = 1;
}

void PageVotes::read_queries(const Asked& a, bool to_estimate) {
  used_ = to_estimate ? used_columns(a.rope, a.queries.head_dim) : a.queries.head_dim;
  for (uint32_t head = 0; head < a.queries.group; ++head)
    for (uint32_t age = 0; age < a.queries.count; ++age) read_query(a, age, head, to_estimate);
}

void PageVotes::read_page(const Asked& a, uint32_t i, float* row) const {
  const RecallStore::Page& page = a.store.page(a.run, i);
  const auto entries = static_cast<float>(std::popcount(page.held));
  const std::span<const float> means = a.store.means(a.run, i), squares = a.store.squares(a.run, i);
  float* column = std::copy(means.begin(), means.end(), row);
  if (a.rope.mode == kRopeList) rotate(row, a.place_of(page), a.rope);
  for (uint32_t r = 0; r < paired(a.rope) / 2; ++r) {
    const auto [first, second] = pair_of(a.rope, r);
    *column++ = (squares[first] + squares[second]) / (2 * entries);
  }
  for (uint32_t c = paired(a.rope); c < squares.size(); ++c) *column++ = squares[c] / entries;
  *column = std::log(entries);
}

// Estimates the attention that all queries would pay to some pages.
void PageVotes::estimate(const Asked& a, uint32_t first, uint32_t count, uint32_t worker) {
  const size_t room = size_t(Host::kMostRows) * used_;
  float *const pages = &scratch_[worker * of_thread_], *const panels = pages + room;
  for (uint32_t i = 0; i < count; ++i) read_page(a, first + i, pages + size_t(i) * used_);
  a.host.multiply(queries_.data(), n_queries_, pages, count, used_, &scores_[first], n_pages_, panels);
}

void PageVotes::estimate(const Asked& a) {
  constexpr uint32_t kPages = 32;  // at once
  static_assert(kPages <= Host::kMostRows);
  read_queries(a, true);
  a.host.run(static_cast<uint32_t>(ceil_div(n_pages_, kPages)), [&](uint32_t some, uint32_t worker) {
    estimate(a, some * kPages, std::min(kPages, n_pages_ - some * kPages), worker);
  });
}

// Computes the attention that all queries would pay to the keys of some pages.
void PageVotes::compare(const Asked& a, uint32_t first, uint32_t count, uint32_t worker) {
  const size_t room = size_t(Host::kMostRows) * used_;
  float *const keys = &scratch_[worker * of_thread_], *const panels = keys + room,
               *const products = panels + room;
  uint32_t ends[Host::kMostRows / kRecallPage], rows = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const RecallStore::Page& page = a.store.page(a.run, pages_[first + i]);
    const uint64_t place = a.place_of(page);
    for (uint32_t at = 0; at < kRecallPage; ++at) {
      if (!(page.held >> at & 1)) continue;
      float* const key = keys + size_t(rows++) * used_;
      a.host.load_row(a.store.key_type(a.run), a.store.key(a.run, pages_[first + i], at), used_, key);
      if (a.rope.mode == kRopeList) rotate(key, place, a.rope);
    }
    ends[i] = rows;
  }
  a.host.multiply(queries_.data(), n_queries_, keys, rows, used_, products, Host::kMostRows, panels);
  for (uint32_t v = 0; v < n_queries_; ++v)
    for (uint32_t i = 0, begin = 0; i < count; begin = ends[i++]) {
      const float* const of_page = products + size_t(v) * Host::kMostRows + begin;
      const float most = *std::max_element(of_page, of_page + (ends[i] - begin));
      const double sum = a.host.sum_exp(of_page, ends[i] - begin, most);
      scores_[size_t(v) * n_pages_ + first + i] = most + static_cast<float>(std::log(sum));
    }
}

void PageVotes::compare(const Asked& a) {
  constexpr uint32_t kPages = Host::kMostRows / kRecallPage;  // at once
  read_queries(a, false);
  a.host.run(static_cast<uint32_t>(ceil_div(n_pages_, kPages)), [&](uint32_t some, uint32_t worker) {
    compare(a, some * kPages, std::min(kPages, n_pages_ - some * kPages), worker);
  });
}

// The votes of all pages, from the scores of all queries.
void PageVotes::share(const Asked& a) {
  constexpr uint32_t kPages = 32, kQueries = 8;  // at once
  const Queries& q = a.queries;
  a.host.run(static_cast<uint32_t>(ceil_div(n_queries_, kQueries)), [&](uint32_t some, uint32_t) {
    for (uint32_t v = some * kQueries; v < std::min(n_queries_, (some + 1) * kQueries); ++v) {
      const float* const scores = &scores_[size_t(v) * n_pages_];
      const float most = *std::max_element(scores, scores + n_pages_);
      sums_[v] = most + static_cast<float>(std::log(a.host.sum_exp(scores, n_pages_, most)));
    }
  });
  a.host.run(static_cast<uint32_t>(ceil_div(n_pages_, kPages)), [&](uint32_t block, uint32_t) {
    const uint32_t first = block * kPages, count = std::min(kPages, n_pages_ - first);
    std::fill_n(&shares_[first], count, 0.0f);
    for (uint32_t head = 0; head < q.group; ++head) {
      float most[kPages];
      std::fill_n(most, kPages, -std::numeric_limits<float>::infinity());
      for (uint32_t v = head * q.count; v < (head + 1) * q.count; ++v)
        for (uint32_t i = 0; i < count; ++i)  // a NaN counts as -inf
          most[i] = std::max(most[i], scores_[size_t(v) * n_pages_ + first + i] - sums_[v]);
      for (uint32_t i = 0; i < count; ++i) shares_[first + i] += std::exp(most[i]);
    }
  });
}

// Reduces the pages to the kMostCompared with the most votes; of equal ones, to the later ones.
void PageVotes::keep_best() {
  const auto end = pages_.begin() + n_pages_, kept = pages_.begin() + kMostCompared;
  std::nth_element(pages_.begin(), kept, end, [&](uint32_t a, uint32_t b) {
    return shares_[a] != shares_[b] ? shares_[a] > shares_[b] : a > b;
  });
  std::sort(pages_.begin(), kept);
  n_pages_ = kMostCompared;
}

void PageVotes::add(const RecallStore& store, size_t run, const Queries& q, const RopeParams& rope,
                    Positions own, Host& host, std::span<float> votes) {
  const Asked asked{store, run, q, rope, own, host};
  n_queries_ = q.count * q.group;
  n_pages_ = store.count(run);
  if (!n_pages_) return;
  std::iota(pages_.begin(), pages_.begin() + n_pages_, 0);
  if (!store.in_memory() || n_pages_ > kMostCompared) {
    estimate(asked);
    share(asked);
  }
  if (store.in_memory()) {
    if (n_pages_ > kMostCompared) keep_best();
    compare(asked);
    share(asked);
  }
  for (uint32_t i = 0; i < n_pages_; ++i) votes[pages_[i]] += shares_[i];
}

}  // namespace thimble
