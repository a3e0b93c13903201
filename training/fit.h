// Fits retainers to labels by AdamW: all but linear ones.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "runtime/model/model.h"
#include "training/product.h"
#include "training/samples.h"

namespace thimble {

struct FitOptions {
  Retainer::Kind kind = Retainer::Kind::kLocret;
  uint32_t act = kActSilu;  // kActSilu, kActGelu, kActGeluErf
  uint32_t hidden = 0;      // channels that what it reads is projected to first; must not be 0
  uint32_t group = 1;       // query heads of a KV head: of a sink, whose `hidden` is SinkShape::channels()
  uint32_t steps = 0;
  uint32_t runs = 16;  // of kRunTokens to a step
  bool weighs_best = true;
  uint64_t seed = 0;
  uint32_t threads = 0;  // of the host, beside the device's; 0: one a core. None changes a result
};

// What a layer's retainer computes: second act(first x + first_bias) + second_bias; a linear one has no
// first. Of a sink, first projects to queries, which first_bias is added to, and then to keys; second is what
// else SinkParameters name, one behind the other.
struct FittedLayer {
  std::vector<float> first, first_bias;    // [hidden][cols], [hidden]
  std::vector<float> second, second_bias;  // [heads][hidden or cols], [heads]
};

// The loss and its gradient, of scores against labels: apart from the fit for the tests.
struct LossOptions {
  uint32_t heads, runs, tokens;  // KV heads; runs, and tokens of each
  float mean;                    // of all labels, which scores do without
  bool weighs_best;
};
// Adds to the gradient of one layer's scores, [heads][runs][tokens]; returns the layer's part of the loss
// (methods 2.3). `weights`: the sum of those of all labels in all layers. labels, best: of run r at [r],
// [heads][tokens].
double loss_of_layer(const LossOptions&, double weights, const float* scores,
                     std::span<const float* const> labels, std::span<const uint8_t* const> best,
                     float* gradient);

// Of the optimizer's rate: its peak, and in which parts of the steps it rises to that and falls from it.
struct Schedule {
  float peak = 1e-3f, rise = 0.3f, fall = 0.5f;
};
// That of step `number` of all, the first being 0: it rises in a line and falls in one, to 0 after the last.
float rate_at(const Schedule&, uint32_t number, uint32_t steps);

class Fit {
 public:
  // What it allocates beside the samples.
  static Result<uint64_t> bytes(const Device&, const SampleShape&, const FitOptions&);
  static Result<std::unique_ptr<Fit>> start(std::shared_ptr<Device>, const Samples&, const FitOptions&);

  // One step of the optimizer. False where all are done, or the loss or a parameter is no longer a number:
  // the retainer is then the last good one.
  Result<bool> step();
  uint32_t steps_done() const { return done_; }
  // Steps of the last good one; 0: there is none but what chance began with.
  uint32_t good_step() const;
  uint32_t steps() const { return options_.steps; }
  double loss() const { return loss_; }
  bool diverged() const { return diverged_; }

  // The scores' gradients by parameters, of the runs that step `number` takes: for the tests.
  Status gradients(uint32_t number, std::vector<float>& to, double& loss);
  std::span<float> parameters() { return parameters_; }

  FittedLayer layer(uint32_t layer) const;

  // All that a later step depends on. load() refuses a state of another size.
  uint64_t state_bytes() const;
  std::vector<std::byte> save() const;
  Status load(std::span<const std::byte>);

 private:
  Fit(std::shared_ptr<Device> device, const Samples& samples, const FitOptions& options);
  Status prepare();
  void initialise();
  // What one layer gives for some runs.
  struct Batch {
    uint32_t layer;
    double weights;  // of all labels in all layers
    std::vector<const float*> labels;
    std::vector<const uint8_t*> best;

    uint32_t runs() const { return static_cast<uint32_t>(labels.size()); }
    uint32_t tokens() const { return runs() * kRunTokens; }
  };
  Status back_propagate(uint32_t layer, const std::vector<uint32_t>& runs, double weights,
                        std::vector<float>& gradients, double& loss);
  // From what was projected, forward_->y(), to the loss and the gradients: by all parameters but the first
  // matrix, and by what was projected, into backward_->x().
  double through_hidden_layer(const Batch&, std::vector<float>& gradients);
  double through_sinks(const Batch&, std::vector<float>& gradients);
  // Calls each(i) for every parameter.
  template <typename Each>
  void each_parameter(const Each& each);
  void update(const std::vector<float>& gradients);
  bool diverge();

  // Where a layer's parameters lie: first, first_bias, second, second_bias.
  struct Places {
    uint64_t first, first_bias, second, second_bias, end;
  };
  Places places(uint32_t layer) const;

  std::shared_ptr<Device> device_;
  const Samples& samples_;
  const FitOptions options_;
  ThreadPool threads_;
  std::unique_ptr<Product> forward_, backward_;
  // [hidden][tokens]: what a layer's hidden channels are, and their derivatives by what they are made of.
  std::vector<float> hidden_, slopes_;
  std::vector<float> parameters_, momentum_, variance_;
  std::vector<float> good_;  // parameters whose loss was a number, those of good_step()
  std::vector<float> gradients_;
  std::vector<float> scales_;  // of each layer: what makes its inputs' root mean square 1
  float mean_ = 0;             // of all labels
  uint32_t done_ = 0;
  double loss_ = 0;
  bool diverged_ = false;
};

}  // namespace thimble
