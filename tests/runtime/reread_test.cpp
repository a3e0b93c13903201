// Tests Reread on whole sessions: the kept entries must be those that a second reading of each chunk attends
// to, in a model in double precision that also reads twice.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

#include "tests/support/judged.h"
#include "tests/support/watched.h"

namespace thimble::test {
namespace {

constexpr uint32_t kSinks = 4;

SessionOptions reread(Positions positions) {
  return {.retention = Retention::kReread,
          .keeps = {24, 40, 150, 60},
          .chunk = 40,
          .stabilizers = 12,
          .local = 20,
          .max_new = 30,
          .positions = positions,
          .context = positions == Positions::kOriginal ? 1000u : 0u};
}

class JudgedBySecondReading : public Judged {
 public:
  JudgedBySecondReading(const SeededModel& m, const SessionOptions& options) : Judged(m, options) {
    f.on_second_reading = [this](const StepParams& step, const Kept& there) {
      rows.push_back(step.n_rows);
      forget(there, step.n_rows);
      for (uint32_t row = 0; row < step.n_rows; ++row) read_again(step, row, there);
    };
  }

  std::vector<uint32_t> rows;  // rows of the second readings

 private:
  using Place = std::tuple<uint32_t, uint32_t, int32_t>;  // layer, KV head, position

  // Entries that are read again have no score yet.
  void forget(const Kept& there, uint32_t count) {
    for (uint32_t layer = 0; layer < there.size(); ++layer)
      for (uint32_t head = 0; head < there[layer].size(); ++head)
        for (uint32_t i = 1; i <= count; ++i)
          scores_.erase({layer, head, there[layer][head].at(there[layer][head].size() - i)});
  }

  // Reads a row once more after all entries that the heads hold, and scores the entries that it attends to.
  void read_again(const StepParams& step, uint32_t row, const Kept& there) {
    const int32_t position = step.position + static_cast<int32_t>(row);
    const int32_t token = f.token(position - static_cast<int32_t>(step.n_rows));
    f.reference.append(token, static_cast<size_t>(position), [&](uint32_t layer, uint32_t head) {
      std::vector<int32_t> seen = there[layer][head];
      for (int32_t p = step.position; p < position; ++p) seen.push_back(p);
      return seen;
    });
    const ModelShape& s = f->model().shape;
    for (uint32_t layer = 0; layer < s.layers; ++layer)
      for (uint32_t h = 0; h < s.heads; ++h)
        score(step, layer, h, position, there[layer][h / (s.heads / s.kv_heads)]);
  }

  void score(const StepParams& step, uint32_t layer, uint32_t h, int32_t position,
             std::vector<int32_t> seen) {
    const ModelShape& s = f->model().shape;
    const uint32_t head = h / (s.heads / s.kv_heads);
    const size_t held = seen.size(), chunk = held - step.n_rows;
    for (int32_t p = step.position; p <= position; ++p) seen.push_back(p);
    const double* q = f.reference.queries(layer).data() + uint64_t(h) * s.head_dim;
    const std::vector<double> logits = f.reference.logits(layer, head, q, seen);
    double sum = 0;
    std::vector<int32_t> counted;
    for (size_t i = 0; i < seen.size(); ++i) {
      if (i >= kSinks && i < chunk) continue;
      sum += std::exp(logits[i]);
      counted.push_back(seen[i]);
    }
    moved_ = std::max(moved_, largest_logit(layer, head, q, counted));
    for (size_t i = chunk; i < held; ++i) {
      const double log_weight = logits[i] - std::log(sum);
      const auto [at, is_new] = scores_.try_emplace({layer, head, seen[i]}, log_weight);
      if (!is_new) at->second = std::max(at->second, log_weight);
    }
  }

  // The session's keys may differ from the reference's by one unit of f16, 2^-10. This moves a logit by 2^-10
  // of the product of lengths, and the logarithm of a sum by no more. The queries of a model that read such
  // keys differ likewise.
  Scores scores(uint32_t layer, uint32_t head, const std::vector<int32_t>& there) override {
    Scores all{.tolerance = 4 * 2 * 0x1p-10 * moved_};
    for (const int32_t p : there) all.score.push_back(scores_.at({layer, head, p}));
    return all;
  }

