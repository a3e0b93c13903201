// Trains the retainer of a model: it reads texts, fits the networks, counts the shares of the pools, and asks
// questions about held-out texts.
#pragma once

#include <algorithm>
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

// A verdict in one or two sentences about a retainer. It compares dense attention, the retainer and a window,
// each of the latter with an eighth of the memory. It uses the share of answered questions, or the
// probability of the right answers if the model itself answers too few.
std::string judgement_of(const Recall& dense, const Recall& retainer, const Recall& window);

class Trainer : public Training {
 public:
  // Resumes the same training from OUTPUT.partial (and OUTPUT.tried), if they exist.
  static Result<std::unique_ptr<Trainer>> create(std::shared_ptr<const Model>, std::shared_ptr<Device>,
                                                 const TrainingOptions&);

  Status save() override;
  std::string report() const override;
  bool resumed() const { return resumed_; }

  struct Checked {
    uint32_t part;  // divisor of the memory: 8 means an eighth
    // With equal pools: the retainer's scores, KeyDiff, the mix of both, and a window. With counted shares,
    // if any: the best of the first three.
    Recall locret, keydiff, mix, window, counted;
  };
  const std::vector<Checked>& checked() const { return checked_; }
  // The retention with the best results in equal pools, over all parts together. It is the mix, unless
  // another retention is better by more than chance.
  static Retention best_of(const std::vector<Checked>&, const Recall& dense);
  // The retention that the file is written for. retainer() is its result, with shares if they helped.
  Retention retention() const { return retention_; }
  const Recall& retainer(const Checked& of) const;
  bool shares_help() const { return shares_help_; }
  // The counted shares: the relative pool size of each head, [layer][KV head]. The mean is 1 over the heads
  // that share the pools. Values of layers with a window have no meaning.
  std::vector<float> shares() const;
  // With no entries dropped, over all texts of the check.
  Recall dense() const;
  // With tries_targets, the result of each tried target: recall over all parts of the memory in checked(),
  // and recall with no entries dropped.
  struct Tried {
    Target target;
    Recall recall, dense;
  };
  // Among equals, the first. Refused targets come last.
  static const Tried& best_of(const std::vector<Tried>&);
  Target target() const { return options_.target; }
  const std::vector<Tried>& tried() const { return tried_; }
  const TrainingSeconds& seconds() const { return seconds_; }
  // The result in one or two sentences.
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
  // A linear retainer is fitted from sums over texts, the others from samples of the texts.
  bool sums_up() const { return trains() && options_.kind == Retainer::Kind::kLinear; }
  // Whether heads make their values from the same latent channels.
  bool shares_values() const {
    return std::any_of(model_->layers.begin(), model_->layers.end(), [](const Layer& layer) {
      return layer.attention() && layer.attention()->is_latent();
    });
  }
  bool repeats() const { return trains() && options_.target == Target::kLogKvzipPlus; }
  Retainer::Input input() const;
  uint32_t hidden() const;
  FitOptions fit_options() const;
  // The texts in reading order: those to train with, those to count shares, and those for the check.
  const TrainingText& text(uint32_t number) const;
  uint32_t texts_read_for_labels() const { return static_cast<uint32_t>(texts_.size() + counted_.size()); }
  uint32_t all_texts() const { return texts_read_for_labels() + static_cast<uint32_t>(asked_.size()); }
  // The offset and size of a text's record in OUTPUT.partial.
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
  std::vector<uint32_t> layers_;  // layers without a window
  uint64_t book_hash_ = 0;

  std::vector<TrainingText> texts_, counted_,
      asked_;  // to learn from; held out for shares, and for the check
  std::unique_ptr<Reader> reader_;
  SampleShape shape_;
  std::unique_ptr<LeastSquares> least_squares_;  // for linear retainers, instead of samples_ and fit_
  bool unsaved_ = false;                         // some texts are in the sums but not in the file
  Samples samples_;
  std::vector<std::vector<uint32_t>> runs_of_text_;  // the runs of each text that are kept
  std::vector<uint32_t> first_run_;                  // for each text, the index of its first run in samples_
  std::vector<std::vector<double>> counts_;          // for each counted text: [layer][kv head]
  uint32_t text_ = 0;                                // the text being read
  std::vector<int32_t> sample_of_;  // for each run of this text, its index in samples_; -1: not kept
  bool reading_ = false;            // whether the reading of text_ has begun
  std::unique_ptr<Fit> fit_;
  double loss_ = 0, recall_ = -1;
  bool asks_ = false;  // whether to ask questions during the fit, to show progress
  struct Diverged {
    // Number of steps when the loss stopped being finite, and number of steps of the restored state.
    uint32_t at, good;
  };
  std::optional<Diverged> diverged_;
  StateFile state_;
  std::optional<SavedTwice> saved_;  // of the fit, or of the sums
  bool resumed_ = false;

  std::vector<Target> to_try_;  // the targets; tried_ has the results in the same order
  std::vector<Tried> tried_;
  std::unique_ptr<Trainer> trial_;
  Status refused_;  // why the last target could not be tried
  StateFile tries_;

  std::shared_ptr<const Retainer> retainer_;
  uint32_t check_ = 0;
  std::vector<Recall> dense_;  // for each text of the check
  std::vector<Checked> checked_;
  Retention retention_ = Retention::kLocret;
  bool shares_help_ = false;
};

}  // namespace thimble
