// Tests drafts by a layer of the model's own file (multi-token prediction): its guesses equal those of a
// reference, and what a session with it generates, holds and saves equals that of a session without.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/memory/host_weights.h"
#include "tests/support/device_test_name.h"
#include "tests/support/drafting.h"
#include "tests/support/goldens.h"
#include "tests/support/reference_model.h"
#include "tests/support/shared_devices.h"
#include "tests/support/synthetic_model.h"
#include "tests/support/tiny_model.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

constexpr uint32_t kVocab = 512;

SessionOptions with_mtp(SessionOptions o, uint32_t tokens = 3) {
  o.draft = Draft::kMtp;
  o.draft_tokens = tokens;
  return o;
}

// What the session's drafter guesses after its text and this token.
std::vector<int32_t> guess_after(Session& session, int32_t token, uint32_t tokens = 3) {
  std::vector<int32_t> draft(tokens);
  must(session.drafter()->note(session.state().read, {&token, 1}));
  draft.resize(must(session.drafter()->guess(draft)));
  return draft;
}

class DraftBlocks : public ::testing::Test {
 protected:
  void SetUp() override { THIMBLE_NEEDS(shared_file("tools/synth_gguf.py")); }
  // Those without recurrent layers: several rows have the bits of single ones.
  std::shared_ptr<const Model> attending(const std::string& family) const {
    return family_model(family, "draft_blocks");
  }
};

// The CPU, the CPU as a device with its own memory, and all other devices of this machine.
constexpr const char* kCopying = "cpu_with_copies";
std::vector<std::string> device_names() {
  std::vector<std::string> names = {kCopying};
  for (const DeviceInfo& info : list_devices())
    if (info.usable) names.push_back(info.name);
  return names;
}

// On a card, products round to f16, which can exchange experts of almost equal scores. So the layers of these
// models have none. That for drafts has some in kDense.
constexpr const char* kDense = "tiny-glm4moe f16 FILE --set leading_dense_block_count=4 --seed 4 --sharp 3";
constexpr const char* kRecurrent = "tiny-qwen35-mtp f16 FILE --seed 4 --sharp 3";

class DraftBlocksOn : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
    const std::string& name = GetParam();
    on_cpu_ = name == kCopying || name == "cpu";
    device_ = std::make_shared<SpyDevice>(on_cpu_ ? cpu() : shared_device(name, [&] {
      return must(open_device(name, strictly({.threads = 1})));
    }));
    device_->discrete = name == kCopying;
    on_software_ = !on_cpu_ && device_->info().software;
    on_card_ = !on_cpu_ && !on_software_;
  }
  static std::shared_ptr<const Model> model_of(const std::string& shape) {
    return SyntheticFile(shape, "draft_blocks_on").open();
  }
  std::unique_ptr<Session> open(const std::shared_ptr<const Model>& model, const SessionOptions& o) const {
    return open_session(model, o, device_);
  }
  // How much a logit may be off, as a share of the largest: see reference_model.h, and FamilyOnDevice of
  // device_test.cpp.
  float share() const { return on_cpu_ ? 0x1p-9f : 0x1p-6f; }
  // A software driver runs some steps a second, so it gets the smallest cases that reach each path.
  uint32_t smaller(uint32_t n, uint32_t on_software) const { return on_software_ ? on_software : n; }

  std::shared_ptr<SpyDevice> device_;
  bool on_cpu_ = false, on_card_ = false, on_software_ = false;
};
INSTANTIATE_TEST_SUITE_P(Device, DraftBlocksOn, ::testing::ValuesIn(device_names()), device_test_name);

// ---- guesses ----

// `at_once`: the tokens of the text that are read at once; the session has chunks of 16. `least_lead`:
// guesses are compared up to the first whose logit leads by less, as a share of the largest logit. Returns
// how many were compared.
size_t expect_golden(const nlohmann::json& golden, Session& session, uint32_t at_once, float least_lead) {
  const std::vector<int32_t> tokens = golden["tokens"];
  size_t compared = 0;
  for (const nlohmann::json& draft : golden["drafts"]) {
    const uint32_t position = draft[0];
    if (position % at_once != 0) continue;
    read(session, std::span(tokens).subspan(position - at_once, at_once));
    std::vector<int32_t> expected = draft[1];
    const std::vector<float> leads = draft[2];
    const auto uncertain =
        std::find_if(leads.begin(), leads.end(), [&](float lead) { return lead < least_lead; });
    expected.resize(static_cast<size_t>(uncertain - leads.begin()));
    // The clone guesses, so that the session reads the token after it itself.
    std::vector<int32_t> guessed = guess_after(*must(session.clone()), tokens[position]);
    guessed.resize(std::min(guessed.size(), expected.size()));
    EXPECT_EQ(guessed, expected) << "position " << position;
    compared += expected.size();
  }
  return compared;
}

