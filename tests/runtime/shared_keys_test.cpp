// Layers that attend to the keys of an earlier layer (gemma4), compared with a computation in double that
// knows which entries the earlier layer held, but neither chunks nor compactions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "base/bits.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"
#include "tests/support/synthetic_model.h"

namespace thimble::test {
namespace {

using Vector = std::vector<double>;
// As in families_test.cpp: a wrong position or list moves logits by a tenth or more.
constexpr float kRounding = 0x1p-7f;

// Evaluates tiny-gemma4-e2b token by token: heads of two widths, layers without keys, token branches.
class Reference {
 public:
  using Sees = std::function<std::vector<int32_t>(uint32_t layer, uint32_t head)>;

  Reference(const Model& model, Positions positions)
      : m_(model), positions_(positions), k_(model.shape.layers), v_(model.shape.layers) {}

  std::vector<float> append(int32_t token, size_t position, const Sees& sees) {
    const double d = m_.shape.d_model;
    Vector x = row(m_.token_embedding, static_cast<size_t>(token));
    for (double& value : x) value *= std::sqrt(d);
    const Vector first = x;
    for (uint32_t i = 0; i < m_.shape.layers; ++i) {
      const Layer& layer = m_.layers[i];
      add(x, norm(product(layer.attention()->output, attend(i, norm(x, layer.norm), position, sees)),
                  layer.post_norm));
      const Dense& f = std::get<Dense>(layer.feed_forward);
      const Vector in = norm(x, layer.ffn_norm);
      add(x, norm(product(f.down, times(gelu(product(f.gate, in)), product(f.up, in))), layer.post_ffn_norm));
      const TokenBranch& b = layer.token_branch;
      const size_t width = b.width();
      Vector part = product(b.project, first);
      for (double& value : part) value /= std::sqrt(d);
      part = norm(part, b.project_norm);
      const Vector of_token = row(m_.layer_embedding, static_cast<size_t>(token));
      for (size_t c = 0; c < width; ++c)
        part[c] = (part[c] + std::sqrt(double(width)) * of_token[i * width + c]) / std::sqrt(2.0);
      add(x, norm(product(b.out, times(gelu(product(b.gate, x)), part)), b.out_norm));
      for (double& value : x) value *= double{layer.scale};
    }
    Vector logits = product(m_.output, norm(x, m_.output_norm));
    for (double& l : logits) l = double{m_.logit_cap} * std::tanh(l / double{m_.logit_cap});
    return {logits.begin(), logits.end()};
  }

