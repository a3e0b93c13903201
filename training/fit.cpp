#include "training/fit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/system.h"
#include "training/random.h"
#include "training/sink.h"
#include "training/transpose.h"

namespace thimble {
namespace {

constexpr float kBeta1 = 0.9f, kBeta2 = 0.95f, kDecay = 0.01f, kEpsilon = 1e-8f;
constexpr float kLargestGradient = 0.5f;  // limit on the gradient of one parameter
constexpr float kBestWeight = 16, kSmoothing = 0.0025f;
constexpr uint32_t kBetweenGood = 50;  // steps between two good states

// Replaces z with act(z), and computes the derivative.
void activate(uint32_t act, float* z, float* slope, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const float x = z[i];
    if (act == kActSilu) {
      const float s = 1 / (1 + std::exp(-x));
      z[i] = x * s;
      slope[i] = s * (1 + x * (1 - s));
    } else if (act == kActGelu) {
      constexpr float kRoot = 0.7978845608f, kCube = 0.044715f;  // sqrt(2 / pi)
      const float t = std::tanh(kRoot * (x + kCube * x * x * x));
      z[i] = 0.5f * x * (1 + t);
      slope[i] = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * kRoot * (1 + 3 * kCube * x * x);
    } else {
      const float share = 0.5f * (1 + std::erf(x * 0.7071067812f));
      z[i] = x * share;
      slope[i] = share + x * 0.3989422804f * std::exp(-0.5f * x * x);
    }
  }
}

// A label as a share in [0, 1]. The labels of KVzip and log-probabilities are logarithms of such a share.
// Labels of KVzip+ can be logarithms of more than 1; a sink's score has a maximum of 1.
double share_of(float label) { return std::exp(std::min(double{label}, 0.0)); }

// The parts of a sink's parameters after its matrix.
template <typename T>
SinkParameters<T> sink_parts(const SampleShape& s, uint32_t group, T* at) {
  const uint64_t queries = uint64_t(s.heads) * group;
  SinkParameters<T> parts{};
  parts.q_bias = at;
  parts.q_norm = parts.q_bias + queries * kSinkRank;
  parts.k_norm = parts.q_norm + kSinkRank;
  parts.sinks = parts.k_norm + kSinkRank;
  parts.bias = parts.sinks + uint64_t(s.heads) * kSinkCount * kSinkRank;
  return parts;
}

// The runs of step `number`.
std::vector<uint32_t> pick_runs(const FitOptions& o, uint32_t of, uint32_t number) {
  Random r = random_of(o.seed, 0x66697400u + uint64_t(number));
  std::vector<uint32_t> runs(o.runs);
  for (uint32_t& run : runs) run = r.below(of);
  return runs;
}

}  // namespace

double loss_of_layer(const LossOptions& o, double weights, const float* scores,
                     std::span<const float* const> labels, std::span<const uint8_t* const> best,
                     float* gradient) {
  double error = 0, roughness = 0;
  // The difference between neighbours is averaged over a layer and summed over layers.
  const double pairs = double(o.heads) * o.runs * (o.tokens - 1);
  for (uint32_t head = 0; head < o.heads; ++head)
    for (uint32_t run = 0; run < o.runs; ++run) {
      const uint64_t at = (uint64_t(head) * o.runs + run) * o.tokens;
      const float* s = scores + at;
      float* g = gradient + at;
      for (uint32_t t = 0; t < o.tokens; ++t) {
        const uint64_t i = uint64_t(head) * o.tokens + t;
        const float d = s[t] - (labels[run][i] - o.mean);
        const float weight = o.weighs_best && best[run][i] ? kBestWeight : 1;
        error += weight * (std::abs(d) < 1 ? 0.5f * d * d : std::abs(d) - 0.5f);
        g[t] += static_cast<float>(weight / weights) * std::clamp(d, -1.0f, 1.0f);
        if (t == 0) continue;
        const float step = s[t] - s[t - 1], pull = static_cast<float>(2 * kSmoothing / pairs) * step;
        roughness += step * step;
        g[t] += pull;
        g[t - 1] -= pull;
      }
    }
  return error / weights + kSmoothing * roughness / pairs;
}