// Where both of two logits may move by a share of the largest, a guess is certain if it leads by twice that.
// The CPU's leads are large enough for all guesses of the file.
TEST_P(DraftBlocksOn, GuessAsTheReferenceDoes) {
  for (const nlohmann::json& golden : load_json(project_file("tests/reference/draft_blocks.json"))) {
    const std::string shape = golden["model"];
    if (on_card_ && shape != kRecurrent) continue;
    if (on_software_ && (shape.starts_with("tiny-qwen35moe") || shape.starts_with("tiny-qwen3next")))
      continue;
    SCOPED_TRACE(shape);
    const auto model = model_of(shape);
    size_t compared = 0;
    for (const uint32_t at_once : {40u, 5u, 1u}) {
      if (on_software_ && at_once == 1) continue;
      const auto session = open(model, with_mtp({.pool = 200, .chunk = 16, .max_new = 32}));
      compared += expect_golden(golden, *session, at_once, on_cpu_ ? 0 : 2 * share());
    }
    EXPECT_GT(compared, 5u);
  }
}

// The entries of guesses are replaced by those of the tokens that follow, and a token keeps the row before it
// after a rewind to a token that waits.
TEST_F(DraftBlocks, GuessAsIfTheyHadNotGuessedBefore) {
  const auto model = attending("glm4moe");
  const SessionOptions o = with_mtp({.pool = 400, .chunk = 256, .max_new = 300});
  const auto guessing = open_session(model, o), reading = open_session(model, o);
  const std::vector<int32_t> text = seeded_tokens(200, kVocab);
  for (Session* s : {guessing.get(), reading.get()}) read(*s, std::span(text).first(50));
  for (size_t i = 50; i < 120; ++i) {
    must(guessing->accept(text[i]));  // guesses before each step
    read(*reading, {&text[i], 1});
    if (i % 10) continue;
    ASSERT_EQ(guess_after(*must(guessing->clone()), 7), guess_after(*must(reading->clone()), 7)) << i;
  }
  const std::vector<int32_t> expected = guess_after(*must(reading->clone()), text[120]);
  read(*reading, std::span(text).subspan(120, 10));
  must(reading->rewind(120));
  EXPECT_EQ(guess_after(*reading, text[120]), expected);
}

// After a rewind the layer has the entries before it. Both sessions lack the entry of the token at 8, whose
// row before it is forgotten.
TEST_P(DraftBlocksOn, ForgetWhatARewindLeaves) {
  const auto model = model_of(kDense);
  const SessionOptions o = with_mtp({.pool = 400, .chunk = 16, .max_new = 300});
  const std::vector<int32_t> text = seeded_tokens(200, kVocab);
  std::vector<std::vector<int32_t>> guesses[2];
  for (const bool more : {false, true}) {
    const auto session = open(model, o);
    read(*session, std::span(text).first(8));
    for (size_t i = 0; i < (more ? smaller(60, 10) : 1); ++i) must(session->accept(text[100 + i]));
    must(session->rewind(8));
    read(*session, std::span(text).subspan(8, 4));
    for (int32_t token = 0; token < 20; ++token)
      guesses[more].push_back(guess_after(*must(session->clone()), token));
  }
  EXPECT_EQ(guesses[0][0].size(), 3u);
  EXPECT_EQ(guesses[0], guesses[1]);
}

// Its pool keeps a window of the text, in which it goes on to guess.
TEST_F(DraftBlocks, KeepAWindow) {
  const auto model = attending("deepseek2");
  const SessionOptions o{
      .retention = Retention::kWindow, .pool = 70, .chunk = 32, .local = 20, .max_new = 44};
  const auto device = std::make_shared<SpyDevice>(cpu());
  device->before_submit = [](const Program&, const StepParams& step, std::span<const HeadState> heads) {
    if (heads.size() > 1) return;  // of the model
    ASSERT_LE(heads[0].n_entries + step.n_rows, heads[0].capacity);
  };
  const auto session = open_session(model, with_mtp(o), device);
  const std::vector<int32_t> text = seeded_tokens(1500, kVocab);
  for (size_t i = 0; i < text.size(); i += 100) {
    read(*session, std::span(text).subspan(i, 60));
    for (size_t k = i + 60; k < i + 100; ++k) must(session->accept(text[k]));
    EXPECT_EQ(guess_after(*must(session->clone()), 3).size(), 3u) << i;
  }
  // What was read long ago does not matter.
  std::vector<int32_t> other = text;
  std::reverse(other.begin() + 200, other.begin() + 600);
  const auto a = open_session(model, with_mtp(o)), b = open_session(model, with_mtp(o));
  read(*a, text), read(*b, other);
  EXPECT_EQ(guess_after(*a, 9), guess_after(*b, 9));
}

