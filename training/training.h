// The interface for running a training: its options, its progress, and its result.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/model/model.h"

namespace thimble {

// The quantity that scores estimate. The first two come from questions and answers after a text,
// kLogKvzipPlus from a repetition of the text. All but kMaxLogit are logarithms.
enum class Target { kLogProb, kMaxLogit, kLogKvzipPlus };
// The value of the key retainer.target: "log_prob", ...
const char* name_of(Target);

struct TrainingOptions {
  std::vector<std::string> data;  // plain UTF-8 text files, or JSON lines (conversations.h)
  std::string output;             // path of the sidecar; must not exist
  // Empty: trains a retainer. Otherwise nothing is trained, and this sidecar is written again with shares.
  std::string heads;
  Retainer::Kind kind = Retainer::Kind::kMlp;  // kAdore: a controller, see controller_trainer.h
  Target target = Target::kLogProb;
  // `target` becomes the target whose short training answers the most questions.
  bool tries_targets = false;
  uint32_t texts = 16, steps = 300;  // a linear retainer needs no steps
  uint64_t seed = 0;
  // Bytes. 0 means 1 GiB for the samples, in addition to the reading; for a linear retainer, as much as it
  // needs.
  uint64_t memory = 0;
  bool equal_shares = false;  // do not count shares
  uint32_t text_tokens = 0;   // 0: 6144, or as many as the model's context allows
  // Host threads, in addition to the device's. 0 means one per core. The file does not depend on it.
  uint32_t threads = 0;
};

struct TrainingProgress {
  enum class Phase { kReading, kFitting, kChecking, kDone, kTrying } phase = Phase::kReading;
  uint64_t done = 0,
           total = 0;     // tokens of reading, steps of fitting, readings of checking, targets of trying
  double per_second = 0;  // of the same unit
  double loss = 0;        // of the last step
  // If the last step was followed by questions about a held-out text: the share of them that was answered,
  // or, if `dense` is below a half, the probability of the right answers relative to dense attention. Else
  // -1.
  double recall = -1;
  // The share of the questions about held-out texts that is answered with no entries dropped. -1: not known
  // yet.
  double dense = -1;
};

// Seconds that this process spent in each phase.
struct TrainingSeconds {
  double trying = 0;   // short trainings for other targets
  double reading = 0;  // reading texts and storing samples
  // Reading the tails after texts, which give the labels.
  double labels = 0;
  double fitting = 0, checking = 0;
};

// Checks that there is something to train, data to train with, and that the output file does not exist.
Status check_training(const Model&, const TrainingOptions&);

// A training that runs step by step. Only one thread at a time may use an object.
class Training {
 public:
  virtual ~Training() = default;
  // Does a part of the work. Returns false if everything is done.
  Result<bool> step();
  TrainingProgress progress() const;
  // Saves all work in OUTPUT.partial, except a text that is being read. step() calls it every minute.
  virtual Status save() = 0;
  // The result as a JSON object, after everything is done.
  virtual std::string report() const = 0;

 protected:
  using Phase = TrainingProgress::Phase;
  // Each does a part of the work of one phase.
  virtual Status read_on() = 0;
  virtual Status fit_on() = 0;
  virtual Status check_on() = 0;
  virtual Status try_on() { return {}; }  // only if it tries targets
  virtual double loss() const = 0;        // of the last step
  virtual double recall() const { return -1; }
  virtual double answered_densely() const { return -1; }
  // Where to add the time of the next step. The step itself counts the time of the labels.
  virtual double& clock();
  void set_phase(Phase phase, uint64_t done, uint64_t total);

  Phase phase_ = Phase::kReading;
  uint64_t done_ = 0, total_ = 0;
  TrainingSeconds seconds_;
  double saved_at_ = 0;

 private:
  Status make_step();

  uint64_t phase_first_ = 0;  // progress of the phase when this process began or resumed it
  double phase_start_ = 0;
};

// Resumes the same training from OUTPUT.partial (and OUTPUT.tried), if they exist.
Result<std::unique_ptr<Training>> open_training(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                const TrainingOptions&);

}  // namespace thimble
