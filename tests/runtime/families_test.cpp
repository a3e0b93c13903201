// Tests policies on models of every family: windowed layers, sinks, soft caps, experts, layers without
// positions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string_view>

#include "tests/support/random.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"
#include "tests/support/synthetic_model.h"
#include "tests/support/tiny_model.h"

namespace thimble::test {
namespace {

constexpr const char* kFamilies[] = {"gemma3",
                                     "gemma2",
                                     "qwen3moe",
                                     "mixtral",
                                     "gpt_oss",
                                     "smollm3",
                                     "granite",
                                     "olmo2",
                                     "olmo3",
                                     "granitemoe_shared",
                                     "ministral3",
                                     "lfm2",
                                     "lfm2moe",
                                     "qwen35",
                                     "qwen35moe",
                                     "qwen3next",
                                     "seed_oss",
                                     "ernie45moe",
                                     "glm4",
                                     "glm4moe",
                                     "exaone4",
                                     "hunyuan",
                                     "minicpm",
                                     "cohere2",
                                     "cohere2moe",
                                     "gemma4",
                                     "gemma4moe",
                                     "gemma4_e2b",
                                     "gemma4_kv",
                                     "granitehybrid",
                                     "nemotronh",
                                     "nemotronh_latent",
                                     "falconh1",
                                     "deepseek2",
                                     "deepseek2_groups",
                                     "deepseek2_old"};
constexpr uint32_t kText = 200;
// The tolerance of logits against dense attention: that of expect_close(), times 4 because one rounding may
// exchange two experts with almost equal scores.
constexpr float kRounding = 0x1p-7f;

class Families : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!is_project_family(GetParam())) THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
    model_ = family_model(GetParam(), "family");
  }

  std::vector<int32_t> text() const { return seeded_tokens(kText, model_->shape.vocab); }
  std::vector<int32_t> behind(size_t count) const { return seeded_tokens(count, model_->shape.vocab, 8); }
  std::unique_ptr<Session> open(const SessionOptions& o) const { return open_session(model_, o); }
  // The logits after a text, and after some more tokens.
  std::vector<float> answer(const SessionOptions& o) const {
    const auto session = open(o);
    std::vector<float> logits = read(*session, text());
    for (const int32_t token : behind(8)) logits = accept(*session, token);
    return logits;
  }
  bool sees_windows() const {
    return std::any_of(model_->layers.begin(), model_->layers.end(),
                       [](const Layer& layer) { return layer.has_window(); });
  }
  void evict_clone_and_go_back(const SessionOptions&) const;
  // Only latent attention has no store.
  bool refuses_store(const SessionOptions& o) const {
    const auto made = Session::create(model_, cpu(), o);
    if (made.ok()) return false;
    EXPECT_TRUE(made.status().code() == Code::kUnsupported &&
                std::string(GetParam()).starts_with("deepseek2"))
        << made.status().message();
    return true;
  }

  std::shared_ptr<const Model> model_;
};
INSTANTIATE_TEST_SUITE_P(Of, Families, ::testing::ValuesIn(kFamilies),
                         [](const auto& family) { return std::string(family.param); });

SessionOptions dense() { return {.pool = 400, .chunk = 64, .max_new = 32}; }

SessionOptions retaining(Retention retention, uint32_t pool) {
  return {.retention = retention, .pool = pool, .chunk = 64, .stabilizers = 10, .local = 20, .max_new = 32};
}

SessionOptions selecting(SessionOptions o, Selection selection, uint32_t k) {
  o.selection = selection;
  o.select_k = k;
  o.select_init = 4;
  o.select_local = 16;
  if (selection == Selection::kQuest) o.select_page = 8, o.dense_layers = 1;
  return o;
}

constexpr Retention kRetentions[] = {Retention::kWindow, Retention::kRandom, Retention::kKeyDiff,
                                     Retention::kTova, Retention::kReread};
// The kinds of retainers whose scores are used.
constexpr const char* kRetainers[] = {"locret", "linear", "mlp", "sink"};

SessionOptions scored(const Model& model, const char* kind, uint32_t pool) {
  SessionOptions o = retaining(Retention::kLocret, pool);
  o.retainer = seeded_retainer(model, kind);
  return o;
}

