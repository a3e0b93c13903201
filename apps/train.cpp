// Implements `thimble heads train` and `thimble heads budgets`, which make heads for a model on this machine.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

struct TrainSettings {
  Settings common;  // model, json
  std::vector<std::string> data;
  std::string output, heads, kind = "mlp", target = "log_prob", memory, budgets = "counted";
  uint32_t texts = 16, steps = 300, text_tokens = 0, threads = 0;
  uint64_t seed = 0;
  bool synthetic = false;
};

using Training = std::unique_ptr<thimble_training, Free<thimble_training_free>>;

volatile std::sig_atomic_t stop_wanted = 0;

// While an object of this class exists, Ctrl-C ends the training after the current step. A second Ctrl-C ends
// the process at once.
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

// Shows the progress of the training: on one line of a terminal, or elsewhere with one line per phase.
class TrainingProgressLine {
 public:
  void show(const thimble_training_progress& p) {
    constexpr const char* kDoing[] = {"reading", "fitting", "checking", "done", "trying"};
    constexpr const char* kUnits[] = {"tokens", "steps", "readings", "", "targets"};
    if (p.phase == THIMBLE_TRAINING_DONE) return clear();
    if (p.dense >= 0 && dense_ < 0) {
      clear();
      std::fprintf(stderr,
                   "without eviction the model answers %.0f %% of the questions about held-out texts\n",
                   100 * p.dense);
      if (p.dense < 0.5)
        std::fprintf(stderr,
                     "these are too few, so the check compares the probabilities of the right answers\n");
    }
    dense_ = p.dense;
    if (p.recall >= 0) recall_ = p.recall;
    if (!is_terminal(stderr)) {
      if (p.phase != phase_)
        std::fprintf(stderr, "%s: %s %s\n", kDoing[p.phase], format_count(p.total).c_str(), kUnits[p.phase]);
      if (p.recall >= 0)
        std::fprintf(stderr, "after %s steps: loss %.4f, %.0f %% of a held-out text's %s\n",
                     format_count(p.done).c_str(), p.loss, 100 * p.recall,
                     p.dense < 0.5 ? "right answers' probability kept" : "questions answered");
      phase_ = p.phase;
      return;
    }
    const uint64_t left =
        p.per_second > 0 ? static_cast<uint64_t>(static_cast<double>(p.total - p.done) / p.per_second) : 0;
    std::fprintf(stderr, "\r\033[K%s  %s of %s %s  %.*f/s  %llu:%02llu left", kDoing[p.phase],
                 format_count(p.done).c_str(), format_count(p.total).c_str(), kUnits[p.phase],
                 p.per_second < 10 ? 1 : 0, p.per_second, static_cast<unsigned long long>(left / 60),
                 static_cast<unsigned long long>(left % 60));
    if (p.phase == THIMBLE_TRAINING_FITTING) {
      std::fprintf(stderr, "  loss %.4f", p.loss);
      if (recall_ >= 0) std::fprintf(stderr, "  recall %.0f %%", 100 * recall_);
    }
    std::fflush(stderr);
  }
  void clear() {
    if (is_terminal(stderr)) std::fprintf(stderr, "\r\033[K");
  }

 private:
  int32_t phase_ = -1;
  double recall_ = -1;  // the last recall that was measured
  double dense_ = -1;
};

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

// Writes the loss of every step and the recall of some steps for plots: NAME.csv during the training, and
// NAME.svg at its end.
class Curve {
 public:
  // `goes_on`: keeps the rows of the same training that are in the file, up to the step from which it
  // continues.
  Curve(const std::string& name, bool goes_on) : name_(name) {
    if (goes_on) read();
    // Fails before hours of work, and not after them.
    if (!std::ofstream(native_path(name_ + ".csv"), std::ios::app))
      throw Failure(THIMBLE_IO, name_ + ".csv cannot be written");
  }
  ~Curve() { draw(); }
  Curve(const Curve&) = delete;
  Curve& operator=(const Curve&) = delete;