float rate_at(const Schedule& s, uint32_t number, uint32_t steps) {
  const float step = static_cast<float>(number), all = static_cast<float>(steps);
  return s.peak * std::min(1.0f, (step + 1) / (all * s.rise)) * std::min(1.0f, (all - step) / (all * s.fall));
}

Fit::Places Fit::places(uint32_t layer) const {
  const SampleShape& s = samples_.shape();
  const bool mlp = options_.kind == Retainer::Kind::kMlp, sink = options_.kind == Retainer::Kind::kSink;
  const uint64_t hidden = options_.hidden, queries = uint64_t(s.heads) * options_.group;
  Places p{};
  p.first_bias = hidden * s.cols;
  p.second = p.first_bias + (mlp ? hidden : sink ? queries * kSinkRank : 0);
  p.second_bias = p.second + (sink ? (2 + s.heads * kSinkCount) * kSinkRank + queries : s.heads * hidden);
  p.end = p.second_bias + (mlp ? s.heads : 0);
  const uint64_t from = p.end * layer;
  return {from, from + p.first_bias, from + p.second, from + p.second_bias, from + p.end};
}

Fit::Fit(std::shared_ptr<Device> device, const Samples& samples, const FitOptions& options)
    : device_(std::move(device)),
      samples_(samples),
      options_(options),
      threads_(options.threads ? options.threads : core_count()) {}

Result<std::unique_ptr<Fit>> Fit::start(std::shared_ptr<Device> device, const Samples& samples,
                                        const FitOptions& options) {
  std::unique_ptr<Fit> fit(new Fit(std::move(device), samples, options));
  THIMBLE_TRY(fit->prepare());
  return fit;
}

Result<uint64_t> Fit::bytes(const Device& device, const SampleShape& s, const FitOptions& o) {
  const uint32_t tokens = o.runs * kRunTokens;
  THIMBLE_LET(forward, Product::bytes(device, o.hidden, s.cols, tokens, DType::kF16));
  THIMBLE_LET(backward, Product::bytes(device, o.hidden, tokens, s.cols, DType::kF16));
  // For each parameter: its value, its two moments, the last good value and the gradient, and four of these
  // again when they are saved. For each hidden channel: two numbers.
  return forward + backward +
         (9 * uint64_t(s.layers) * s.cols + 2 * uint64_t(tokens)) * o.hidden * sizeof(float);
}

Status Fit::prepare() {
  const SampleShape& s = samples_.shape();
  double sum = 0;
  for (uint32_t run = 0; run < samples_.runs(); ++run)
    for (uint32_t layer = 0; layer < s.layers; ++layer)
      sum = std::accumulate(samples_.labels(run, layer), samples_.labels(run, layer) + s.heads * kRunTokens,
                            sum);
  mean_ = static_cast<float>(sum / (double(samples_.runs()) * static_cast<double>(s.label_elements())));
  std::vector<double> squares(samples_.runs());
  for (uint32_t layer = 0; layer < s.layers; ++layer) {
    threads_.run(samples_.runs(), [&](uint32_t run, uint32_t) {
      const uint16_t* x = samples_.states(run, layer);
      double of_run = 0;
      for (uint64_t i = 0; i < uint64_t(kRunTokens) * s.cols; ++i) {
        const double value = f16_to_f32(x[i]);
        of_run += value * value;
      }
      squares[run] = of_run;
    });
    const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) /
                        (double(samples_.runs()) * kRunTokens * s.cols);
    if (!std::isfinite(mean))
      return error(Code::kNotFinite,
                   "the model gives NaN as hidden states, so training is impossible; use another file "
                   "of it");
    scales_.push_back(mean > 0 ? static_cast<float>(1 / std::sqrt(mean)) : 1);
  }

  parameters_.resize(places(s.layers - 1).end);
  const uint32_t tokens = options_.runs * kRunTokens;
  momentum_.resize(parameters_.size());
  variance_.resize(parameters_.size());
  gradients_.resize(parameters_.size());
  initialise();
  good_ = parameters_;
  // In the backward pass, tokens are the inner dimension. Both products store them in rows of the hidden
  // channels.
  THIMBLE_LET(forward, Product::make(device_, options_.hidden, s.cols, tokens, DType::kF16));
  THIMBLE_LET(backward, Product::make(device_, options_.hidden, tokens, s.cols, DType::kF16));
  forward_ = std::move(forward);
  backward_ = std::move(backward);
  if (options_.kind != Retainer::Kind::kSink) {
    hidden_.resize(uint64_t(options_.hidden) * tokens);
    slopes_.resize(hidden_.size());
  }
  return {};
}

