// query_score on every device, compared with its definition in double.
#include <cmath>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One layer: the entries of its heads, followed by the step's rows.
struct Layer {
  std::vector<uint32_t> held;
  uint32_t rows, group, dh;
  uint32_t kind = kQueryLast;
  bool chunk = true;
  uint32_t sinks = 0;
  uint32_t window = 0;
  std::vector<std::vector<uint32_t>> lists = {};  // per head; empty: all entries
  Rotation rotation{};
  Softmax softmax{};

  uint32_t queries() const { return kind == kQueryRows ? rows : 1; }
  uint32_t kv_heads() const { return static_cast<uint32_t>(held.size()); }
};

class QueryScores : public OpTest {
 protected:
  // Position of the step's first row in the text, for original positions.
  static constexpr uint32_t kPosition = 3000;

  // The weights that the queries give to one entry of a KV head.
  struct Weights {
    double sum = 0;               // of the weights
    double largest = -kInfinity;  // largest logarithm of a weight
  };

  // The rotated key [dh] of an entry.
  static std::vector<double> turned_key(const Layer& l, const std::vector<uint16_t>& keys, uint32_t entry,
                                        uint32_t position) {
    const std::vector<double> key = doubles(keys, size_t{entry} * l.dh, l.dh);
    return l.rotation.mode == kRopeList ? l.rotation.rotated(key, position) : key;
  }

  // Weights of one KV head by list index, or by entry: `keys` [entry][dh], `q` [query][stride].
  static std::vector<Weights> expected(const Layer& l, uint32_t head, const std::vector<uint16_t>& keys,
                                       const std::vector<float>& q, size_t stride) {
    const uint32_t held = l.held[head], n = l.lists.empty() ? held + l.rows : uint32_t(l.lists[head].size());
    const size_t from = size_t{head} * l.group * l.dh;
    std::vector<std::vector<double>> turned;
    for (uint32_t i = 0; i < n; ++i)
      turned.push_back(turned_key(l, keys, l.lists.empty() ? i : l.lists[head][i], i));
    std::vector<Weights> weights(n);
    for (uint32_t row = 0; row < l.queries(); ++row)
      for (uint32_t h = 0; h < l.group; ++h) {
        const uint32_t own = n - l.queries() + row;  // the query's own entry
        const double position = l.rotation.mode == kRopeList ? own : kPosition + l.rows - l.queries() + row;
        const std::vector<double> query =
            l.rotation.rotated_query(doubles(q, from + row * stride + size_t{h} * l.dh, l.dh), position);
        double sum = std::exp(l.softmax.sink);
        std::vector<double> logits(n, -kInfinity);
        for (uint32_t i = 0; i <= own; ++i) {
          if (l.kind == kQueryRows && i >= l.sinks && i + l.rows < held) continue;
          if (l.window && i + l.window <= own) continue;
          logits[i] = dot(query, turned[i]) / std::sqrt(l.dh);
          if (l.softmax.cap != 0) logits[i] = l.softmax.cap * std::tanh(logits[i] / l.softmax.cap);
          sum += std::exp(logits[i]);
        }
        for (uint32_t i = 0; i <= own; ++i) {
          weights[i].sum += std::exp(logits[i]) / sum;
          weights[i].largest = std::max(weights[i].largest, logits[i] - std::log(sum));
        }
      }
    return weights;
  }

  // The error of a logit is that in attention (attention_tolerance) plus 2^-22 of the cap. A log-sum-exp has
  // the same error, plus that of the logarithms of its blocks and of their sum, each 2^-23 of its size.
  static double tolerance(const Layer& l, double q_most) {
    const double factor = l.rotation.factor * l.rotation.factor;
    const double logit = (l.dh + 8) * 0x1p-24 * q_most * std::sqrt(l.dh) * factor + 0x1p-22 * l.softmax.cap;
    const double size = q_most * std::sqrt(l.dh) * factor + 12;  // 12: log of entries
    return 2 * logit + 4 * size * 0x1p-23 + 0x1p-20;
  }

