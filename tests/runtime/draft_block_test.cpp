// Tests drafts by a layer of the model's own file (multi-token prediction): its guesses equal those of a
// reference, and what a session with it generates, holds and saves equals that of a session without.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/support/drafting.h"
#include "tests/support/goldens.h"
#include "tests/support/reference_model.h"
#include "tests/support/synthetic_model.h"
#include "tests/support/tiny_model.h"

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

// ---- guesses ----

// `at_once`: the tokens of the text that are read at once; the session has chunks of 16.
void expect_golden(const nlohmann::json& golden, const Model& model, Session& session, uint32_t at_once) {
  const std::vector<int32_t> tokens = golden["tokens"];
  for (const nlohmann::json& draft : golden["drafts"]) {
    const uint32_t position = draft[0];
    if (position % at_once != 0) continue;
    read(session, std::span(tokens).subspan(position - at_once, at_once));
    const std::vector<int32_t> expected = draft[1];
    // The clone guesses, so that the session reads the token after it itself.
    std::vector<int32_t> guessed = guess_after(*must(session.clone()), tokens[position]);
    guessed.resize(std::min(guessed.size(), expected.size()));
    EXPECT_EQ(guessed, expected) << model.info.architecture << ", position " << position;
  }
}

TEST_F(DraftBlocks, GuessAsTheReferenceDoes) {
  for (const nlohmann::json& golden : load_json(project_file("tests/reference/draft_blocks.json"))) {
    const auto model = SyntheticFile(golden["model"], "draft_block_golden").open();
    for (const uint32_t at_once : {1u, 5u, 40u}) {
      const auto session = open_session(model, with_mtp({.pool = 200, .chunk = 16, .max_new = 32}));
      expect_golden(golden, *model, *session, at_once);
    }
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
TEST_F(DraftBlocks, ForgetWhatARewindLeaves) {
  const auto model = attending("glm4moe");
  const SessionOptions o = with_mtp({.pool = 400, .chunk = 16, .max_new = 300});
  const std::vector<int32_t> text = seeded_tokens(200, kVocab);
  std::vector<std::vector<int32_t>> guesses[2];
  for (const bool more : {false, true}) {
    const auto session = open_session(model, o);
    read(*session, std::span(text).first(8));
    for (size_t i = 0; i < (more ? 60 : 1); ++i) must(session->accept(text[100 + i]));
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
std::vector<int32_t> foreseen(const std::shared_ptr<const Model>& model, size_t count) {
  const auto session = open_session(model, with_mtp({.pool = 1000, .chunk = 64, .max_new = 1000}));
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

TEST_F(DraftBlocks, SaveSteps) {
  const auto model = attending("glm4moe");
  const std::vector<int32_t> text = foreseen(model, 300);
  const SessionOptions o = with_mtp({.pool = 500, .chunk = 64, .max_new = 32});
  const auto device = std::make_shared<SpyDevice>(cpu());
  const auto session = open_session(model, o, device);
  read(*session, std::span(text).first(100));
  uint64_t steps = 0, position = 0;
  device->before_submit = [&](const Program&, const StepParams& step, std::span<const HeadState> heads) {
    const bool of_model = heads.size() > 2;  // the drafting layer has two KV heads
    if (of_model && static_cast<uint64_t>(step.position) != position) ++steps;
    if (of_model) position = static_cast<uint64_t>(step.position);
  };
  for (size_t i = 100; i < 300; ++i) must(session->accept(text[i]));
  // The text consists of groups of 1, 2, 3 and 4 tokens, each of which needs a step.
  EXPECT_NEAR(static_cast<double>(steps), 80, 2);
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

std::string refusal(const std::shared_ptr<const Model>& model,
                    const std::shared_ptr<Device>& device = cpu()) {
  const Status status =
      Session::create(model, device, with_mtp({.pool = 100, .chunk = 32, .max_new = 32})).status();
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
  const auto device = std::make_shared<SpyDevice>(cpu());
  device->discrete = true;
  EXPECT_NE(refusal(attending("glm4moe"), device).find("cannot run a layer for multi-token prediction"),
            std::string::npos);
}

}  // namespace
}  // namespace thimble::test
