// Tests retainers of every kind: the files that are read and refused, and the scores, compared with the
// formulas of the methods in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numbers>
#include <numeric>

#include "runtime/policy/policy.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"
#include "tests/support/tiny_model.h"

namespace thimble::test {
namespace {

// ---- files ----

class RetainerFile : public testing::Test {
 protected:
  Result<std::shared_ptr<const Retainer>> open(const FileBytes& bytes) {
    return model_->open_retainer(lend(bytes), "r.gguf");
  }
  Result<std::shared_ptr<const Retainer>> open(const GgufWriter& w) { return open(bytes_ = w.bytes()); }
  void expect_refused(const GgufWriter& w, Code code, const std::string& part) {
    const Status status = open(w).status();
    EXPECT_EQ(code_name(status.code()), std::string(code_name(code))) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }

 private:
  FileBytes model_bytes_ = tiny_model("llama").bytes(), bytes_;
  std::shared_ptr<const Model> model_ = must(Model::open(lend(model_bytes_), "m.gguf"));
};

const char* const kKinds[] = {"locret", "linear", "mlp", "sink"};

TEST_F(RetainerFile, OfEveryKindIsRead) {
  for (const std::string kind : kKinds) {
    SCOPED_TRACE(kind);
    const auto r = must(open(tiny_retainer("llama", kind)));
    EXPECT_STREQ(kKinds[static_cast<int>(r->kind)], kind.c_str());
    EXPECT_EQ(r->input, kind == "locret" ? Retainer::Input::kQkv : Retainer::Input::kX);
    EXPECT_EQ(r->stabilizers, 7u);
    EXPECT_EQ(r->protect_init, 2u);
    ASSERT_EQ(r->layers.size(), 2u);
    const bool hidden = kind == "locret" || kind == "mlp";
    EXPECT_EQ(bool(r->layers[1].fc1), hidden);
    EXPECT_EQ(bool(r->layers[1].fc2), kind != "sink");
    EXPECT_EQ(bool(r->layers[1].fc2_bias), kind == "mlp" || kind == "linear");
    EXPECT_EQ(bool(r->layers[1].sinks), kind == "sink");
    const auto [first, second] = r->matrices();
    EXPECT_EQ(first.rows, kind == "linear" ? 0 : hidden ? 3 : 8);
    EXPECT_EQ(second.rows, kind == "sink" ? 4u : 1u);
    EXPECT_EQ(r->tensors().size(), 2 * (kind == "sink" ? 7u : kind == "mlp" ? 4u : 2u));
  }
}

TEST_F(RetainerFile, SaysWhatItIs) {
  const auto with = [](const char* key, const auto& value) {
    return tiny_retainer("llama", "mlp").set(key, value);
  };
  expect_refused(with("retainer.kind", "gru"), Code::kUnsupported,
                 "key 'retainer.kind' is 'gru', where locret, linear, mlp and sink are supported");
  expect_refused(with("retainer.input", "k"), Code::kUnsupported, "'k', where qkv and x are supported");
  expect_refused(with("retainer.act", "relu"), Code::kUnsupported,
                 "'relu', where silu, gelu and gelu_erf are");
  expect_refused(with("adapter.type", "lora"), Code::kFormat, "r.gguf holds no retainer");
  expect_refused(with("retainer.retention", "window"), Code::kUnsupported,
                 "key 'retainer.retention' is 'window', where locret, keydiff and mix are supported");
  expect_refused(tiny_retainer("llama", "mlp").erase("retainer.kind"), Code::kFormat,
                 "lacks the key 'retainer.kind'");
  expect_refused(with("retainer.base.head_count", 3u), Code::kMismatch, "'retainer.base.head_count' is 3");
  expect_refused(with("retainer.base.fingerprint", uint64_t{1}), Code::kMismatch, "the fingerprint is");
  EXPECT_EQ(must(open(with("retainer.act", "gelu")))->act, kActGelu);
  EXPECT_EQ(must(open(tiny_retainer("llama", "mlp").erase("retainer.act")))->act, kActGeluErf);
  // The default of llama.
  EXPECT_EQ(must(open(tiny_retainer("llama", "locret").erase("retainer.act")))->act, kActSilu);
}

// Every tensor is required, in the shape that keys and model define, and no other tensor is allowed.
TEST_F(RetainerFile, HasAllTensorsInTheirShapes) {
  for (const std::string kind : kKinds) {
    const GgufWriter whole = tiny_retainer("llama", kind);
    for (const GgufWriter::Tensor& tensor : whole.tensors) {
      SCOPED_TRACE(kind + ", " + tensor.name);
      GgufWriter lacks = whole;
      expect_refused(lacks.erase_tensor(tensor.name), Code::kFormat,
                     "lacks the tensor '" + tensor.name + "'");
      GgufWriter larger = whole;
      std::vector<uint64_t> shape = tensor.shape;
      ++shape.back();
      const uint64_t elements = std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
      larger.tensor(tensor.name, shape, std::vector<float>(elements));
      expect_refused(larger, Code::kFormat, "tensor '" + tensor.name + "' is ");
    }
    GgufWriter more = whole;
    more.tensor("blk.0.retain_norm.weight", {8}, std::vector<float>(8));
    expect_refused(more, Code::kUnsupported, "'blk.0.retain_norm.weight' has no place");
  }
  GgufWriter halves = tiny_retainer("llama", "sink");
  halves.tensor("blk.0.retain_kbase", {4, 5}, 1, FileBytes(40));
  expect_refused(halves, Code::kUnsupported, "'blk.0.retain_kbase' is of type f16, where f32 is needed");
  for (const char* key : {"retainer.rank", "retainer.sinks"}) {
    expect_refused(tiny_retainer("llama", "sink").erase(key), Code::kFormat, "lacks the key");
    expect_refused(tiny_retainer("llama", "sink").set(key, 3u), Code::kFormat, "where");
  }
}

TEST_F(RetainerFile, SurvivesEveryByteReplaced) {
  size_t accepted = 0;
  for (const std::string kind : kKinds) {
    const FileBytes good = tiny_retainer("llama", kind).bytes();
    for (const uint8_t replaced : {0x00, 0x01, 0x40, 0xff})
      for (size_t at = 0; at < good.size(); ++at) {
        FileBytes bytes = good;
        bytes[at] = std::byte{replaced};
        const auto retainer = open(bytes);
        accepted += retainer.ok();
        ASSERT_EQ(retainer.ok(), retainer.status().message().empty());
      }
  }
  EXPECT_GT(accepted, 0u);
}

// ---- scores ----

using Vector = ReferenceModel::Vector;
using Tensors = std::map<std::string, std::vector<float>>;  // the tensors of a file by name

Vector product(const std::vector<float>& w, const std::vector<float>& bias, const Vector& x) {
  Vector y(w.size() / x.size());
  for (size_t i = 0; i < y.size(); ++i) {
    y[i] = std::inner_product(x.begin(), x.end(), w.begin() + static_cast<ptrdiff_t>(i * x.size()), 0.0);
    if (!bias.empty()) y[i] += bias[i];
  }
  return y;
}

double activated(const std::string& act, double x) {
  if (act == "gelu_erf") return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
  const double u = act == "gelu" ? 2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x) : x;
  return x / (1 + std::exp(-u));
}

// Normalises vectors of as many channels as there are weights to a root mean square of 1, and multiplies them
// with the weights.
void norm(Vector& x, const std::vector<float>& weight) {
  for (size_t at = 0; at < x.size(); at += weight.size()) {
    const auto first = x.begin() + static_cast<ptrdiff_t>(at),
               last = first + static_cast<ptrdiff_t>(weight.size());
    const double squares = std::inner_product(first, last, first, 0.0);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(weight.size()) + 1e-6);
    for (size_t c = 0; c < weight.size(); ++c) x[at + c] *= scale * weight[c];
  }
}

