// Makes the retainer of a model: texts are read, the small networks are fitted, the pools' shares counted,
// and the result is asked about texts that it did not learn from.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/state_file.h"
#include "base/thread_pool.h"
#include "gguf/new_gguf.h"
#include "training/fit.h"
#include "training/least_squares.h"
#include "training/partial.h"
#include "training/reading.h"
#include "training/recall.h"
#include "training/training.h"

namespace thimble {

// What is said of a retainer by what was answered, or where the model itself answers too little, by how
// likely the right answers are: densely, and with an eighth of the memory with it and with a window.
std::string judgement_of(const Recall& dense, const Recall& retainer, const Recall& window);

class Trainer : public Training {
 public:
  // Takes up what OUTPUT.partial (and OUTPUT.tried) holds of the same training, if it is there.
  static Result<std::unique_ptr<Trainer>> create(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                 const TrainingOptions&);

  Status save() override;
  std::string report() const override;
  bool resumed() const { return resumed_; }

  struct Checked {
    uint32_t part;  // of the memory: 8 is an eighth
    // With equal pools: the scores, KeyDiff, both, and a window. With counted shares, if there are any: the
    // best of the first three.
    Recall locret, keydiff, mix, window, counted;
  };
  const std::vector<Checked>& checked() const { return checked_; }
  // The retention that did best in equal pools, over all parts together. The mix, unless another one did
  // better by more than chance.
  static Retention best_of(const std::vector<Checked>&, const Recall& dense);
  // The retention that the file is written for, and its result, with the shares if they helped.
  Retention retention() const { return retention_; }
  const Recall& retainer(const Checked& of) const;
  bool shares_help() const { return shares_help_; }
  // As they were counted: how much of the pools each head is worth, [layer][KV head], 1 on average over those
  // that divide them; those of layers with a window do not matter.
  std::vector<float> shares() const;
  // With nothing dropped, of all texts that the check asks about.
  Recall dense() const;
  // The target that is trained for, and with tries_targets what came of each: at the parts of the memory that
  // checked() has together, and with nothing dropped.
  struct Tried {
    Target target;
    Recall recall, dense;
  };
  static const Tried& best_of(const std::vector<Tried>&);  // of equals the first; what was refused comes last
  Target target() const { return options_.target; }
  const std::vector<Tried>& tried() const { return tried_; }
  const TrainingSeconds& seconds() const { return seconds_; }
  // What came of it, in a sentence or two.
  std::string verdict() const;

 private:
  Trainer(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, TrainingOptions options);
  Status prepare();
  Status begin();
  Status open_tries();
  Status try_on() override;
  Status start_trial();
  Status make_texts();
  Status make_texts_to_learn(const TextMaker&);
  Status refuse_beyond_budget(uint64_t least) const;
  Status plan_learning(uint64_t checking);
  void choose_runs(uint64_t beside);
  Status open_state();
  Status take_sums();
  double loss() const override { return loss_; }
  double recall() const override { return recall_; }
  double answered_densely() const override;
  Status read_on() override;
  Status ask_densely();
  Status finish_text();
  Status start_fit();
  Status fit_on() override;
  double& clock() override;
  Status ask_meanwhile();
  void keep_states(uint32_t layer, uint32_t first, uint32_t rows, const float* states);
  void keep_labels(uint32_t layer, const std::vector<float>& labels);
  void count_best(const std::vector<float>& labels);
  Result<Recall> ask(const TrainingText&, Retention, std::shared_ptr<const Retainer>, uint32_t part) const;
  Result<Recall> ask_with(const NewGguf&, const TrainingText&, Retention, uint32_t part) const;
  Status check_on() override;
  const Recall& in_equal_pools(const Checked& of) const;
  Status finish_check();
  Result<NewGguf> made() const;
  Result<std::shared_ptr<const Retainer>> open_retainer(const std::string& path) const;
  Status write_sidecar();
  void add_layer(NewGguf&, const std::string& name, const FittedLayer&) const;

  bool trains() const { return options_.heads.empty(); }
  // A linear one is made of sums over texts, the others of what is kept of them.
  bool sums_up() const { return trains() && options_.kind == Retainer::Kind::kLinear; }
  bool repeats() const { return trains() && options_.target == Target::kLogKvzipPlus; }
  Retainer::Input input() const;
  uint32_t hidden() const;
  FitOptions fit_options() const;
  // Those to learn from, those that are counted, and those that are asked about, as they are read.
  const TrainingText& text(uint32_t number) const;
  uint32_t texts_read_for_labels() const { return static_cast<uint32_t>(texts_.size() + counted_.size()); }
  uint32_t all_texts() const { return texts_read_for_labels() + static_cast<uint32_t>(asked_.size()); }
  // Where a text's record lies in OUTPUT.partial, and how large it is.
  uint64_t record_at(uint32_t text) const;
  uint64_t record_bytes(uint32_t text) const;
  template <typename Each>
  Status each_part(uint32_t text, const Each& each);
  Status save_record(uint32_t text);
  Result<bool> take_record(uint32_t text);

  std::shared_ptr<const Model> model_;
  std::shared_ptr<Device> device_;
  TrainingOptions options_;
  ThreadPool threads_;
  uint32_t text_tokens_ = 0, tail_tokens_ = 0;
  std::vector<uint32_t> layers_;  // without a window
  uint64_t book_hash_ = 0;

  std::vector<TrainingText> texts_, counted_,
      asked_;  // to learn from; held out for shares, and for the check
  std::unique_ptr<Reader> reader_;
  SampleShape shape_;
  std::unique_ptr<LeastSquares> least_squares_;  // of a linear one, in the place of samples_ and fit_
  bool unsaved_ = false;                         // texts that are in its sums alone
  Samples samples_;
  std::vector<std::vector<uint32_t>> runs_of_text_;  // which runs of a text are kept
  std::vector<uint32_t> first_run_;                  // of each text, in samples_
  std::vector<std::vector<double>> counts_;          // of each counted text: [layer][kv head]
  uint32_t text_ = 0;                                // that is being read
  std::vector<int32_t> sample_of_;                   // which of samples_ each run of it is; -1: none
  bool reading_ = false;                             // it was begun
  std::unique_ptr<Fit> fit_;
  double loss_ = 0, recall_ = -1;
  bool asks_ = false;  // questions while it fits, for those who look
  struct Diverged {
    uint32_t at, good;  // steps that were done when the loss was no longer a number, and of the state taken
  };
  std::optional<Diverged> diverged_;
  StateFile state_;
  std::optional<SavedTwice> saved_;  // the fit, or the sums
  bool resumed_ = false;

  std::vector<Target> to_try_;  // tried_ follows it
  std::vector<Tried> tried_;
  std::unique_ptr<Trainer> trial_;
  Status refused_;  // the last target that could not be tried
  StateFile tries_;

  std::shared_ptr<const Retainer> retainer_;
  uint32_t check_ = 0;
  std::vector<Recall> dense_;  // of each text that is asked about
  std::vector<Checked> checked_;
  Retention retention_ = Retention::kLocret;
  bool shares_help_ = false;
};

}  // namespace thimble
