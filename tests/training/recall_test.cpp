// Questions about texts that were read within less memory.
#include "training/recall.h"

#include <gtest/gtest.h>

#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {
namespace {

// What the model answers to a question that is the only one.
std::vector<int32_t> answer_alone(const SeededModel& small, const TrainingText& text, const Question& q,
                                  Retention retention, uint32_t pool) {
  SessionOptions o;
  o.retention = retention;
  if (retention == Retention::kLocret) o.retainer = small.retainer;
  o.chunk = 512;
  o.max_new = 200;
  o.pool = pool ? pool : static_cast<uint32_t>(text.tokens.size());
  const auto session = open_session(small.model, o);
  must(session->feed(text.tokens));
  must(session->flush());
  must(session->feed(q.prompt));
  std::vector<int32_t> answer;
  for (int i = 0; i < 4; ++i) answer.push_back(must(session->step()));
  return answer;
}

// Every question finds what the text left, whatever was asked before it: those of more than 100 tokens evict,
// and with layers that have a window all do. Each second answer that is asked for is not the model's.
TEST(Recall, AsksEachQuestionAsTheFirstOne) {
  for (const uint32_t window : {0u, 16u}) {
    const SeededModel small = seeded_model({.window = window});
    for (const Retention retention : {Retention::kNone, Retention::kWindow, Retention::kLocret}) {
      SCOPED_TRACE(::testing::Message() << "window " << window << ", retention " << int(retention));
      const uint32_t pool = retention == Retention::kNone ? 0 : 300;
      TrainingText text;
      text.tokens = seeded_tokens(1024);
      for (uint64_t i = 0; i < 6; ++i) {
        Question q{seeded_tokens(i % 3 ? 150 : 20, 64, 10 + i), {}, false};
        q.answer = answer_alone(small, text, q, retention, pool);
        if (i % 2) q.answer.back() ^= 1;
        text.questions.push_back(q);
      }
      text.questions.insert(text.questions.begin() + 2,
                            Question{seeded_tokens(5), {1}, true});  // is passed over
      const auto spy = std::make_shared<SpyDevice>(cpu());
      const std::shared_ptr<const Retainer> retainer =
          retention == Retention::kLocret ? small.retainer : nullptr;
      const Recall recall = must(ask_about(text, small.model, spy, retention, retainer, pool, 5));
      EXPECT_EQ(recall.asked, 5u);
      EXPECT_EQ(recall.answered, 3u);
      EXPECT_LE(spy->peak_bytes, must(bytes_to_ask(text, *small.model, *spy, retention, retainer, pool)));
    }
  }
}

}  // namespace
}  // namespace thimble::test
