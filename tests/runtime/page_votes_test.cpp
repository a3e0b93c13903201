// Tests the votes for pages of the store against a computation in double.
#include "runtime/kv/page_votes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "backends/cpu/host/cpu_host.h"
#include "base/bits.h"
#include "tests/support/random.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

constexpr uint32_t kDim = 8, kRotating = 6, kGroup = 2, kTokens = 5;
const std::vector<double> kFrequencies = {1.0, 0.2, 0.04};
using Row = std::vector<double>;

Row rotated(Row x, double position) {
  for (size_t i = 0; i < kFrequencies.size(); ++i) {
    const double c = std::cos(position * kFrequencies[i]), s = std::sin(position * kFrequencies[i]);
    const double a = x[i], b = x[i + kFrequencies.size()];
    x[i] = a * c - b * s;
    x[i + kFrequencies.size()] = a * s + b * c;
  }
  return x;
}

// A page's positions in the text, and their keys.
struct TextPage {
  std::vector<int32_t> positions;
  std::vector<Row> keys;

  // The logarithm of the attention that a query would pay to the keys at this place of the run.
  double attention(const Row& query, double place, bool by_list) const {
    double sum = 0;
    for (const Row& key : keys) {
      const Row at = by_list ? rotated(key, place) : key;
      sum += std::exp(std::inner_product(query.begin(), query.end(), at.begin(), 0.0));
    }
    return std::log(sum);
  }
  // The same, estimated from their mean and variance.
  double estimate(const Row& query, double place, bool by_list) const {
    Row mean(kDim), variance(kDim);
    for (const Row& key : keys)
      for (size_t c = 0; c < kDim; ++c) mean[c] += key[c] / static_cast<double>(keys.size());
    for (const Row& key : keys)
      for (size_t c = 0; c < kDim; ++c)
        variance[c] += (key[c] - mean[c]) * (key[c] - mean[c]) / static_cast<double>(keys.size());
    if (by_list) {
      mean = rotated(mean, place);
      for (size_t i = 0; i < kRotating / 2; ++i)
        variance[i] = variance[i + kRotating / 2] = (variance[i] + variance[i + kRotating / 2]) / 2;
    }
    double log = std::log(static_cast<double>(keys.size()));
    for (size_t c = 0; c < kDim; ++c) log += query[c] * mean[c] + query[c] * query[c] * variance[c] / 2;
    return log;
  }
};

// The rows of keys as f16, and the keys that these rows have.
std::vector<std::byte> halves_of(std::vector<float>& keys) {
  std::vector<std::byte> rows(keys.size() * sizeof(uint16_t));
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint16_t half = f32_to_f16(keys[i]);
    std::memcpy(&rows[i * sizeof half], &half, sizeof half);
    keys[i] = f16_to_f32(half);
  }
  return rows;
}

void expect_votes(uint32_t mode, uint32_t ahead, bool in_file) {
  Random random{7};
  CpuHost host(2);
  const std::vector<int32_t> own = {0, 1, 2, 30, 31, 50, 51, 52, 53, 54};  // without the tokens ahead
  const uint64_t read = 55 + ahead;
  std::vector<TextPage> pages = {{{3, 4, 7}, {}}, {{33}, {}}, {{35, 36, 37, 38, 40, 41, 42, 47}, {}}};
  RecallStore store =
      must(RecallStore::create({.runs = {{.head_dim = kDim}}, .pages = 4, .in_file = in_file}));
  for (TextPage& page : pages) {
    std::vector<float> keys = random.floats(page.positions.size() * kDim, -2, 2);
    const std::vector<float> scores(page.positions.size());
    const std::vector<std::byte> rows = halves_of(keys);
    must(store.add(0, {page.positions, scores.data(), keys.data(), rows.data(), rows.data()}, host));
    for (size_t i = 0; i < page.positions.size(); ++i)
      page.keys.emplace_back(keys.data() + i * kDim, keys.data() + (i + 1) * kDim);
  }
  pages[1].keys.insert(pages[1].keys.end(), pages[2].keys.begin(),
                       pages[2].keys.end());  // one page of the text
  pages.pop_back();

  const float scale = 0.7f;
  const std::vector<float> ring = random.floats(kAskingTokens * kGroup * kDim, -2, 2);
  std::vector<double> expected(pages.size());
  for (size_t head = 0; head < kGroup; ++head) {
    std::vector<double> most(pages.size());
    for (uint32_t age = 0; age < kTokens; ++age) {
      const uint64_t position = read - 1 - age;
      const float* q = &ring[(position % kAskingTokens * kGroup + head) * kDim];
      Row query(q, q + kDim);
      const double place = static_cast<double>(own.size() + ahead - 1 - age);
      query = rotated(query, mode == kRopeList ? place : static_cast<double>(position));
      for (double& x : query) x *= static_cast<double>(scale);
      std::vector<double> shares;
      double sum = 0;
      // The middle of the first page is after 3 own entries, that of the second after 5.
      for (size_t i = 0; i < pages.size(); ++i) {
        const double at = i == 0 ? 3 : 5;
        shares.push_back(std::exp(in_file ? pages[i].estimate(query, at, mode == kRopeList)
                                          : pages[i].attention(query, at, mode == kRopeList)));
        sum += shares.back();
      }
      for (size_t i = 0; i < pages.size(); ++i) most[i] = std::max(most[i], shares[i] / sum);
    }
    for (size_t i = 0; i < pages.size(); ++i) expected[i] += most[i];
  }

  const RopeScheme rope{.pairing = kRopeHalves, .n_rot = kRotating, .inverse_frequency = kFrequencies};
  PageVotes votes(rope, {.positions = 100,
                         .context = 100,
                         .group = kGroup,
                         .head_dim = kDim,
                         .pages = 4,
                         .threads = host.threads()});
  std::vector<float> got(pages.size());
  votes.add(store, 0,
            {.ring = ring.data(),
             .stride = kGroup * kDim,
             .count = kTokens,
             .group = kGroup,
             .head_dim = kDim,
             .read = read,
             .ahead = ahead,
             .scale = scale},
            {.mode = mode, .pairing = kRopeHalves, .n_rot = kRotating}, own, host, got);
  // Scores are sums of 16 products of at most 100 with few roundings each, so their error is below 16 * 100 *
  // 2^-22, and that of a share below twice that.
  for (size_t i = 0; i < pages.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-3) << i;
}

