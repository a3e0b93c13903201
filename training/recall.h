// How many questions about a text are answered when it was read within less memory, and how likely the right
// answers are then.
#pragma once

#include <cmath>
#include <memory>

#include "runtime/session.h"
#include "training/texts.h"

namespace thimble {

// What tells how good a retainer is: answers, where the model itself gives them; else the probability of the
// right ones, which every model has.
enum class Measure { kAnswers, kProbability };
// What the report and the file call it: "answers", "probability".
const char* name_of(Measure);

struct Recall {
  uint64_t asked = 0;   // questions
  double answered = 0;  // of these; of one with several answers the share of them that was given
  uint64_t tokens = 0;  // of right answers
  double log_prob = 0;  // natural, of all of these together

  void add(const Recall& more) {
    asked += more.asked;
    answered += more.answered;
    tokens += more.tokens;
    log_prob += more.log_prob;
  }
  double share() const { return asked ? answered / static_cast<double>(asked) : 0; }
  // Of a token of a right answer, the geometric mean; and 1 over it, 0 where nothing was scored.
  double probability() const { return tokens ? std::exp(log_prob / static_cast<double>(tokens)) : 0; }
  double perplexity() const { return tokens ? std::exp(-log_prob / static_cast<double>(tokens)) : 0; }
  // What tells about retainers where this is what dense attention gives.
  Measure measure() const { return share() < 0.5 ? Measure::kProbability : Measure::kAnswers; }
  // What a check reports, of [0, 1] where nothing is gained: the share of the questions that was answered, or
  // of dense attention's probability that is kept.
  double reported(const Recall& dense) const { return reported(dense, dense.measure()); }
  double reported(const Recall& dense, Measure measure) const {
    if (measure == Measure::kAnswers) return share();
    return dense.probability() > 0 ? probability() / dense.probability() : 0;
  }
};

// The share of the expected texts that occur in what was said. Case (of ASCII), white space, and commas,
// apostrophes and underscores between two digits do not matter.
double share_said(std::string_view said, std::span<const std::string> expected);

// Reads a text and asks those of its questions that a check may ask, at most `most`, each as the first one.
// Of what is not wanted (`answers`, `probability`) the result has nothing. `pool`: entries that a head keeps
// on average; 0: all are kept.
struct Asking {
  uint32_t pool, most;
  bool answers, probability;
};
Result<Recall> ask_about(const TrainingText&, std::shared_ptr<const Model>, std::shared_ptr<Device>,
                         Retention, std::shared_ptr<const Retainer>, const Asking&);
// What that takes, with the model's weights: the text's session, and one beside it for a question at a time.
Result<uint64_t> bytes_to_ask(const TrainingText&, const Model&, const Device&, Retention,
                              std::shared_ptr<const Retainer>, uint32_t pool);

}  // namespace thimble
