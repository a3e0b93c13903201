// Chooses a token from logits: repetition penalty, top-k, top-p, min-p, then temperature.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "text/grammar/token_trie.h"

namespace thimble {

struct SamplerOptions {
  float temperature = 0;  // 0: the most likely token, or the lower id of equal ones
  float top_p = 0.95f;    // smallest set of tokens with this total probability; 1: all
  float min_p = 0.05f;    // least probability relative to the most likely token; 0: all
  float repeat_penalty =
      1;                // divides positive and multiplies negative logits of the answer's tokens; 1: none
  uint32_t top_k = 40;  // 0: all
  uint32_t repeat_last = 64;  // number of tokens that it applies to, the last ones; at most kLongestHistory
  uint64_t seed = 0;

  bool operator==(const SamplerOptions&) const = default;
};

// Subtracted from the logits of the tokens of the answer: `presence` once for each token, `frequency` for
// each time. A session file does not have them.
struct AnswerPenalties {
  float presence = 0, frequency = 0;

  bool operator==(const AnswerPenalties&) const = default;
};

// Penalties apply to the tokens of the answer, which are those that were accepted since the last other token
// of the stream. So they do not depend on how a prompt was read, again or as a part of a longer conversation.
//
// Equal options, logits and accepted tokens give equal tokens on every platform. A copy continues
// independently from the same state. Nothing is allocated after construction.
class Sampler {
 public:
  static constexpr uint32_t kLongestHistory = 4096, kMostBiased = 1024;

  // `vocab`: at least 1. `rewindable`: the number of tokens by which rewind() may go back. `suppressed`: ids
  // that are never sampled; the caller keeps them alive.
  Sampler(uint32_t vocab, uint32_t rewindable, std::span<const int32_t> suppressed = {});
  // Sets the options and restarts the random numbers from the seed. The history stays. On error nothing
  // changes.
  Status set(const SamplerOptions&);
  // Checks whether the options are valid. The error says what is wrong with them.
  static Status check(const SamplerOptions&);
  // Adds biases[i] to the logit of tokens[i] from now on. On error nothing changes.
  Status set_bias(std::span<const int32_t> tokens, std::span<const float> biases);
  // Sets the penalties for tokens of the answer. On error nothing changes.
  Status set_penalties(const AnswerPenalties&);
  // Samples the next token from `logits` [vocab]. NaN counts as -inf, and +inf as the largest float. With
  // `allowed`, only its tokens take part; at least one of them must be in the vocabulary. `position`: that of
  // the token in the stream, which tells where the answer began.
  int32_t sample(const float* logits, const grammar::TokenMask* allowed = nullptr, uint64_t position = 0);
  // Adds a token to the history, for the penalty. `position` is its position in the stream.
  void accept(int32_t token, uint64_t position);
  // Forgets the tokens from this position on, and the random numbers drawn for them.
  void rewind(uint64_t position);
  // Forgets the history and restarts the random numbers.
  void reset();

  // An accepted token, and the state of the random numbers after it.
  struct Accepted {
    uint64_t random;
    uint32_t position;
    int32_t token;

    bool operator==(const Accepted&) const = default;
  };
  // The state that another sampler needs to continue. A session file stores its parts as they are in memory.
  struct Saved {
    SamplerOptions options;
    uint64_t random = 0;
    std::vector<Accepted> accepted;  // the tokens of the history, oldest first

    bool operator==(const Saved&) const = default;
  };
  const SamplerOptions& options() const { return options_; }
  uint64_t random() const { return random_; }
  // Undoes the draws for a token that was sampled but not accepted.
  void set_random(uint64_t random) { random_ = random; }
  Saved saved() const;
  // Whether restore() accepts these tokens: all are in the vocabulary.
  bool takes(std::span<const Accepted> accepted) const;
  // Continues from `saved`. Its options must have passed check(), and takes() must accept its tokens. If it
  // has more tokens than the history holds, the last ones are used: a session that was made smaller has more.
  void restore(const Saved&);
  // Whether both samplers continue alike.
  bool operator==(const Sampler& other) const;

  // Whether sample() would return `best`, which is the arg max of the unmodified logits.
  bool samples_best(int32_t best) const;
  // The bytes that such a sampler allocates.
  static uint64_t bytes(uint32_t vocab, uint32_t rewindable);
  uint64_t bytes() const;

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  struct Bias {
    int32_t token;
    float bias;

    bool operator==(const Bias&) const = default;
  };
  std::span<const Bias> biases() const { return std::span(biases_).first(biased_); }

  void penalise_answer(uint64_t position);
  double uniform();
  // The i-th most recent token, i < accepted_ and < kLongestHistory.
  const Accepted& recent(uint64_t i) const { return history_[(accepted_ - 1 - i) % history_.size()]; }

  SamplerOptions options_;
  AnswerPenalties penalties_;
  std::span<const int32_t> suppressed_;
  std::vector<Candidate> candidates_;  // [vocab], scratch memory
  std::vector<Bias> biases_;           // [kMostBiased], the first biased_ are used
  size_t biased_ = 0;
  std::vector<Accepted> history_;  // [kLongestHistory + rewindable], a ring buffer
  uint64_t accepted_ = 0;
  uint64_t random_ = 0;
};

}  // namespace thimble
