// The ops of Quest, which work on pages of entries: page_bounds and page_score, and vote and top_k of pages.
#include <array>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Entries = std::vector<uint32_t>;

// Where a head's pages begin in a layer's bounds, and how many pages the bounds must hold.
uint32_t first_page(const std::vector<HeadState>& heads, uint32_t head, uint32_t page) {
  return heads[head].first / page + head;
}
uint32_t page_count(const std::vector<HeadState>& heads, uint32_t page) {
  uint32_t count = 0;
  for (uint32_t head = 0; head < heads.size(); ++head)
    count = std::max(count, first_page(heads, head, page) + units(heads[head].capacity, page));
  return count;
}

// Computes the pages of a head with `entries` entries, from page `from` on, into a layer's bounds
// [pages][2][dh].
void bound(std::vector<uint16_t>& bounds, const Pool& pool, uint32_t head, uint32_t page, uint32_t from,
           uint32_t entries) {
  for (uint32_t p = from; p < units(entries, page); ++p)
    for (uint32_t c = 0; c < pool.dh; ++c) {
      const auto key = [&](uint32_t e) { return pool.k[(size_t(pool.heads[head].first) + e) * pool.dh + c]; };
      uint16_t low = key(p * page), high = low;
      for (uint32_t e = p * page; e < std::min(entries, (p + 1) * page); ++e) {
        if (f16_to_f32(key(e)) < f16_to_f32(low)) low = key(e);
        if (f16_to_f32(key(e)) > f16_to_f32(high)) high = key(e);
      }
      const size_t at = (size_t(first_page(pool.heads, head, page)) + p) * 2 * pool.dh + c;
      bounds[at] = low;
      bounds[at + pool.dh] = high;
    }
}

class KvPages : public OpTest {
 protected:
  const Entries kEntries = {0, 1, 15, 16, 17, 63, 64, 65, 1000, 4000};
};
THIMBLE_OP_TESTS(KvPages);

// ---- bounds ----

TEST_P(KvPages, BoundsAreTheSmallestAndLargestKeysOfAPage) {
  for (const uint32_t page : {1u, 4u, 16u})
    for (const uint32_t dh : {64u, 80u, 128u})
      for (const uint32_t rows : {0u, 1u, 33u}) {  // 0: after an eviction
        SCOPED_TRACE(::testing::Message() << "page " << page << " dh " << dh << " rows " << rows);
        clear();
        Random random{page + dh + rows};
        Entries with_rows = kEntries;
        for (uint32_t& n : with_rows) n += rows;
        const Pool pool(random, unequal_heads(with_rows, 7), dh);
        const uint32_t heads = pool.count(), pages = page_count(pool.heads, page);
        std::vector<HeadState> table = pool.heads;
        std::vector<uint16_t> want = padded_rows(std::vector<uint16_t>(), size_t(pages) * 2 * dh);
        for (uint32_t head = 0; head < heads; ++head) {
          table[head].n_entries -= rows;
          table[head].keep = table[head].n_entries / (1 + head % 3);
          if (rows)  // the page that was open, and those that the rows opened
            bound(want, pool, head, page, table[head].n_entries / page, pool.heads[head].n_entries);
          else
            bound(want, pool, head, page, 0, table[head].keep);
        }
        size_for(heads, 1, dh, session_of(behind_other_rows(table), rows + 1));
        const View bounds = output<uint16_t>(want.size());
        const PageBounds op{
            {input(pool.k)},
            bounds,
            {.heads = heads, .head_dim = dh, .head_state = kOtherRows, .page = page, .all = rows == 0}};
        run({.n_rows = rows}, behind_other_rows(table), rows + 1, [&](Recorder& r) { r.record(op); });
        EXPECT_EQ(get<uint16_t>(bounds), want);
      }
}