// The score of each KV head, for a token whose input to the layer's tensors is x.
Vector scores(const Seeded& s, Tensors& all, uint32_t layer, const Vector& x) {
  const std::string name = "blk." + std::to_string(layer) + (s.kind.empty() ? ".locret" : ".retain");
  if (s.kind == "linear") return product(all[name + ".weight"], all[name + ".bias"], x);
  if (s.kind != "sink") {
    Vector hidden = product(all[name + "_fc1.weight"], all[name + "_fc1.bias"], x);
    for (double& h : hidden) h = activated(s.act, h);
    return product(all[name + "_fc2.weight"], all[name + "_fc2.bias"], hidden);
  }
  Vector q = product(all[name + "_q.weight"], all[name + "_q.bias"], x),
         k = product(all[name + "_k.weight"], {}, x);
  norm(q, all[name + "_q_norm.weight"]);
  norm(k, all[name + "_k_norm.weight"]);
  const Vector sinks(all[name + "_kbase"].begin(), all[name + "_kbase"].end());
  const auto dot = [&](uint32_t head, const Vector& y, uint32_t row) {
    double sum = 0;
    for (uint32_t c = 0; c < s.rank; ++c) sum += q[head * s.rank + c] * y[row * s.rank + c];
    return sum / std::sqrt(double(s.rank));
  };
  Vector score(s.kv_heads);
  for (uint32_t head = 0; head < s.heads; ++head) {
    const uint32_t kv_head = head / (s.heads / s.kv_heads);
    const double own = dot(head, k, kv_head) + all[name + "_b"][head];
    double others = 0;
    for (uint32_t sink = 0; sink < s.sinks; ++sink)
      others += std::exp(dot(head, sinks, kv_head * s.sinks + sink) - own);
    score[kv_head] += 1 / (1 + others) * s.kv_heads / s.heads;
  }
  return score;
}

