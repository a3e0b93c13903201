// Selection, retention and compaction at sizes at which several blocks of a device share a head's work.
#include <bit>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Entries = std::vector<uint32_t>;

class KvManyEntries : public OpTest {};
THIMBLE_OP_TESTS(KvManyEntries);

// Scores that are difficult for a radix selection; one pattern per head of a test.
constexpr uint32_t kPatterns = 8;
std::vector<float> score_pattern(Random& random, uint32_t kind, uint32_t n) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float odd[] = {kNan, -kNan, -kInfinity, -0.0f, 0.0f, 1e-40f, -1e-40f, kInfinity, -1, 1};
  std::vector<float> scores(n);
  for (uint32_t i = 0; i < n; ++i) switch (kind) {
      case 0:  // all different
        scores[i] = random.uniform(-3, 3);
        break;
      case 1:  // all equal
        scores[i] = 0.5f;
        break;
      case 2:  // many ties
        scores[i] = std::trunc(random.uniform(-4, 4));
        break;
      case 3:  // NaN, infinities and signed zeros
        scores[i] = odd[random.below(10)];
        break;
      case 4:  // equal except for the last 8 bits
        scores[i] = std::bit_cast<float>(0x40490f00u | random.below(256));
        break;
      case 5:  // all -inf or NaN
        scores[i] = kNan;
        break;
      case 6:  // runs of ties that end inside blocks of every size
        scores[i] = static_cast<float>(i / 997 % 5);
        break;
      default:  // zeros of both signs, and one larger number
        scores[i] = i == n / 2 ? 1.0f : i % 3 ? -0.0f : 0.0f;
    }
  return scores;
}

