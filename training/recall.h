// Measures how many questions about a text are answered after it was read with a limited pool, and how
// probable the right answers are.
#pragma once

#include <cmath>
#include <memory>

#include "runtime/session.h"
#include "training/texts.h"

namespace thimble {

// The measure of a retainer's quality: the share of answered questions if the model itself answers enough of
// them, else the probability of the right answers, which every model has.
enum class Measure { kAnswers, kProbability };
// The name in reports and in the file: "answers", "probability".
const char* name_of(Measure);

struct Recall {
  uint64_t asked = 0;  // questions
  // Number of answered questions. A question with several answers counts as the share of them that was given.
  double answered = 0;
  uint64_t tokens = 0;  // of the right answers
  double log_prob = 0;  // sum of the natural logarithms of all tokens' probabilities

  void add(const Recall& more) {
    asked += more.asked;
    answered += more.answered;
    tokens += more.tokens;
    log_prob += more.log_prob;
  }
  double share() const { return asked ? answered / static_cast<double>(asked) : 0; }
  // The geometric mean of the probability of a token in a right answer, and its reciprocal. Both are 0 if
  // nothing was scored.
  double probability() const { return tokens ? std::exp(log_prob / static_cast<double>(tokens)) : 0; }
  double perplexity() const { return tokens ? std::exp(-log_prob / static_cast<double>(tokens)) : 0; }
  // The measure to use for retainers if this is the recall of dense attention.
  Measure measure() const { return share() < 0.5 ? Measure::kProbability : Measure::kAnswers; }
  // The value that a check reports: the share of answered questions, or this probability divided by that of
  // dense attention. It is in [0, 1] unless retention improves on dense attention.
  double reported(const Recall& dense) const { return reported(dense, dense.measure()); }
  double reported(const Recall& dense, Measure measure) const {
    if (measure == Measure::kAnswers) return share();
    return dense.probability() > 0 ? probability() / dense.probability() : 0;
  }
};

// The share of the `expected` strings that occur in `said`. The comparison ignores case (of ASCII), white
// space, and commas, apostrophes and underscores between two digits.
double share_said(std::string_view said, std::span<const std::string> expected);

// Reads a text and asks at most `most` of the questions that a check may ask, each as the first question
// after the text. `answers` and `probability` select what to measure; the rest of the result stays empty.
// `pool` is the average number of entries that a head keeps; 0 keeps all.
struct Asking {
  uint32_t pool, most;
  bool answers, probability;
};
Result<Recall> ask_about(const TrainingText&, std::shared_ptr<const Model>, std::shared_ptr<Device>,
                         Retention, std::shared_ptr<const Retainer>, const Asking&);
// Bytes that ask_about() needs, including the model's weights, the session of the text, and a second session
// for one question at a time.
Result<uint64_t> bytes_to_ask(const TrainingText&, const Model&, const Device&, Retention,
                              std::shared_ptr<const Retainer>, uint32_t pool);

}  // namespace thimble
