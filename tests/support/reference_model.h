// A model in double precision and the expected answers of its sessions. It is written independently, token by
// token, and shares nothing with the ops, chunks, runs and lists that are tested.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "base/bits.h"
#include "tests/support/watched.h"

namespace thimble::test {

// Other orders of summation and other kernels differ in the last bit of f32. This occasionally rounds a key
// or value to the neighbouring half, 2^-11 of it. A few such steps through two layers stay below 2^-9 of the
// logits; a wrong position or list moves them by a tenth or more.
inline void expect_close(const std::vector<float>& got, const std::vector<float>& expected,
                         float share = 0x1p-9f) {
  ASSERT_EQ(got.size(), expected.size());
  float scale = 0, distance = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(got[i]));
    scale = std::max(scale, std::abs(expected[i]));
    distance = std::max(distance, std::abs(got[i] - expected[i]));
  }
  EXPECT_LE(distance, scale * share);
}

// Evaluates a model of f32 weights with adjacent rotary pairs (llama, mistral3), without rope scaling.
class ReferenceModel {
 public:
  using Vector = std::vector<double>;
  // Positions before a token's own that the token attends to in a KV head of a layer, ascending.
  using Sees = std::function<std::vector<int32_t>(uint32_t layer, uint32_t head)>;

  ReferenceModel(const Model& model, Positions positions)
      : m_(model),
        s_(model.shape),
        positions_(positions),
        in_(s_.layers),
        qkv_(s_.layers),
        grown_(s_.layers),
        q_(s_.layers),
        k_(s_.layers),
        v_(s_.layers) {}

  // The logits after this token, whose position is `position`. Tokens at or after that position are replaced.
  std::vector<float> append(int32_t token, size_t position, const Sees& sees) {
    Vector x = row(m_.token_embedding, static_cast<uint32_t>(token));
    attended_.assign(position + 1, 0);
    moved_ = 0;
    for (uint32_t layer = 0; layer < s_.layers; ++layer) {
      const AttentionMixer& w = *m_.layers[layer].attention();
      const Dense& f = std::get<Dense>(m_.layers[layer].feed_forward);
      const Vector in = norm(x, m_.layers[layer].norm), of_token = product(w.q, in),
                   q = grown(of_token, position);
      k_[layer].resize(position);
      v_[layer].resize(position);
      const Vector k = product(w.k, in), v = product(w.v, in);
      k_[layer].push_back(halves(k, position));
      v_[layer].push_back(halves(v, 0));
      in_[layer] = in;
      qkv_[layer] = of_token;
      for (const Vector& part : {k, v}) qkv_[layer].insert(qkv_[layer].end(), part.begin(), part.end());
      grown_[layer] = q_[layer] = q;
      for (uint32_t head = 0; head < s_.heads; ++head) rotate(&q_[layer][head * s_.head_dim], position);
      Vector y(q.size());
      for (uint32_t head = 0; head < s_.heads; ++head) {
        const uint32_t kv_head = head / (s_.heads / s_.kv_heads);
        std::vector<int32_t> seen = sees(layer, kv_head);
        seen.push_back(static_cast<int32_t>(position));
        attend(layer, kv_head, &q[head * s_.head_dim], seen, &y[head * s_.head_dim]);
        moved_ = std::max(moved_, largest_logit(layer, kv_head, &q[head * s_.head_dim], seen));
      }
      add(x, product(w.output, y));
      const Vector ffn = norm(x, m_.layers[layer].ffn_norm);
      Vector gate = product(f.gate, ffn);
      const Vector up = product(f.up, ffn);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      add(x, product(f.down, gate));
    }
    const Vector logits = product(m_.output, norm(x, m_.output_norm));
    return {logits.begin(), logits.end()};
  }

  uint64_t saturated = 0;  // numbers of keys and values beyond the range of halves

