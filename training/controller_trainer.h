// Makes the controller of ADORE for a model: texts are read densely, which tokens the model attends to is
// counted, and a controller is fitted to that. The model itself stays as it is.
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

// What a controller says of held-out texts.
struct ControllerQuality {
  uint64_t pairs = 0, positives = 0;          // a query and a token before it; those with label 1
  uint64_t right = 0, claimed = 0, hits = 0;  // at the threshold 1/2: as the label, 1, and 1 as the label
  uint64_t chosen = 0, best_hits = 0, last_hits = 0;  // the kBest of a query by score; those that have label
                                                      // 1; as many, of the most recent tokens
  double loss = 0;                                    // summed

  // Of one query, by the logits of all tokens before it.
  void add(const LabelledQuery&, const std::vector<float>& logits);

  double base_rate() const { return share(positives, pairs); }
  double accuracy() const { return share(right, pairs); }
  double f1() const { return share(2 * hits, claimed + positives); }
  double f1_of_best() const { return share(2 * best_hits, chosen + positives); }
  double f1_of_last() const { return share(2 * last_hits, chosen + positives); }

 private:
  static double share(uint64_t of, uint64_t all) { return all ? double(of) / double(all) : 0; }
};

// Of `texts` a fifth, at least one, is held out, from the last fifth of the books. Every 50 steps the
// controller is measured on these, and the best state is the result: that with the largest f1_of_best(),
// since who keeps tokens asks which score highest and not which score above 1/2. Few tokens in a hundred have
// label 1, and F1 at 1/2 says more about how well the bias is met.
class ControllerTrainer : public Training {
 public:
  // Refuses what check_training() refuses, models with windows, and targets and shares, which a controller
  // has none of.
  static Result<std::unique_ptr<ControllerTrainer>> create(std::shared_ptr<const Model>,
                                                           std::shared_ptr<Device>, const TrainingOptions&);

  Status save() override;
  std::string report() const override;

  bool resumed() const { return resumed_; }
  // On the held-out texts, when everything is done.
  const ControllerQuality& quality() const { return quality_; }
  uint64_t best_step() const { return fit_.best_step; }

 private:
  struct Text {
    std::vector<int32_t> tokens;
    std::vector<uint32_t> rows;   // of the embeddings
    std::vector<uint32_t> asked;  // positions of its queries
    std::vector<LabelledQuery> queries;
  };
  // All that a later step depends on, behind the four vectors.
  struct FitState {
    uint64_t step = 0, best_step = 0, diverged = 0;  // best_step 0: none was measured yet
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
  std::vector<Text> texts_;  // those that are learnt from, then those that are held out
  uint32_t learnt_ = 0;
  std::vector<float> embeddings_;  // [distinct tokens of all texts][d_model]

  std::unique_ptr<Reader> reader_;
  std::unique_ptr<AttentionLabels> labels_;
  uint32_t text_ = 0;     // that is being read
  bool reading_ = false;  // it was begun

  std::unique_ptr<ControllerNetwork<float>> controller_;
  std::vector<float> momentum_, variance_, best_;
  FitState fit_;

  StateFile state_;
  std::optional<SavedTwice> saved_fit_;
  bool resumed_ = false;

  ControllerQuality quality_;
};

}  // namespace thimble
