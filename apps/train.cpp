// thimble heads train, thimble heads budgets: heads made for a model on this machine.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

struct TrainSettings {
  Settings common;  // model, json
  std::vector<std::string> data;
  std::string output, heads, kind = "locret", target = "log_prob", memory, budgets = "counted";
  uint32_t texts = 16, steps = 300, threads = 0;
  uint64_t seed = 0;
};

using Training = std::unique_ptr<thimble_training, Free<thimble_training_free>>;

volatile std::sig_atomic_t stop_wanted = 0;

// While it lives, Ctrl-C ends the training after its step; a second one ends the process at once.
class StopOnSignal {
 public:
  StopOnSignal() : before_(std::signal(SIGINT, &on_signal)) {}
  ~StopOnSignal() { std::signal(SIGINT, before_); }
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

 private:
  static void on_signal(int) {
    stop_wanted = 1;
    std::signal(SIGINT, SIG_DFL);
  }
  void (*before_)(int);
};

// What is being done, on one line of a terminal, or a line for every phase elsewhere.
class TrainingProgressLine {
 public:
  void show(const thimble_training_progress& p) {
    constexpr const char* kDoing[] = {"reading", "fitting", "checking", "done"};
    constexpr const char* kUnits[] = {"tokens", "steps", "readings", ""};
    if (p.phase == THIMBLE_TRAINING_DONE) return clear();
    if (!is_terminal(stderr)) {
      if (p.phase != phase_)
        std::fprintf(stderr, "%s: %s %s\n", kDoing[p.phase], format_count(p.total).c_str(), kUnits[p.phase]);
      phase_ = p.phase;
      return;
    }
    const uint64_t left =
        p.per_second > 0 ? static_cast<uint64_t>(static_cast<double>(p.total - p.done) / p.per_second) : 0;
    std::fprintf(stderr, "\r\033[K%s  %s of %s %s  %.*f/s  %llu:%02llu left", kDoing[p.phase],
                 format_count(p.done).c_str(), format_count(p.total).c_str(), kUnits[p.phase],
                 p.per_second < 10 ? 1 : 0, p.per_second, static_cast<unsigned long long>(left / 60),
                 static_cast<unsigned long long>(left % 60));
    if (p.phase == THIMBLE_TRAINING_FITTING) std::fprintf(stderr, "  loss %.4f", p.loss);
    std::fflush(stderr);
  }
  void clear() {
    if (is_terminal(stderr)) std::fprintf(stderr, "\r\033[K");
  }

 private:
  int32_t phase_ = -1;
};

// The loss of every step, for people and their plots.
class Curve {
 public:
  // `goes_on`: behind what is there of the same training.
  Curve(const std::string& path, bool goes_on) : file_(std::fopen(path.c_str(), goes_on ? "a" : "w")) {
    if (!file_) throw Failure(THIMBLE_IO, path + " cannot be written");
    if (!goes_on) std::fprintf(file_, "step,loss\n");
  }
  ~Curve() { std::fclose(file_); }
  Curve(const Curve&) = delete;
  Curve& operator=(const Curve&) = delete;
  void add(const thimble_training_progress& p) {
    if (p.phase != THIMBLE_TRAINING_FITTING || p.done == 0) return;
    std::fprintf(file_, "%llu,%.6f\n", static_cast<unsigned long long>(p.done), p.loss);
  }

 private:
  std::FILE* file_;
};

void print_recall(const Json& report) {
  std::printf("\nQuestions about held-out texts that are answered (%d asked):\n",
              report.at("questions").get<int>());
  std::printf("  memory      these heads   window\n");
  for (const Json& row : report.at("recall"))
    std::printf("  1/%-2d        %5.0f %%       %5.0f %%\n", row.at("part").get<int>(),
                100 * row.at("heads").get<double>(), 100 * row.at("window").get<double>());
  std::printf("  everything  %5.0f %%\n\n%s\n", 100 * report.at("dense").get<double>(),
              report.at("verdict").get<std::string>().c_str());
}