TEST(PageVotes, AreTheSharesOfAttentionAndEstimatedForAFile) {
  for (const uint32_t ahead : {0u, 4u})
    for (const bool in_file : {false, true}) {
      SCOPED_TRACE(::testing::Message() << ahead << (in_file ? " in a file" : ""));
      expect_votes(kRopeList, ahead, in_file);
      expect_votes(kRopeOriginal, ahead, in_file);
    }
}

// One token's shares of many pages add up to 1 for each query head, and no bit depends on the threads. Of
// more pages than are compared, those with the most votes by the estimate are.
void expect_sums(uint32_t n_pages) {
  SCOPED_TRACE(n_pages);
  Random random{8};
  CpuHost one(1), five(5);
  RecallStore store = must(RecallStore::create({.runs = {{.head_dim = kDim}}, .pages = n_pages})),
              file = must(
                  RecallStore::create({.runs = {{.head_dim = kDim}}, .pages = n_pages, .in_file = true}));
  std::vector<int32_t> positions;
  for (uint32_t i = 0; i < n_pages; ++i) positions.push_back(static_cast<int32_t>(i * kRecallPage + i % 9));
  std::vector<float> keys = random.floats(n_pages * kDim, -2, 2);
  const std::vector<float> scores(n_pages);
  const std::vector<std::byte> rows = halves_of(keys);
  for (RecallStore* any : {&store, &file})
    must(any->add(0, {positions, scores.data(), keys.data(), rows.data(), rows.data()}, five));
  const std::vector<float> ring = random.floats(kAskingTokens * kGroup * kDim, -2, 2);
  const RopeScheme rope{.pairing = kRopeHalves, .n_rot = kRotating, .inverse_frequency = kFrequencies};
  const auto votes = [&](const RecallStore& of, uint32_t tokens, Host& host) {
    PageVotes all(rope, {.positions = 100,
                         .context = 100,
                         .group = kGroup,
                         .head_dim = kDim,
                         .pages = n_pages,
                         .threads = host.threads()});
    std::vector<float> got(n_pages);
    all.add(of, 0,
            {.ring = ring.data(),
             .stride = kGroup * kDim,
             .count = tokens,
             .group = kGroup,
             .head_dim = kDim,
             .read = 90,
             .ahead = 0,
             .scale = 0.7f},
            {.mode = kRopeList, .pairing = kRopeHalves, .n_rot = kRotating}, std::vector<int32_t>{5, 700},
            host, got);
    return got;
  };
  double sum = 0;
  for (const float share : votes(store, 1, one)) sum += static_cast<double>(share);
  // A share is off by the error of its exponential's argument, a few roundings of numbers up to 64.
  EXPECT_NEAR(sum, kGroup, kGroup * 4 * 64 * 0x1p-24);
  const std::vector<float> got = votes(store, kAskingTokens, one),
                           estimates = votes(file, kAskingTokens, one);
  EXPECT_EQ(got, votes(store, kAskingTokens, five));
  EXPECT_EQ(estimates, votes(file, kAskingTokens, five));
  // A page of one key has no variance, so the estimate is exact and the same pages are the best.
  const uint32_t compared = std::min(n_pages, kMostCompared);
  EXPECT_EQ(std::count_if(got.begin(), got.end(), [](float vote) { return vote > 0; }), compared);
  std::vector<float> order = estimates;
  std::nth_element(order.begin(), order.begin() + (compared - 1), order.end(), std::greater<>());
  for (uint32_t i = 0; i < n_pages; ++i) {
    const bool is_best = estimates[i] > order[compared - 1];
    EXPECT_TRUE(!is_best || got[i] > 0) << i;
  }
}

TEST(PageVotes, AddUpOverManyPagesWithAnyThreads) {
  expect_sums(150);
  expect_sums(kMostCompared + 70);
}

}  // namespace
}  // namespace thimble::test