void Fit::initialise() {
  const SampleShape& s = samples_.shape();
  Random random = random_of(options_.seed, 0x696e6974u);
  for (uint32_t layer = 0; layer < s.layers; ++layer) {
    const Places p = places(layer);
    const float first = 1 / std::sqrt(float(s.cols)), second = 0.6f / std::sqrt(float(options_.hidden));
    for (uint64_t i = p.first; i < p.first_bias; ++i) parameters_[i] = first * random.normal();
    if (options_.kind != Retainer::Kind::kSink) {
      for (uint64_t i = p.second; i < p.second_bias; ++i) parameters_[i] = second * random.normal();
      continue;
    }
    const SinkParameters<float> parts = sink_parts(s, options_.group, &parameters_[p.first_bias]);
    std::fill(parts.q_norm, parts.sinks, 1.0f);
    for (float* x = parts.sinks; x < parts.bias; ++x) *x = random.normal();
    // At first, products with keys and with sinks have about the same size, so a score starts at the mean of
    // all labels.
    double mean = 0;
    for (uint32_t run = 0; run < samples_.runs(); ++run)
      for (uint64_t i = 0; i < uint64_t(s.heads) * kRunTokens; ++i)
        mean += share_of(samples_.labels(run, layer)[i]) / (double(samples_.runs()) * s.heads * kRunTokens);
    mean = std::clamp(mean, 1e-4, 0.5);
    std::fill_n(parts.bias, s.heads * options_.group,
                static_cast<float>(std::log(mean / (1 - mean) * kSinkCount)));
  }
}

Status Fit::back_propagate(uint32_t layer, const std::vector<uint32_t>& runs, double weights,
                           std::vector<float>& gradients, double& loss) {
  const SampleShape& s = samples_.shape();
  const Places p = places(layer);
  Batch batch{.layer = layer, .weights = weights, .labels = {}, .best = {}};
  auto* x = static_cast<uint16_t*>(forward_->w());
  auto* x_columns = static_cast<uint16_t*>(backward_->w());
  for (const uint32_t run : runs) {
    batch.labels.push_back(samples_.labels(run, layer));
    batch.best.push_back(samples_.best(run, layer));
  }
  threads_.run(static_cast<uint32_t>(runs.size()), [&](uint32_t i, uint32_t) {
    const uint16_t* states = samples_.states(runs[i], layer);
    std::memcpy(x + uint64_t(i) * kRunTokens * s.cols, states, uint64_t(kRunTokens) * s.cols * sizeof *x);
    transpose(states, kRunTokens, s.cols, x_columns + uint64_t(i) * kRunTokens, runs.size() * kRunTokens);
  });
  const float scale = scales_[layer];
  const auto scale_row = [&](const float* from, float* to) {
    std::transform(from, from + s.cols, to, [scale](float w) { return w * scale; });
  };
  threads_.run(options_.hidden, [&](uint32_t h, uint32_t) {
    scale_row(&parameters_[p.first + uint64_t(h) * s.cols], forward_->x() + uint64_t(h) * s.cols);
  });
  THIMBLE_TRY(forward_->run());
  loss += options_.kind == Retainer::Kind::kSink ? through_sinks(batch, gradients)
                                                 : through_hidden_layer(batch, gradients);
  THIMBLE_TRY(backward_->run());
  threads_.run(options_.hidden, [&](uint32_t h, uint32_t) {
    scale_row(backward_->y() + uint64_t(h) * s.cols, &gradients[p.first + uint64_t(h) * s.cols]);
  });
  return {};
}

