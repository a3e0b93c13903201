// Trains the controller of ADORE for a model. The trainer reads texts densely, counts which tokens the model
// attends to, and fits a controller to these labels. The model does not change.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/state_file.h"
#include "base/thread_pool.h"
#include "training/controller_labels.h"
#include "training/partial.h"
#include "training/reading.h"
#include "training/training.h"

namespace thimble {

// How well a controller predicts the labels of held-out texts.
struct ControllerQuality {
  // A pair is a query and a token before it. A positive is a pair with label 1.
  uint64_t pairs = 0, positives = 0;
  // At the threshold 1/2: predictions that equal the label, predictions of 1, and correct predictions of 1.
  uint64_t right = 0, claimed = 0, hits = 0;
  // The kBest tokens of each query by score; those among them with label 1; and the number with label 1 among
  // as many of the most recent tokens.
  uint64_t chosen = 0, best_hits = 0, last_hits = 0;
  double loss = 0;  // summed over pairs

  // Adds one query, given the logits of all tokens before it.
  void add(const LabelledQuery&, const std::vector<float>& logits);

  double base_rate() const { return share(positives, pairs); }
  double accuracy() const { return share(right, pairs); }
  double f1() const { return share(2 * hits, claimed + positives); }
  double f1_of_best() const { return share(2 * best_hits, chosen + positives); }
  double f1_of_last() const { return share(2 * last_hits, chosen + positives); }

 private:
  static double share(uint64_t of, uint64_t all) { return all ? double(of) / double(all) : 0; }
};

// A fifth of `texts`, and at least one, is held out. Held-out texts come from the last fifth of the books.
// Every 50 steps the controller is measured on them, and the state with the largest f1_of_best() becomes the
// result. Retention asks which tokens score highest, not which score above 1/2. Only a few tokens in a
// hundred have label 1, so F1 at the threshold 1/2 mostly measures how well the bias fits.
class ControllerTrainer : public Training {
 public:
  // Refuses what check_training() refuses, models with windows, and options for targets and shares, which a
  // controller does not have.
  static Result<std::unique_ptr<ControllerTrainer>> create(std::shared_ptr<const Model>,
                                                           std::shared_ptr<Device>, const TrainingOptions&);

  Status save() override;
  std::string report() const override;

  bool resumed() const { return resumed_; }
  // Measured on the held-out texts, after all steps.
  const ControllerQuality& quality() const { return quality_; }
  uint64_t best_step() const { return fit_.best_step; }

 private:
  struct Text {
    std::vector<int32_t> tokens;
    std::vector<uint32_t> rows;   // rows in embeddings_
    std::vector<uint32_t> asked;  // positions of its queries
    std::vector<LabelledQuery> queries;
  };
  // All that a later step depends on. It is stored after the four vectors of parameters and optimizer state.
  struct FitState {
    // best_step 0: not measured yet.
    uint64_t step = 0, best_step = 0, diverged = 0;
    double loss = 0, best = 0;
  };

  ControllerTrainer(std::shared_ptr<const Model> model, std::shared_ptr<Device> device,
                    TrainingOptions options);
  Status prepare();
  Status make_texts();
  void find_rows(std::vector<int32_t>& distinct);
  Status open_reader(uint64_t distinct);
  Status open_state();
  Result<bool> take_record(Text&, uint64_t at);
  double loss() const override { return fit_.loss; }
  Status read_on() override;
  Status finish_text();
  Status start_fit();
  void initialise();
  std::vector<Excerpt> excerpts_of(uint64_t step) const;
  Status fit_on() override;
  void update(const std::vector<float>& gradient);
  void keep_best();
  void measure(const Text&, ControllerQuality&);
  Status write_sidecar();
  Status check_on() override;
  std::string verdict() const;

  uint64_t record_bytes() const;
  uint64_t record_at(uint32_t text) const;
  std::vector<std::byte> state() const;
  void load(const std::vector<std::byte>&);

  std::shared_ptr<const Model> model_;
  std::shared_ptr<Device> device_;
  TrainingOptions options_;
  ThreadPool threads_;
  ControllerShape shape_;

  uint64_t book_hash_ = 0;
  uint32_t text_tokens_ = 0;
  std::vector<Text> texts_;  // training texts first, then held-out texts
  uint32_t learnt_ = 0;
  std::vector<float> embeddings_;  // [distinct tokens of all texts][d_model]

  std::unique_ptr<Reader> reader_;
  std::unique_ptr<AttentionLabels> labels_;
  uint32_t text_ = 0;     // the text being read
  bool reading_ = false;  // whether the reading of text_ has begun

  std::unique_ptr<ControllerNetwork<float>> controller_;
  std::vector<float> momentum_, variance_, best_;
  FitState fit_;

  StateFile state_;
  std::optional<SavedTwice> saved_fit_;
  bool resumed_ = false;

  ControllerQuality quality_;
};

}  // namespace thimble