// ---- sessions ----

// A text that some guesses foresee, some in part and some not at all.
std::vector<int32_t> foreseen(const std::shared_ptr<const Model>& model, size_t count,
                              const std::shared_ptr<Device>& device = cpu()) {
  const auto session = open_session(model, with_mtp({.pool = 1000, .chunk = 64, .max_new = 1000}), device);
  const std::vector<int32_t> other = seeded_tokens(count + 100, kVocab);
  std::vector<int32_t> text(other.begin(), other.begin() + 20);
  read(*session, text);
  for (uint32_t right = 0; text.size() < count; right = (right + 1) % 4) {
    const size_t before = text.size();
    text.push_back(other[before]);
    const std::vector<int32_t> guess = guess_after(*must(session->clone()), text.back());
    text.insert(text.end(), guess.begin(), guess.begin() + right);
    read(*session, std::span(text).subspan(before));
  }
  text.resize(count);
  return text;
}

std::vector<SessionOptions> policies() {
  const SessionOptions window{
      .retention = Retention::kWindow, .pool = 70, .chunk = 32, .local = 12, .max_new = 60};
  SessionOptions keydiff = window, reread = window;
  keydiff.retention = Retention::kKeyDiff, reread.retention = Retention::kReread;
  return {{.pool = 500, .chunk = 32, .max_new = 32}, window, keydiff, reread};
}

// Up to four rows, products of f16 give a row the same bits as a single row.
TEST_F(DraftBlocks, LeaveEveryBitAsWithoutThem) {
  for (const char* family : {"glm4moe", "deepseek2"}) {
    SCOPED_TRACE(family);
    const auto model = attending(family);
    const std::vector<int32_t> text = foreseen(model, 400);
    for (const SessionOptions& o : policies()) {
      SCOPED_TRACE(policy_name(o.retention));
      Counted counted;
      const auto plain = open_session(model, o), drafting = open_session(model, with_mtp(o), counted.device);
      for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
      for (size_t i = 100; i < 300; ++i) {
        must(plain->accept(text[i])), must(drafting->accept(text[i]));
        expect_same(*drafting, *plain);
        if (HasFatalFailure()) FAIL() << "after token " << i;
        if (i % 7 != 3) continue;  // saving leaves a draft
        EXPECT_EQ(body_of(save(*drafting)), body_of(save(*plain))) << i;
        if (i % 3 || plain->state().read - 1 < plain->state().earliest()) continue;
        for (Session* s : {plain.get(), drafting.get()}) {
          must(s->rewind(s->state().read - 1));
          must(s->accept(text[i]));
        }
        expect_same(*drafting, *plain);
      }
      const auto twin = must(drafting->clone()), plain_twin = must(plain->clone());
      EXPECT_EQ(go_on(*twin), go_on(*plain_twin));
      const SessionBytes saved = save(*drafting);
      for (Session* s : {drafting.get(), plain.get()}) {
        must(s->set_sampler(kWarm));
        EXPECT_EQ(s->state().read, 300u);
        restore(*s, saved);
      }
      EXPECT_EQ(go_on(*drafting), go_on(*plain));
      EXPECT_LE(twin->allocated(), 2 * twin->plan().total);
    }
  }
}

TEST_F(DraftBlocks, SampleTheSameTokens) {
  const auto model = attending("glm4moe");
  for (const SessionOptions& o : policies())
    for (const SamplerOptions& sampler : {SamplerOptions{}, kWarm}) {
      const auto plain = open_session(model, o), drafting = open_session(model, with_mtp(o));
      const auto paced = open_session(model, with_mtp(o, 0));
      for (Session* s : {plain.get(), drafting.get(), paced.get()}) {
        must(s->set_sampler(sampler));
        read(*s, seeded_tokens(100, kVocab));
      }
      for (int i = 0; i < 100; ++i) {
        const int32_t token = must(plain->step());
        ASSERT_EQ(must(drafting->step()), token) << i;
        must(paced->accept(token));
      }
      expect_same(*drafting, *plain);
    }
}