  void add(const thimble_training_progress& p) {
    if (p.phase != THIMBLE_TRAINING_FITTING || p.done == 0) return;
    if (!file_.is_open()) {
      rows_.erase(rows_.lower_bound(p.done), rows_.end());
      file_.open(native_path(name_ + ".csv"), std::ios::trunc);
      file_ << "step,loss,recall\n";
      for (const auto& [step, row] : rows_) write(step, row);
    }
    const Row row{p.loss, p.recall};
    if (!rows_.insert({p.done, row}).second) return;  // the calls that begin and end a phase are not steps
    write(p.done, row);
    file_.flush();
  }

 private:
  struct Row {
    double loss, recall;  // -1: not measured
  };
  void write(uint64_t step, const Row& row) {
    char line[64], recall[16] = "";
    if (row.recall >= 0) std::snprintf(recall, sizeof recall, "%.4f", row.recall);
    std::snprintf(line, sizeof line, "%llu,%.6f,%s\n", static_cast<unsigned long long>(step), row.loss,
                  recall);
    file_ << line;
  }
  void read() {
    std::ifstream file(native_path(name_ + ".csv"));
    std::string line;
    for (std::getline(file, line); std::getline(file, line);) {
      unsigned long long step = 0;
      Row row{0, -1};
      if (std::sscanf(line.c_str(), "%llu,%lf,%lf", &step, &row.loss, &row.recall) >= 2) rows_[step] = row;
    }
  }

  // Draws the loss of each step; both axes begin at 0.
  void draw() const {
    if (rows_.size() < 2) return;
    constexpr int kWidth = 640, kHeight = 320, kLeft = 60, kBottom = 40, kTop = 20, kRight = 20;
    constexpr int kInnerWidth = kWidth - kLeft - kRight, kInnerHeight = kHeight - kTop - kBottom;
    double most = 0;
    for (const auto& [step, row] : rows_)
      if (std::isfinite(row.loss)) most = std::max(most, row.loss);
    if (most == 0) most = 1;
    const auto steps = static_cast<double>(rows_.rbegin()->first);
    std::ostringstream points;
    points.precision(5);
    for (const auto& [step, row] : rows_)
      if (std::isfinite(row.loss))
        points << kLeft + kInnerWidth * static_cast<double>(step) / steps << ','
               << kTop + kInnerHeight * (1 - row.loss / most) << ' ';
    std::ofstream svg(native_path(name_ + ".svg"));
    svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << ' ' << kHeight
        << "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" "
           "fill=\"white\"/>\n";
    for (int i = 0; i <= 4; ++i) {
      const int y = kTop + kInnerHeight * (4 - i) / 4, x = kLeft + kInnerWidth * i / 4;
      svg << "<path d=\"M" << kLeft << ' ' << y << 'h' << kInnerWidth << "\" stroke=\"#ddd\"/>\n<text x=\""
          << kLeft - 8 << "\" y=\"" << y + 4 << "\" text-anchor=\"end\">" << number(most * i / 4)
          << "</text>\n<text x=\"" << x << "\" y=\"" << kHeight - kBottom + 18 << "\" text-anchor=\"middle\">"
          << number(steps * i / 4) << "</text>\n";
    }
    svg << "<text x=\"" << kLeft + kInnerWidth / 2 << "\" y=\"" << kHeight - 6
        << "\" text-anchor=\"middle\">loss by steps</text>\n<polyline fill=\"none\" stroke=\"#1f5fa8\" "
           "stroke-width=\"1.5\" points=\""
        << points.str() << "\"/>\n</svg>\n";
  }
  const std::string name_;
  std::ofstream file_;
  std::map<uint64_t, Row> rows_;
};