SessionOptions adore(const Model& model, uint32_t pool) {
  return {.retainer = seeded_retainer(model, "adore"),
          .retention = Retention::kAdore,
          .pool = pool,
          .chunk = 64,
          .rebuild = 2};
}

constexpr Selection kSelections[] = {Selection::kTokenSelect, Selection::kQuest};

TEST_P(Families, EqualDenseIfTheBudgetCoversTheText) {
  const std::vector<float> expected = answer(dense());
  for (const uint32_t chunk : {1u, 7u, 200u}) {
    SessionOptions o = dense();
    o.chunk = chunk;
    expect_close(answer(o), expected, kRounding);
  }
  SessionOptions original = dense();
  original.positions = Positions::kOriginal;
  expect_close(answer(original), expected, kRounding);
  for (const Retention retention : kRetentions) {
    SCOPED_TRACE(policy_name(retention));
    expect_close(answer(retaining(retention, 300)), expected, kRounding);
    for (const Selection selection : kSelections) {
      SCOPED_TRACE(policy_name(selection));
      expect_close(answer(selecting(dense(), selection, 400)), expected, kRounding);
      expect_close(answer(selecting(retaining(retention, 300), selection, 400)), expected, kRounding);
    }
  }
  for (const char* kind : kRetainers) {
    SCOPED_TRACE(kind);
    expect_close(answer(scored(*model_, kind, 300)), expected, kRounding);
  }
  for (const Selection selection : kSelections) {
    SCOPED_TRACE(policy_name(selection));
    expect_close(answer(selecting(scored(*model_, "mlp", 300), selection, 400)), expected, kRounding);
  }
}

// The text is read with dense attention. Then all but a few entries leave the pool, and what follows attends
// to them in the store: with windows, sinks, caps, keys of earlier layers, states and any rotation.
TEST_P(Families, EqualDenseIfAllIsRecalled) {
  SessionOptions o = retaining(Retention::kWindow, 300);
  o.recall_mem = 8 << 20;
  o.recall = kRecallAll;
  for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
    o.positions = positions;
    if (refuses_store(o)) return;
    SessionOptions without = o;
    without.recall_mem = without.recall = 0;
    const auto plain = open(without), session = open(o);
    const std::vector<int32_t> question = behind(15);
    for (Session* s : {plain.get(), session.get()}) read(*s, text());
    must(session->shrink(20));
    EXPECT_GT(must(session->stats()).stored, 0u);
    expect_close(read(*session, question), read(*plain, question));
    for (const int32_t token : behind(8)) expect_close(accept(*session, token), accept(*plain, token));
  }
}

// The same with a pool that is small while the text is read, if reading attends to the store too.
TEST_P(Families, AreReadDenselyWithTheStore) {
  SessionOptions o = retaining(Retention::kWindow, 60);
  o.recall_mem = 8 << 20;
  o.recall = kRecallAll;
  o.recall_prefill = true;
  if (refuses_store(o)) return;
  const auto plain = open(dense()), session = open(o);
  expect_close(read(*session, text()), read(*plain, text()));
  EXPECT_GT(must(session->stats()).stored, 0u);
}

// Checks what every head holds: ascending positions, including the last tokens, and as many as its layer
// allows.
void expect_kept(const Session& session, const Model& model, uint32_t pool, uint32_t local,
                 int32_t position) {
  const Kept sets = kept(session);
  for (size_t layer = 0; layer < sets.size(); ++layer)
    for (const std::vector<int32_t>& head : sets[layer]) {  // none in a layer without attention
      ASSERT_TRUE(std::is_sorted(head.begin(), head.end()));
      ASSERT_EQ(std::adjacent_find(head.begin(), head.end()), head.end());
      const uint32_t window = model.layers[layer].attention()->window, last = window ? window : local;
      ASSERT_EQ(head.size(), (window ? window : pool) + local);
      for (uint32_t i = 0; i < last; ++i)
        ASSERT_EQ(head[head.size() - 1 - i], position - 1 - static_cast<int32_t>(i)) << "layer " << layer;
    }
}

// With layer scope, all heads of a layer keep the same entries.
void expect_shared(const Session& session) {
  for (const auto& layer : kept(session))
    for (const std::vector<int32_t>& head : layer) ASSERT_EQ(head, layer[0]);
}