TEST_P(DraftBlocksOn, SaveSteps) {
  const auto model = model_of(kDense);
  const uint32_t first = smaller(100, 20), tokens = smaller(200, 30);
  const std::vector<int32_t> text = foreseen(model, first + tokens, device_);
  const auto session = open(model, with_mtp({.pool = 500, .chunk = 64, .max_new = 32}));
  read(*session, std::span(text).first(first));
  uint64_t steps = 0, position = 0;
  device_->before_submit = [&](const Program&, const StepParams& step, std::span<const HeadState> heads) {
    const bool of_model = heads.size() > 2;  // the drafting layer has two KV heads
    if (of_model && static_cast<uint64_t>(step.position) != position) ++steps;
    if (of_model) position = static_cast<uint64_t>(step.position);
  };
  for (uint32_t i = 0; i < tokens; ++i) must(session->accept(text[first + i]));
  device_->before_submit = {};
  // The text consists of groups of 1, 2, 3 and 4 tokens, each of which needs a step. On other devices than
  // the CPU several rows round differently from one, and a guess may differ from the one that made the text.
  const double groups = 0.4 * tokens;
  EXPECT_GE(static_cast<double>(steps), groups - 2);
  EXPECT_LE(static_cast<double>(steps), on_cpu_ ? groups + 2 : 1.5 * groups);
}

// Tokens that lead by more than rounding are the same with drafts, and logits differ by rounding only.
TEST_P(DraftBlocksOn, LeaveAnswersAsWithoutThem) {
  const SessionOptions all{.pool = 400, .chunk = 64, .max_new = 64};
  const SessionOptions window{
      .retention = Retention::kWindow, .pool = 60, .chunk = 64, .local = 20, .max_new = 44};
  for (const char* shape : {kDense, kRecurrent}) {
    SCOPED_TRACE(shape);
    const auto model = model_of(shape);
    const uint32_t first = smaller(100, 70), tokens = smaller(150, 30);
    const std::vector<int32_t> text = foreseen(model, first + tokens, device_);
    for (const SessionOptions& o : {window, all}) {
      if (on_software_ && o.retention == Retention::kNone) continue;
      const auto plain = open(model, o), drafting = open(model, with_mtp(o));
      for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(first));
      for (uint32_t i = 0; i < tokens; ++i) {
        const std::vector<float> expected = accept(*plain, text[first + i]);
        expect_close(accept(*drafting, text[first + i]), expected, share());
        if (HasFailure()) FAIL() << "after token " << i;
      }
      EXPECT_EQ(kept(*drafting), kept(*plain));
      for (uint32_t i = 0; i < smaller(50, 10); ++i) {
        std::vector<float> logits = flush(*plain);
        const auto largest = [](float a, float b) { return std::abs(a) < std::abs(b); };
        const float scale = std::abs(*std::max_element(logits.begin(), logits.end(), largest));
        std::partial_sort(logits.begin(), logits.begin() + 2, logits.end(), std::greater<>());
        if (must(drafting->step()) == must(plain->step())) continue;
        EXPECT_LE(logits[0] - logits[1], 2 * share() * scale) << i;
        break;  // the texts differ from here on
      }
    }
  }
}

TEST_F(DraftBlocks, SurviveInterruptsAndOtherCalls) {
  const auto model = attending("glm4moe");
  const std::vector<int32_t> text = foreseen(model, 500);
  for (const SessionOptions& o : policies()) {
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto plain = open_session(model, o), drafting = open_session(model, with_mtp(o), device);
    for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
    int submits = 0, interrupts = 0;
    device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
      if (++submits % 3 == 0) drafting->interrupt();
    };
    for (size_t i = 100; i < 400; ++i) {
      if (i % 50 == 20) {
        std::vector<float> a(10), b(10);
        must(plain->score(std::span(text).subspan(i, 10), a));
        interrupts += insist([&] { return drafting->score(std::span(text).subspan(i, 10), b); });
        EXPECT_EQ(a, b);
        i += 10;
      }
      must(plain->accept(text[i]));
      interrupts += insist([&] { return drafting->accept(text[i]); });
      expect_same(*drafting, *plain);
      if (HasFatalFailure()) FAIL() << "after token " << i;
    }
    EXPECT_GT(interrupts, 50);
  }
}