void print_recall(const Json& report) {
  const bool by_answers = report.at("measure") == "answers";
  if (report.contains("tried")) {
    std::printf("\n%s after a short training for each target:\n",
                by_answers ? "Questions that were answered" : "Right answers' probability that was kept");
    for (const Json& row : report.at("tried")) {
      const std::string target = row.at("target").get<std::string>();
      if (row.at("recall").is_null())
        std::printf("  %-14s      not possible here\n", target.c_str());
      else
        std::printf("  %-14s  %5.0f %%%s\n", target.c_str(), 100 * row.at("recall").get<double>(),
                    report.at("target") == target ? "  taken" : "");
    }
  }
  const int questions = report.at("questions").get<int>();
  const double dense = 100 * report.at("dense").get<double>();
  if (by_answers)
    std::printf("\nQuestions about held-out texts that are answered (%d asked):\n", questions);
  else
    std::printf(
        "\nOf %d questions about held-out texts %.0f %% are answered with everything kept.\n"
        "What is kept of a right answer's probability, for each token (and its perplexity):\n",
        questions, dense);
  const auto in_brackets = [](const Json& perplexity) {
    return " (" + (perplexity.is_null() ? "inf" : number(perplexity.get<double>())) + ")";
  };
  const auto cell = [&](const Json& row, const std::string& name) {
    char text[64];
    std::snprintf(text, sizeof text, "%.0f %%", 100 * row.at(name).get<double>());
    if (by_answers) return std::string(text);
    return text + in_brackets(row.at(name + "_perplexity"));
  };
  const bool counted = report.at("recall").at(0).contains("counted");
  const auto line = [](const std::string& memory, const std::vector<std::string>& cells) {
    std::printf("  %-10s", memory.c_str());
    for (const std::string& c : cells) std::printf("  %14s", c.c_str());
    std::printf("\n");
  };
  std::vector<std::string> ways = {"locret", "keydiff", "mix", "window"};
  if (counted) ways.push_back("counted");
  std::vector<std::string> titles = ways;
  if (counted) titles.back() = report.at("retention").get<std::string>() + ", shares";
  line("memory", titles);
  for (const Json& row : report.at("recall")) {
    std::vector<std::string> cells;
    for (const std::string& way : ways) cells.push_back(cell(row, way));
    line("1/" + std::to_string(row.at("part").get<int>()), cells);
  }
  if (by_answers)
    std::printf("  everything  %12.0f %%\n", dense);
  else
    std::printf("  everything  %14s\n", ("100 %" + in_brackets(report.at("dense_perplexity"))).c_str());
}

void print_quality(const Json& report) {
  const auto percent = [&](const char* key) { return 100 * report.at(key).get<double>(); };
  std::printf("\nOf %d queries of held-out texts and the tokens before them, after step %d:\n",
              report.at("queries").get<int>(), report.at("step").get<int>());
  std::printf("  attended to most      %5.1f %%\n  right (accuracy)      %5.1f %%\n", percent("base_rate"),
              percent("accuracy"));
  std::printf("  F1, above a half      %5.1f %%\n  F1, the best scores   %5.1f %%\n", percent("f1"),
              percent("f1_of_best"));
  std::printf("  F1, the last tokens   %5.1f %%\n", percent("f1_of_last"));
}

void print_seconds(const Json& report) {
  const Json& seconds = report.at("seconds");
  const auto of = [&](const char* phase) { return seconds.at(phase).get<double>(); };
  std::printf("\nSeconds: ");
  if (report.contains("tried")) std::printf("%.1f trying, ", of("trying"));
  std::printf("%.1f reading, %.1f for labels, %.1f fitting, %.1f checking\n\n%s\n", of("reading"),
              of("labels"), of("fitting"), of("checking"), report.at("verdict").get<std::string>().c_str());
}

int train(const TrainSettings& s) {
  if (s.synthetic && s.target != "log_prob" && s.target != "max_logit")
    throw UsageError("--synthetic asks about facts that it hides in books, but --target " + s.target +
                     " may repeat texts instead; leave out one of them");
  const Model model = open_model(s.common.model);
  need_tokenizer(model);
  std::vector<const char*> data;
  for (const std::string& path : s.data) data.push_back(path.c_str());
  thimble_training_options options;
  thimble_training_options_init(&options, sizeof options);
  options.threads = s.threads;
  options.device = s.common.device.c_str();
  options.data = data.data();
  options.data_count = static_cast<uint32_t>(data.size());
  options.texts = s.texts;
  options.steps = s.steps;
  options.text_tokens = s.text_tokens;
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

  const bool goes_on = std::filesystem::exists(native_path(s.output + ".partial"));
  thimble_training* made = nullptr;
  call(thimble_training_create, model.get(), &options, &made);
  const Training training(made);
  const StopOnSignal stop;
  TrainingProgressLine line;
  std::unique_ptr<Curve> curve;
  if (s.heads.empty()) curve = std::make_unique<Curve>(s.output + ".loss", goes_on);
  thimble_training_progress progress = {};
  progress.struct_size = sizeof progress;
  while (progress.phase != THIMBLE_TRAINING_DONE) {
    call(thimble_training_step, training.get(), &progress);
    line.show(progress);
    if (curve) curve->add(progress);
    if (!stop_wanted) continue;
    line.clear();
    curve.reset();
    call(thimble_training_save, training.get());
    std::fprintf(stderr,
                 progress.phase == THIMBLE_TRAINING_CHECKING
                     ? "stopped before the check; %s is written\n"
                     : "stopped; the same command continues from %s.partial\n",
                 s.output.c_str());
    return kExitInterrupted;
  }
  curve.reset();
  const Json report = Json::parse(training_report(training.get()));
  if (s.common.json) {
    Json all = {{"output", s.output}};
    all.update(report);
    print_json(all);
    return 0;
  }
  std::printf("%s is written; use it with --heads\n", s.output.c_str());
  if (report.contains("f1"))
    print_quality(report);
  else
    print_recall(report);
  print_seconds(report);
  return 0;
}

