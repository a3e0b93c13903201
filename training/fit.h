// Fits all retainers except linear ones to labels, with AdamW.
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
  uint32_t hidden = 0;      // channels of the first projection; must not be 0
  // Query heads per KV head. Only a sink needs it; its `hidden` is SinkShape::channels().
  uint32_t group = 1;
  uint32_t steps = 0;
  uint32_t runs = 16;  // runs of kRunTokens tokens per step
  bool weighs_best = true;
  uint64_t seed = 0;
  // Host threads, in addition to the device's. 0 means one per core. The result does not depend on it.
  uint32_t threads = 0;
};

// The parameters of one layer's retainer. It computes second act(first x + first_bias) + second_bias; a
// linear retainer has no `first`. For a sink, `first` projects to queries, to which first_bias is added, and
// then to keys; `second` contains the other arrays of SinkParameters, one after the other.
struct FittedLayer {
  std::vector<float> first, first_bias;    // [hidden][cols], [hidden]
  std::vector<float> second, second_bias;  // [heads][hidden or cols], [heads]
};

// The loss of scores against labels, and its gradient. It is separate from Fit so that tests can call it.
struct LossOptions {
  uint32_t heads, runs, tokens;  // KV heads; runs per step; tokens per run
  float mean;                    // mean of all labels; the scores do not include it
  bool weighs_best;
};
// Adds the gradient of one layer's scores, [heads][runs][tokens], to `gradient`. Returns the layer's part of
// the loss (methods 2.3). `weights` is the sum of the weights of all labels in all layers. labels[r] and
// best[r] belong to run r and are [heads][tokens].
double loss_of_layer(const LossOptions&, double weights, const float* scores,
                     std::span<const float* const> labels, std::span<const uint8_t* const> best,
                     float* gradient);

// The learning rate: its peak, and the fractions of all steps in which it rises to the peak and falls from
// it.
struct Schedule {
  float peak = 1e-3f, rise = 0.3f, fall = 0.5f;
};
// The learning rate of step `number`, counted from 0. It rises and falls linearly, and reaches 0 after the
// last step.
float rate_at(const Schedule&, uint32_t number, uint32_t steps);

class Fit {
 public:
  // Bytes that the fit allocates in addition to the samples.
  static Result<uint64_t> bytes(const Device&, const SampleShape&, const FitOptions&);
  static Result<std::unique_ptr<Fit>> start(std::shared_ptr<Device>, const Samples&, const FitOptions&);

  // Runs one step of the optimizer. Returns false if all steps are done, or if the loss or a parameter is not
  // finite. In the latter case the retainer is the last good one.
  Result<bool> step();
  uint32_t steps_done() const { return done_; }
  // The number of steps of the last good state. 0 means that only the random initial state is good.
  uint32_t good_step() const;
  uint32_t steps() const { return options_.steps; }
  double loss() const { return loss_; }
  bool diverged() const { return diverged_; }

  // The gradients of the parameters for the runs of step `number`, for tests.
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
  // The labels of one layer for some runs.
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
  // Both compute the loss and the gradients from the projection forward_->y(). They write the gradients of
  // all parameters except the first matrix to `gradients`, and the gradient of the projection to
  // backward_->x().
  double through_hidden_layer(const Batch&, std::vector<float>& gradients);
  double through_sinks(const Batch&, std::vector<float>& gradients);
  // Calls each(i) for every parameter.
  template <typename Each>
  void each_parameter(const Each& each);
  void update(const std::vector<float>& gradients);
  bool diverge();

  // The offsets of a layer's parameters: first, first_bias, second, second_bias.
  struct Places {
    uint64_t first, first_bias, second, second_bias, end;
  };
  Places places(uint32_t layer) const;

  std::shared_ptr<Device> device_;
  const Samples& samples_;
  const FitOptions options_;
  ThreadPool threads_;
  std::unique_ptr<Product> forward_, backward_;
  // [hidden][tokens]: the hidden channels of a layer, and the derivatives of the activation.
  std::vector<float> hidden_, slopes_;
  std::vector<float> parameters_, momentum_, variance_;
  std::vector<float> good_;  // the parameters at good_step(), whose loss was finite
  std::vector<float> gradients_;
  // For each layer, the factor that gives its inputs a root mean square of 1.
  std::vector<float> scales_;
  float mean_ = 0;  // mean of all labels
  uint32_t done_ = 0;
  double loss_ = 0;
  bool diverged_ = false;
};

}  // namespace thimble