  std::map<Place, double> scores_;
  double moved_ = 0;  // the largest product of lengths
};

TEST(Reread, KeepsWhatTheSecondReadingAttendsTo) {
  for (const SeededModel& m : {seeded_model(), seeded_model(growing())})
    for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
      SCOPED_TRACE(m.model->info.architecture + (positions == Positions::kList ? ", list" : ", original"));
      JudgedBySecondReading s(m, reread(positions));
      const std::vector<int32_t> text = seeded_tokens(301);
      s.feed(std::span(text).first(61));
      for (size_t at = 61; at < 301; at += 40) s.feed(std::span(text).subspan(at, 40));
      s.read(seeded_tokens(25, 64, 8));
      // Generated tokens are also read again before an eviction.
      for (int32_t i = 0; i < 120; ++i) s.accept(i % 64);
      s.read(seeded_tokens(70, 64, 9));
      EXPECT_GE(s.judged, 10u);
      EXPECT_GE(std::count(s.rows.begin(), s.rows.end(), 40u), 7);
      if (::testing::Test::HasFailure()) return;
    }
}

// The plan has room for exactly two chunks of 40 rows and the entries that an eviction leaves.
TEST(Reread, IsPlannedWithTheChunkInThePool) {
  const SeededModel m = seeded_model();
  SessionOptions o{.retention = Retention::kReread, .pool = 60, .chunk = 40, .local = 5, .max_new = 7};
  const MemoryPlan plan = must(make_plan(*m.model, *cpu(), o));
  EXPECT_EQ(plan.capacity, 60u + std::max(40u, 5 + plan.options.max_new));
  EXPECT_EQ(plan.dimensions.reach, plan.capacity + 40);
  EXPECT_EQ(plan.options.protect_init, kSinks);
}

TEST(Reread, CountsWhatItReadsTwice) {
  const SeededModel m = seeded_model();
  SessionOptions o = reread(Positions::kList);
  const auto twice = open_session(m.model, o);
  o.retention = Retention::kKeyDiff;
  const auto once = open_session(m.model, o);
  const std::vector<int32_t> text = seeded_tokens(300);
  for (Session* s : {twice.get(), once.get()}) must(s->feed(text));
  const SessionStats a = must(twice->stats()), b = must(once->stats());
  EXPECT_EQ(a.prefill_tokens, b.prefill_tokens);
  EXPECT_EQ(a.evicted, b.evicted);
  EXPECT_GT(a.prefill.flop, 1.9 * b.prefill.flop);
  EXPECT_LT(a.prefill.flop, 2.5 * b.prefill.flop);
}

// Which tokens are read again together depends only on the text: not on how calls divide it, nor on whether
// it is scored or generated.
TEST(Reread, ReadsTheSameBatchesHoweverATextIsScored) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> prompt = seeded_tokens(150), scored = seeded_tokens(237, 64, 8);
  using Batch = std::pair<int32_t, uint32_t>;  // position and number of rows
  const auto batches = [&](size_t cut) {       // 0: the tokens are given one by one, as when generating
    Watched s(m.model, reread(Positions::kList));
    must(s->feed(prompt));
    must(s->flush());
    std::vector<Batch> seen;
    s.device->before_submit = [&](const Program& program, const StepParams& step, const auto&) {
      // The program has the embedding and all layers; no other program has so many segments.
      if (program.segments != 1 + m.model->shape.layers) return;
      const Batch batch{step.position, step.n_rows};
      if (seen.empty() || seen.back() != batch) seen.push_back(batch);
    };
    std::vector<float> log_probs(scored.size());
    for (size_t at = 0; cut && at < scored.size(); at += cut) {
      const size_t count = std::min(cut, scored.size() - at);
      must(s->score(std::span(scored).subspan(at, count), std::span(log_probs).subspan(at, count)));
    }
    for (const int32_t token : scored)
      if (!cut) must(s->accept(token));
    return seen;
  };
  const std::vector<Batch> generating = batches(0);
  ASSERT_GE(generating.size(), 5u);
  for (const size_t cut : {size_t(1), size_t(7), size_t(40), size_t(41), scored.size()}) {
    SCOPED_TRACE(cut);
    EXPECT_EQ(batches(cut), generating);
  }
}

TEST(Reread, IsForEachHeadAlone) {
  SessionOptions o = reread(Positions::kList);
  o.retain_scope = RetainScope::kLayer;
  const Status status = make_plan(*seeded_model().model, *cpu(), o).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("reread scores the entries of each KV head"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace thimble::test
