// Training as those see it who run it: what may be asked for, how far it is, and what came of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/model/model.h"

namespace thimble {

// What scores estimate. The first two are of questions and answers behind a text, the others of the text
// repeated; all but kMaxLogit are logarithms.
enum class Target { kLogProb, kMaxLogit, kLogKvzipPlus };
// As the key retainer.target has it: "log_prob", ...
const char* name_of(Target);

struct TrainingOptions {
  std::vector<std::string> data;  // plain text files, UTF-8
  std::string output;             // the sidecar; must not exist
  // Empty: a retainer is trained. Else this sidecar is written anew with shares, and nothing is trained.
  std::string heads;
  Retainer::Kind kind = Retainer::Kind::kMlp;  // kAdore: a controller, see controller_trainer.h
  Target target = Target::kLogProb;
  bool tries_targets = false;        // `target` becomes the one whose short training answers most
  uint32_t texts = 16, steps = 300;  // a linear one has no steps
  uint64_t seed = 0;
  // Bytes; 0: a GiB for what is kept of the texts, beside the reading; of a linear one what it takes.
  uint64_t memory = 0;
  bool equal_shares = false;  // no shares are counted
  uint32_t text_tokens = 0;   // 0: 6144, or what the model's context allows
  uint32_t threads = 0;       // of the host, beside the device's; 0: one a core. None changes the file
};

struct TrainingProgress {
  enum class Phase { kReading, kFitting, kChecking, kDone, kTrying } phase = Phase::kReading;
  uint64_t done = 0,
           total = 0;     // tokens of reading, steps of fitting, readings of checking, targets of trying
  double per_second = 0;  // of those
  double loss = 0;        // of the last step
  // Of the step that was followed by questions about a held-out text, the share of them that was answered
  // right, or where `dense` is below a half, of the right answers' probability that is kept; of the others
  // -1.
  double recall = -1;
  // The share of the questions about held-out texts that is answered with nothing dropped; -1: not known yet.
  double dense = -1;
};

// Where the time of this process went.
struct TrainingSeconds {
  double trying = 0;   // short trainings for other targets
  double reading = 0;  // of texts, with what is kept of them
  double labels = 0;   // of what stands behind texts, which tells what they were worth
  double fitting = 0, checking = 0;
};

// That there is something to train, with something, into a file that is not there yet.
Status check_training(const Model&, const TrainingOptions&);

// A training that is done step by step. One object is used by one thread at a time.
class Training {
 public:
  virtual ~Training() = default;
  // Does a part of the work; false when everything is done.
  Result<bool> step();
  TrainingProgress progress() const;
  // Keeps all that was done in OUTPUT.partial, but for a text that is being read. step() does so every
  // minute.
  virtual Status save() = 0;
  // What came of it, as a JSON object, when everything is done.
  virtual std::string report() const = 0;

 protected:
  using Phase = TrainingProgress::Phase;
  // A part of the work of each phase.
  virtual Status read_on() = 0;
  virtual Status fit_on() = 0;
  virtual Status check_on() = 0;
  virtual Status try_on() { return {}; }  // of those that try
  virtual double loss() const = 0;        // of the last step
  virtual double recall() const { return -1; }
  virtual double answered_densely() const { return -1; }
  // Where the time of the next step goes, but for what the step itself counts among the labels.
  virtual double& clock();
  void set_phase(Phase phase, uint64_t done, uint64_t total);

  Phase phase_ = Phase::kReading;
  uint64_t done_ = 0, total_ = 0;
  TrainingSeconds seconds_;
  double saved_at_ = 0;

 private:
  Status make_step();

  uint64_t phase_first_ = 0;  // done before this process took the phase up
  double phase_start_ = 0;
};

// Takes up what OUTPUT.partial (and OUTPUT.tried) holds of the same training, if it is there.
Result<std::unique_ptr<Training>> open_training(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                const TrainingOptions&);

}  // namespace thimble