// Methods 8.30: rows that are added a few at a time give the same bounds as all of them at once.
TEST_P(KvPages, BoundsGrowWithTheKeys) {
  const uint32_t page = 16, dh = 64, heads = 2, stride = 2 * heads * dh, capacity = 80, max_rows = 33;
  Random random;
  const std::vector<HeadState> empty = equal_heads(heads, capacity, 0, capacity);
  const uint32_t pages = page_count(empty, page);
  size_for(heads, 1, dh, session_of(empty, max_rows));
  const View x = input(std::vector<float>(max_rows * stride)), k = output<uint16_t>(heads * capacity * dh),
             v = output<uint16_t>(heads * capacity * dh), pos = output<int32_t>(heads * capacity),
             saturated = inout(std::vector<uint32_t>(1)), grown = output<uint16_t>(pages * 2 * dh),
             whole = output<uint16_t>(pages * 2 * dh);
  const auto bounds = [&](const View& to, uint32_t all) {
    return PageBounds{{k}, to, {.heads = heads, .head_dim = dh, .page = page, .all = all}};
  };
  const auto append = record(max_rows, [&](Recorder& r) {
    r.record(KvAppend{
        x,
        {},
        {k},
        {v},
        pos,
        saturated,
        {.heads = heads, .head_dim = dh, .row_stride = stride, .v_column = heads * dh, .into = kIntoPool}});
    r.record(bounds(grown, 0));
  });
  const auto rebuild = record(max_rows, [&](Recorder& r) { r.record(bounds(whole, 1)); });
  ASSERT_TRUE(append && rebuild);
  std::vector<HeadState> table = empty;
  for (const uint32_t rows : {1u, 1u, 13u, 1u, 1u, 2u, 33u, 1u, 17u, 9u}) {
    put(x, padded_rows(random.floats(size_t(rows) * stride), size_t(max_rows) * stride));
    run(*append, {.n_rows = rows}, table);
    for (HeadState& head : table) head.n_entries += rows;
    run(*rebuild, {.n_rows = 0}, table);
    const uint32_t used = units(table[0].n_entries, page);
    const auto a = get<uint16_t>(grown), b = get<uint16_t>(whole);
    for (uint32_t head = 0; head < heads; ++head) {
      const auto at = first_page(table, head, page) * 2 * dh;
      EXPECT_EQ(std::vector<uint16_t>(a.begin() + at, a.begin() + at + used * 2 * dh),
                std::vector<uint16_t>(b.begin() + at, b.begin() + at + used * 2 * dh))
          << "head " << head << " with " << table[head].n_entries << " entries";
    }
  }
}

// ---- scores ----

// Methods 8.29.
TEST_P(KvPages, ScoreFollowsTheGoldenExample) {
  const uint32_t dh = 64;
  std::vector<float> keys(4 * dh), query(dh);
  keys[0] = 1, keys[1] = -2, keys[dh] = 3;
  query[0] = 1, query[1] = -1;
  const std::vector<HeadState> heads = equal_heads(1, 4, 3);  // the second page is the open one
  size_for(1, 1, dh, session_of(heads, 1, 64, 2));
  const View k = input(halves(keys)), bounds = output<uint16_t>(3 * 2 * dh), q = input(query),
             table = input(Rotation{}.table(64)), scores = output<float>(2), lse = output<float>(1);
  run({.n_rows = 1, .n_local = 1}, heads, 1, [&](Recorder& r) {
    r.record(PageBounds{{k}, bounds, {.heads = 1, .head_dim = dh, .page = 2, .all = 0}});
  });
  run({.n_rows = 0}, equal_heads(1, 4, 2, 2), 1, [&](Recorder& r) {
    r.record(PageBounds{{k}, bounds, {.heads = 1, .head_dim = dh, .page = 2, .all = 1}});
  });
  run({.n_rows = 1, .n_local = 1}, heads, 1, [&](Recorder& r) {
    r.record(PageScore{q,
                       bounds,
                       table,
                       scores,
                       lse,
                       {.heads = 1,
                        .group = 1,
                        .head_dim = dh,
                        .row_stride = dh,
                        .page = 2,
                        .score_capacity = 2,
                        .scale = 1,
                        .rope = Rotation{}.params()}});
  });
  EXPECT_EQ(get<float>(scores)[0], 5);
  EXPECT_EQ(get<float>(lse)[0], 5);
  EXPECT_TRUE(is_poison(get<float>(scores), 1, 1));
}