void Families::evict_clone_and_go_back(const SessionOptions& o) const {
  const auto session = open(o);
  const std::vector<float> logits = read(*session, text());
  ASSERT_TRUE(std::all_of(logits.begin(), logits.end(), [](float l) { return std::isfinite(l); }));
  expect_kept(*session, *model_, o.pool, o.local, kText);
  if (o.retain_scope == RetainScope::kLayer) expect_shared(*session);
  if (HasFatalFailure()) return;

  const auto other = must(session->clone());
  std::vector<std::vector<float>> answers;
  for (const int32_t token : behind(6)) answers.push_back(accept(*session, token));
  must(session->rewind(kText));
  expect_kept(*session, *model_, o.pool, o.local, kText);
  size_t i = 0;
  for (const int32_t token : behind(6)) {
    const std::vector<float> again = accept(*session, token), cloned = accept(*other, token);
    ASSERT_EQ(cloned, answers[i]);
    ASSERT_EQ(again, answers[i++]);
  }
}

constexpr uint32_t kPool = 60;

// Tests every retention with one of the selections; the next family combines it with the next selection.
TEST_P(Families, EvictSelectCloneAndGoBack) {
  constexpr Selection kAll[] = {Selection::kDense, Selection::kTokenSelect, Selection::kQuest};
  auto turn = std::find(std::begin(kFamilies), std::end(kFamilies), std::string_view(GetParam())) - kFamilies;
  for (const Retention retention : kRetentions) {
    const Selection selection = kAll[turn++ % 3];
    SCOPED_TRACE(std::string(policy_name(retention)) + " and " + policy_name(selection));
    SessionOptions o = retaining(retention, kPool);
    if (selection != Selection::kDense) o = selecting(o, selection, 24);
    evict_clone_and_go_back(o);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Families, EvictByTheScoresOfARetainer) {
  for (const char* kind : kRetainers) {
    SCOPED_TRACE(kind);
    evict_clone_and_go_back(scored(*model_, kind, kPool));
    if (HasFatalFailure()) return;
  }
  for (const Selection selection : kSelections) {
    SCOPED_TRACE(policy_name(selection));
    evict_clone_and_go_back(selecting(scored(*model_, "sink", kPool), selection, 24));
    if (HasFatalFailure()) return;
  }
}

TEST_P(Families, EvictByTheLayerAndUnderOriginalPositions) {
  for (SessionOptions o : {retaining(Retention::kRandom, kPool), scored(*model_, "locret", kPool)}) {
    SCOPED_TRACE(policy_name(o.retention));
    o.retain_scope = RetainScope::kLayer;
    evict_clone_and_go_back(o);
    if (HasFatalFailure()) return;
  }
  SessionOptions mix = scored(*model_, "mlp", kPool);
  mix.retention = Retention::kMix;
  SessionOptions all[] = {scored(*model_, "mlp", kPool),        mix,
                          retaining(Retention::kRandom, kPool), retaining(Retention::kKeyDiff, kPool),
                          retaining(Retention::kTova, kPool),   retaining(Retention::kReread, kPool)};
  for (SessionOptions& o : all) {
    SCOPED_TRACE(std::string(policy_name(o.retention)) + " under original positions");
    o.positions = Positions::kOriginal;
    evict_clone_and_go_back(o);
    if (HasFatalFailure()) return;
  }
}

// A controller chooses tokens for all layers together, and reads some again out of order. Layers with a
// window or with a state do not support that.
TEST_P(Families, FollowAControllerUnlessTheySeeWindowsOrHaveStates) {
  const SessionOptions o = adore(*model_, kPool);
  if (model_->has_states()) {
    const Status refused = Session::create(model_, cpu(), o).status();
    EXPECT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_EQ(refused.message(),
              "adore reads evicted tokens again out of order, which layers with a recurrent state cannot; "
              "choose another retention");
    return;
  }
  if (sees_windows()) {
    const Status refused = Session::create(model_, cpu(), o).status();
    EXPECT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_EQ(refused.message(),
              "adore keeps the same tokens in every layer, and this model has layers with a sliding window; "
              "choose another retention");
    return;
  }
  expect_close(answer(adore(*model_, 300)), answer(dense()), kRounding);
  const auto session = open(o);
  read(*session, text());
  const Kept sets = kept(*session);
  ASSERT_EQ(sets[0][0].size(), kPool);
  EXPECT_EQ(sets[0][0].back(), int32_t{kText} - 1);
  for (const auto& layer : sets)
    for (const std::vector<int32_t>& head : layer) ASSERT_EQ(head, sets[0][0]);
  const auto other = must(session->clone());
  for (const int32_t token : behind(6)) {
    const std::vector<float> logits = accept(*session, token);
    ASSERT_TRUE(std::all_of(logits.begin(), logits.end(), [](float l) { return std::isfinite(l); }));
    ASSERT_EQ(accept(*other, token), logits);
  }
}

// A reading that is interrupted at every progress report ends in the same state as one that is not.
TEST_P(Families, ContinueAfterAnInterrupt) {
  std::vector<SessionOptions> all = {
      selecting(retaining(Retention::kWindow, kPool), Selection::kTokenSelect, 24),
      selecting(scored(*model_, "locret", kPool), Selection::kQuest, 24), retaining(Retention::kTova, kPool),
      retaining(Retention::kReread, kPool)};
  if (!sees_windows() && !model_->has_states()) all.push_back(adore(*model_, kPool));
  for (const SessionOptions& o : all) {
    SCOPED_TRACE(policy_name(o.retention));
    const auto unbroken = open(o), broken = open(o);
    const std::vector<int32_t> text = this->text();
    const std::vector<float> expected = read(*unbroken, text);
    uint32_t interrupts = 0;
    broken->set_progress([&](const Progress&) { broken->interrupt(); });
    const auto until_done = [&](const auto& call) {
      for (;; ++interrupts) {
        const Status status = call();
        if (status.ok() || status.code() != Code::kInterrupted) return must(status);
      }
    };
    until_done([&] { return broken->feed(text); });
    until_done([&] { return broken->flush(); });
    EXPECT_GT(interrupts, 1u);
    const std::span<const float> logits = must(broken->logits());
    EXPECT_EQ(std::vector<float>(logits.begin(), logits.end()), expected);
    EXPECT_EQ(kept(*broken), kept(*unbroken));
  }
}

// If all layers have a window, the base for windowed layers applies to all layers, and yarn scales it as
// usual.
TEST(FamiliesWithAWindow, MayRotateOnABaseOfTheirOwn) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  for (const std::string family : {"gemma2", "gpt-oss"}) {
    SCOPED_TRACE(family);
    const auto logits = [&](const std::string& base) {
      const SyntheticFile file("tiny-" + family +
                                   " f16 FILE --seed 4 --sharp 3 --rope yarn"
                                   " --set attention.sliding_window_pattern=0 --set rope." +
                                   base,
                               "base_of_" + family);
      return read(*open_session(file.open(), dense()), seeded_tokens(kText, 512));
    };
    const std::vector<float> windows = logits("freq_base_swa=700.0");
    EXPECT_EQ(windows, logits("freq_base=700.0"));
    EXPECT_NE(windows, logits("freq_base=800.0"));
  }
}