 private:
  // All values of a tensor, f32 or f16.
  const Vector& values(const Tensor& t) {
    Vector& all = values_[t.data];
    if (!all.empty()) return all;
    for (uint64_t i = 0; i < uint64_t(t.rows) * t.cols; ++i) {
      float value;
      uint16_t half;
      if (t.type == DType::kF32)
        std::memcpy(&value, t.data + i * sizeof value, sizeof value);
      else
        std::memcpy(&half, t.data + i * sizeof half, sizeof half), value = f16_to_f32(half);
      all.push_back(double{value});
    }
    return all;
  }
  Vector row(const Tensor& t, size_t i) {
    const auto begin = values(t).begin() + static_cast<std::ptrdiff_t>(i * t.cols);
    return {begin, begin + t.cols};
  }
  Vector product(const Tensor& t, const Vector& x) {
    const Vector& w = values(t);
    Vector y(t.rows);
    for (size_t i = 0; i < t.rows; ++i)
      y[i] = std::inner_product(x.begin(), x.end(), w.begin() + static_cast<std::ptrdiff_t>(i * t.cols), 0.0);
    return y;
  }
  // Without a weight, the norm of a vector.
  Vector norm(Vector x, const Tensor& weight) {
    const double squares = std::inner_product(x.begin(), x.end(), x.begin(), 0.0),
                 root = std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= (weight ? values(weight)[i] : 1) / root;
    return x;
  }
  Vector norm_heads(const Vector& x, size_t width, const Tensor& weight) {
    Vector y;
    for (auto head = x.begin(); head != x.end(); head += static_cast<std::ptrdiff_t>(width)) {
      const Vector normed = norm({head, head + static_cast<std::ptrdiff_t>(width)}, weight);
      y.insert(y.end(), normed.begin(), normed.end());
    }
    return y;
  }
  static Vector gelu(Vector x) {
    for (double& v : x) v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    return x;
  }
  static Vector times(Vector x, const Vector& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] *= y[i];
    return x;
  }
  static void add(Vector& x, const Vector& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  // Windowed layers rotate all channels on base 1e4; of others the first quarter turns, on base 1e6.
  static void rotate(double* head, const AttentionMixer& m, size_t position) {
    const size_t half = m.head_dim / 2, turning = m.window ? half : half / 4;
    for (size_t i = 0; i < turning; ++i) {
      const double angle = double(position) * std::pow(m.window ? 1e4 : 1e6, -double(i) / double(half));
      const double a = head[i], b = head[i + half];
      head[i] = a * std::cos(angle) - b * std::sin(angle);
      head[i + half] = a * std::sin(angle) + b * std::cos(angle);
    }
  }
  static Vector halves(Vector x) {
    for (double& value : x) value = double{f16_to_f32(f32_to_f16(static_cast<float>(value)))};
    return x;
  }

  Vector attend(uint32_t layer, const Vector& in, size_t position, const Sees& sees) {
    const AttentionMixer& m = *m_.layers[layer].attention();
    const size_t width = m.head_dim;
    const bool listed = positions_ == Positions::kList;
    Vector q = norm_heads(product(m.q, in), width, m.q_norm);
    if (m.k) {
      Vector k = norm_heads(product(m.k, in), width, m.k_norm);
      for (size_t at = 0; at < k.size() && !listed; at += width) rotate(&k[at], m, position);
      k_[layer].resize(position);
      v_[layer].resize(position);
      k_[layer].push_back(halves(k));
      v_[layer].push_back(halves(norm_heads(product(m.v, in), width, {})));
    }
    Vector y(q.size());
    for (uint32_t head = 0; head < m.heads; ++head) {
      const uint32_t kv_head = head / m.group();
      std::vector<int32_t> seen = sees(layer, kv_head);
      seen.push_back(static_cast<int32_t>(position));
      rotate(&q[head * width], m, listed ? seen.size() - 1 : position);
      Vector weights;
      for (size_t i = 0; i < seen.size(); ++i) {
        const Vector& stored = k_[m.owner][static_cast<size_t>(seen[i])];
        Vector k(&stored[kv_head * width], &stored[kv_head * width] + width);
        if (listed) rotate(k.data(), m, i);
        weights.push_back(std::inner_product(k.begin(), k.end(), &q[head * width], 0.0));
      }
      const double most = *std::max_element(weights.begin(), weights.end());
      double sum = 0;
      for (double& w : weights) sum += w = std::exp(w - most);
      for (size_t i = 0; i < seen.size(); ++i)
        for (size_t c = 0; c < width; ++c)
          y[head * width + c] +=
              weights[i] / sum * v_[m.owner][static_cast<size_t>(seen[i])][kv_head * width + c];
    }
    return y;
  }

  const Model& m_;
  const Positions positions_;
  std::map<const std::byte*, Vector> values_;
  std::vector<std::vector<Vector>> k_, v_;  // [layer][position][kv head * head_dim]
};

// A chunk or a token: what each head held before it.
struct Begun {
  size_t position = 0, rows = 0;
  Kept held;
};

class SharedKeys : public ::testing::Test {
 protected:
  void SetUp() override {
    THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
    model_ = SyntheticFile("tiny-gemma4-e2b f16 FILE --seed 4 --sharp 3", "shared_keys").open();
  }