TEST_P(KvPages, ScoreIsTheLargestProductWithinTheBounds) {
  struct Case {
    uint32_t page, group, dh;
    Rotation rotation;
  };
  std::vector<Case> cases = {Case{16, 4, 128, {kRopeOriginal, kRopeHalves, 128}},
                             Case{16, 1, 64, {kRopeOriginal, kRopeAdjacent, 40, 1.19}},
                             Case{4, 7, 80, {kRopeList, kRopeHalves, 80}}, Case{1, 8, 256, {kRopeList}},
                             Case{16, 7, 96, {kRopeOriginal, kRopeHalves, 96}}};
  if (takes_heads_of(576)) {
    cases.push_back({16, 5, 576, {kRopeOriginal, kRopeHalves, 512}});
    cases.push_back({16, 4, 576, {kRopeList}});
    cases.push_back({8, 20, 576, {kRopeOriginal, kRopeAdjacent, 64}});
  }
  if (!GetParam().starts_with("cuda"))
    for (const uint32_t mode : {kRopeList, kRopeOriginal})
      cases.push_back({4, 3, 64, weighted({mode, kRopeHalves, 64}, 64)});
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << "page " << c.page << " group " << c.group << " dh " << c.dh);
    clear();
    Random random{c.dh};
    const uint32_t n_init = 1, n_local = 2, select_k = 2, position = 5000;
    const Pool pool(random, unequal_heads(kEntries, 7), c.dh);
    const uint32_t kv_heads = pool.count(), heads = kv_heads * c.group, stride = heads * c.dh + 3,
                   pages = page_count(pool.heads, c.page), capacity = units(4001, c.page);
    std::vector<uint16_t> bounds = padded_rows(std::vector<uint16_t>(), size_t(pages) * 2 * c.dh);
    for (uint32_t head = 0; head < kv_heads; ++head)
      bound(bounds, pool, head, c.page, 0, pool.heads[head].n_entries);
    const auto q = random.floats(stride);
    const float scale = static_cast<float>(1 / std::sqrt(c.dh));
    size_for(kv_heads, c.group, c.dh, session_of(behind_other_rows(pool.heads), 1, 64, 5001));
    const View scores = output<float>(size_t(heads) * capacity), lse = output<float>(heads);
    const PageScore op{input(q),
                       input(bounds),
                       input(c.rotation.table(position + 1)),
                       scores,
                       lse,
                       {.heads = kv_heads,
                        .group = c.group,
                        .head_dim = c.dh,
                        .row_stride = stride,
                        .head_state = kOtherRows,
                        .page = c.page,
                        .score_capacity = capacity,
                        .scale = scale,
                        .rope = c.rotation.params()}};
    run({.n_rows = 1, .position = position, .n_init = n_init, .n_local = n_local, .select_k = select_k},
        behind_other_rows(pool.heads), 1, [&](Recorder& r) { r.record(op); });
    const auto got = get<float>(scores), got_lse = get<float>(lse);
    for (uint32_t h = 0; h < heads; ++h) {
      const uint32_t head = h / c.group, n = units(pool.heads[head].n_entries + 1, c.page);
      if (n <= n_init + select_k + n_local) {
        EXPECT_TRUE(is_poison(got, size_t(h) * capacity, capacity))
            << "nothing is selected from head " << head;
        EXPECT_TRUE(is_poison(got_lse, h, 1));
        continue;
      }
      std::vector<double> query = doubles(q, h * c.dh, c.dh);
      if (c.rotation.mode == kRopeOriginal) query = c.rotation.rotated(query, position);
      query = c.rotation.weighed(query);
      double sum = 0;
      for (uint32_t p = 0; p < capacity; ++p) {
        const size_t at = size_t(h) * capacity + p;
        if (p < n_init || p >= n - n_local) {
          ASSERT_TRUE(is_poison(got, at, 1)) << "page " << p << " is not a candidate";
          continue;
        }
        const size_t from = (size_t(first_page(pool.heads, head, c.page)) + p) * 2 * c.dh;
        const auto low = doubles(bounds, from, c.dh), high = doubles(bounds, from + c.dh, c.dh);
        double want = 0;
        for (uint32_t e = 0; e < c.dh; ++e) want += std::max(query[e] * low[e], query[e] * high[e]);
        // Bounds are below 1. A rotated element is two products of numbers below 1 and the factor, and its
        // cosines have 3 roundings: an error of 16 2^-24 factor in total, and a value below 1.42 factor. dh
        // products of these are added; each product and each sum is rounded: (dh + 2) 2^-24 of the sum of
        // magnitudes, including the scale.
        const double f = c.rotation.factor;
        ASSERT_NEAR(got[at], scale * want, scale * c.dh * (16 * f + (c.dh + 2) * 1.42 * f) * 0x1p-24)
            << "head " << h << " page " << p;
        sum += std::exp(double{got[at]});
      }
      ASSERT_NEAR(got_lse[h], std::log(sum), (64 + n / 64.0) * 0x1p-24 + 0x1p-19);  // as for token_score
    }
  }
}

