#include "training/training.h"

#include <cmath>
#include <cstdio>

#include "base/system.h"
#include "text/json.h"
#include "training/controller_trainer.h"
#include "training/report.h"
#include "training/trainer.h"

namespace thimble {

Status check_training(const Model& model, const TrainingOptions& o) {
  if (!model.has_weights())
    return error(Code::kInvalidArgument,
                 "the model has no weights, so there is nothing to train a retainer for");
  for (const Layer& layer : model.layers)
    if (const AttentionMixer* m = layer.attention())
      if (m->heads != model.shape.heads || m->kv_heads != model.shape.kv_heads ||
          m->head_dim != model.shape.head_dim)
        return error(
            Code::kUnsupported,
            "layers of this model have attention of different shapes, which training does not support");
  if (o.data.empty())
    return error(Code::kInvalidArgument,
                 "training needs texts; give books, or prompts and answers, with --data");
  if (o.output.empty()) return error(Code::kInvalidArgument, "the output file is missing; name it with -o");
  if (o.heads.empty() && (o.texts == 0 || o.steps == 0))
    return error(Code::kInvalidArgument, "training needs at least 1 text and 1 step, not %u and %u", o.texts,
                 o.steps);
  if (MappedFile::open(o.output).ok())
    return error(Code::kIo, "%s exists already; remove it or name another file", o.output.c_str());
  return {};
}

void Training::set_phase(Phase phase, uint64_t done, uint64_t total) {
  phase_ = phase;
  done_ = phase_first_ = done;
  total_ = total;
  phase_start_ = steady_seconds();
}

TrainingProgress Training::progress() const {
  TrainingProgress p;
  p.phase = phase_;
  p.done = done_;
  p.total = total_;
  const double seconds = steady_seconds() - phase_start_;
  if (seconds > 0) p.per_second = static_cast<double>(done_ - phase_first_) / seconds;
  p.loss = loss();
  p.recall = recall();
  p.dense = answered_densely();
  return p;
}

double& Training::clock() {
  switch (phase_) {
    case Phase::kReading:
      return seconds_.reading;
    case Phase::kFitting:
      return seconds_.fitting;
    case Phase::kTrying:
      return seconds_.trying;
    default:
      return seconds_.checking;
  }
}

Status Training::make_step() {
  switch (phase_) {
    case Phase::kReading:
      return read_on();
    case Phase::kFitting:
      return fit_on();
    case Phase::kTrying:
      return try_on();
    default:
      return check_on();
  }
}

Result<bool> Training::step() {
  constexpr double kBetweenSaves = 60;
  if (phase_ == Phase::kDone) return false;
  const double begin = steady_seconds(), labels = seconds_.labels;
  double& seconds = clock();
  THIMBLE_TRY(make_step());
  seconds += steady_seconds() - begin - (seconds_.labels - labels);
  if (steady_seconds() - saved_at_ > kBetweenSaves) THIMBLE_TRY(save());
  return true;
}

template <typename T>
static Result<std::unique_ptr<Training>> as_training(Result<std::unique_ptr<T>> made) {
  if (!made.ok()) return made.status();
  return std::unique_ptr<Training>(std::move(*made));
}

Result<std::unique_ptr<Training>> open_training(std::shared_ptr<const Model> model,
                                                std::shared_ptr<Device> device,
                                                const TrainingOptions& options) {
  if (options.kind == Retainer::Kind::kAdore)
    return as_training(ControllerTrainer::create(std::move(model), std::move(device), options));
  return as_training(Trainer::create(std::move(model), std::move(device), options));
}

std::string json_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", x);
  return std::isfinite(x) ? text : "null";
}

std::string json_of(const TrainingSeconds& s) {
  JsonWriter json;
  for (const auto& [name, value] :
       {std::pair{"trying", s.trying}, std::pair{"reading", s.reading}, std::pair{"labels", s.labels},
        std::pair{"fitting", s.fitting}, std::pair{"checking", s.checking}})
    json.raw(name, json_number(value));
  return json.object();
}

}  // namespace thimble