double Fit::through_hidden_layer(const Batch& batch, std::vector<float>& gradients) {
  const SampleShape& s = samples_.shape();
  const Places p = places(batch.layer);
  const uint32_t hidden = options_.hidden, tokens = batch.tokens();
  const bool biased = p.first_bias != p.second;
  std::vector<float> scores(uint64_t(s.heads) * tokens), gradient(scores.size());
  threads_.run(batch.runs(), [&](uint32_t run, uint32_t) {
    const uint64_t first = uint64_t(run) * kRunTokens;
    for (uint32_t head = 0; head < s.heads; ++head)
      std::fill_n(&scores[head * uint64_t(tokens) + first], kRunTokens,
                  biased ? parameters_[p.second_bias + head] : 0.0f);
    for (uint32_t h = 0; h < hidden; ++h) {
      const uint64_t at = h * uint64_t(tokens) + first;
      const float bias = biased ? parameters_[p.first_bias + h] : 0;
      float* row = &hidden_[at];
      for (uint32_t t = 0; t < kRunTokens; ++t) row[t] = forward_->y()[at + t] + bias;
      activate(options_.act, row, &slopes_[at], kRunTokens);
      for (uint32_t head = 0; head < s.heads; ++head) {
        const float w = parameters_[p.second + uint64_t(head) * hidden + h];
        float* score = &scores[head * uint64_t(tokens) + first];
        for (uint32_t t = 0; t < kRunTokens; ++t) score[t] += w * row[t];
      }
    }
  });
  const double loss = loss_of_layer({.heads = s.heads,
                                     .runs = batch.runs(),
                                     .tokens = kRunTokens,
                                     .mean = mean_,
                                     .weighs_best = options_.weighs_best},
                                    batch.weights, scores.data(), batch.labels, batch.best, gradient.data());
  threads_.run(hidden, [&](uint32_t h, uint32_t) {
    const float* row = &hidden_[uint64_t(h) * tokens];
    const float* steep = &slopes_[uint64_t(h) * tokens];
    float* out = backward_->x() + uint64_t(h) * tokens;
    std::fill_n(out, tokens, 0.0f);
    for (uint32_t head = 0; head < s.heads; ++head) {
      const uint64_t at = p.second + uint64_t(head) * hidden + h;
      const float w = parameters_[at];
      const float* g = &gradient[uint64_t(head) * tokens];
      // Adds short partial sums first, which has a smaller rounding error.
      float sum = 0;
      for (uint32_t first = 0; first < tokens; first += kRunTokens)
        sum += std::inner_product(g + first, g + first + kRunTokens, row + first, 0.0f);
      gradients[at] = sum;
      for (uint32_t t = 0; t < tokens; ++t) out[t] += w * g[t];
    }
    for (uint32_t t = 0; t < tokens; ++t) out[t] *= steep[t];
    if (biased) gradients[p.first_bias + h] = std::accumulate(out, out + tokens, 0.0f);
  });
  if (biased)
    for (uint32_t head = 0; head < s.heads; ++head)
      gradients[p.second_bias + head] = std::accumulate(&gradient[uint64_t(head) * tokens],
                                                        &gradient[uint64_t(head) * tokens] + tokens, 0.0f);
  return loss;
}

double Fit::through_sinks(const Batch& batch, std::vector<float>& gradients) {
  const SampleShape& s = samples_.shape();
  const uint64_t first_bias = places(batch.layer).first_bias;
  const uint32_t tokens = batch.tokens();
  std::vector<float> shares(uint64_t(s.heads) * tokens);
  threads_.run(batch.runs(), [&](uint32_t run, uint32_t) {
    for (uint32_t head = 0; head < s.heads; ++head)
      std::transform(batch.labels[run] + head * kRunTokens, batch.labels[run] + (head + 1) * kRunTokens,
                     &shares[uint64_t(head) * tokens + run * kRunTokens],
                     [](float label) { return static_cast<float>(share_of(label)); });
  });
  return loss_of_sinks({.heads = s.heads, .group = options_.group, .tokens = tokens},
                       sink_parts<const float>(s, options_.group, &parameters_[first_bias]), forward_->y(),
                       shares.data(), backward_->x(), sink_parts(s, options_.group, &gradients[first_bias]),
                       threads_);
}

Status Fit::gradients(uint32_t number, std::vector<float>& to, double& loss) {
  const SampleShape& s = samples_.shape();
  const std::vector<uint32_t> runs = pick_runs(options_, samples_.runs(), number);
  double weights = 0;
  for (const uint32_t run : runs)
    for (uint64_t i = 0; i < s.label_elements(); ++i)
      weights += options_.weighs_best && samples_.best(run, 0)[i] ? kBestWeight : 1;
  to.resize(parameters_.size());
  loss = 0;
  for (uint32_t layer = 0; layer < s.layers; ++layer)
    THIMBLE_TRY(back_propagate(layer, runs, weights, to, loss));
  return {};
}