// Experts whose gate and up are in one tensor compute what they compute in two.
TEST(FusedExperts, EqualThoseInTwoTensors) {
  GgufWriter apart = tiny_model("qwen3moe", 4);
  Random random;
  for (GgufWriter::Tensor& t : apart.tensors) {
    const std::vector<float> values = random.floats(t.data.size() / sizeof(float), -1, 1);
    std::memcpy(t.data.data(), values.data(), t.data.size());
  }
  GgufWriter fused = apart;
  for (const std::string block : {"blk.0.", "blk.1."}) {
    const auto taken = [&](const char* name) {
      const auto found = std::find_if(fused.tensors.begin(), fused.tensors.end(),
                                      [&](const auto& t) { return t.name == block + name; });
      const FileBytes data = found->data;
      fused.erase_tensor(block + name);
      return data;
    };
    const FileBytes gate = taken("ffn_gate_exps.weight"), up = taken("ffn_up_exps.weight");
    const size_t each = gate.size() / 4;
    FileBytes both;
    for (size_t expert = 0; expert < 4; ++expert)
      for (const FileBytes* of : {&gate, &up}) append(both, of->data() + expert * each, each);
    fused.tensor(block + "ffn_gate_up_exps.weight", {8, 24, 4}, 0, both);
  }
  const auto logits = [](const GgufWriter& w) {
    const FileBytes bytes = w.bytes();
    const auto model = must(Model::open(lend(bytes), "m.gguf"));
    const auto session = open_session(model, {.pool = 60, .chunk = 16, .max_new = 4});
    std::vector<float> all = read(*session, seeded_tokens(40, 6));
    const std::vector<float> next = accept(*session, 3);
    all.insert(all.end(), next.begin(), next.end());
    return all;
  };
  EXPECT_EQ(logits(fused), logits(apart));
}