  // A key as stored in the pool: unrotated, or rotated to its position.
  std::span<const double> key(uint32_t layer, uint32_t kv_head, int32_t position) const {
    return std::span(k_[layer][static_cast<size_t>(position)]).subspan(kv_head * s_.head_dim, s_.head_dim);
  }
  // For the last token: the input of its query, key and value; and these three before rotation and before the
  // query is scaled by position.
  const Vector& input(uint32_t layer) const { return in_[layer]; }
  const Vector& projections(uint32_t layer) const { return qkv_[layer]; }
  // The last token's queries as attention uses them, but unrotated; and one of them rotated to its position.
  const Vector& queries(uint32_t layer) const { return grown_[layer]; }
  std::span<const double> query(uint32_t layer, uint32_t head) const {
    return std::span(q_[layer]).subspan(head * s_.head_dim, s_.head_dim);
  }
  // The attention that the last token paid to positions, averaged over layers and query heads.
  const Vector& attended() const { return attended_; }
  // The largest product of the lengths of a query of the last token and of a key that it saw, scaled as
  // logits are. A session's keys may be the neighbouring halves of the reference's, 2^-10 off, and move a
  // logit by that much of this value.
  double most_moved() const { return moved_; }
  double largest_logit(uint32_t layer, uint32_t kv_head, const double* q,
                       const std::vector<int32_t>& seen) const {
    const double of_query = std::inner_product(q, q + s_.head_dim, q, 0.0);
    double largest = 0;
    for (const int32_t p : seen) {
      const auto k = key(layer, kv_head, p);
      const double of_key = std::inner_product(k.begin(), k.end(), k.begin(), 0.0);
      largest = std::max(largest, std::sqrt(of_query * of_key / s_.head_dim));
    }
    return largest;
  }
  // The logits of an unrotated query, which comes last among the positions that it sees. Under list positions
  // a key rotates by its index among the seen.
  Vector logits(uint32_t layer, uint32_t kv_head, const double* q, const std::vector<int32_t>& seen) const {
    const bool list = positions_ == Positions::kList;
    Vector query(q, q + s_.head_dim), logits;
    rotate(query.data(), list ? seen.size() - 1 : static_cast<size_t>(seen.back()));
    for (size_t i = 0; i < seen.size(); ++i) {
      const auto stored = key(layer, kv_head, seen[i]);
      Vector k(stored.begin(), stored.end());
      if (list) rotate(k.data(), i);
      logits.push_back(std::inner_product(k.begin(), k.end(), query.begin(), 0.0) /
                       std::sqrt(double(s_.head_dim)));
    }
    return logits;
  }

 private:
  static constexpr double kLargestHalf = 65504;

  static Vector row(const Tensor& t, uint32_t i) {
    std::vector<float> values(t.cols);
    std::memcpy(values.data(), t.data + uint64_t(i) * t.cols * sizeof(float), t.cols * sizeof(float));
    return {values.begin(), values.end()};
  }
  static Vector product(const Tensor& t, const Vector& x) {
    Vector y(t.rows);
    for (uint32_t i = 0; i < t.rows; ++i) {
      const Vector w = row(t, i);
      y[i] = std::inner_product(w.begin(), w.end(), x.begin(), 0.0);
    }
    return y;
  }
  Vector norm(const Vector& x, const Tensor& weight) const {
    const double mean =
        std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / static_cast<double>(x.size());
    Vector y = row(weight, 0);
    for (size_t i = 0; i < y.size(); ++i) y[i] *= x[i] / std::sqrt(mean + m_.norm_epsilon);
    return y;
  }
  static void add(Vector& x, const Vector& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  void rotate(double* head, size_t position) const {
    for (uint32_t i = 0; i < s_.head_dim; i += 2) {
      const double angle = static_cast<double>(position) * std::pow(10000.0, -double(i) / s_.head_dim);
      const double a = head[i], b = head[i + 1];
      head[i] = a * std::cos(angle) - b * std::sin(angle);
      head[i + 1] = a * std::sin(angle) + b * std::cos(angle);
    }
  }
  Vector grown(Vector q, size_t position) const {
    const double periods = std::floor(static_cast<double>(position) / m_.rope.original_context);
    for (double& value : q) value *= 1 + double{m_.query_growth} * std::log(1 + periods);
    return q;
  }
  // Rounds a vector as the pool stores it.
  Vector halves(Vector x, size_t position) {
    if (positions_ == Positions::kOriginal)
      for (size_t at = 0; at < x.size(); at += s_.head_dim) rotate(&x[at], position);
    for (double& value : x) {
      saturated += std::abs(value) > kLargestHalf;
      value = f16_to_f32(f32_to_f16(static_cast<float>(std::clamp(value, -kLargestHalf, kLargestHalf))));
    }
    return x;
  }
  void attend(uint32_t layer, uint32_t kv_head, const double* q, const std::vector<int32_t>& seen,
              double* y) {
    Vector weights = logits(layer, kv_head, q, seen);
    const double most = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& w : weights) sum += w = std::exp(w - most);
    std::fill_n(y, s_.head_dim, 0.0);
    for (size_t i = 0; i < seen.size(); ++i) {
      attended_[static_cast<size_t>(seen[i])] += weights[i] / sum / (s_.layers * s_.heads);
      const double* v = &v_[layer][static_cast<size_t>(seen[i])][kv_head * s_.head_dim];
      for (uint32_t c = 0; c < s_.head_dim; ++c) y[c] += weights[i] / sum * v[c];
    }
  }

