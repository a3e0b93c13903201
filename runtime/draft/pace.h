// The pace decides how many tokens are drafted: as many as generate the most tokens per second, by how long
// steps took and how many guesses were right so far. If no draft pays, it tries one from time to time.
#pragma once

#include <array>
#include <cstdint>

namespace thimble {

class Pace {
 public:
  static constexpr uint32_t kMostDrafted = 15;

  // The number of tokens to draft next, at most `most`. 0: a plain step gives more tokens per second.
  uint32_t choose(uint32_t most);
  // A plain step took so long.
  void stepped(double seconds);
  // A step with a draft of so many tokens took so long. The first `right` of them were generated. `wrong`:
  // the next one was not.
  void drafted(uint32_t tokens, uint32_t right, bool wrong, double seconds);
  // After that, the right ones had to be read again, which took so long.
  void caught_up(double seconds);
  // Before a draft, a text was read for it, which took so long.
  void read(double seconds) { lost_ += seconds; }

 private:
  static constexpr uint32_t kTried = 3;  // tokens of the first draft
  static constexpr double kHoped = 0.7;  // how often a guess is right, until it is known

  // How often a guess is right if those before it are.
  struct Guess {
    double right = kHoped;
    uint32_t seen = 0;
  };

  // Seconds of a step with a draft of so many tokens.
  double seconds(double tokens) const;

  // Moving averages, in seconds: a plain step, a step with a draft, and what follows it.
  double plain_ = 0, draft_ = 0, again_ = 0;
  // A step with a draft takes some time for any draft, and more for each token: the line that fits best.
  // These are the moving average of a draft's tokens, their variance, and their covariance with the seconds.
  double tokens_ = 0, variance_ = 0, covariance_ = 0;
  uint32_t plain_steps_ = 0, drafts_ = 0;  // how many were measured
  std::array<Guess, kMostDrafted> guesses_;
  uint32_t drafts_since_ = 0;  // drafts since the latest plain step
  // Seconds of all plain steps, and seconds that drafts lost and did not win back.
  double elapsed_ = 0, lost_ = 0;
  bool tries_ = false;       // the draft is one that was not expected to pay
  uint32_t tried_ = kTried;  // tokens of the next such draft: doubled as long as all are right
};

}  // namespace thimble
