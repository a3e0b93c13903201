// References for the tests of the KV ops: plain loops in double precision, and operands for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "backends/regions.h"
#include "tests/ops/op_test.h"

namespace thimble::test {

// How the keys and queries of a test rotate.
struct Rotation {
  uint32_t mode = kRopeList, pairing = kRopeAdjacent, n_rot = 64;
  double factor = 1;  // the model's attention factor
  // [dh]: factors of rotated queries; or empty. The table is then for kWeighedPositions, and they follow it.
  std::vector<float> weight = {};
  static constexpr uint32_t kWeighedPositions = 8192;

  RopeParams params() const {
    return {mode, pairing, n_rot, weight.empty() ? 0 : (65 + kWeighedPositions / 64) * n_rot};
  }
  double frequency(uint32_t pair) const { return std::pow(10000.0, -2.0 * pair / n_rot); }
  // The table of backend.h for positions below `positions`.
  std::vector<float> table(uint32_t positions) const {
    std::vector<float> t;
    if (!weight.empty()) positions = kWeighedPositions;
    for (uint32_t row = 0; row < 64 + positions / 64 + 1; ++row)
      for (uint32_t p = 0; p < n_rot / 2; ++p) {
        const double angle = (row < 64 ? row : (row - 64) * 64.0) * frequency(p), f = row < 64 ? 1 : factor;
        t.push_back(static_cast<float>(f * std::cos(angle)));
        t.push_back(static_cast<float>(f * std::sin(angle)));
      }
    t.insert(t.end(), weight.begin(), weight.end());
    return t;
  }
  std::vector<double> rotated_query(const std::vector<double>& q, double position) const {
    return weighed(rotated(q, position));
  }
  std::vector<double> weighed(std::vector<double> q) const {
    for (size_t c = 0; c < weight.size(); ++c) q[c] *= double{weight[c]};
    return q;
  }
  std::vector<double> rotated(std::vector<double> x, double position) const {
    for (uint32_t p = 0; p < n_rot / 2; ++p) {
      double& a = x[pairing == kRopeAdjacent ? 2 * p : p];
      double& b = x[pairing == kRopeAdjacent ? 2 * p + 1 : p + n_rot / 2];
      const double c = std::cos(position * frequency(p)), s = std::sin(position * frequency(p)), a0 = a;
      a = factor * (a0 * c - b * s);
      b = factor * (a0 * s + b * c);
    }
    return x;
  }
};

// The rotation with weights of queries, which CUDA does not have.
inline Rotation weighted(Rotation rotation, uint32_t dh) {
  rotation.weight = Random{dh}.floats(dh, -1, 1);
  return rotation;
}

inline std::vector<uint16_t> halves(const std::vector<float>& values) {
  std::vector<uint16_t> h(values.size());
  std::transform(values.begin(), values.end(), h.begin(), f32_to_f16);
  return h;
}
// `count` values from `first` on, as double.
inline std::vector<double> doubles(const std::vector<uint16_t>& h, size_t first, size_t count) {
  std::vector<double> d(count);
  for (size_t i = 0; i < count; ++i) d[i] = f16_to_f32(h[first + i]);
  return d;
}
inline std::vector<double> doubles(const std::vector<float>& f, size_t first, size_t count) {
  return std::vector<double>(f.begin() + static_cast<ptrdiff_t>(first),
                             f.begin() + static_cast<ptrdiff_t>(first + count));
}
inline double dot(const std::vector<double>& x, const std::vector<double>& y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

inline std::vector<uint32_t> every_entry(uint32_t n) {
  std::vector<uint32_t> list(n);
  std::iota(list.begin(), list.end(), 0u);
  return list;
}
// `picked` of n entries in ascending order, including the last `last`.
inline std::vector<uint32_t> some_entries(Random& random, uint32_t n, uint32_t picked, uint32_t last) {
  std::vector<uint32_t> all(n - last), list;
  std::iota(all.begin(), all.end(), 0u);
  for (uint32_t i = 0; i < picked - last; ++i) {
    std::swap(all[i], all[i + random.below(static_cast<uint32_t>(all.size()) - i)]);
    list.push_back(all[i]);
  }
  std::sort(list.begin(), list.end());
  for (uint32_t i = n - last; i < n; ++i) list.push_back(i);
  return list;
}

// Lists as ops take them: [heads][capacity], with poison after the end of a list.
inline std::vector<uint32_t> lists(const std::vector<std::vector<uint32_t>>& heads, uint32_t capacity) {
  std::vector<uint32_t> all;
  for (std::vector<uint32_t> list : heads) {
    list.insert(list.begin(), static_cast<uint32_t>(list.size()));
    list = padded_rows(list, capacity);
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}
// The list of one head.
inline std::vector<uint32_t> list_of(const std::vector<uint32_t>& all, uint32_t capacity, uint32_t head) {
  const auto l = all.begin() + head * capacity;
  EXPECT_LT(*l, capacity) << "the list of head " << head << " is longer than it can be";
  if (*l >= capacity) return {};
  return {l + 1, l + 1 + *l};
}

// A bound on attention's error for |q| <= q_max, |k|, |v| <= 1 and n keys. A score is a sum of dh products,
// each rotated, scaled and rounded about 8 times before, times factor^2 / sqrt(dh). Its error is at most (dh
// + 8) 2^-24 q_max sqrt(dh) factor^2. The relative error of a weight is twice that, plus 2^-21 for the
// exponential and the rescaling. Sums over n keys are made in tiles of 64.
inline double attention_tolerance(uint32_t head_dim, double q_max, uint32_t n, double factor = 1) {
  const double score = (head_dim + 8) * 0x1p-24 * q_max * std::sqrt(head_dim) * factor * factor;
  return 2 * score + 0x1p-21 + (64 + n / 64.0) * 0x1p-24;
}

struct Attended {
  std::vector<double> y;
  std::vector<double>
      f16_tolerance;  // the additional error on tensor cores (see attention_tolerance); otherwise empty
};

// The parameters of a softmax other than keys: a cap of its logits (0: none), and a sink logit (-inf: none).
struct Softmax {
  double cap = 0, sink = -std::numeric_limits<double>::infinity();
};

// softmax(q k^T * scale) v for one query. Keys and values [n][channels] are as multiplied, q is rotated. A
// cap moves no two logits apart, and a sink reduces all weights in the same proportion.
//
// With tensor cores, q * scale * log2(e), k, the weights p and v are rounded to f16, each by at most 2^-11 of
// itself or 2^-25. The score of key i then changes by at most m_i: the largest product of the rounded vectors
// minus the product of the exact ones, with magnitudes throughout, plus dh truncated additions in f32. With E
// = max m_i,
//   y' - y = sum w_i (e^m_i - 1) (v_i - y) / sum w_i e^m_i <= e^E sum w_i (e^|m_i| - 1) |v_i - y|.
// Weights are relative to the largest so far, so their smallest step is at most 2^-25 / sum p. Whether the
// sum uses rounded weights or not, p_i changes y by at most that and 2^-11 of w_i, times |v_i| + |y|. Tensor
// cores truncate sums, so n additions amount to n 2^-23 of sum w_i |v_i|. A second e^E covers the interaction
// of these effects.
inline Attended attend(const std::vector<double>& q, std::span<const double> k, std::span<const double> v,
                       double scale, bool f16, const Softmax& softmax = {}) {
  const size_t dh = q.size(), n = k.size() / dh, width = v.size() / n;
  const auto rounding = [](double x) { return x * 0x1p-11 + 0x1p-25; };
  constexpr double kLog2E = 1.4426950408889634;
  std::vector<double> s(n), moved(f16 ? n : 0);
  double top = softmax.sink, most = 0, sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const double* key = &k[i * dh];
    s[i] = std::inner_product(q.begin(), q.end(), key, 0.0) * scale;
    if (softmax.cap != 0) s[i] = softmax.cap * std::tanh(s[i] / softmax.cap);
    top = std::max(top, s[i]);
    if (!f16) continue;
    double exact = 0, largest = 0;
    for (size_t c = 0; c < dh; ++c) {
      const double a = std::fabs(q[c]) * scale * kLog2E, b = std::fabs(key[c]);
      exact += a * b;
      largest += (a + rounding(a)) * (b + rounding(b));
    }
    moved[i] = (largest - exact + static_cast<double>(dh) * 0x1p-23 * exact) / kLog2E;
    most = std::max(most, moved[i]);
  }
  Attended out{std::vector<double>(width), std::vector<double>(f16 ? width : 0)};
  for (size_t i = 0; i < n; ++i) {
    s[i] = std::exp(s[i] - top);
    sum += s[i];
    for (size_t c = 0; c < width; ++c) out.y[c] += s[i] * v[i * width + c];
  }
  sum += std::exp(softmax.sink - top);
  for (double& y : out.y) y /= sum;
  if (!f16) return out;
  for (size_t i = 0; i < n; ++i) {
    const double w = s[i] / sum, moves = w * (std::exp(moved[i]) - 1), step = w * 0x1p-11 + 0x1p-25 / sum;
    for (size_t c = 0; c < width; ++c) {
      const double x = v[i * width + c], y = out.y[c];
      out.f16_tolerance[c] += moves * std::fabs(x - y) + step * (std::fabs(x) + std::fabs(y)) +
                              w * static_cast<double>(n) * 0x1p-23 * std::fabs(x);
    }
  }
  for (double& t : out.f16_tolerance) t *= std::exp(2 * most);
  return out;
}

// The rotated keys of a KV head and its values, for the entries of a list, as attend() takes them.
struct Listed {
  std::vector<double> k, v;
  template <typename Keys, typename Values>
  Listed(const std::vector<uint32_t>& entries, const Rotation& rotation, const Keys& key,
         const Values& value) {
    for (size_t i = 0; i < entries.size(); ++i) {
      std::vector<double> one = key(entries[i]);
      if (rotation.mode == kRopeList) one = rotation.rotated(one, static_cast<double>(i));
      k.insert(k.end(), one.begin(), one.end());
      one = value(entries[i]);
      v.insert(v.end(), one.begin(), one.end());
    }
  }
  // Those of [first, end) of the list.
  std::span<const double> keys(size_t first, size_t end, uint32_t dh) const {
    return part(k, first, end, dh);
  }
  std::span<const double> values(size_t first, size_t end, uint32_t width) const {
    return part(v, first, end, width);
  }

 private:
  static std::span<const double> part(const std::vector<double>& all, size_t first, size_t end, uint32_t dh) {
    return {all.data() + first * dh, (end - first) * dh};
  }
};

// The arrays of one layer: random numbers where heads hold entries, poison between them.
struct Pool {
  std::vector<HeadState> heads;
  uint32_t dh;
  std::vector<uint16_t> k, v;
  std::vector<int32_t> pos;
  std::vector<float> cis;

  Pool(Random& random, const std::vector<HeadState>& h, uint32_t d) : heads(h), dh(d) {
    const size_t all = layer_entries(heads) + 5;
    k = padded_rows(k, all * dh);
    v = padded_rows(v, all * dh);
    pos = padded_rows(pos, all);
    cis = padded_rows(cis, all);
    for (const HeadState& head : heads)
      for (size_t i = 0, e = head.first; i < head.n_entries; ++i, ++e) {
        for (uint32_t c = 0; c < dh; ++c) {
          k[e * dh + c] = f32_to_f16(random.uniform(-1, 1));
          v[e * dh + c] = f32_to_f16(random.uniform(-1, 1));
        }
        pos[e] = static_cast<int32_t>(3 * i + random.below(3));
        cis[e] = random.uniform(-3, 3);
      }
  }
  uint32_t count() const { return static_cast<uint32_t>(heads.size()); }
};

// Attention to a list, or to all entries, in as many passes over a view as its `entries` require.
struct ViewAttention {
  View q, pool_k, pool_v, chunk_k, chunk_v, list, table, view_k, view_v, y, ml, sinks = {}, row_index = {};
  uint32_t chunk_capacity = 0, entries = 0;  // `entries`: of the longest head, including the step's rows
  AttentionParams p{};                       // of the first pass

  void record(Recorder& r) const {
    AttentionParams pass = p;
    for (; pass.first_entry < entries; pass.first_entry += pass.view_capacity) {
      r.record(KvView{{pool_k},
                      {pool_v},
                      {chunk_k},
                      {chunk_v},
                      list,
                      table,
                      view_k,
                      view_v,
                      {.heads = p.heads,
                       .head_dim = p.head_dim,
                       .chunk_capacity = chunk_capacity,
                       .head_state = p.head_state,
                       .first_entry = pass.first_entry,
                       .view_capacity = p.view_capacity,
                       .list_capacity = p.list_capacity,
                       .rope = p.rope}});
      r.record(Attention{q, {view_k}, {view_v}, list, table, sinks, y, ml, pass, row_index});
    }
  }
};

// A selection: the pool's scores, their votes, and the lists made from them.
struct Selecting {
  View q, k, table, pos, gate, scores, lse, votes, list;
  TokenScoreParams p{};
  uint32_t scope = kVoteGroup, vote_capacity = 0, list_capacity = 0, window = 0;

  void record(Recorder& r) const {
    r.record(TokenScore{q, {k}, table, gate, scores, lse, p});
    r.record(Vote{scores,
                  lse,
                  pos,
                  gate,
                  votes,
                  {.heads = p.heads,
                   .group = p.group,
                   .head_state = p.head_state,
                   .scope = scope,
                   .page = 1,
                   .score_capacity = p.score_capacity,
                   .vote_capacity = vote_capacity,
                   .window = window}});
    r.record(TopK{votes,
                  {},
                  pos,
                  gate,
                  list,
                  {.heads = p.heads,
                   .head_state = p.head_state,
                   .keep = kKeepOfStep,
                   .page = 1,
                   .by_position = scope == kVoteLayer,
                   .score_capacity = vote_capacity,
                   .list_capacity = list_capacity}});
  }
};

// The order of scores in top_k: NaN counts as -inf, ties go to the larger index.
inline std::vector<uint32_t> largest(const std::vector<float>& scores, uint32_t begin, uint32_t end,
                                     uint32_t count) {
  std::vector<uint32_t> order(end - begin);
  std::iota(order.begin(), order.end(), begin);
  const auto value = [&](uint32_t i) {
    return std::isnan(scores[i]) ? -std::numeric_limits<float>::infinity() : scores[i];
  };
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return value(a) != value(b) ? value(a) > value(b) : a > b; });
  order.resize(std::min<size_t>(count, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace thimble::test