// Methods 8.29: no key of a page has a larger product than the page's score; a page with one key has exactly
// its product.
//
// In exact arithmetic the score is not below the product, since q_c k_c <= max(q_c lo_c, q_c hi_c) in every
// channel and bounds are exact. The device's score is below its exact value by at most the rounding of f32:
// dh products and dh - 1 additions in any order, and the scale: (dh + 1) 2^-24 of the sum of |q_c|
// max(|lo_c|, |hi_c|), to first order; one more covers the second order. The products here are in double: dh
// 2^-53 of the same.
TEST_P(KvPages, ScoreIsAtLeastEveryKeysProduct) {
  constexpr uint32_t kDim = 64, kHeads = 4, kGroup = 2, kHeld = 65536;  // 4 kinds of 4 heads: 1,048,576 keys
  Random random;
  for (const uint32_t kind : {0u, 1u, 2u, 3u})
    for (const uint32_t page : {16u, 1u}) {
      if (page == 1 && kind != 2) continue;
      SCOPED_TRACE(::testing::Message() << "kind " << kind << " page " << page);
      clear();
      const uint32_t held = page == 1 ? 1024 : kHeld;
      const std::vector<HeadState> heads = equal_heads(kHeads, held, held - 1);
      std::vector<uint16_t> k(size_t(kHeads) * held * kDim);
      for (size_t i = 0; i < k.size(); ++i) switch (kind) {
          case 0:  // uniformly distributed
            k[i] = f32_to_f16(random.uniform(-1, 1));
            break;
          case 1:  // of one magnitude, with random signs: every page's bounds are far from its keys
            k[i] = random.next() & 1 ? 0x3c00 : 0xbc00;
            break;
          case 2:  // any finite halves
            do k[i] = static_cast<uint16_t>(random.next());
            while ((k[i] & 0x7c00) == 0x7c00);
            break;
          case 3:  // mostly zeros, with a few of the largest numbers
            k[i] = random.below(50) ? static_cast<uint16_t>(random.below(2) << 15 | random.below(3))
                                    : static_cast<uint16_t>(random.below(2) << 15 | 0x7bff);
        }
      std::vector<float> query = random.floats(kHeads * kGroup * kDim, -30, 30);
      for (size_t i = 0; i < query.size(); i += 7) query[i] *= i % 2 ? 1e-6f : 0;
      const uint32_t pages = page_count(heads, page), capacity = held / page;
      const float scale = 0.125f;
      size_for(kHeads, kGroup, kDim, session_of(heads, 1, 64, held));
      const View keys = input(k), bounds = output<uint16_t>(size_t(pages) * 2 * kDim), q = input(query),
                 table = input(Rotation{}.table(64)), scores = output<float>(kHeads * kGroup * capacity),
                 lse = output<float>(kHeads * kGroup);
      run({.n_rows = 0}, equal_heads(kHeads, held, held, held), 1, [&](Recorder& r) {
        r.record(PageBounds{{keys}, bounds, {.heads = kHeads, .head_dim = kDim, .page = page, .all = 1}});
      });
      run({.n_rows = 1, .n_local = 1, .select_k = 10}, heads, 1, [&](Recorder& r) {
        r.record(PageScore{q,
                           bounds,
                           table,
                           scores,
                           lse,
                           {.heads = kHeads,
                            .group = kGroup,
                            .head_dim = kDim,
                            .row_stride = kHeads * kGroup * kDim,
                            .page = page,
                            .score_capacity = capacity,
                            .scale = scale,
                            .rope = Rotation{}.params()}});
      });
      const auto got = get<float>(scores);
      std::array<double, kDim> largest{};
      std::vector<double> key(kDim);
      for (uint32_t head = 0; head < kHeads; ++head)
        for (uint32_t p = 0; p + 1 < capacity; ++p) {
          largest.fill(0);
          std::array<double, kGroup> product;
          product.fill(-std::numeric_limits<double>::infinity());
          for (uint32_t e = p * page; e < (p + 1) * page; ++e) {
            for (uint32_t c = 0; c < kDim; ++c) {
              key[c] = f16_to_f32(k[(size_t(head) * held + e) * kDim + c]);
              largest[c] = std::max(largest[c], std::fabs(key[c]));
            }
            for (uint32_t g = 0; g < kGroup; ++g) {
              double sum = 0;
              for (uint32_t c = 0; c < kDim; ++c)
                sum += double{query[(head * kGroup + g) * kDim + c]} * key[c];
              product[g] = std::max(product[g], sum);
            }
          }
          for (uint32_t g = 0; g < kGroup; ++g) {
            double magnitude = 0;
            for (uint32_t c = 0; c < kDim; ++c)
              magnitude += std::fabs(double{query[(head * kGroup + g) * kDim + c]}) * largest[c];
            const double rounding = scale * magnitude * (kDim + 2) * 0x1p-24,
                         score = got[(size_t(head) * kGroup + g) * capacity + p];
            ASSERT_GE(score, scale * product[g] - rounding) << "head " << head << " page " << p;
            if (page == 1) {
              ASSERT_NEAR(score, scale * product[g], rounding) << "head " << head << " page " << p;
            }
          }
        }
    }
}

