// The pace decides how many tokens are drafted: as many as generate the most tokens per second, by how long
// steps took and how many guesses were right so far. If no draft pays, it tries one from time to time.
#pragma once

#include <array>
#include <cstdint>

namespace thimble {

class Pace {
 public:
  static constexpr uint32_t kMostDrafted = 15;

  Pace() { right_.fill(kHoped); }
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
  static constexpr double kHoped = 0.7;     // how often a guess is right, until it is known
  double plain_ = 0;                        // seconds of a plain step, a moving average
  double more_ = 0;                         // seconds that a drafted token adds, a moving average
  double again_ = 0;                        // seconds after a draft, a moving average
  uint32_t plain_steps_ = 0, drafts_ = 0;   // how many were measured
  std::array<double, kMostDrafted> right_;  // how often a guess is right if those before it are
  uint32_t drafts_since_ = 0;               // drafts since the latest plain step
  // Seconds of all plain steps, and seconds that drafts lost and did not win back.
  double elapsed_ = 0, lost_ = 0;
  bool tries_ = false;  // the draft is one that was not expected to pay
};

}  // namespace thimble