  void expect_scores(const Layer& l, Random random) {
    clear();
    const double q_most = 2;
    const uint32_t count = l.kv_heads(), max_rows = std::max(l.rows, 1u) + 2;
    const std::vector<HeadState> heads = unequal_heads(l.held, 2);
    const size_t entries = layer_entries(heads), stride = size_t{count} * l.group * l.dh + 7;
    const uint32_t q_rows = l.kind == kQueryRows ? max_rows : 1;
    std::vector<std::vector<uint16_t>> keys;
    std::vector<uint16_t> k = padded_rows(std::vector<uint16_t>(), entries * l.dh), chunk_k;
    for (uint32_t head = 0; head < count; ++head) {
      keys.push_back(halves(random.floats(size_t{l.held[head] + l.rows} * l.dh, -1, 1)));
      const auto first_row = keys.back().end() - ptrdiff_t{l.rows} * l.dh;
      std::copy(keys.back().begin(), first_row, k.begin() + ptrdiff_t{heads[head].first} * l.dh);
      chunk_k.insert(chunk_k.end(), first_row, keys.back().end());
      chunk_k = padded_rows(chunk_k, size_t{head + 1} * max_rows * l.dh);
    }
    const std::vector<float> q = padded_rows(
        random.floats(l.queries() * stride, -static_cast<float>(q_most), static_cast<float>(q_most)),
        q_rows * stride);
    std::vector<float> sinks(size_t{count} * l.group, static_cast<float>(l.softmax.sink));
    const bool has_sinks = l.softmax.sink > -kInfinity;
    size_for(count, l.group, l.dh, session_of(behind_other_rows(heads), max_rows));
    const View cis = output<float>(entries), chunk_cis = output<float>(size_t{count} * max_rows);
    const bool writes_chunk = l.chunk && l.kind != kQueryRows;
    const uint32_t list_capacity = l.lists.empty() ? 0 : 1 + *std::max_element(l.held.begin(), l.held.end());
    const QueryScore op{input(q),
                        {input(k)},
                        {l.chunk ? input(chunk_k) : View{}},
                        list_capacity ? input(lists(l.lists, list_capacity)) : View{},
                        input(l.rotation.table(6000)),
                        has_sinks ? input(sinks) : View{},
                        output<float>(size_t{count} * l.group * q_rows * kQueryScoreSums),
                        cis,
                        writes_chunk ? chunk_cis : View{},
                        {.heads = count,
                         .group = l.group,
                         .head_dim = l.dh,
                         .row_stride = static_cast<uint32_t>(stride),
                         .chunk_capacity = max_rows,
                         .head_state = kOtherRows,
                         .kind = l.kind,
                         .rows = q_rows,
                         .sinks = l.sinks,
                         .window = l.window,
                         .list_capacity = list_capacity,
                         .scale = 1 / std::sqrt(static_cast<float>(l.dh)),
                         .cap = static_cast<float>(l.softmax.cap),
                         .rope = l.rotation.params()}};
    const auto program = record(max_rows, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    const StepParams step{.n_rows = l.rows, .position = int(kPosition)};
    run(*program, step, behind_other_rows(heads));
    const std::vector<float> got = get<float>(cis), of_chunk = get<float>(chunk_cis);

    std::vector<std::vector<Weights>> weights;
    for (uint32_t head = 0; head < count; ++head) weights.push_back(expected(l, head, keys[head], q, stride));
    const double error = tolerance(l, q_most);
    size_t used = 0;
    for (uint32_t head = 0; head < count; ++head) {
      SCOPED_TRACE(::testing::Message() << "head " << head << " of " << l.held[head]);
      const uint32_t held = l.held[head], n = static_cast<uint32_t>(weights[head].size());
      const uint32_t first = l.kind == kQueryRows ? held - l.rows : l.window ? n - std::min(n, l.window) : 0;
      EXPECT_TRUE(is_poison(got, used, heads[head].first + first - used));
      used = heads[head].first + std::min(held, n);
      for (uint32_t i = first; i < (l.kind == kQueryRows ? held : n); ++i) {
        const float score =
            i < held ? got[heads[head].first + i] : of_chunk[size_t{head} * max_rows + i - held];
        if (l.kind == kQueryRows) {
          EXPECT_NEAR(score, weights[head][i].largest, error) << i;
        } else if (l.kind == kQueryHeads) {
          EXPECT_NEAR(score, weights[head][i].sum, weights[head][i].sum * error) << i;
        } else if (i + 1 == n) {
          EXPECT_EQ(score, std::numeric_limits<float>::infinity()) << i;
        } else {
          double mean = 0;
          for (const auto& of_head : weights) mean += of_head[i].sum / (count * l.group);
          EXPECT_NEAR(score, mean, mean * error) << i;
        }
      }
      const uint32_t written = writes_chunk ? l.rows : 0;
      EXPECT_TRUE(is_poison(of_chunk, size_t{head} * max_rows + written, max_rows - written));
    }
    EXPECT_TRUE(is_poison(got, used, entries - used));
    run(*program, step, behind_other_rows(heads));  // sums are made in the same order
    const std::vector<float> again = get<float>(cis);
    EXPECT_EQ(std::memcmp(again.data(), got.data(), got.size() * sizeof(float)), 0);
  }

  // All rotation modes, with and without a cap and a sink.
  template <typename Each>
  static void for_ways(uint32_t dh, const Each& each) {
    for (const uint32_t mode : {kRopeList, kRopeOriginal}) {
      SCOPED_TRACE(::testing::Message() << "mode " << mode << " dh " << dh);
      each(Rotation{.mode = mode, .pairing = kRopeAdjacent, .n_rot = dh}, Softmax{});
      each(Rotation{.mode = mode, .pairing = kRopeHalves, .n_rot = dh / 2, .factor = 1.2},
           Softmax{.cap = 5, .sink = 1.5});
    }
  }
};
THIMBLE_SHARED_OP_TESTS(QueryScores);

TEST_P(QueryScores, OfTheLastOneAreTheMeanWeightsOfAllHeads) {
  for (const uint32_t dh : {8u, 80u, 256u, 512u, 576u})
    for (const uint32_t rows : {0u, 1u, 33u})
      for (const uint32_t held : {1u, 63u, 65u, 300u})
        for_ways(dh, [&](const Rotation& rotation, const Softmax& softmax) {
          if (!takes_heads_of(dh)) return;
          SCOPED_TRACE(::testing::Message() << held << " entries, " << rows << " rows");
          expect_scores({.held = {held, held, held},
                         .rows = rows,
                         .group = held % 2 ? 2u : 5u,
                         .dh = dh,
                         .chunk = rows > 0,
                         .rotation = rotation,
                         .softmax = softmax},
                        Random{dh + rows + held});
        });
}

// More tiles than sums, so that a sum covers several tiles.
TEST_P(QueryScores, OfTheLastOneReadALongPool) {
  const uint32_t held = kQueryScoreTile * kQueryScoreSums + 1000;
  expect_scores({.held = {held, held}, .rows = 70, .group = 2, .dh = 64}, Random{});
}

// More logits than one thread's scratch can hold, so that heads are processed in turn.
TEST_P(QueryScores, OfTheLastOneReadManyLogits) {
  open({.threads = 1});
  const uint32_t held = kQueryScoreTile * kQueryScoreSums + 1000;
  expect_scores({.held = {held, held, held, held, held}, .rows = 1, .group = 8, .dh = 64}, Random{});
}

TEST_P(QueryScores, OfAnEmptyPoolAreThoseOfTheRows) {
  expect_scores({.held = {0, 0}, .rows = 5, .group = 1, .dh = 64}, Random{});
  expect_scores({.held = {0, 0}, .rows = 1, .group = 3, .dh = 64}, Random{});
}

TEST_P(QueryScores, OfHeadsAreTheirSummedWeights) {
  for (const uint32_t dh : {8u, 128u})
    for (const uint32_t window : {0u, 1u, 65u, 200u})
      for (const uint32_t rows : {0u, 3u})
        for_ways(dh, [&](const Rotation& rotation, const Softmax& softmax) {
          SCOPED_TRACE(::testing::Message() << "window " << window << ", " << rows << " rows");
          expect_scores({.held = {1, 300, 64, 130},
                         .rows = rows,
                         .group = 3,
                         .dh = dh,
                         .kind = kQueryHeads,
                         .chunk = rows > 0,
                         .window = window,
                         .rotation = rotation,
                         .softmax = softmax},
                        Random{dh + window + rows});
        });
}

TEST_P(QueryScores, WeighRotatedQueries) {
  if (GetParam().starts_with("cuda")) return;
  for (const uint32_t mode : {kRopeList, kRopeOriginal}) {
    const Rotation rotation = weighted({mode, kRopeHalves, 64, 1.19}, 80);
    expect_scores({.held = {1, 300, 64, 130},
                   .rows = 0,
                   .group = 3,
                   .dh = 80,
                   .kind = kQueryHeads,
                   .chunk = false,
                   .rotation = rotation},
                  Random{mode});
    expect_scores({.held = {150, 150},
                   .rows = 20,
                   .group = 3,
                   .dh = 80,
                   .kind = kQueryRows,
                   .chunk = true,
                   .sinks = 4,
                   .rotation = rotation},
                  Random{mode});
  }
}

TEST_P(QueryScores, OfHeadsWithListsAreByIndex) {
  const auto every = [](uint32_t step, uint32_t last) {  // and the last entry
    std::vector<uint32_t> list;
    for (uint32_t entry = last % step; entry <= last; entry += step) list.push_back(entry);
    return list;
  };
  for_ways(64, [&](const Rotation& rotation, const Softmax& softmax) {
    expect_scores({.held = {1, 300, 64, 400},
                   .rows = 0,
                   .group = 4,
                   .dh = 64,
                   .kind = kQueryHeads,
                   .chunk = false,
                   .lists = {every(1, 0), every(2, 299), every(1, 63), every(7, 399)},
                   .rotation = rotation,
                   .softmax = softmax},
                  Random{});
  });
}

TEST_P(QueryScores, OfRowsAreTheLargestWeightsOfRereadEntries) {
  for (const uint32_t dh : {8u, 80u, 128u, 512u, 576u})
    for (const uint32_t rows : {1u, 17u, 75u})
      for_ways(dh, [&](const Rotation& rotation, const Softmax& softmax) {
        if (!takes_heads_of(dh)) return;
        SCOPED_TRACE(::testing::Message() << rows << " rows");
        expect_scores({.held = {rows, rows + 2, rows + 4, rows + 90},
                       .rows = rows,
                       .group = rows % 2 ? 2u : 5u,
                       .dh = dh,
                       .kind = kQueryRows,
                       .sinks = 4,
                       .rotation = rotation,
                       .softmax = softmax},
                      Random{dh + rows});
      });
}

}  // namespace
}  // namespace thimble::test