// ---- votes and lists ----

TEST_P(KvPages, VotesAreOfPages) {
  Random random;
  for (const uint32_t page : {4u, 16u})
    for (const uint32_t group : {1u, 4u, 7u}) {
      SCOPED_TRACE(::testing::Message() << "page " << page << " group " << group);
      clear();
      const uint32_t n_init = 2, n_local = 1, select_k = 3, capacity = units(4001, page);
      const std::vector<HeadState> heads = unequal_heads(kEntries, 7);
      const uint32_t kv_heads = static_cast<uint32_t>(heads.size());
      const auto s = random.floats(size_t(kv_heads) * group * capacity, -20, 20),
                 sums = random.floats(kv_heads * group, 18, 24);
      size_for(kv_heads, group, 64, session_of(behind_other_rows(heads), 1, 64, 5001));
      const View scores = input(s), lse = input(sums), votes = output<float>(size_t(kv_heads) * capacity);
      run({.n_rows = 1, .n_init = n_init, .n_local = n_local, .select_k = select_k}, behind_other_rows(heads),
          1, [&](Recorder& r) {
            r.record(Vote{scores,
                          lse,
                          {},
                          {},
                          votes,
                          {.heads = kv_heads,
                           .group = group,
                           .head_state = kOtherRows,
                           .scope = kVoteGroup,
                           .page = page,
                           .score_capacity = capacity,
                           .vote_capacity = capacity}});
          });
      const auto got = get<float>(votes);
      for (uint32_t head = 0; head < kv_heads; ++head) {
        const uint32_t n = units(heads[head].n_entries + 1, page);
        for (uint32_t p = 0; p < capacity; ++p) {
          const size_t at = size_t(head) * capacity + p;
          if (n <= n_init + select_k + n_local) {
            ASSERT_TRUE(is_poison(got, at, 1)) << "nobody votes for pages of head " << head;
          } else if (p < n && (p < n_init || p >= n - n_local)) {
            ASSERT_EQ(got[at], -kInfinity);
          } else if (p < n) {
            double sum = 0;
            for (uint32_t h = head * group; h < (head + 1) * group; ++h)
              sum += std::exp(double{s[size_t(h) * capacity + p]} - double{sums[h]});
            // Differences of numbers below 64 round by 2^-19; exponentials and logarithms by less.
            ASSERT_NEAR(got[at], std::log(sum), 2 * 0x1p-19) << "head " << head << " page " << p;
          }
        }
      }
    }
}

// The entries of the first pages, of the picked pages and of the last pages, for a head with n entries.
Entries entries_of(const StepParams& step, uint32_t page, uint32_t n, const std::vector<float>& scores) {
  const uint32_t pages = units(n, page);
  if (pages <= step.n_init + step.select_k + step.n_local) return every_entry(n);
  Entries listed = every_entry(step.n_init), all;
  for (uint32_t p : largest(scores, step.n_init, pages - step.n_local, step.select_k)) listed.push_back(p);
  for (uint32_t p = pages - step.n_local; p < pages; ++p) listed.push_back(p);
  for (uint32_t p : listed)
    for (uint32_t e = p * page; e < std::min(n, (p + 1) * page); ++e) all.push_back(e);
  return all;
}