// Recurrent layers read the rows again that stay. They round several rows differently from one.
TEST_F(DraftBlocks, LeaveNoTraceInStates) {
  const auto model =
      SyntheticFile("tiny-qwen35-mtp f16 FILE --seed 4 --sharp 3", "draft_block_states").open();
  const std::vector<int32_t> text = foreseen(model, 300);
  for (const Retention retention : {Retention::kNone, Retention::kWindow}) {
    SessionOptions o{.pool = 400, .chunk = 64, .max_new = 64};
    if (retention == Retention::kWindow)
      o = {.retention = retention, .pool = 60, .chunk = 64, .local = 20, .max_new = 44};
    const auto plain = open_session(model, o), drafting = open_session(model, with_mtp(o));
    for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
    for (size_t i = 100; i < 300; ++i) {
      const std::vector<float> expected = accept(*plain, text[i]);
      expect_close(accept(*drafting, text[i]), expected);
      if (i % 13 != 5) continue;
      EXPECT_EQ(save(*drafting).size(), save(*plain).size());
      EXPECT_EQ(drafting->state().recent, plain->state().recent);
      EXPECT_EQ(drafting->state().snapshots.size(), plain->state().snapshots.size());
    }
    EXPECT_EQ(kept(*drafting), kept(*plain));
  }
}

// ---- files ----

// A model of one layer and a layer for drafts, which has these tensors of its own.
struct WithLayerForDrafts {
  FileBytes bytes;
  std::shared_ptr<const Model> model;
  explicit WithLayerForDrafts(std::initializer_list<std::string> names) {
    GgufWriter w = tiny_model("glm4moe");
    w.set("glm4moe.nextn_predict_layers", 1u);
    for (const std::string& name : names) {
      std::vector<uint64_t> shape = {8, 6};
      if (name == "eh_proj") shape = {16, 8};
      if (name.ends_with("norm")) shape = {8};
      const uint64_t elements = shape[0] * (shape.size() > 1 ? shape[1] : 1);
      w.tensor("blk.1.nextn." + name + ".weight", shape, std::vector<float>(elements, 0.5f));
    }
    bytes = w.bytes();
    model = must(Model::open(thimble::lend(bytes), "file"));
  }
};

TEST(DraftBlockFiles, ShareWhatTheLayerLacks) {
  const WithLayerForDrafts sharing({"eh_proj", "enorm", "hnorm"});
  const auto& shared = sharing.model;
  ASSERT_NE(shared->draft_block, nullptr);
  EXPECT_EQ(shared->shape.layers, 1u);
  EXPECT_EQ(shared->draft_block->output.data, shared->output.data);
  EXPECT_EQ(shared->draft_block->output_norm.data, shared->output_norm.data);
  EXPECT_EQ(shared->draft_block->token_embedding.data, shared->token_embedding.data);
  // Backends have scratch memory for products of this shape.
  EXPECT_EQ(shared->draft_block->shape.mixer_out, shared->draft_block->joined->join.cols);
  const WithLayerForDrafts having(
      {"eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_norm", "shared_head_head"});
  const auto& own = having.model;
  ASSERT_NE(own->draft_block, nullptr);
  EXPECT_NE(own->draft_block->output.data, own->output.data);
  EXPECT_NE(own->draft_block->output_norm.data, own->output_norm.data);
  EXPECT_NE(own->draft_block->token_embedding.data, own->token_embedding.data);
}

TEST(DraftBlockFiles, AreReadWithoutALayerThatCannotBeUsed) {
  const WithLayerForDrafts lacking({"eh_proj", "enorm"});
  EXPECT_EQ(lacking.model->draft_block, nullptr);
  EXPECT_NE(lacking.model->description_of_draft_block_error.find("'blk.1.nextn.hnorm.weight'"),
            std::string::npos);
}

// ---- memory and refusals ----

TEST_F(DraftBlocks, AreInsideTheBudget) {
  const auto model = attending("glm4moe");
  SessionOptions o{.budget = 12 << 20, .retention = Retention::kWindow, .chunk = 64};
  const uint32_t alone = must(make_plan(*model, *cpu(), o)).options.pool;
  const auto device = std::make_shared<SpyDevice>(cpu());
  const auto session = open_session(model, with_mtp(o), device);
  EXPECT_LT(session->plan().options.pool, alone);
  EXPECT_GT(session->plan().draft, 0u);
  EXPECT_LE(session->plan().total, o.budget);
  EXPECT_LE(device->peak_bytes, session->plan().total);
}