  // Reads a text in chunks and some tokens after it, and compares the logits.
  void expect_reference(const SessionOptions& o) {
    Watched w(model_, o);
    std::vector<Begun> steps;
    w.device->before_submit = [&](const Program& program, const StepParams& step,
                                  std::span<const HeadState>) {
      const uint32_t layers = model_->shape.layers;
      const bool chunk = program.segments > layers + 1, token = program.segments == 1 && step.n_rows == 1;
      const auto position = static_cast<size_t>(step.position);
      if ((!chunk && !token) || !step.n_rows || (!steps.empty() && steps.back().position == position)) return;
      steps.push_back({position, step.n_rows, kept(*w)});
    };
    std::vector<int32_t> text = seeded_tokens(150, model_->shape.vocab);
    std::vector<std::vector<float>> logits = {read(*w, text)};
    for (const int32_t token : seeded_tokens(6, model_->shape.vocab, 8)) {
      text.push_back(token);
      logits.push_back(accept(*w, token));
    }
    Reference reference(*model_, w->plan().options.positions);
    std::vector<std::vector<float>> expected;
    for (const Begun& step : steps)
      for (size_t position = step.position; position < step.position + step.rows; ++position)
        expected.push_back(reference.append(text[position], position, [&](uint32_t layer, uint32_t head) {
          return seen_from(step, layer, head, position);
        }));
    ASSERT_EQ(expected.size(), text.size());
    for (size_t i = 0; i < logits.size(); ++i)
      expect_close(logits[i], expected[expected.size() - logits.size() + i], kRounding);
  }

  // The positions before a token that it sees: the held ones and those of its step, or its window.
  std::vector<int32_t> seen_from(const Begun& step, uint32_t layer, uint32_t head, size_t position) const {
    const auto own = static_cast<int32_t>(position);
    std::vector<int32_t> seen;
    const auto window = static_cast<int32_t>(model_->layers[layer].attention()->window);
    if (!window) seen = step.held[model_->layers[layer].attention()->owner][head];
    for (int32_t p = window ? std::max(0, own - window + 1) : static_cast<int32_t>(step.position); p < own;
         ++p)
      seen.push_back(p);
    return seen;
  }

  std::shared_ptr<const Model> model_;
};

TEST_F(SharedKeys, AreThoseOfTheLastEarlierLayerOfTheSameKind) {
  for (uint32_t i = 0; i < 10; ++i) {
    const AttentionMixer& m = *model_->layers[i].attention();
    EXPECT_EQ(m.has_keys(), i < 5);
    EXPECT_EQ(m.owner, i < 5 ? i : i == 9 ? 4u : 3u);
    EXPECT_EQ(m.last_reader, i == 3 ? 8u : i == 4 ? 9u : i);
    EXPECT_EQ(m.first_run, m.owner);  // one KV head a layer
  }
  EXPECT_EQ(model_->layer_of_run, (std::vector<uint32_t>{0, 1, 2, 3, 4}));
}

// Layers that read keys after their owner see the whole chunk, whatever the owner evicts after it.
TEST_F(SharedKeys, OutlastTheEvictionOfTheirChunk) {
  for (const Positions positions : {Positions::kList, Positions::kOriginal})
    for (const Retention retention :
         {Retention::kNone, Retention::kRandom, Retention::kKeyDiff, Retention::kTova, Retention::kReread}) {
      SCOPED_TRACE(policy_name(retention));
      SessionOptions o{
          .retention = retention, .pool = 40, .chunk = 32, .max_new = 16, .positions = positions};
      if (retention == Retention::kNone)
        o.pool = 200;
      else
        o.stabilizers = 5, o.local = 10;
      expect_reference(o);
    }
}

// A device with its own memory gets the rows of a step's tokens, and the matrices of experts without what the
// file has between them.
TEST(Gemma4, EqualsItselfOnADeviceWithItsOwnMemory) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  for (const std::string family : {"gemma4-e2b", "gemma4moe"}) {
    SCOPED_TRACE(family);
    const auto model =
        SyntheticFile("tiny-" + family + " f16 FILE --seed 4 --sharp 3", "own_memory_" + family).open();
    const SessionOptions o{.pool = 200, .chunk = 32, .max_new = 16};
    const auto discrete = std::make_shared<SpyDevice>(cpu());
    discrete->discrete = true;
    const std::vector<int32_t> text = seeded_tokens(100, model->shape.vocab);
    const auto one = open_session(model, o), other = open_session(model, o, discrete);
    EXPECT_EQ(read(*one, text), read(*other, text));
    EXPECT_EQ(accept(*one, 7), accept(*other, 7));
  }
}

}  // namespace
}  // namespace thimble::test