  const Model& m_;
  const ModelShape& s_;
  Positions positions_;
  Vector attended_;  // [position]
  double moved_ = 0;
  std::vector<Vector> in_, qkv_;            // [layer][...]
  std::vector<Vector> grown_, q_;           // [layer][head * head_dim]
  std::vector<std::vector<Vector>> k_, v_;  // [layer][position][kv head * head_dim]
};

// A session and a reference that follows it. In layers without a window, the reference attends to what the
// pools held when the chunk or token began, and to the listed entries among these; in the other layers to the
// last tokens of the text, whatever the pools hold.
class Followed : public Watched {
 public:
  Followed(const std::shared_ptr<const Model>& model, const SessionOptions& options,
           const std::shared_ptr<Device>& on = cpu())
      : Watched(model, options, on), reference(*model, session->plan().options.positions) {
    device->before_submit = [this](const Program& program, const StepParams& step,
                                   std::span<const HeadState> heads) {
      if (on_submit) on_submit(program, step, heads);
      const uint32_t layers = session->model().shape.layers;
      const bool again = program.segments == layers + 1;  // a second reading, which has no tail
      if (again && !heard_again_) {
        finish_step();
        if (on_second_reading) on_second_reading(step, kept(*session));
      }
      heard_again_ = again;
      const bool chunk = program.segments > layers + 1, token = program.segments == 1 && step.n_rows == 1;
      if ((!chunk && !token) || !step.n_rows || (running_ && step.position == step_.position)) return;
      finish_step();
      running_ = true;
      step_ = {step.position, step.n_rows, chunk, kept(*session)};
    };
  }
  Followed(const Followed&) = delete;

  ReferenceModel reference;
  std::vector<float> expected;  // expected logits after the last step
  std::function<void(const Program&, const StepParams&, std::span<const HeadState>)> on_submit;
  std::function<void(int32_t position)> on_token;  // called after the reference has read a token
  // Called before the last tokens are read again; `there` are the positions that the heads hold before them.
  std::function<void(const StepParams&, const Kept& there)> on_second_reading;

  void feed(std::span<const int32_t> tokens) {
    text_.insert(text_.end(), tokens.begin(), tokens.end());
    must(session->feed(tokens));
    finish_step();
  }
  // Reads tokens, or continues with one token, and compares the logits.
  void read(std::span<const int32_t> tokens) {
    feed(tokens);
    const std::vector<float> logits = flush(*session);
    finish_step();
    expect_close(logits, expected);
  }
  void accept(int32_t token) {
    text_.push_back(token);
    const std::vector<float> logits = test::accept(*session, token);
    finish_step();
    expect_close(logits, expected);
  }
  void rewind(uint64_t position) {
    must(session->rewind(position));
    text_.resize(position);
  }
  int32_t token(int32_t position) const { return text_.at(static_cast<size_t>(position)); }

 private:
  struct Step {
    int32_t position = 0;
    uint32_t rows = 0;
    bool chunk = false;
    Kept before;
  };

  void finish_step() {
    if (!running_) return;
    running_ = false;
    const SessionOptions& o = session->plan().options;
    const bool lists = o.selection != Selection::kDense && (!step_.chunk || o.select_prefill == 1);
    const auto made = lists ? this->lists() : decltype(this->lists())(session->model().shape.layers);
    for (uint32_t row = 0; row < step_.rows; ++row) {
      const int32_t position = step_.position + static_cast<int32_t>(row);
      expected = reference.append(text_.at(static_cast<size_t>(position)), static_cast<size_t>(position),
                                  [&](uint32_t layer, uint32_t head) {
                                    std::vector<int32_t> seen;
                                    if (const auto window = static_cast<int32_t>(
                                            session->model().layers[layer].attention()->window)) {
                                      for (int32_t p = std::max(0, position - window + 1); p < position; ++p)
                                        seen.push_back(p);
                                      return seen;
                                    }
                                    seen = step_.before[layer][head];
                                    for (int32_t p = step_.position; p < position; ++p) seen.push_back(p);
                                    if (made[layer].empty()) return seen;
                                    std::vector<int32_t> listed;
                                    for (const uint32_t entry : made[layer][head])
                                      if (entry < seen.size()) listed.push_back(seen[entry]);
                                    return listed;
                                  });
      if (on_token) on_token(position);
    }
  }

  std::vector<int32_t> text_;
  Step step_;
  bool running_ = false, heard_again_ = false;
};

}  // namespace thimble::test
