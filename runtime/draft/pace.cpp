#include "runtime/draft/pace.h"

#include <algorithm>

namespace thimble {
namespace {

constexpr uint32_t kTried = 3;        // tokens of the first draft, and of one that is only tried
constexpr double kTrying = 1.0 / 50;  // the share of the time that such drafts may lose
constexpr uint32_t kLeastSteps = 3;   // plain steps before the first draft
constexpr uint32_t kMostDrafts = 16;  // between two plain steps, because their time may change

// Takes a value into an average of the `count` values before it, or of about the last eight.
void average(double& mean, double value, uint32_t count = 8) {
  mean += (value - mean) / std::min(count + 1, 8u);
}

}  // namespace

void Pace::stepped(double seconds) {
  // The first step does not count, because it may read weights that no step has read before. A pause of the
  // system must not make plain steps look slow.
  if (plain_steps_ == 2)
    plain_ = std::min(plain_, seconds);
  else if (plain_steps_)
    average(plain_, plain_ ? std::min(seconds, 1.5 * plain_) : seconds, plain_steps_ - 1);
  elapsed_ += seconds;
  ++plain_steps_;
  drafts_since_ = 0;
}

uint32_t Pace::choose(uint32_t most) {
  most = std::min(most, kMostDrafted);
  if (plain_steps_ < kLeastSteps || drafts_since_ == kMostDrafts) return 0;
  if (!drafts_) return std::min(most, kTried);
  uint32_t best = 0;
  double expected = 1, all_right = 1, fastest = 1 / plain_;  // tokens; probability; tokens per second
  for (uint32_t i = 0; i < most; ++i) {
    all_right *= right_[i];
    expected += all_right;
    const double rate = expected / (plain_ + (i + 1) * more_ + again_);
    if (rate > fastest) fastest = rate, best = i + 1;
  }
  tries_ = !best && lost_ <= kTrying * elapsed_;
  return tries_ ? std::min(most, kTried) : best;
}

void Pace::drafted(uint32_t tokens, uint32_t right, bool wrong, double seconds) {
  average(more_, std::max(0.0, seconds - plain_) / tokens, drafts_);
  average(again_, 0);  // caught_up() makes it an average of its seconds
  ++drafts_;
  ++drafts_since_;
  for (uint32_t i = 0; i < right; ++i) average(right_[i], 1);
  if (wrong) average(right_[right], 0);
  const double lost = seconds - (1 + right) * plain_;
  lost_ = std::max(0.0, lost_ + lost);
  if (lost < 0 && tries_)  // the text may repeat from here on
    for (uint32_t i = 0; i < right; ++i) right_[i] = std::max(right_[i], kHoped);
}

void Pace::caught_up(double seconds) { average(again_, again_ + seconds); }

}  // namespace thimble