const Seeded kRetainers[] = {{},
                             {.kind = "locret"},
                             {.kind = "locret", .input = "x"},
                             {.kind = "linear"},
                             {.kind = "linear", .input = "qkv"},
                             {.kind = "mlp", .act = "gelu_erf"},
                             {.kind = "mlp", .act = "gelu", .d_retain = 37},
                             {.kind = "mlp", .input = "qkv", .act = "silu"},
                             growing({.kind = "mlp", .input = "qkv"}),
                             {.kind = "sink"},
                             {.kind = "sink", .rank = 6, .sinks = 35}};

SessionOptions options_of(const SeededModel& m) {
  return {.retainer = m.retainer,
          .retention = Retention::kLocret,
          .pool = 60,
          .chunk = 20,
          .stabilizers = 12,
          .local = 10,
          .max_new = 32};
}

// Tests tokens that are read in chunks, at the end of a prompt, and decoded; the scores of decoded tokens
// come from the ring.
TEST(Retainer, OfEveryKindGivesTheScoresOfItsFormula) {
  for (Seeded s : kRetainers) {
    SCOPED_TRACE(s.kind + " " + s.input + " " + s.act);
    Tensors tensors;
    s.edit = [&](const std::string& name, std::vector<float>& values) { tensors[name] = values; };
    const SeededModel m = seeded_model(s);
    ASSERT_TRUE(m.retainer);
    Followed f(m.model, options_of(m));
    std::map<int32_t, Vector> expected[2];  // for each layer, by position
    f.on_token = [&](int32_t position) {
      const bool qkv = m.retainer->input == Retainer::Input::kQkv;
      for (uint32_t layer = 0; layer < 2; ++layer)
        expected[layer][position] =
            scores(s, tensors, layer, qkv ? f.reference.projections(layer) : f.reference.input(layer));
    };
    f.read(seeded_tokens(150));
    for (const int32_t token : {3, 14, 15, 9, 26, 5, 35}) f.accept(token);
    f.read(seeded_tokens(5, 64, 8));  // scores the tokens in the ring
    for (uint32_t layer = 0; layer < 2; ++layer)
      for (uint32_t head = 0; head < 2; ++head) {
        const std::map<int32_t, float> got = f.scores(layer, head);
        ASSERT_TRUE(got.contains(140) && got.contains(150) && got.contains(156) && got.size() > 60u);
        double largest = 0, distance = 0;
        for (const auto& [position, score] : got) {
          const double exact = expected[layer].at(position)[head];
          ASSERT_TRUE(std::isfinite(score));
          largest = std::max(largest, std::abs(exact));
          distance = std::max(distance, std::abs(score - exact));
        }
        // Layer 0 sums at most 64 products twice, of numbers a few times as large as the result, so the
        // tolerance is 2 * 64 * 8 half ulps of f32. The input of the other layer depends on attention over
        // halves (expect_close).
        EXPECT_LE(distance, largest * (layer == 0 ? 0x1p-14 : 0x1p-9)) << "layer " << layer << ", " << head;
      }
  }
}