TEST_P(KvPages, ListsHoldEveryEntryOfTheBestPages) {
  for (const uint32_t page : {1u, 4u, 16u})
    for (const char* kind : {"spread", "ties", "no numbers"}) {
      clear();
      Random random{page};
      const std::vector<HeadState> heads =
          unequal_heads({0, 1, 15, 16, 31, 63, 64, 65, 1000, 4000, 40000}, 3);
      const uint32_t count = static_cast<uint32_t>(heads.size()), capacity = units(40001, page),
                     list_capacity = 1 + 40001;
      auto scores = random.floats(size_t(count) * capacity, -9, 9);
      for (float& s : scores) {
        if (*kind == 't') s = std::trunc(s);
        if (*kind == 'n' && random.below(3)) s = random.below(2) ? -kInfinity : std::nanf("");
      }
      size_for(count, 1, 64, session_of(behind_other_rows(heads), 1, 64, 40002));
      const View votes = input(scores), list = output<uint32_t>(size_t(count) * list_capacity);
      const auto program = record(1, [&](Recorder& r) {
        r.record(TopK{votes,
                      {},
                      {},
                      {},
                      list,
                      {.heads = count,
                       .head_state = kOtherRows,
                       .keep = kKeepOfStep,
                       .page = page,
                       .score_capacity = capacity,
                       .list_capacity = list_capacity}});
      });
      ASSERT_TRUE(program);
      struct Picks {
        uint32_t n_init, select_k, n_local;
      };
      for (const Picks& p :
           {Picks{0, 3, 1}, Picks{0, 0, 1}, Picks{2, 1, 1}, Picks{1, 60, 3},
            Picks{0, units(40001, page) - 2, 1}, Picks{0, units(40001, page) - 1, 1}, Picks{0, 50000, 1}}) {
        SCOPED_TRACE(::testing::Message() << "page " << page << ", " << kind << ", " << p.n_init << " + "
                                          << p.select_k << " + " << p.n_local << " pages");
        const StepParams step{.n_rows = 1, .n_init = p.n_init, .n_local = p.n_local, .select_k = p.select_k};
        restore();
        run(*program, step, behind_other_rows(heads));
        const auto got = get<uint32_t>(list);
        for (uint32_t head = 0; head < count; ++head) {
          const auto own = scores.begin() + static_cast<ptrdiff_t>(head) * capacity;
          EXPECT_TRUE(list_of(got, list_capacity, head) ==
                      entries_of(step, page, heads[head].n_entries + 1, {own, own + capacity}))
              << "head " << head << " with " << heads[head].n_entries + 1 << " entries";
        }
      }
    }
}