// Elements [begin, begin + count) of all heads' scores.
std::vector<float> columns(const std::vector<std::vector<float>>& heads, uint32_t begin, uint32_t count,
                           uint32_t capacity) {
  std::vector<float> all;
  for (const std::vector<float>& head : heads) {
    const auto own =
        padded_rows(std::vector<float>(head.begin() + begin, head.begin() + begin + count), capacity);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

TEST_P(KvManyEntries, RetentionAgreesWithASort) {
  Random random;
  const uint32_t entries = 20000, rows = 1000, n = entries + rows, capacity = entries + 9,
                 chunk_capacity = 1024, list_capacity = n + 1;
  size_for(kPatterns, 1, 16, session_of(equal_heads(kPatterns, capacity, entries), chunk_capacity));
  std::vector<std::vector<float>> heads;
  for (uint32_t kind = 0; kind < kPatterns; ++kind) heads.push_back(score_pattern(random, kind, n));
  const View scores = input(columns(heads, 0, entries, capacity)),
             chunk_scores = input(columns(heads, entries, rows, chunk_capacity)),
             list = output<uint32_t>(size_t(kPatterns) * list_capacity);
  struct Case {
    uint32_t keep, first, last;
  };
  for (const Case c : {Case{16384, 4, 2500}, Case{16384, 0, 0}, Case{n - 1, 0, 100}, Case{1, 0, 0},
                       Case{300, 100, 200}, Case{n, 0, 0}}) {
    restore();
    run({.n_rows = rows}, equal_heads(kPatterns, capacity, entries, c.keep, c.first, c.last), chunk_capacity,
        [&](Recorder& r) {
          r.record(TopK{scores,
                        chunk_scores,
                        {},
                        {},
                        list,
                        {.heads = kPatterns,
                         .keep = kKeepOfHead,
                         .page = 1,
                         .in_runs = 1,
                         .chunk_capacity = chunk_capacity,
                         .list_capacity = list_capacity}});
        });
    const auto got = get<uint32_t>(list);
    for (uint32_t head = 0; head < kPatterns; ++head) {
      Entries want = largest(heads[head], c.first, n - c.last, c.keep - c.first - c.last);
      for (uint32_t i = 0; i < c.first; ++i) want.push_back(i);
      for (uint32_t i = n - c.last; i < n; ++i) want.push_back(i);
      std::sort(want.begin(), want.end());
      EXPECT_TRUE(list_of(got, list_capacity, head) == want)
          << "keep " << c.keep << ", protected " << c.first << " and " << c.last << ", pattern " << head;
    }
  }
}

// Devices divide the entries among their threads in many ways.
TEST_P(KvManyEntries, RetentionOfAnyLengthAgreesWithASort) {
  for (const uint32_t n : {1000u, 6080u, 7104u, 8192u, 11200u, 16740u, 18332u, 20416u, 28000u, 31680u}) {
    SCOPED_TRACE(::testing::Message() << n << " entries");
    clear();
    Random random{n};
    const uint32_t heads = 4, keep = n / 8 * 7, capacity = n + 3, list_capacity = n + 1;
    const std::vector<HeadState> runs = equal_heads(heads, capacity, n, keep);
    size_for(heads, 1, 16, session_of(runs, 1));
    const auto scores = random.floats(heads * capacity);
    const View list = output<uint32_t>(size_t(heads) * list_capacity);
    const TopK op{
        input(scores),
        {},
        {},
        {},
        list,
        {.heads = heads, .keep = kKeepOfHead, .page = 1, .in_runs = 1, .list_capacity = list_capacity}};
    run({.n_rows = 0}, runs, 1, [&](Recorder& r) { r.record(op); });
    const auto got = get<uint32_t>(list);
    for (uint32_t head = 0; head < heads; ++head) {
      const auto begin = scores.begin() + head * capacity;
      EXPECT_TRUE(list_of(got, list_capacity, head) == largest({begin, begin + n}, 0, n, keep))
          << "head " << head;
    }
  }
}

TEST_P(KvManyEntries, SelectionAgreesWithASort) {
  Random random;
  for (const uint32_t n : {20000u, 70000u})
    for (const uint32_t k : {1u, 2048u, n / 2}) {
      clear();
      const uint32_t capacity = n + 5, list_capacity = 1 + 128 + k + 512, end = n - 512;
      const StepParams step{
          .n_rows = 1, .position = static_cast<int32_t>(n) - 1, .n_init = 128, .n_local = 512, .select_k = k};
      const std::vector<HeadState> runs = equal_heads(kPatterns, capacity, n - 1);
      size_for(kPatterns, 1, 16, session_of(runs, 1, 64, capacity));
      std::vector<std::vector<float>> heads;
      std::vector<int32_t> positions;
      for (uint32_t kind = 0; kind < kPatterns; ++kind) {
        heads.push_back(score_pattern(random, kind, n));
        for (uint32_t i = 0; i < capacity; ++i) positions.push_back(static_cast<int32_t>(i));
      }
      const View pos = input(positions), list = output<uint32_t>(size_t(kPatterns) * list_capacity),
                 votes = input(columns(heads, 0, n, capacity));
      const auto lists_of = [&](const View& v, uint32_t by_position) {
        restore();
        run(step, runs, 1, [&](Recorder& r) {
          r.record(TopK{v,
                        {},
                        pos,
                        {},
                        list,
                        {.heads = kPatterns,
                         .keep = kKeepOfStep,
                         .page = 1,
                         .by_position = by_position,
                         .score_capacity = capacity,
                         .list_capacity = list_capacity}});
        });
        return get<uint32_t>(list);
      };
      const auto selection = [&](const Entries& picked) {
        Entries l(128);
        std::iota(l.begin(), l.end(), 0u);
        l.insert(l.end(), picked.begin(), picked.end());
        for (uint32_t i = end; i < n; ++i) l.push_back(i);
        return l;
      };
      const auto got = lists_of(votes, 0);
      for (uint32_t head = 0; head < kPatterns; ++head)
        EXPECT_TRUE(list_of(got, list_capacity, head) == selection(largest(heads[head], 128, end, k)))
            << n << " entries, " << k << " picked, pattern " << head;

      // Votes by position are used where they are: -inf outside of the middle, as vote writes them.
      for (uint32_t kind : {0u, 2u, 4u, 6u}) {
        std::vector<float> layer = heads[kind];
        std::fill(layer.begin(), layer.begin() + 128, -kInfinity);
        std::fill(layer.begin() + end, layer.end(), -kInfinity);
        const auto shared = lists_of(input(padded_rows(layer, capacity)), 1);
        const Entries want = selection(largest(layer, 0, n, k));
        for (uint32_t head : {0u, kPatterns - 1})
          EXPECT_TRUE(list_of(shared, list_capacity, head) == want)
              << n << " positions, " << k << " picked, pattern " << kind << ", head " << head;
      }
    }
}

// The three ops of a selecting step, each compared with a reference for the previous one's result.
TEST_P(KvManyEntries, AStepScoresVotesAndLists) {
  struct Case {
    uint32_t n, rows, scope, window;
    bool whole = false;   // no head has lost an entry
    uint32_t keys = 0;    // distinct keys per head, repeated; 0: as many as entries
    float sharpness = 1;  // factor for the length of queries
  };
  for (const Case c :
       {Case{20000, 33, kVoteGroup, 0}, Case{20000, 1, kVoteLayer, 0}, Case{20000, 1, kVoteLayer, 5},
        Case{20000, 1, kVoteGroup, 5}, Case{20000, 1, kVoteLayer, 0, true},
        Case{40000, 1, kVoteLayer, 0, true}, Case{60000, 1, kVoteLayer, 0, true},
        Case{20000, 1, kVoteLayer, 0, true, 7}, Case{20000, 1, kVoteLayer, 0, true, 0, 3},
        Case{20000, 1, kVoteLayer, 0, true, 0, 1 / 16.0f}, Case{20000, 1, kVoteLayer, 0, true, 0, 1 / 512.0f},
        Case{70000, 1, kVoteLayer, 0, true}, Case{70000, 1, kVoteLayer, 0}, Case{70000, 1, kVoteGroup, 0}}) {
    if (is_variation() && (c.keys || c.sharpness != 1 || c.window)) continue;
    SCOPED_TRACE(::testing::Message()
                 << c.n << " entries, " << c.rows << " rows, scope " << c.scope << ", window " << c.window
                 << ", whole " << c.whole << ", keys " << c.keys << ", sharpness " << c.sharpness);
    clear();
    Random random{c.n};
    const uint32_t kv_heads = 2, group = 4, heads = kv_heads * group, dh = 64, capacity = c.n + 3,
                   n_init = 128, n_local = 512, k = 2048, end = c.n - n_local, stride = heads * dh,
                   list_capacity = 1 + n_init + k + n_local, positions = c.whole ? c.n : c.n + c.n / 4,
                   vote_capacity = c.scope == kVoteLayer && !c.whole ? positions + 7 : capacity;
    const Rotation rotation;
    const std::vector<HeadState> runs = equal_heads(kv_heads, capacity, c.n - c.rows);
    size_for(kv_heads, group, dh, session_of(runs, c.rows, 64, vote_capacity));
    const auto q = random.floats(size_t(c.rows) * stride, -c.sharpness, c.sharpness);
    auto k_bits = halves(random.floats(size_t(kv_heads) * capacity * dh));
    for (size_t i = 0; c.keys && i < k_bits.size(); ++i)
      if (i / dh % capacity >= c.keys) k_bits[i] = k_bits[i - size_t(c.keys) * dh];
    std::vector<int32_t> pos;  // each head has lost different entries
    for (uint32_t head = 0; head < kv_heads; ++head) {
      Entries held = some_entries(random, positions, c.n, n_local);
      held.resize(capacity, 0);
      pos.insert(pos.end(), held.begin(), held.end());
    }
    const View x = input(q), keys = input(k_bits), table = input(rotation.table(n_local + 64)),
               held = input(pos), scores = output<float>(size_t(heads) * capacity),
               lse = output<float>(heads),
               votes = output<float>(c.scope == kVoteLayer ? vote_capacity : kv_heads * capacity),
               list = output<uint32_t>(kv_heads * list_capacity);
    run({.n_rows = c.rows,
         .position = static_cast<int32_t>(positions - c.rows),
         .n_init = n_init,
         .n_local = n_local,
         .select_k = k},
        runs, c.rows, [&](Recorder& r) {
          Selecting{.q = x,
                    .k = keys,
                    .table = table,
                    .pos = held,
                    .gate = {},
                    .scores = scores,
                    .lse = lse,
                    .votes = votes,
                    .list = list,
                    .p = {.heads = kv_heads,
                          .group = group,
                          .head_dim = dh,
                          .row_stride = stride,
                          .score_capacity = capacity,
                          .scale = 1,
                          .rope = rotation.params()},
                    .scope = c.scope,
                    .vote_capacity = vote_capacity,
                    .list_capacity = list_capacity,
                    .window = c.window}
              .record(r);
        });

    const auto got = get<float>(scores), got_lse = get<float>(lse), got_votes = get<float>(votes);
    for (uint32_t h = 0; h < heads; ++h) {
      std::vector<double> query(dh);
      for (uint32_t row = 0; row < c.rows; ++row) {
        const auto rotated = rotation.rotated(doubles(q, row * stride + h * dh, dh), n_local + row);
        for (uint32_t e = 0; e < dh; ++e) query[e] += rotated[e] / c.rows;
      }
      double sum = 0;
      const uint16_t* own = &k_bits[size_t(h / group) * capacity * dh];
      for (uint32_t i = n_init; i < end; ++i) {
        double score = 0;
        for (uint32_t e = 0; e < dh; ++e) score += query[e] * double{f16_to_f32(own[size_t(i) * dh + e])};
        // As in kv_selection_test, with keys below 1.
        ASSERT_NEAR(got[size_t(h) * capacity + i], score, 2 * c.sharpness * dh * (dh + 24 + c.rows) * 0x1p-24)
            << "head " << h << " entry " << i;
        sum += std::exp(double{got[size_t(h) * capacity + i]});
      }
      // As in kv_selection_test: 64 + n/64 additions.
      ASSERT_NEAR(got_lse[h], std::log(sum), (64 + c.n / 64.0) * 0x1p-24 + 0x1p-19);
      ASSERT_TRUE(is_poison(got, size_t(h) * capacity, n_init) &&
                  is_poison(got, size_t(h) * capacity + end, capacity - end));
    }

    // For each set of votes: the candidates' votes before the max-pool, and their positions.
    const uint32_t sets = c.scope == kVoteLayer ? 1 : kv_heads,
                   length = c.scope == kVoteLayer ? positions : c.n;
    for (uint32_t set = 0; set < sets; ++set) {
      std::vector<double> mass(length);
      for (uint32_t head = set; head < (c.scope == kVoteLayer ? kv_heads : set + 1); ++head)
        for (uint32_t h = head * group; h < (head + 1) * group; ++h)
          for (uint32_t i = n_init; i < end; ++i)
            mass[c.scope == kVoteLayer ? static_cast<uint32_t>(pos[head * capacity + i]) : i] +=
                std::exp(double{got[size_t(h) * capacity + i]} - double{got_lse[h]});
      Entries places;
      for (uint32_t i = 0; i < length; ++i)
        if (mass[i] > 0) places.push_back(i);
      const std::vector<float> own(got_votes.begin() + set * vote_capacity,
                                   got_votes.begin() + set * vote_capacity + length);
      for (size_t at = 0, i = 0; i < length; ++i) {
        if (at == places.size() || places[at] != i) {
          ASSERT_EQ(own[i], -kInfinity) << "no candidate at " << i;
          continue;
        }
        const size_t reach = c.window / 2, from = at - std::min(at, reach),
                     to = std::min(places.size(), at + reach + 1);
        double most = 0;
        for (size_t near = from; near < to; ++near) most = std::max(most, mass[places[near]]);
        // Differences of numbers below 64 round by 2^-19; exponentials and logarithms by less.
        ASSERT_NEAR(own[i], std::log(most), 2 * 0x1p-19) << "set " << set << " at " << i;
        ++at;
      }
      const Entries chosen = largest(own, 0, length, k);
      std::vector<bool> is_chosen(length);
      for (uint32_t i : chosen) is_chosen[i] = true;
      for (uint32_t head = set; head < (c.scope == kVoteLayer ? kv_heads : set + 1); ++head) {
        Entries want;
        for (uint32_t i = 0; i < c.n; ++i)
          if (i < n_init || i >= end ||
              is_chosen[c.scope == kVoteLayer ? static_cast<uint32_t>(pos[head * capacity + i]) : i])
            want.push_back(i);
        EXPECT_TRUE(list_of(get<uint32_t>(list), list_capacity, head) == want) << "head " << head;
      }
    }
  }
}

TEST_P(KvManyEntries, CompactionMovesEveryRowOnce) {
  struct Case {
    uint32_t entries, rows, keep, dh;
  };
  for (const Case c : {Case{20000, 1000, 19000, 128}, Case{1500, 100, 1200, 80}, Case{1500, 100, 1500, 96},
                       Case{1500, 100, 33, 64}, Case{700, 33, 600, 256}, Case{1000, 0, 999, 64}}) {
    SCOPED_TRACE(::testing::Message() << c.entries << " entries, " << c.rows << " rows, keep " << c.keep
                                      << ", head size " << c.dh);
    clear();
    Random random{c.dh};
    const uint32_t n = c.entries + c.rows, heads = 6, capacity = c.entries + 3, chunk_capacity = c.rows + 2,
                   list_capacity = n + 1;
    const std::vector<HeadState> runs = equal_heads(heads, capacity, c.entries);
    size_for(heads, 1, c.dh, session_of(runs, c.rows + 1));
    std::vector<Entries> survivors(heads);
    survivors[0] = some_entries(random, n, c.keep, 0);
    survivors[1] = some_entries(random, n, c.keep, std::min(c.rows, c.keep));
    for (uint32_t i = 0; i < c.keep; ++i) {
      survivors[2].push_back(i);               // nothing moves
      survivors[3].push_back(i + 1);           // all entries move by one, onto their neighbour
      survivors[4].push_back(n - c.keep + i);  // all entries move by the number of lost entries
    }
    for (uint32_t i = 0; survivors[5].size() < c.keep;
         ++i)  // entries are lost at intervals, while there are some to lose
      if (i % 17 != 3 || c.keep - survivors[5].size() == n - i) survivors[5].push_back(i);
    const auto words = [&](size_t count) {
      std::vector<uint16_t> w(count);
      for (uint16_t& one : w) one = static_cast<uint16_t>(random.next());
      return w;
    };
    const auto pool_k = words(size_t(heads) * capacity * c.dh),
               pool_v = words(size_t(heads) * capacity * c.dh),
               new_k = words(size_t(heads) * chunk_capacity * c.dh),
               new_v = words(size_t(heads) * chunk_capacity * c.dh);
    std::vector<int32_t> pool_pos(heads * capacity), new_pos(heads * chunk_capacity);
    std::iota(pool_pos.begin(), pool_pos.end(), 7);
    std::iota(new_pos.begin(), new_pos.end(), 1000000);
    const auto pool_cis = random.floats(heads * capacity), new_cis = random.floats(heads * chunk_capacity);
    const View k = inout(pool_k), v = inout(pool_v), pos = inout(pool_pos), cis = inout(pool_cis);
    const KvCompact op{
        input(lists(survivors, list_capacity)),
        {c.rows ? input(new_k) : View{}},
        {c.rows ? input(new_v) : View{}},
        c.rows ? input(new_pos) : View{},
        c.rows ? input(new_cis) : View{},
        {k},
        {v},
        pos,
        cis,
        {.heads = heads, .head_dim = c.dh, .chunk_capacity = chunk_capacity, .list_capacity = list_capacity}};
    run({.n_rows = c.rows}, runs, c.rows + 1, [&](Recorder& r) { r.record(op); });
    const auto check = [&](const auto& got, const auto& pool, const auto& chunk, size_t width,
                           const char* what) {
      for (uint32_t head = 0; head < heads; ++head)
        for (uint32_t i = 0; i < c.keep; ++i) {
          const uint32_t e = survivors[head][i];
          const auto* from = e < c.entries ? &pool[(size_t(head) * capacity + e) * width]
                                           : &chunk[(size_t(head) * chunk_capacity + e - c.entries) * width];
          ASSERT_EQ(std::memcmp(&got[(size_t(head) * capacity + i) * width], from, width * sizeof *from), 0)
              << what << " of head " << head << " at " << i << " is not that of entry " << e;
        }
    };
    check(get<uint16_t>(k), pool_k, new_k, c.dh, "k");
    check(get<uint16_t>(v), pool_v, new_v, c.dh, "v");
    check(get<int32_t>(pos), pool_pos, new_pos, 1, "position");
    check(get<float>(cis), pool_cis, new_cis, 1, "score");
  }
}

}  // namespace
}  // namespace thimble::test
