// page_vote on every device that has it: the votes of queries for the pages of a store, compared with shares
// computed in double precision.
#include <algorithm>

#include "tests/ops/kv_blocks.h"

namespace thimble::test {
namespace {

struct Case {
  const char* name;
  uint32_t heads = 2, group = 3, dh = 64;
  uint32_t tokens = 5, ahead = 0;
  std::vector<uint32_t> pages = {70, 33};  // of each head
  Rotation rotation = {};
  DType type = DType::kF16;
};

class PageVotes : public OpTest {
 protected:
  void check(const Case& c) {
    SCOPED_TRACE(c.name);
    clear();
    Random random{c.dh + c.tokens + c.group};
    constexpr uint32_t kRing = 8, kOwn = 40, kUnlisted = 3;
    const uint32_t most = *std::max_element(c.pages.begin(), c.pages.end()), capacity = most + 3,
                   text = 2 * most * kStoredPage, list_capacity = kOwn + kUnlisted + 2;
    const uint64_t key_bytes = kv_bytes(c.type, c.dh), page_bytes = kStoredPage * 2 * key_bytes,
                   stride = round_up(capacity * 16, 64) + 64,
                   rows_stride = round_up(capacity * page_bytes, 64);
    constexpr auto kPoison = std::byte{0xff};  // NaN in every format
    std::vector<HeadState> heads = unequal_heads(std::vector<uint32_t>(c.heads, kOwn + kUnlisted), 4);
    std::vector<int32_t> pos(layer_entries(heads), -1);
    std::vector<uint32_t> lists(c.heads * list_capacity), pages(c.heads * stride / 4, UINT32_MAX),
        order = pages, count = c.pages;
    std::vector<std::byte> rows(c.heads * rows_stride, kPoison);
    const uint32_t queries = c.heads * c.group, cols = queries * c.dh;
    const std::vector<float> ring = random.floats(kRing * cols, -2, 2);
    const double scale = 1 / std::sqrt(c.dh);
    std::vector<std::vector<double>> expected(c.heads);
    double largest = 0;  // sum of the magnitudes of a logit's products
    for (uint32_t head = 0; head < c.heads; ++head) {
      // Some entries of the run came from the store and are not listed.
      const std::vector<uint32_t> places = some_entries(random, text, kOwn + kUnlisted, 0);
      std::vector<int32_t> own;
      uint32_t* const list = &lists[head * list_capacity];
      for (uint32_t i = 0; i < places.size(); ++i) {
        pos[heads[head].first + i] = static_cast<int32_t>(places[i]);
        if (i % 14 == 3) continue;
        own.push_back(static_cast<int32_t>(places[i]));
        list[own.size()] = i;
      }
      list[0] = static_cast<uint32_t>(own.size());
      const std::vector<uint32_t> numbers = some_entries(random, text / kStoredPage, c.pages[head], 0);
      std::vector<uint32_t> slots = every_entry(capacity);
      for (uint32_t i = capacity; i-- > 1;) std::swap(slots[i], slots[random.below(i + 1)]);
      // The logits of all queries with the keys of all pages.
      std::vector<std::vector<std::vector<double>>> logits(c.group * c.tokens);
      for (auto& of_query : logits) of_query.resize(numbers.size());
      for (uint32_t i = 0; i < numbers.size(); ++i) {
        const uint32_t slot = slots[i], held = 1 + random.below(0xffff);
        order[head * stride / 4 + i] = slot;
        pages[head * stride / 4 + slot * 4] = numbers[i];
        pages[head * stride / 4 + slot * 4 + 1] = 0xabcd0000 | held;
        const auto middle = static_cast<int32_t>(numbers[i] * kStoredPage + kStoredPage / 2);
        const auto place =
            static_cast<double>(std::lower_bound(own.begin(), own.end(), middle) - own.begin());
        for (uint32_t at = 0; at < kStoredPage; ++at) {
          if (!(held >> at & 1)) continue;
          const std::vector<float> key =
              exact_blocks(c.type == DType::kF16 ? DType::kQ8_0 : c.type, random, c.dh);
          const std::vector<std::byte> row = rows_of(c.type, key, c.dh);
          std::copy(
              row.begin(), row.end(),
              rows.begin() + static_cast<ptrdiff_t>(head * rows_stride + slot * page_bytes + at * key_bytes));
          std::vector<double> rotated = doubles(key, 0, c.dh);
          if (c.rotation.mode == kRopeList) rotated = c.rotation.rotated(rotated, place);
          for (uint32_t v = 0; v < logits.size(); ++v) {
            const uint32_t age = v % c.tokens, position = text + c.ahead - 1 - age;
            const double turned = c.rotation.mode == kRopeList
                                      ? static_cast<double>(own.size() + c.ahead - 1 - age)
                                      : double(position);
            const std::vector<double> q = c.rotation.rotated(
                doubles(ring, position % kRing * cols + (head * c.group + v / c.tokens) * c.dh, c.dh),
                turned);
            double logit = 0, magnitude = 0;
            for (size_t channel = 0; channel < q.size(); ++channel) {
              logit += scale * q[channel] * rotated[channel];
              magnitude += scale * std::fabs(q[channel] * rotated[channel]);
            }
            logits[v][i].push_back(logit);
            largest = std::max(largest, magnitude);
          }
        }
      }
      expected[head].resize(numbers.size());
      for (uint32_t h = 0; h < c.group; ++h) {
        std::vector<double> best(numbers.size());
        for (uint32_t age = 0; age < c.tokens; ++age) {
          const auto& of_pages = logits[h * c.tokens + age];
          double all = 0;
          std::vector<double> shares;
          for (const auto& of_page : of_pages) {
            shares.push_back(0);
            for (const double logit : of_page) shares.back() += std::exp(logit);
            all += shares.back();
          }
          for (size_t i = 0; i < shares.size(); ++i) best[i] = std::max(best[i], shares[i] / all);
        }
        for (size_t i = 0; i < best.size(); ++i) expected[head][i] += best[i];
      }
    }
    SessionShape shape = session_of(behind_other_rows(heads), 1);
    shape.voted_pages = capacity;
    shape.voters = kRing;
    shape.reach = list_capacity;
    size_for(c.heads, c.group, c.dh, shape);
    const View votes = output<float>(c.heads * capacity);
    const PageVote op{.queries = input(ring),
                      .asked = input(std::vector<uint32_t>{c.tokens, text + c.ahead - 1, c.ahead}),
                      .list = input(lists),
                      .pos = input(pos),
                      .pages = input(pages),
                      .order = input(order),
                      .stored_k = {input(rows), c.type},
                      .count = input(count),
                      .rope = input(c.rotation.table(text + 64)),
                      .votes = votes,
                      .p = {.heads = c.heads,
                            .group = c.group,
                            .head_dim = c.dh,
                            .cols = cols,
                            .ring = kRing,
                            .head_state = kOtherRows,
                            .list_capacity = list_capacity,
                            .page_capacity = capacity,
                            .stored_stride = static_cast<uint32_t>(stride / 64),
                            .rows_stride = static_cast<uint32_t>(rows_stride / 64),
                            .page_bytes = static_cast<uint32_t>(page_bytes),
                            .scale = static_cast<float>(scale),
                            .rope = c.rotation.params()}};
    if (!device().supports(op)) return;
    run(StepParams{}, behind_other_rows(heads), 1, [&](Recorder& r) { r.record(op); });
    const auto got = get<float>(votes);
    // Keys and queries are rounded to f16, each number by at most 2^-11 of itself, which bounds the error of
    // a logit; that of the logarithm of a share is at most twice as large.
    const double tolerance = std::expm1(2 * 2.1 * 0x1p-11 * largest);
    for (uint32_t head = 0; head < c.heads; ++head) {
      for (uint32_t i = 0; i < expected[head].size(); ++i)
        ASSERT_NEAR(got[head * capacity + i], expected[head][i], expected[head][i] * tolerance)
            << "head " << head << ", page " << i;
      EXPECT_TRUE(is_poison(got, head * capacity + expected[head].size(), capacity - expected[head].size()));
    }
  }
};
THIMBLE_SHARED_OP_TESTS(PageVotes);

TEST_P(PageVotes, AreTheLargestSharesOfAttentionToThePages) {
  const Rotation part{.mode = kRopeList, .pairing = kRopeHalves, .n_rot = 24, .factor = 1.19},
      adjacent{.mode = kRopeList, .pairing = kRopeAdjacent, .n_rot = 64},
      original{.mode = kRopeOriginal, .pairing = kRopeHalves, .n_rot = 64};
  check({.name = "by list", .rotation = adjacent});
  check({.name = "by position", .rotation = original});
  check({.name = "tokens ahead", .tokens = 8, .ahead = 6, .rotation = adjacent});
  check({.name = "one query", .heads = 1, .group = 1, .tokens = 1, .pages = {9}, .rotation = original});
  check({.name = "part of wide heads", .group = 7, .dh = 96, .rotation = part});
  check({.name = "widest heads", .group = 8, .dh = 512, .pages = {5, 17}, .rotation = adjacent});
  check({.name = "a head without pages", .pages = {0, 40}, .rotation = adjacent});
  for (const DType type : {DType::kQ8_0, DType::kQ4_0})
    check({.name = "blocks", .dh = 128, .rotation = adjacent, .type = type});
}

}  // namespace
}  // namespace thimble::test