// What the arenas and weights of a session take, without its host memory and the device's own part.
uint64_t device_bytes(const Model& model, const Device& device, const MemoryPlan& plan) {
  const Model& block = *model.draft_block;
  const MemoryPlan draft = must(make_plan(block, device, draft_options(block, plan.options)));
  return plan.total - plan.draft - plan.fixed - host_bytes(model, plan) + draft.total - draft.fixed -
         host_bytes(block, draft);
}

// Only what is named after the layer in the file is placed for it: the rest is where the model has it.
TEST_P(DraftBlocksOn, TakeTheBytesOfThePlan) {
  for (const char* shape : {kDense, kRecurrent}) {
    SCOPED_TRACE(shape);
    const auto model = model_of(shape);
    const SessionOptions o = with_mtp({.pool = 200, .chunk = 32, .max_new = 32});
    const DeviceInfo info = device_->info();
    uint64_t of_layer = 0;
    for (const GgufTensor& t : model->gguf().tensors())
      if (t.name.starts_with("blk." + std::to_string(model->shape.layers) + "."))
        of_layer += round_up(t.bytes, info.alignment);
    const MemoryPlan plan = must(make_plan(*model, *device_, o));
    EXPECT_EQ(plan.draft_weights, info.unified ? 0 : round_up(of_layer, info.granularity));
    const uint64_t expected = device_->allocated_bytes + device_bytes(*model, *device_, plan);
    const auto session = open(model, o);
    EXPECT_EQ(device_->allocated_bytes, expected);

    // A second session and a clone use the same weights.
    const MemoryPlan second = must(make_plan(*model, *device_, o));
    EXPECT_EQ(second.draft_weights, 0u);
    EXPECT_EQ(second.total, plan.total - plan.weights - plan.draft_weights);
    const uint64_t alone = session->allocated();
    const auto twin = must(session->clone());
    const uint64_t of_twin = session->allocated() - alone,
                   own = alone - plan.weights - plan.draft_weights - (plan.fixed - plan.programs);
    EXPECT_LE(of_twin, own);
    const bool loads_kernels = GetParam().starts_with("cuda");  // which a second session finds loaded
    EXPECT_TRUE(loads_kernels || of_twin == own) << of_twin << " and " << own;
  }
}

// If the budget has room for none of the model's matrices, the layer reads the output matrix, too, from the
// host's memory.
TEST_P(DraftBlocksOn, ReadTheirModelsWeightsInTheHostsMemory) {
  if (device_->info().unified) return;
  const auto model = model_of(kDense);
  SessionOptions o = with_mtp({.pool = 200, .chunk = 32, .max_new = 32});
  const auto groups = static_cast<uint32_t>(host_groups(*model).size());
  Policies policies(o);
  const std::vector<int32_t> text = seeded_tokens(40, kVocab);
  std::vector<std::vector<int32_t>> guesses[2];
  std::vector<float> logits[2];
  for (const bool in_host : {false, true}) {
    if (in_host)
      o.budget = must(count_plan(*model, *device_, must(resolve(*model, o)), policies, false, groups)).total;
    const MemoryPlan plan = must(make_plan(*model, *device_, o));
    // On a card that allocates whole MiB, the budget may have room for a few of these small matrices.
    EXPECT_EQ(plan.host_groups > 0, in_host);
    const auto session = open(model, o);
    read(*session, std::span(text).first(20));
    for (size_t i = 20; i < text.size(); ++i) {
      guesses[in_host].push_back(guess_after(*session, text[i]));
      logits[in_host] = read(*session, {&text[i], 1});
    }
    EXPECT_EQ(guesses[in_host].back().size(), 3u);
  }
  EXPECT_EQ(logits[0], logits[1]);
  EXPECT_EQ(guesses[0], guesses[1]);
}

std::string refusal(const std::shared_ptr<const Model>& model) {
  const Status status =
      Session::create(model, cpu(), with_mtp({.pool = 100, .chunk = 32, .max_new = 32})).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  return status.message();
}

TEST_F(DraftBlocks, AreRefusedWhereThereIsNone) {
  const auto trunk = SyntheticFile("tiny-qwen35-trunk f16 FILE", "draft_block_trunk").open();
  EXPECT_EQ(trunk->draft_block, nullptr);
  EXPECT_NE(refusal(trunk).find("has no layer for drafts (multi-token prediction); choose"),
            std::string::npos);
  const auto exaone = SyntheticFile("tiny-exaone4-swa f16 FILE", "draft_block_exaone").open();
  EXPECT_NE(refusal(exaone).find("multi-token prediction"), std::string::npos);
}

}  // namespace
}  // namespace thimble::test