// A token of Quest: its key, the bounds of its page, the pages' scores and votes, the list, and attention to
// it; repeated for the following tokens, across the end of a page.
TEST_P(KvPages, AStepOfQuestAgreesWithItsReference) {
  const uint32_t page = 16, dh = 64, group = 2, n_init = 0, n_local = 1, select_k = 3;
  const Rotation rotation{kRopeOriginal, kRopeHalves, dh, 1};
  Random random;
  // The first two heads become long enough to be selected from during the test.
  Pool pool(random, unequal_heads({61, 63, 300, 2, 1000}, 40), dh);
  const uint32_t kv_heads = pool.count(), heads = kv_heads * group, queries = heads * dh,
                 stride = queries + 2 * kv_heads * dh, pages = page_count(pool.heads, page),
                 capacity = units(1040, page), list_capacity = 1 + (n_init + select_k + n_local) * page;
  std::vector<uint16_t> bounds = padded_rows(std::vector<uint16_t>(), size_t(pages) * 2 * dh);
  for (uint32_t head = 0; head < kv_heads; ++head)
    bound(bounds, pool, head, page, 0, pool.heads[head].n_entries);
  size_for(kv_heads, group, dh, session_of(behind_other_rows(pool.heads), 1, 64, 2000));
  const View qkv = input(std::vector<float>(stride)), table = input(rotation.table(2000)), k = inout(pool.k),
             v = inout(pool.v), pos = inout(pool.pos), saturated = inout(std::vector<uint32_t>(1)),
             held = inout(bounds), scores = output<float>(heads * capacity), lse = output<float>(heads),
             votes = output<float>(kv_heads * capacity), list = output<uint32_t>(kv_heads * list_capacity),
             y = output<float>(queries);
  const auto program = record(1, [&](Recorder& r) {
    r.record(KvAppend{qkv,
                      table,
                      {k},
                      {v},
                      pos,
                      saturated,
                      {.heads = kv_heads,
                       .head_dim = dh,
                       .row_stride = stride,
                       .k_column = queries,
                       .v_column = queries + kv_heads * dh,
                       .head_state = kOtherRows,
                       .into = kIntoPool,
                       .rope = rotation.params()}});
    r.record(PageBounds{
        {k}, held, {.heads = kv_heads, .head_dim = dh, .head_state = kOtherRows, .page = page, .all = 0}});
    r.record(PageScore{qkv,
                       held,
                       table,
                       scores,
                       lse,
                       {.heads = kv_heads,
                        .group = group,
                        .head_dim = dh,
                        .row_stride = stride,
                        .head_state = kOtherRows,
                        .page = page,
                        .score_capacity = capacity,
                        .scale = 0.125f,
                        .rope = rotation.params()}});
    r.record(Vote{scores,
                  lse,
                  {},
                  {},
                  votes,
                  {.heads = kv_heads,
                   .group = group,
                   .head_state = kOtherRows,
                   .scope = kVoteGroup,
                   .page = page,
                   .score_capacity = capacity,
                   .vote_capacity = capacity}});
    r.record(TopK{votes,
                  {},
                  {},
                  {},
                  list,
                  {.heads = kv_heads,
                   .head_state = kOtherRows,
                   .keep = kKeepOfStep,
                   .page = page,
                   .score_capacity = capacity,
                   .list_capacity = list_capacity}});
    r.record(Attention{qkv,
                       {k},
                       {v},
                       list,
                       table,
                       {},
                       y,
                       {},
                       {.heads = kv_heads,
                        .group = group,
                        .head_dim = dh,
                        .row_stride = stride,
                        .y_stride = queries,
                        .source = kFromPool,
                        .head_state = kOtherRows,
                        .list_capacity = list_capacity,
                        .scale = 0.125f,
                        .rope = rotation.params()}});
  });
  ASSERT_TRUE(program);
  for (uint32_t token = 0; token < 36; ++token) {
    SCOPED_TRACE(::testing::Message() << "token " << token);
    const StepParams step{.n_rows = 1,
                          .position = static_cast<int32_t>(1200 + token),
                          .n_init = n_init,
                          .n_local = n_local,
                          .select_k = select_k};
    const auto row = random.floats(stride);
    put(qkv, row);
    run(*program, step, behind_other_rows(pool.heads));
    pool.k = get<uint16_t>(k);
    pool.v = get<uint16_t>(v);
    const auto got_votes = get<float>(votes), got_y = get<float>(y);
    for (uint32_t head = 0; head < kv_heads; ++head) {
      HeadState& own = pool.heads[head];
      ++own.n_entries;
      bound(bounds, pool, head, page, (own.n_entries - 1) / page, own.n_entries);
      const auto of_head = got_votes.begin() + head * capacity;
      const Entries listed = list_of(get<uint32_t>(list), list_capacity, head);
      ASSERT_EQ(listed, entries_of(step, page, own.n_entries, {of_head, of_head + capacity}))
          << "head " << head;
      ASSERT_EQ(listed.back(), own.n_entries - 1) << "the token sees itself";
      const auto key = [&](uint32_t e) { return doubles(pool.k, (size_t(own.first) + e) * dh, dh); };
      const auto value = [&](uint32_t e) { return doubles(pool.v, (size_t(own.first) + e) * dh, dh); };
      const Listed all(listed, rotation, key, value);
      for (uint32_t h = head * group; h < (head + 1) * group; ++h) {
        const Attended want =
            attend(rotation.rotated(doubles(row, h * dh, dh), step.position), all.k, all.v, 0.125, false);
        for (uint32_t e = 0; e < dh; ++e)
          ASSERT_NEAR(got_y[h * dh + e], want.y[e], attention_tolerance(dh, 1, list_capacity))
              << "head " << h << " element " << e;
      }
    }
    ASSERT_EQ(get<uint16_t>(held), bounds);
  }
}

}  // namespace
}  // namespace thimble::test
