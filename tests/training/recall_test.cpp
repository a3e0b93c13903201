// Tests questions about texts that were read with less memory.
#include "training/recall.h"

#include <gtest/gtest.h>

#include "tests/support/spy_device.h"
#include "tests/training/small_trainer.h"

namespace thimble::test {
namespace {

TEST(Answers, AreFoundInWhatIsSaid) {
  const auto share = [](const char* said, std::vector<std::string> expected) {
    return share_said(said, expected);
  };
  EXPECT_EQ(share("The door code of the Oslo bank is 48213.", {"48213"}), 1);
  EXPECT_EQ(share("It is 48,213.", {"48213"}), 1);
  EXPECT_EQ(share("4 8 2\n1 3", {"48213"}), 1);
  EXPECT_EQ(share("48'213", {"48_213"}), 1);
  EXPECT_EQ(share("48, 213", {"48213"}), 0) << "two numbers";
  EXPECT_EQ(share("48.213", {"48213"}), 0) << "a point is not a separator";
  EXPECT_EQ(share("IN THE  GREENHOUSE", {"greenhouse"}), 1);
  EXPECT_EQ(share("She keeps it in the green house.", {"Greenhouse"}), 1);
  EXPECT_EQ(share("Apricot and plum.", {"plum", "fig", "apricot", "pear"}), 0.5);
  EXPECT_EQ(share("4821", {"48213"}), 0);
  EXPECT_EQ(share("", {"48213"}), 0);
  EXPECT_EQ(share("anything", {}), 0);
}

TEST(Recalls, AreComparedByWhatTheModelItselfCan) {
  const Recall answers{48, 24, 100, -20}, silent{48, 23.5, 100, -20};
  EXPECT_EQ(answers.measure(), Measure::kAnswers);
  EXPECT_EQ(silent.measure(), Measure::kProbability);
  EXPECT_EQ(Recall().measure(), Measure::kProbability);
  const Recall fewer{48, 12, 100, -120};
  EXPECT_EQ(fewer.reported(answers), 0.25);
  // The ratio of exp(-1.2) to exp(-0.2).
  EXPECT_NEAR(fewer.reported(silent), std::exp(-1.0), 1e-15);
  EXPECT_NEAR(silent.perplexity(), std::exp(0.2), 1e-15);
  EXPECT_EQ(Recall().reported(Recall()), 0);
}

constexpr uint32_t kAround = 24;  // tokens that an answer may have in addition to the right one's

SessionOptions options_of(const SeededModel& small, const TrainingText& text, Retention retention,
                          uint32_t pool) {
  SessionOptions o;
  o.retention = retention;
  if (retention == Retention::kLocret) o.retainer = small.retainer;
  o.chunk = 512;
  o.max_new = 200;
  o.pool = pool ? pool : static_cast<uint32_t>(text.tokens.size());
  return o;
}

// A session that was asked only this question.
std::unique_ptr<Session> asked_alone(const SeededModel& small, const TrainingText& text, const Question& q,
                                     Retention retention, uint32_t pool) {
  auto session = open_session(small.model, options_of(small, text, retention, pool));
  must(session->feed(text.tokens));
  must(session->flush());
  must(session->feed(q.prompt));
  return session;
}

// Every question finds the entries that the text left, whatever was asked before it. Questions of more than
// 100 tokens evict, and with windowed layers all questions do. For every second question that is asked, half
// of the expected texts are not in the model's answer.
TEST(Recall, AsksEachQuestionAsTheFirstOne) {
  for (const uint32_t window : {0u, 16u}) {
    Seeded seeded = bytes_model(true);
    seeded.window = window;
    const SeededModel small = seeded_model(seeded);
    for (const Retention retention : {Retention::kNone, Retention::kWindow, Retention::kLocret}) {
      SCOPED_TRACE(::testing::Message() << "window " << window << ", retention " << int(retention));
      const uint32_t pool = retention == Retention::kNone ? 0 : 300;
      TrainingText text;
      text.tokens = seeded_tokens(1024);
      double log_prob = 0, shares = 0;
      for (uint64_t i = 0; i < 6; ++i) {
        Question q{seeded_tokens(i % 3 ? 150 : 20, 64, 10 + i), seeded_tokens(3, 64, 20 + i), {}};
        const auto session = asked_alone(small, text, q, retention, pool);
        std::string said;
        for (uint32_t t = 0; t < q.answer.size() + kAround; ++t) {
          const int32_t token = must(session->step());
          if (small.model->tokenizer.ends_generation(token)) break;
          small.model->tokenizer.append_piece(token, false, said);
        }
        q.expected = {said};
        if (i % 2) q.expected.push_back(said + "!");
        text.questions.push_back(q);
        if (i == 5) break;  // this question is not asked
        if (!said.empty()) shares += i % 2 ? 0.5 : 1;
        std::vector<float> of_answer(q.answer.size());
        must(asked_alone(small, text, q, retention, pool)->score(q.answer, of_answer));
        for (const float one : of_answer) log_prob += one;
      }
      text.questions.insert(text.questions.begin() + 2,
                            Question{seeded_tokens(5), {1}, {}});  // this question is ignored
      const auto spy = std::make_shared<SpyDevice>(cpu());
      const std::shared_ptr<const Retainer> retainer =
          retention == Retention::kLocret ? small.retainer : nullptr;
      const auto ask = [&](bool answers, bool probability) {
        return must(ask_about(text, small.model, spy, retention, retainer,
                              {.pool = pool, .most = 5, .answers = answers, .probability = probability}));
      };
      const Recall both = ask(true, true), answered = ask(true, false), scored = ask(false, true);
      EXPECT_EQ(both.asked, 5u);
      EXPECT_EQ(both.answered, shares);
      EXPECT_EQ(both.tokens, 15u);
      EXPECT_DOUBLE_EQ(both.log_prob, log_prob);
      EXPECT_GE(shares, 3);
      EXPECT_EQ(answered.answered, shares);
      EXPECT_EQ(answered.tokens, 0u);
      EXPECT_EQ(scored.answered, 0);
      EXPECT_DOUBLE_EQ(scored.log_prob, log_prob);
      EXPECT_LE(spy->peak_bytes, must(bytes_to_ask(text, *small.model, *spy, retention, retainer, pool)));
    }
  }
}

}  // namespace
}  // namespace thimble::test