int train(const TrainSettings& s) {
  const Model model = open_model(s.common.model);
  need_tokenizer(model);
  std::vector<const char*> data;
  for (const std::string& path : s.data) data.push_back(path.c_str());
  thimble_training_options options;
  thimble_training_options_init(&options, sizeof options);
  options.threads = s.threads;
  options.data = data.data();
  options.data_count = static_cast<uint32_t>(data.size());
  options.texts = s.texts;
  options.steps = s.steps;
  options.equal_shares = s.budgets == "equal";
  options.output = s.output.c_str();
  options.heads = s.heads.empty() ? nullptr : s.heads.c_str();
  options.kind = s.kind.c_str();
  options.target = s.target.c_str();
  options.seed = s.seed;
  if (!s.memory.empty()) {
    const auto bytes = parse_size(s.memory);
    if (!bytes) throw UsageError("--mem-budget takes a size such as 2GiB, not '" + s.memory + "'");
    options.memory_bytes = *bytes;
  }

  const bool goes_on = std::ifstream(s.output + ".partial").good();
  thimble_training* made = nullptr;
  call(thimble_training_create, model.get(), &options, &made);
  const Training training(made);
  const StopOnSignal stop;
  TrainingProgressLine line;
  std::unique_ptr<Curve> curve;
  if (s.heads.empty()) curve = std::make_unique<Curve>(s.output + ".loss.csv", goes_on);
  thimble_training_progress progress = {};
  progress.struct_size = sizeof progress;
  while (progress.phase != THIMBLE_TRAINING_DONE) {
    call(thimble_training_step, training.get(), &progress);
    line.show(progress);
    if (curve) curve->add(progress);
    if (!stop_wanted) continue;
    line.clear();
    call(thimble_training_save, training.get());
    std::fprintf(stderr,
                 progress.phase < THIMBLE_TRAINING_CHECKING
                     ? "stopped; the same command goes on from %s.partial\n"
                     : "stopped before it was checked; %s is written\n",
                 s.output.c_str());
    return kExitInterrupted;
  }
  const Json report = Json::parse(training_report(training.get()));
  if (s.common.json) {
    Json all = {{"output", s.output}};
    all.update(report);
    print_json(all);
    return 0;
  }
  std::printf("%s is written; use it with --heads\n", s.output.c_str());
  print_recall(report);
  return 0;
}

void add_flags(CLI::App& app, TrainSettings& s) {
  add_model_flag(app, s.common);
  app.add_option("--data", s.data, "Plain texts in UTF-8, one book or more, in which facts are hidden")
      ->required()
      ->type_name("FILE...")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("-o,--output", s.output, "The file of heads to write")->required()->type_name("FILE");
  app.add_option("--mem-budget", s.memory,
                 "All that training may allocate (default: what reading takes and 1 GiB)")
      ->type_name("SIZE");
  app.add_option("--threads", s.threads, "Worker threads (default: one a core)")->type_name("N");
  app.add_option("--seed", s.seed, "What chance begins with (default: 0)")->type_name("N");
  add_json_flag(app, s.common);
}

}  // namespace

Command add_heads_train(CLI::App& heads) {
  static TrainSettings settings;
  CLI::App* app = heads.add_subcommand("train", "Make a retainer for a model, on this machine");
  add_flags(*app, settings);
  app->add_option("--kind", settings.kind, "What is trained (default: locret)")
      ->type_name("locret|linear|mlp");
  app->add_option("--target", settings.target, "What its scores estimate (default: log_prob)")
      ->type_name("log_prob|max_logit");
  app->add_option("--texts", settings.texts, "Texts to learn from (default: 16)")->type_name("N");
  app->add_option("--steps", settings.steps, "Steps of the optimizer (default: 300)")->type_name("N");
  app->add_option("--budgets", settings.budgets, "How pools are divided among KV heads (default: counted)")
      ->type_name("counted|equal")
      ->check(CLI::IsMember({"counted", "equal"}));
  app->footer(
      "Ctrl-C stops, and the same command goes on.\n\n"
      "Examples:\n  thimble heads train -m model.gguf --data book.txt -o model.retainer.gguf");
  return {app, [] { return train(settings); }};
}

Command add_heads_budgets(CLI::App& heads) {
  static TrainSettings settings;
  CLI::App* app =
      heads.add_subcommand("budgets", "Give the file of a retainer shares of the pools for each KV head");
  add_flags(*app, settings);
  app->add_option("--heads", settings.heads, "The file that gets them")->required()->type_name("FILE");
  app->footer(
      "Examples:\n  thimble heads budgets -m model.gguf --heads model.retainer.gguf --data book.txt -o "
      "divided.retainer.gguf");
  return {app, [] { return train(settings); }};
}

}  // namespace app