void add_flags(CLI::App& app, TrainSettings& s) {
  add_model_flag(app, s.common);
  app.add_option("--data", s.data,
                 "Training texts: books as plain text in UTF-8, JSON lines of prompts and answers, or both")
      ->required()
      ->type_name("FILE...")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("-o,--output", s.output, "The file to write")->required()->type_name("FILE");
  app.add_option("--mem-budget", s.memory,
                 "Limit for all memory that training allocates (default: the need of the prefill plus 1 GiB; "
                 "for linear "
                 "the need of the training)")
      ->type_name("SIZE");
  app.add_option("--device", s.common.device, "Device to compute on, see 'thimble devices' (default: auto)")
      ->type_name("NAME");
  app.add_option("--threads", s.threads, "Worker threads (default: one for each core)")->type_name("N");
  app.add_option("--seed", s.seed, "Seed of the random numbers (default: 0)")->type_name("N");
  add_json_flag(app, s.common);
}

}  // namespace

Command add_heads_train(CLI::App& heads) {
  static TrainSettings settings;
  CLI::App* app = heads.add_subcommand("train", "Train a retainer for a model on this machine");
  add_flags(*app, settings);
  app->add_option("--kind", settings.kind, "Kind of the retainer (default: mlp)")
      ->type_name("locret|linear|mlp|sink|adore");
  app->add_option(
         "--target", settings.target,
         "The quantity that the scores estimate. auto trains each target for a short time and takes the "
         "one that answers most questions (default: log_prob)")
      ->type_name("log_prob|max_logit|log_kvzip_plus|auto");
  app->add_flag("--synthetic", settings.synthetic,
                "Hide facts in the books and ask about each of them (default with log_prob and max_logit)");
  app->add_option("--texts", settings.texts, "Number of training texts (default: 16)")->type_name("N");
  app->add_option("--text-tokens", settings.text_tokens,
                  "Tokens per training text, at least 1024. The questions after the text take half as many "
                  "(default: 6144)")
      ->type_name("N");
  app->add_option("--steps", settings.steps, "Steps of the optimizer (default: 300)")->type_name("N");
  app->add_option(
         "--budgets", settings.budgets,
         "How the pool is divided among KV heads. counted divides it by counts if the check finds that "
         "better; equal gives all heads the same (default: counted)")
      ->type_name("counted|equal")
      ->check(CLI::IsMember({"counted", "equal"}).description(""));
  app->footer(
      "Ctrl-C stops the training. The same command continues it.\n\n"
      "Examples:\n  thimble heads train -m model.gguf --data book.txt -o model.heads.gguf\n"
      "  thimble heads train -m model.gguf --data chats.jsonl --target auto -o model.heads.gguf");
  return {app, [] { return train(settings); }};
}

Command add_heads_budgets(CLI::App& heads) {
  static TrainSettings settings;
  CLI::App* app =
      heads.add_subcommand("budgets", "Add shares of the pools to the file of a retainer if they help");
  add_flags(*app, settings);
  app->add_option("--heads", settings.heads, "The file of the retainer")->required()->type_name("FILE");
  app->footer(
      "Examples:\n  thimble heads budgets -m model.gguf --heads published.heads.gguf --data book.txt -o "
      "model.heads.gguf");
  return {app, [] { return train(settings); }};
}

}  // namespace app
