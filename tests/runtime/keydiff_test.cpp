// KeyDiff on whole sessions: what stays is what the keys of a model in double precision say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"

namespace thimble::test {
namespace {

SessionOptions keydiff(Positions positions) {
  return {.retention = Retention::kKeyDiff,
          .keeps = {24, 40, 150, 60},
          .chunk = 40,
          .stabilizers = 12,
          .local = 20,
          .protect_init = 2,
          .max_new = 50,
          .positions = positions};
}

// A session whose evictions are watched, and compared with the reference's keys when a call is over.
class Judged {
 public:
  Judged(const SeededModel& m, const SessionOptions& options)
      : kv_heads_(m.model->shape.kv_heads), f(m.model, options) {
    f.on_submit = [this](const Program&, const StepParams& step, std::span<const HeadState> heads) {
      const bool again = !evictions_.empty() && evictions_.back().position == step.position &&
                         evictions_.back().rows == step.n_rows;  // the next segment
      const bool drops = std::any_of(heads.begin(), heads.end(), [&](const HeadState& head) {
        return head.keep < head.n_entries + step.n_rows;
      });
      if (drops && !again)
        evictions_.push_back({step.position, step.n_rows, kept(*f), {heads.begin(), heads.end()}});
    };
  }

  void feed(std::span<const int32_t> tokens) {
    f.feed(tokens);
    judge();
  }
  void read(std::span<const int32_t> tokens) {
    f.read(tokens);
    judge();
  }
  void accept(int32_t token) {
    f.accept(token);
    judge();
  }

 private:
  struct Eviction {
    int32_t position;
    uint32_t rows;
    Kept before;
    std::vector<HeadState> heads;
  };

 public:
  uint32_t judged = 0, of_generated = 0;  // evictions; those beside a chunk

 private:
  void judge() {
    for (size_t i = 0; i < evictions_.size(); ++i) {
      const Kept after = i + 1 < evictions_.size() ? evictions_[i + 1].before : kept(*f);
      for (uint32_t layer = 0; layer < after.size(); ++layer)
        for (uint32_t head = 0; head < kv_heads_; ++head)
          judge(evictions_[i], layer, head, after[layer][head]);
      ++judged;
      of_generated += evictions_[i].rows == 0;
    }
    evictions_.clear();
  }

  // No entry that was dropped, and that was not protected, scores higher than one that stayed. The session's
  // keys may be the next halves to the reference's, 2^-10 off, and so turn by as much; their mean by n /
  // |sum| times that.
  void judge(const Eviction& e, uint32_t layer, uint32_t head, std::vector<int32_t> after) {
    SCOPED_TRACE(::testing::Message() << "layer " << layer << " head " << head << " at " << e.position);
    const HeadState& state = e.heads[layer * kv_heads_ + head];
    std::vector<int32_t> there = e.before[layer][head];
    for (uint32_t row = 0; row < e.rows; ++row) there.push_back(e.position + static_cast<int32_t>(row));
    std::erase_if(after, [&](int32_t p) { return p > there.back(); });  // generated since
    ASSERT_EQ(after.size(), std::min<size_t>(state.keep, there.size()));

    const size_t dh = f->model().shape.head_dim, n = there.size();
    std::vector<double> sum(dh), scores;
    const auto length = [](const auto& x) {
      return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
    };
    for (const int32_t p : there) {
      const auto key = f.reference.key(layer, head, p);
      for (size_t c = 0; c < dh; ++c) sum[c] += key[c] / length(key);
    }
    for (const int32_t p : there) {
      const auto key = f.reference.key(layer, head, p);
      scores.push_back(-std::inner_product(key.begin(), key.end(), sum.begin(), 0.0) /
                       (length(key) * length(sum)));
    }
    double worst_kept = 1, best_dropped = -1;
    for (size_t i = 0; i < n; ++i) {
      const bool stays = std::binary_search(after.begin(), after.end(), there[i]);
      if (i < state.protect_first || i >= n - state.protect_last)
        EXPECT_TRUE(stays) << "protected " << there[i];
      else if (stays)
        worst_kept = std::min(worst_kept, scores[i]);
      else
        best_dropped = std::max(best_dropped, scores[i]);
    }
    EXPECT_GE(worst_kept, best_dropped - 2 * 0x1p-10 * (1 + static_cast<double>(n) / length(sum)));
  }

  uint32_t kv_heads_;
  std::vector<Eviction> evictions_;

 public:
  Followed f;
};

TEST(KeyDiff, KeepsTheKeysThatAreLeastLikeTheMean) {
  const SeededModel m = seeded_model();
  for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
    SCOPED_TRACE(positions == Positions::kList ? "list" : "original");
    Judged s(m, keydiff(positions));
    const std::vector<int32_t> text = seeded_tokens(301);
    s.feed(std::span(text).first(61));
    for (size_t at = 61; at < 301; at += 40) s.feed(std::span(text).subspan(at, 40));
    s.read(seeded_tokens(25, 64, 8));
    for (int32_t i = 0; i < 120; ++i) s.accept(i % 64);  // the scores of these are made when they must go
    s.read(seeded_tokens(70, 64, 9));
    EXPECT_GE(s.judged, 10u);
    EXPECT_GE(s.of_generated, 2u);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(KeyDiff, IsForEachHeadAlone) {
  SessionOptions o = keydiff(Positions::kList);
  o.retain_scope = RetainScope::kLayer;
  const Status status = make_plan(*seeded_model().model, *cpu(), o).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("keydiff compares the keys of one head"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace thimble::test
