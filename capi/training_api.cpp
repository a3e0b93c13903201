// Entry points for training the retainers of a model, step by step.
#include <algorithm>

#include "capi/handles.h"
#include "training/training.h"

using namespace thimble;
using namespace thimble::capi;

struct thimble_training {
  std::unique_ptr<Training> training;
};

namespace {

template <typename T>
Status choose(const char* name, const char* given, std::initializer_list<std::pair<const char*, T>> words,
              T& to) {
  if (!given) return {};
  std::string known;
  for (const auto& [word, meaning] : words) {
    if (std::string_view(given) == word) {
      to = meaning;
      return {};
    }
    known += (known.empty() ? "" : ", ") + std::string(word);
  }
  return error(Code::kInvalidArgument, "options.%s is '%s'; there are %s", name,
               std::string(cut_text(given, 80)).c_str(), known.c_str());
}

Result<TrainingOptions> read_options(const thimble_training_options& o) {
  TrainingOptions options;
  THIMBLE_TRY(need(o.output, "options.output"));
  THIMBLE_TRY(need_array(o.data, o.data_count, "options.data"));
  for (uint32_t i = 0; i < o.data_count; ++i) {
    THIMBLE_TRY(need(o.data[i], "a path of options.data"));
    options.data.emplace_back(o.data[i]);
  }
  THIMBLE_TRY(choose<Retainer::Kind>("kind", o.kind,
                                     {{"locret", Retainer::Kind::kLocret},
                                      {"linear", Retainer::Kind::kLinear},
                                      {"mlp", Retainer::Kind::kMlp},
                                      {"sink", Retainer::Kind::kSink},
                                      {"adore", Retainer::Kind::kAdore}},
                                     options.kind));
  options.tries_targets = o.target && std::string_view(o.target) == "auto";
  THIMBLE_TRY(choose<Target>("target", o.target,
                             {{"log_prob", Target::kLogProb},
                              {"max_logit", Target::kMaxLogit},
                              {"log_kvzip_plus", Target::kLogKvzipPlus},
                              {"auto", Target::kLogProb}},
                             options.target));
  options.output = o.output;
  if (o.heads) options.heads = o.heads;
  if (o.texts) options.texts = o.texts;
  if (o.steps) options.steps = o.steps;
  options.text_tokens = static_cast<uint32_t>(std::min<uint64_t>(o.text_tokens, UINT32_MAX));
  options.equal_shares = o.equal_shares != 0;
  options.seed = o.seed;
  options.memory = o.memory_bytes;
  options.threads = o.threads;
  return options;
}

}  // namespace

void thimble_training_options_init(thimble_training_options* options, uint32_t struct_size) {
  init_struct(options, struct_size, thimble_training_options{});
}

thimble_status thimble_training_create(const thimble_model* model, const thimble_training_options* lent,
                                       thimble_training** training, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(training, "training"));
    thimble_training_options options = {};
    THIMBLE_TRY(read_struct(lent, "options", options));
    THIMBLE_LET(read, read_options(options));
    THIMBLE_LET(device, model->device(options.device ? options.device : "cpu", options.threads));
    auto handle = std::make_unique<thimble_training>();
    THIMBLE_LET(opened, open_training(model->model, device, read));
    handle->training = std::move(opened);
    *training = handle.release();
    return {};
  });
}

thimble_status thimble_training_step(thimble_training* training, thimble_training_progress* progress,
                                     thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(training, "training"));
    if (progress) THIMBLE_TRY(need_struct(progress, "progress"));
    THIMBLE_TRY(training->training->step());
    const TrainingProgress p = training->training->progress();
    if (progress)
      write_struct(progress, thimble_training_progress{.struct_size = 0,
                                                       .phase = static_cast<int32_t>(p.phase),
                                                       .done = p.done,
                                                       .total = p.total,
                                                       .per_second = p.per_second,
                                                       .loss = p.loss,
                                                       .recall = p.recall,
                                                       .dense = p.dense});
    return {};
  });
}

thimble_status thimble_training_save(thimble_training* training, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(training, "training"));
    return training->training->save();
  });
}

thimble_status thimble_training_report(const thimble_training* training, char* json, uint64_t capacity,
                                       uint64_t* length, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(training, "training"));
    THIMBLE_TRY(need_buffer(json, capacity, length, "json"));
    if (training->training->progress().phase != TrainingProgress::Phase::kDone)
      return error(Code::kInvalidArgument,
                   "the training is not done yet; call thimble_training_step until it is");
    return give_text(training->training->report(), json, capacity, length);
  });
}

void thimble_training_free(thimble_training* training) { delete training; }