// Families in which the buffer of the feed-forward does not overwrite the output of attention for a token, so
// that the test can read it.
class FamiliesThatShowAttention : public Families {};
INSTANTIATE_TEST_SUITE_P(Of, FamiliesThatShowAttention,
                         ::testing::Values("gemma3", "gemma2", "gpt_oss", "smollm3", "granite", "olmo2",
                                           "olmo3", "ministral3"),
                         [](const auto& family) { return std::string(family.param); });

// The weights that a session reports for its last layer are those with which attention summed values; caps
// and sinks affect both. A logit is a sum of head_dim products, which the two ops add in different orders. It
// is off by head_dim 2^-24 of the product of lengths, which stays below 2^6 here. A weight changes by twice
// this, relative to itself.
TEST_P(FamiliesThatShowAttention, TellTheWeightsThatAttentionUsed) {
  const ModelShape& s = model_->shape;
  for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
    SCOPED_TRACE(policy_name(selection));
    SessionOptions o = selection == Selection::kDense ? dense() : selecting(dense(), selection, 24);
    o.watch = true;
    Watched w(model_, o);
    read(*w, text());
    std::vector<float> attended(kText + 1);
    accept(*w, 5);
    const QueryScore& watch = w.device->watches.back();
    const auto attention = std::find_if(w.device->attention.rbegin(), w.device->attention.rend(),
                                        [](const Attention& op) { return op.p.source == kFromPool; });
    ASSERT_EQ(watch.p.head_state, (s.layers - 1) * s.kv_heads);
    ASSERT_EQ(attention->p.head_state, watch.p.head_state);
    std::vector<float> y(uint64_t(s.heads) * s.head_dim), weights(watch.cis.bytes / sizeof(float));
    std::vector<uint16_t> values(attention->v.values.bytes / sizeof(uint16_t));
    must(w.device->read(y.data(), attention->y.slice(0, y.size() * sizeof(float))));
    must(w->kept_by_position(nullptr, attended.data()));  // this overwrites y
    must(w.device->read(weights.data(), watch.cis));
    must(w.device->read(values.data(), attention->v.values));
    const auto lists = w.lists()[s.layers - 1];
    const double error = 2 * s.head_dim * 0x1p-24 * 0x1p6;
    for (uint32_t head = 0; head < s.kv_heads; ++head) {
      const uint64_t run = w->runs()[watch.p.head_state + head].first;
      std::vector<uint32_t> entries(must(w->kept_count(s.layers - 1, head)));
      std::iota(entries.begin(), entries.end(), 0u);
      if (!lists.empty()) entries = lists[head];
      const uint32_t group = s.heads / s.kv_heads, window = watch.p.window;
      for (uint32_t c = 0; c < s.head_dim; ++c) {
        double told = 0, size = 0, used = 0;
        for (size_t i = window && entries.size() > window ? entries.size() - window : 0; i < entries.size();
             ++i) {
          const double value = f16_to_f32(values[(run + entries[i]) * s.head_dim + c]);
          told += weights[run + i] * value;
          size += weights[run + i] * std::abs(value);
        }
        for (uint32_t h = head * group; h < (head + 1) * group; ++h) used += y[uint64_t(h) * s.head_dim + c];
        ASSERT_NEAR(told, used, error * size) << "head " << head << " channel " << c;
      }
    }
  }
}

}  // namespace
}  // namespace thimble::test
