// What the tests of the KV ops compare with: plain loops in double precision, and operands made for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/ops/op_test.h"

namespace thimble::test {

// How a test's keys and queries rotate.
struct Rotation {
  uint32_t mode = kRopeList, pairing = kRopeAdjacent, n_rot = 64;
  double factor = 1;  // the model's attention factor

  RopeParams params() const { return {mode, pairing, n_rot}; }
  double frequency(uint32_t pair) const { return std::pow(10000.0, -2.0 * pair / n_rot); }
  // The table of backend.h for positions below `positions`.
  std::vector<float> table(uint32_t positions) const {
    std::vector<float> t;
    for (uint32_t row = 0; row < 64 + positions / 64 + 1; ++row)
      for (uint32_t p = 0; p < n_rot / 2; ++p) {
        const double angle = (row < 64 ? row : (row - 64) * 64.0) * frequency(p), f = row < 64 ? 1 : factor;
        t.push_back(static_cast<float>(f * std::cos(angle)));
        t.push_back(static_cast<float>(f * std::sin(angle)));
      }
    return t;
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

// `picked` of n entries in ascending order, the last `last` among them.
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

// Lists as ops take them: [heads][capacity], poison where a list has ended.
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
  return {l + 1, l + 1 + *l};
}

// softmax(q k^T * scale) v for one query: keys and values as they are multiplied.
inline std::vector<double> attend(const std::vector<double>& q, const std::vector<std::vector<double>>& k,
                                  const std::vector<std::vector<double>>& v, double scale) {
  std::vector<double> s;
  for (const auto& key : k) s.push_back(dot(q, key) * scale);
  const double top = *std::max_element(s.begin(), s.end());
  std::vector<double> y(v[0].size());
  double sum = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    const double weight = std::exp(s[i] - top);
    sum += weight;
    for (size_t c = 0; c < y.size(); ++c) y[c] += weight * v[i][c];
  }
  for (double& f : y) f /= sum;
  return y;
}

// A bound on attention's error for |q| <= q_max, |k|, |v| <= 1, n keys. A score is a sum of dh products, each
// rotated, scaled and rounded about 8 times before, times factor^2 / sqrt(dh): it errs by at most (dh + 8)
// 2^-24 q_max sqrt(dh) factor^2. A weight errs by twice that, relatively, and 2^-21 for the exponential and
// the rescaling; sums over n keys are made in tiles of 64.
inline double attention_tolerance(uint32_t head_dim, double q_max, uint32_t n, double factor = 1) {
  const double score = (head_dim + 8) * 0x1p-24 * q_max * std::sqrt(head_dim) * factor * factor;
  return 2 * score + 0x1p-21 + (64 + n / 64.0) * 0x1p-24;
}

// Score order of top_k: NaN as -inf, ties to the larger index.
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
