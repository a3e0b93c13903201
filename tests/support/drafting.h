// Shared by tests of drafts: what a session with drafts holds and saves equals that of a session without.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/support/saved_sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {

// A text that repeats itself with changes, so that some guesses are right, some in part and some not at all.
inline std::vector<int32_t> repeating(size_t count, uint64_t seed = 7) {
  const std::vector<int32_t> once = seeded_tokens(40, 64, seed), other = seeded_tokens(count, 64, seed + 1);
  std::vector<int32_t> text(count);
  for (size_t i = 0; i < count; ++i) text[i] = i % 11 == 10 ? other[i] : once[i % 40];
  return text;
}

// The state without statistics of time and cost.
inline SequenceFields without_costs(SequenceFields s) {
  s.prefill_seconds = s.decode_seconds = 0;
  s.prefill = s.decode = s.selecting = {};
  return s;
}

// The arrays of a saved session. Its head contains times.
inline SessionBytes body_of(const SessionBytes& file) {
  return {file.begin() + static_cast<ptrdiff_t>(head_end(file)) + sizeof(uint64_t),
          file.end() - sizeof(uint64_t)};
}

inline void expect_same(Session& drafting, Session& plain) {
  const std::span<const float> logits = must(drafting.logits()), expected = must(plain.logits());
  ASSERT_TRUE(std::equal(logits.begin(), logits.end(), expected.begin(), expected.end()));
  ASSERT_EQ(kept(drafting), kept(plain));
  ASSERT_EQ(without_costs(drafting.state()), without_costs(plain.state()));
  ASSERT_EQ(drafting.state().sampler, plain.state().sampler);
  ASSERT_EQ(must(drafting.stats()).saturated, must(plain.stats()).saturated);
}

inline bool takes_drafts(const SessionOptions& o) {
  return o.retention != Retention::kTova && o.retention != Retention::kAdore &&
         o.selection == Selection::kDense;
}

// Counts the steps: each begins at another position.
struct Counted {
  std::shared_ptr<SpyDevice> device = std::make_shared<SpyDevice>(cpu());
  uint64_t steps = 0;
  int position = -1;
  Counted() {
    device->before_submit = [this](const Program&, const StepParams& step, std::span<const HeadState>) {
      if (step.position != position) ++steps;
      position = step.position;
    };
  }
};

}  // namespace thimble::test
