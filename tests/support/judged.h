// A session whose evictions are checked: after a call, the kept entries are compared with a reference's
// scores in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"

namespace thimble::test {

class Judged {
 public:
  Judged(const SeededModel& m, const SessionOptions& options)
      : f(m.model, options), kv_heads_(m.model->shape.kv_heads) {
    f.on_submit = [this](const Program&, const StepParams& step, std::span<const HeadState> heads) {
      const bool again = !evictions_.empty() && evictions_.back().position == step.position &&
                         evictions_.back().rows == step.n_rows;  // the next segment of the same step
      const bool drops = std::any_of(heads.begin(), heads.end(), [&](const HeadState& head) {
        return head.keep < head.n_entries + step.n_rows;
      });
      if (drops && !again)
        evictions_.push_back({step.position, step.n_rows, kept(*f), {heads.begin(), heads.end()}});
    };
  }
  virtual ~Judged() = default;

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

  // Reads a text in pieces and a prompt, generates tokens, and reads another prompt: evictions of every kind.
  void read_and_generate() {
    const std::vector<int32_t> text = seeded_tokens(301);
    feed(std::span(text).first(61));
    for (size_t at = 61; at < 301; at += 40) feed(std::span(text).subspan(at, 40));
    read(seeded_tokens(25, 64, 8));
    for (int32_t i = 0; i < 120; ++i) accept(i % 64);
    read(seeded_tokens(70, 64, 9));
  }

  Followed f;
  uint32_t judged = 0, of_generated = 0;  // evictions in total, and those without a chunk

 protected:
  struct Scores {
    std::vector<double> score;  // of the positions
    double tolerance = 0;       // how much higher a dropped entry may score than a kept one
  };
  // The reference's scores of these positions, which a head held when entries had to be evicted.
  virtual Scores scores(uint32_t layer, uint32_t head, const std::vector<int32_t>& there) = 0;

  // See ReferenceModel: how much the rounding of keys may move a logit.
  double largest_logit(uint32_t layer, uint32_t kv_head, const double* q,
                       const std::vector<int32_t>& positions) {
    return f.reference.largest_logit(layer, kv_head, q, positions);
  }

 private:
  struct Eviction {
    int32_t position;
    uint32_t rows;
    Kept before;
    std::vector<HeadState> heads;
  };

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

  // Checks that no dropped, unprotected entry scores higher than a kept one.
  void judge(const Eviction& e, uint32_t layer, uint32_t head, std::vector<int32_t> after) {
    SCOPED_TRACE(::testing::Message() << "layer " << layer << " head " << head << " at " << e.position);
    const HeadState& state = e.heads[layer * kv_heads_ + head];
    std::vector<int32_t> there = e.before[layer][head];
    for (uint32_t row = 0; row < e.rows; ++row) there.push_back(e.position + static_cast<int32_t>(row));
    std::erase_if(after, [&](int32_t p) { return p > there.back(); });  // generated since
    ASSERT_EQ(after.size(), std::min<size_t>(state.keep, there.size()));

    const Scores scores = this->scores(layer, head, there);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    double worst_kept = kInfinity, best_dropped = -kInfinity;
    for (size_t i = 0; i < there.size(); ++i) {
      const bool stays = std::binary_search(after.begin(), after.end(), there[i]);
      if (i < state.protect_first || i >= there.size() - state.protect_last)
        EXPECT_TRUE(stays) << "protected " << there[i];
      else if (stays)
        worst_kept = std::min(worst_kept, scores.score[i]);
      else
        best_dropped = std::max(best_dropped, scores.score[i]);
    }
    EXPECT_GE(worst_kept, best_dropped - scores.tolerance);
  }

  uint32_t kv_heads_;
  std::vector<Eviction> evictions_;
};

}  // namespace thimble::test