template <typename Each>
void Fit::each_parameter(const Each& each) {
  constexpr uint64_t kOfItem = 1 << 14;
  const uint64_t count = parameters_.size();
  threads_.run(static_cast<uint32_t>(ceil_div(count, kOfItem)), [&](uint32_t item, uint32_t) {
    for (uint64_t i = item * kOfItem; i < std::min((item + 1) * kOfItem, count); ++i) each(i);
  });
}

void Fit::update(const std::vector<float>& gradients) {
  const float step = static_cast<float>(done_), rate = rate_at(Schedule(), done_, options_.steps);
  const float unbiased1 = 1 - std::pow(kBeta1, step + 1), unbiased2 = 1 - std::pow(kBeta2, step + 1);
  each_parameter([&](uint64_t i) {
    const float g = std::clamp(gradients[i], -kLargestGradient, kLargestGradient);
    float &p = parameters_[i], &m = momentum_[i], &v = variance_[i];
    m = kBeta1 * m + (1 - kBeta1) * g;
    v = kBeta2 * v + (1 - kBeta2) * g * g;
    p -= rate * (kDecay * p + m / unbiased1 / (std::sqrt(v / unbiased2) + kEpsilon));
  });
}

// A state is good if the loss of the step after it was finite. In a fit that diverged, the loss of the last
// step was not.
uint32_t Fit::good_step() const { return done_ ? (done_ - 1) / kBetweenGood * kBetweenGood : 0; }

bool Fit::diverge() {
  diverged_ = true;
  parameters_ = good_;
  return false;
}

Result<bool> Fit::step() {
  if (done_ >= options_.steps || diverged_) return false;
  THIMBLE_TRY(gradients(done_, gradients_, loss_));
  if (!std::isfinite(loss_)) return diverge();
  if (done_ % kBetweenGood == 0) good_ = parameters_;
  update(gradients_);
  ++done_;
  // No later loss shows what the last step did.
  if (done_ == options_.steps &&
      !std::all_of(parameters_.begin(), parameters_.end(), [](float p) { return std::isfinite(p); }))
    return diverge();
  return true;
}

FittedLayer Fit::layer(uint32_t layer) const {
  const Places p = places(layer);
  const auto range = [&](uint64_t first, uint64_t end, float factor) {
    std::vector<float> values(parameters_.begin() + static_cast<ptrdiff_t>(first),
                              parameters_.begin() + static_cast<ptrdiff_t>(end));
    for (float& value : values) value *= factor;
    return values;
  };
  return {range(p.first, p.first_bias, scales_[layer]), range(p.first_bias, p.second, 1),
          range(p.second, p.second_bias, 1), range(p.second_bias, p.end, 1)};
}

uint64_t Fit::state_bytes() const {
  uint64_t bytes = sizeof done_ + sizeof loss_;
  for (const auto* values : {&parameters_, &momentum_, &variance_, &good_})
    bytes += values->size() * sizeof(float);
  return bytes;
}

std::vector<std::byte> Fit::save() const {
  std::vector<std::byte> out;
  const auto put = [&](const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    out.insert(out.end(), from, from + bytes);
  };
  put(&done_, sizeof done_);
  put(&loss_, sizeof loss_);
  for (const auto* values : {&parameters_, &momentum_, &variance_, &good_})
    put(values->data(), values->size() * sizeof(float));
  return out;
}

Status Fit::load(std::span<const std::byte> state) {
  if (state.size() != state_bytes())
    return error(Code::kFormat, "a checkpoint of %zu bytes is not one of this training", state.size());
  const auto take = [&](void* data, size_t bytes) {
    if (bytes) std::memcpy(data, state.data(), bytes);  // an empty vector may have a null pointer
    state = state.subspan(bytes);
  };
  take(&done_, sizeof done_);
  take(&loss_, sizeof loss_);
  for (auto* values : {&parameters_, &momentum_, &variance_, &good_})
    take(values->data(), values->size() * sizeof(float));
  return {};
}

}  // namespace thimble
