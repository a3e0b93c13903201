#include "runtime/draft/pace.h"

#include <algorithm>

namespace thimble {
namespace {

constexpr double kTrying = 1.0 / 50;     // the share of the time that such drafts may lose
constexpr uint32_t kLeastSteps = 3;      // plain steps before the first draft
constexpr uint32_t kRemembered = 8;      // steps that a moving average covers
constexpr double kLeastVariance = 1e-6;  // of the tokens of drafts, to know what one adds
constexpr uint32_t kMostDrafts = 16;     // between two plain steps, because their time may change

// Takes a value into an average of the `count` values before it, or of about the last kRemembered.
void average(double& mean, double value, uint32_t count = kRemembered) {
  mean += (value - mean) / std::min(count + 1, kRemembered);
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

// Drafts of one length do not tell what a token adds; then the time of the tokens is all that exceeds a
// plain step.
double Pace::seconds(double tokens) const {
  const double most = std::max(0.0, draft_ - plain_) / tokens_,
               more = variance_ > kLeastVariance ? std::clamp(covariance_ / variance_, 0.0, most) : most;
  return std::max(plain_, draft_ + (tokens - tokens_) * more) + again_;
}

uint32_t Pace::choose(uint32_t most) {
  most = std::min(most, kMostDrafted);
  if (plain_steps_ < kLeastSteps || drafts_since_ == kMostDrafts) return 0;
  if (!drafts_) return std::min(most, kTried);
  uint32_t best = 0;
  double fastest = 1 / plain_;                         // tokens per second
  double expected = 1, all_right = 1, right = kHoped;  // tokens; probabilities
  for (uint32_t i = 0; i < most; ++i) {
    if (guesses_[i].seen) right = guesses_[i].right;  // otherwise as the one before it
    all_right *= right;
    expected += all_right;
    const double rate = expected / seconds(i + 1);
    if (rate > fastest) fastest = rate, best = i + 1;
  }
  tries_ = !best && lost_ <= kTrying * elapsed_;
  return tries_ ? std::min(most, tried_) : best;
}

void Pace::drafted(uint32_t tokens, uint32_t right, bool wrong, double seconds) {
  const double part = 1.0 / std::min(drafts_ + 1, kRemembered), longer = tokens - tokens_,
               slower = seconds - draft_;
  tokens_ += part * longer;
  draft_ += part * slower;
  variance_ = (1 - part) * (variance_ + part * longer * longer);
  covariance_ = (1 - part) * (covariance_ + part * longer * slower);
  average(again_, 0);  // caught_up() makes it an average of its seconds
  ++drafts_;
  ++drafts_since_;
  const auto note = [&](Guess& guess, bool is_right) { average(guess.right, is_right, ++guess.seen); };
  for (uint32_t i = 0; i < right; ++i) note(guesses_[i], true);
  if (wrong) note(guesses_[right], false);
  const double lost = seconds - (1 + right) * plain_;
  lost_ = std::max(0.0, lost_ + lost);
  if (!tries_) return;
  tried_ = wrong ? kTried : std::min(2 * tokens, kMostDrafted);
  if (lost < 0)  // the text may repeat from here on
    for (uint32_t i = 0; i < right; ++i) guesses_[i].right = std::max(guesses_[i].right, kHoped);
}

void Pace::caught_up(double seconds) { average(again_, again_ + seconds); }

}  // namespace thimble
