// Chooses a token from logits: repetition penalty, top-k, top-p, min-p, then temperature.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace thimble {

struct SamplerOptions {
  float temperature = 0;      // 0: the most likely token, ties to the lower id
  float top_p = 0.95f;        // the fewest tokens that have this probability together; 1: all
  float min_p = 0.05f;        // none less likely than this share of the most likely one; 0: all
  float repeat_penalty = 1;   // divides positive logits of recent tokens, multiplies negative ones; 1: none
  uint32_t top_k = 40;        // 0: all
  uint32_t repeat_last = 64;  // how many tokens are recent, at most kLongestHistory
  uint64_t seed = 0;

  bool operator==(const SamplerOptions&) const = default;
};

// Equal options, logits and accepted tokens give equal tokens on every platform. A copy goes on independently
// from the same state. Nothing allocates after construction.
class Sampler {
 public:
  static constexpr uint32_t kLongestHistory = 4096;

  // `rewindable`: tokens back to which rewind() may ask to go. `suppressed`: ids that are never sampled,
  // lent.
  Sampler(uint32_t vocab, uint32_t rewindable,
          std::span<const int32_t> suppressed = {});  // vocab: at least 1
  // Takes the options and starts the random numbers from the seed; the history stays. On error nothing
  // changes.
  Status set(const SamplerOptions&);
  // Whether options make sense, or what is wrong with them.
  static Status check(const SamplerOptions&);
  // The next token by `logits` [vocab]. NaN counts as -inf, +inf as the largest float.
  int32_t sample(const float* logits);
  // Remembers a token, which stands at that position of the stream, for the penalty.
  void accept(int32_t token, uint64_t position);
  // Forgets the tokens from this position on, and the random numbers drawn for them.
  void rewind(uint64_t position);
  // Forgets the history and starts the random numbers again.
  void reset();

  // A token that was accepted, and the state of the random numbers after it.
  struct Accepted {
    uint64_t random;
    uint32_t position;
    int32_t token;

    bool operator==(const Accepted&) const = default;
  };
  // What it takes to go on elsewhere. A session file stores its parts as they are in memory.
  struct Saved {
    SamplerOptions options;
    uint64_t random = 0;
    std::vector<Accepted> accepted;  // the tokens that it remembers, oldest first

    bool operator==(const Saved&) const = default;
  };
  const SamplerOptions& options() const { return options_; }
  uint64_t random() const { return random_; }
  // Takes back what was drawn for a token that was sampled and not accepted.
  void set_random(uint64_t random) { random_ = random; }
  Saved saved() const;
  // Whether restore() takes these tokens: all are in its vocabulary.
  bool takes(std::span<const Accepted> accepted) const;
  // Goes on from there. The options passed check(), and it takes the tokens. Of more tokens than it remembers
  // it takes the last: a session that was made smaller has more.
  void restore(const Saved&);
  // Whether both go on alike.
  bool operator==(const Sampler& other) const { return saved() == other.saved(); }

  // Whether sample() gives this, the arg max of the logits as they are.
  bool samples_best(int32_t best) const;
  // What such a sampler allocates.
  static uint64_t bytes(uint32_t vocab, uint32_t rewindable);
  uint64_t bytes() const;

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  void count_recent();
  float logit(const float* logits, uint32_t id) const;
  double uniform();
  // The i-th most recent token, i < accepted_ and < kLongestHistory.
  const Accepted& recent(uint64_t i) const { return history_[(accepted_ - 1 - i) % history_.size()]; }

  SamplerOptions options_;
  std::span<const int32_t> suppressed_;
  std::vector<Candidate> candidates_;   // [vocab], scratch
  std::vector<uint16_t> recent_count_;  // [vocab], occurrences among the last repeat_last
  std::vector<Accepted> history_;       // [kLongestHistory + rewindable], a ring
  uint64_t accepted_ = 0;
  uint64_t random_ = 0;
};

}  // namespace thimble