// Layers with a window keep their last tokens, so no tensors of a retainer are read or placed for them.
TEST(Retainer, NeedsNoTensorsForLayersWithAWindow) {
  for (const bool covers : {false, true}) {
    const SeededModel m = seeded_model({.layers = 4, .kind = "mlp", .covers_windows = covers, .window = 20});
    ASSERT_TRUE(m.retainer);
    EXPECT_EQ(m.retainer->tensors().size(), 2 * 4u);
    Followed f(m.model, options_of(m));
    f.read(seeded_tokens(150));
    for (int32_t i = 0; i < 40; ++i) f.accept(i);
    EXPECT_EQ(must(f->kept_count(0, 0)), must(f->kept_count(0, 1)));
    EXPECT_GT(must(f->stats()).evicted, 0u);
  }
}

// The shares of windowed layers are not distributed to other layers.
TEST(Retainer, DividesThePoolsOfLayersWithoutAWindow) {
  // Layer 0 has the window.
  const SeededModel m = seeded_model({.kind = "linear", .shares = {9, 9, 1, 2}, .window = 20});
  ASSERT_TRUE(m.retainer);
  SessionOptions o = options_of(m);
  o.pool = 400;
  const auto session = open_session(m.model, o);
  const std::vector<HeadRun>& runs = session->plan().dimensions.last_runs();
  EXPECT_EQ(runs[0].keep, 20u);
  EXPECT_EQ(runs[2].keep + runs[3].keep, 800u);
  // Each head gets 64 entries. The other 672 are divided by the shares above 64 / 400, which are 2/3 - 0.16
  // to 4/3 - 0.16.
  EXPECT_EQ(runs[2].keep, 266u);  // 64 + 202.7
}

TEST(Retainer, GivesDefaultsThatItWasTrainedWith) {
  const SeededModel m = seeded_model({.kind = "linear"});
  Retainer trained;  // the same as in the file, with other numbers
  trained.stabilizers = 100;
  trained.protect_init = 4;
  SessionOptions o{.retainer = std::shared_ptr<const Retainer>(m.retainer, &trained),
                   .retention = Retention::kLocret};
  const auto stabilizers = [&](uint32_t pool) {
    SessionOptions resolved = o;
    resolved.pool = pool;
    must(Policies(o).retention->resolve(*m.model, resolved));
    EXPECT_EQ(resolved.protect_init, 4u);
    return resolved.stabilizers;
  };
  EXPECT_EQ(stabilizers(1000), 100u);
  EXPECT_EQ(stabilizers(100), 50u);  // half, so that the scores have a choice
  EXPECT_EQ(stabilizers(7), 2u);     // one in addition to the first four
  trained.budget = 500;              // a number of entries is treated as a share
  EXPECT_EQ(stabilizers(1000), 200u);
  trained.stabilizers = 0;
  EXPECT_EQ(stabilizers(1000), 250u);
  trained.protect_init = 0;  // the value of a file applies even if it is 0
  must(Policies(o).retention->resolve(*m.model, o));
  EXPECT_EQ(o.protect_init, 0u);
}

}  // namespace
}  // namespace thimble::test
