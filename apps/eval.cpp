// thimble eval: needle tests, exact-match recall and how much of each needle is still held.
//
// With a selection, and with adore, the question is fed token by token, as generated tokens are: the text is
// what a program reads ahead, and what each word of the question attends to is the policy's choice.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <sstream>

#include "apps/generation.h"
#include "apps/held.h"
#include "apps/options.h"

namespace app {

namespace {

struct EvalFlags {
  std::string file;
  std::vector<std::string> tasks;
  uint64_t length = 0, limit = 0;
  bool baseline = false;
};

struct Sample {
  std::string id, task, answer, asked;
  uint64_t length = 0;  // as the file gives it
  std::vector<int32_t> prompt;
  std::ptrdiff_t question = 0;  // index of the first token of the question
  std::vector<int32_t> needle;  // positions of the needle's tokens in the prompt
};

// One line of the file, tokenised; nothing where a filter leaves it out.
std::optional<Sample> read_sample(const Settings& s, const EvalFlags& flags, const Model& model,
                                  const std::string& line, const std::string& where,
                                  std::map<std::pair<std::string, uint64_t>, uint64_t>& taken) {
  const Json json = Json::parse(line, nullptr, false);
  if (json.is_discarded() || !json.is_object()) throw Failure(THIMBLE_FORMAT, where + " is no JSON object");
  auto text_of = [&](const char* key) -> const std::string& {
    if (!json.contains(key) || !json[key].is_string()) {
      throw Failure(THIMBLE_FORMAT, where + " has no text \"" + key + "\"");
    }
    return json[key].get_ref<const std::string&>();
  };
  if (!json.contains("tokens") || !json["tokens"].is_number_unsigned()) {
    throw Failure(THIMBLE_FORMAT, where + " has no number \"tokens\"");
  }
  Sample sample{text_of("id"),
                text_of("task"),
                text_of("answer"),
                text_of("question"),
                json["tokens"].get<uint64_t>(),
                {},
                0,
                {}};
  const std::string &text = text_of("text"), &question = sample.asked, &needle = text_of("needle");
  if (needle.empty() || text.find(needle) == std::string::npos) {
    throw Failure(THIMBLE_FORMAT, where + ": \"needle\" does not occur in \"text\"");
  }
  const bool of_task = flags.tasks.empty() || std::count(flags.tasks.begin(), flags.tasks.end(), sample.task);
  if (!of_task || (flags.length && flags.length != sample.length)) return std::nullopt;
  uint64_t& count = taken[{sample.task, sample.length}];
  if (flags.limit && count == flags.limit) return std::nullopt;
  ++count;

  const std::string prompt = prompt_text(s, model, join_question(text, question));
  const Tokens tokens = tokenize(model, prompt, kPromptFlags);
  sample.prompt = tokens.ids;
  const uint64_t asked_at = prompt.rfind(question);
  sample.question =
      std::lower_bound(tokens.offsets.begin(), tokens.offsets.end(), asked_at) - tokens.offsets.begin();
  const size_t begin = prompt.find(needle), end = begin + needle.size();
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    const uint64_t next = i + 1 < tokens.ids.size() ? tokens.offsets[i + 1] : prompt.size();
    if (tokens.offsets[i] < end && next > begin) sample.needle.push_back(static_cast<int32_t>(i));
  }
  return sample;
}

std::vector<Sample> read_samples(const Settings& s, const EvalFlags& flags, const Model& model) {
  std::istringstream lines(read_file(flags.file));
  std::vector<Sample> samples;
  std::map<std::pair<std::string, uint64_t>, uint64_t> taken;
  std::string line;
  for (size_t number = 1; std::getline(lines, line); ++number) {
    if (strip(line).empty()) continue;
    const std::string where = "line " + std::to_string(number) + " of '" + flags.file + "'";
    if (auto sample = read_sample(s, flags, model, line, where, taken)) samples.push_back(std::move(*sample));
  }
  if (samples.empty())
    throw Failure(THIMBLE_FORMAT, "'" + flags.file + "' has no sample that the filters let through");
  return samples;
}

// The share of the needle's positions that the pool still holds, averaged over layers and KV heads.
double needle_retention(const std::vector<std::vector<int32_t>>& heads, const std::vector<int32_t>& needle) {
  uint64_t held = 0;
  for (const std::vector<int32_t>& positions : heads) {
    for (int32_t p : needle) held += std::binary_search(positions.begin(), positions.end(), p) ? 1 : 0;
  }
  return static_cast<double>(held) / static_cast<double>(needle.size() * heads.size());
}

struct Outcome {
  std::string answer;
  bool correct = false;
  Json subject;       // what the server would find that the question asks about; null: nothing
  bool gone = false;  // and say that it is no longer held
  double retention = 0, seconds = 0;
  uint64_t read = 0;  // tokens of the prompt that were read ahead, not stepped
  uint64_t saturated = 0;
};

// What the question asks about, as thimble serve finds it, and whether that is still held.
void note_subject(const Model& model, const Sample& sample, const std::vector<std::vector<int32_t>>& heads,
                  Outcome& outcome) {
  const std::vector<Sentence> stream =
      cut_sentences(sample.prompt.size(), [&](uint64_t i) { return token_bytes(model, sample.prompt[i]); });
  const auto subject = find_subject(stream, sample.asked, heads);
  if (!subject) return;
  outcome.subject = {{"text", strip(stream[subject->sentence].text)}, {"held", subject->held}};
  outcome.gone = subject->gone;
}

bool same_text(const Sample& a, const Sample& b) {
  return a.question == b.question &&
         std::equal(a.prompt.begin(), a.prompt.begin() + a.question, b.prompt.begin());
}

// A session that is asked one sample after the other. A text that several of them share, one behind the
// other, is read once: all questions but the last are asked on clones, where those fit.
class Asked {
 public:
  // `selects`: questions are stepped token by token. The session may be none.
  Asked(const Settings& s, const Model& model, Session session, bool selects)
      : settings_(s), model_(model), session_(std::move(session)), selects_(selects) {}

  explicit operator bool() const { return session_ != nullptr; }
  const Session& session() const { return session_; }

  // Nothing where Ctrl-C came. `last`: no further sample of this text follows.
  std::optional<Outcome> ask(const Sample& sample, bool last, Progress& progress) {
    const auto start = std::chrono::steady_clock::now();
    if (!reads_) {
      const Interruptible interruptible(session_);
      call(thimble_session_reset, session_.get());
      if (!call_unless_interrupted(thimble_session_feed, session_.get(), sample.prompt.data(),
                                   sample.question))
        return std::nullopt;
    }
    const Session copy = last ? nullptr : clone_where_it_fits();
    reads_ = copy != nullptr;
    auto outcome = answer(copy ? copy : session_, sample, progress);
    if (!outcome) return std::nullopt;
    if (copy) outcome->saturated -= stats(session_).saturated;  // which clones go on counting
    outcome->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return outcome;
  }

 private:
  // Nothing where the budget or the device has no room for it: the text is then read anew for the next
  // question.
  Session clone_where_it_fits() const {
    try {
      return clone(session_);
    } catch (const Failure& failure) {
      if (failure.status != THIMBLE_BUDGET && failure.status != THIMBLE_OUT_OF_MEMORY) throw;
      return nullptr;
    }
  }
  std::optional<Outcome> answer(const Session& session, const Sample& sample, Progress& progress) const {
    const Interruptible interruptible(session);
    const std::vector<int32_t> question(sample.prompt.begin() + sample.question, sample.prompt.end());
    if (!read_prompt(session, selects_ ? std::vector<int32_t>() : question, progress)) return std::nullopt;
    for (size_t i = 0; selects_ && i < question.size(); ++i)
      if (!call_unless_interrupted(thimble_session_accept, session.get(), question[i])) return std::nullopt;
    Outcome outcome;
    const std::vector<std::vector<int32_t>> heads = kept_by_head(model_, session);
    outcome.retention = needle_retention(heads, sample.needle);
    note_subject(model_, sample, heads, outcome);
    const Answer answer = generate(model_, session, settings_.predict, [](std::string_view) {});
    if (answer.finish == Finish::kInterrupted) return std::nullopt;
    outcome.answer = strip(answer.text);
    outcome.correct = outcome.answer == strip(sample.answer);
    const thimble_stats seen = stats(session);
    outcome.read = seen.prefill_tokens;
    outcome.saturated = seen.saturated;
    return outcome;
  }

  const Settings& settings_;
  const Model& model_;
  const Session session_;
  const bool selects_;
  bool reads_ = false;  // it holds the text of the next sample
};

// A row of the table: samples of one task and length, or all.
struct Row {
  uint64_t samples = 0, correct = 0, baseline_correct = 0;
  double retention = 0;
  uint64_t saturated = 0;
  uint64_t gone = 0, gone_wrong = 0;  // said to be no longer held; of these answered wrongly
  void add(const Outcome& outcome, const Outcome* baseline) {
    ++samples;
    correct += outcome.correct;
    retention += outcome.retention;
    saturated += outcome.saturated;
    gone += outcome.gone;
    gone_wrong += outcome.gone && !outcome.correct;
    if (baseline) baseline_correct += baseline->correct;
  }
};

Json row_json(const Row& row, bool baseline) {
  const double n = static_cast<double>(std::max<uint64_t>(row.samples, 1));
  Json json = {{"samples", row.samples},
               {"correct", row.correct},
               {"recall", static_cast<double>(row.correct) / n},
               {"retention", row.retention / n},
               {"gone", row.gone},
               {"gone_wrong", row.gone_wrong}};
  if (baseline) {
    json["baseline_correct"] = row.baseline_correct;
    json["baseline_recall"] = static_cast<double>(row.baseline_correct) / n;
  }
  return json;
}

void print_row(const std::string& task, const std::string& length, const Row& row, bool baseline) {
  if (row.samples == 0) return;
  std::printf("%-12s %8s %5llu/%-5llu", task.c_str(), length.c_str(),
              static_cast<unsigned long long>(row.correct), static_cast<unsigned long long>(row.samples));
  if (baseline) {
    std::printf(" %5llu/%-5llu", static_cast<unsigned long long>(row.baseline_correct),
                static_cast<unsigned long long>(row.samples));
  }
  std::printf(" %13.1f %%\n", 100 * row.retention / static_cast<double>(row.samples));
}

int eval(Settings& s, const EvalFlags& flags) {
  const Model model = open_model(s.model);
  need_tokenizer(model);
  settle_seed(s);
  const std::vector<Sample> samples = read_samples(s, flags, model);
  uint64_t longest = 0, question = 0;
  for (const Sample& sample : samples) {
    longest = std::max<uint64_t>(longest, sample.prompt.size());
    question = std::max<uint64_t>(question, sample.prompt.size() - static_cast<uint64_t>(sample.question));
  }

  Progress progress;
  // Where a generated token's step is unlike a chunk's, the question is read as an answer is written.
  bool selects = s.session.selection != THIMBLE_SELECTION_DENSE;
  Settings asking = s;  // the question takes room as an answer does
  if (selects && s.predict >= 0) asking.predict += static_cast<int64_t>(question);
  const Retention retention = choose_retention(asking, model, longest);
  selects =
      selects || retention.policy == THIMBLE_RETENTION_ADORE;  // which needs no room: each token releases one
  thimble_session_options options = session_options(asking, model, retention, longest);
  progress.attach(options);
  Asked asked(s, model, create_session(model, options), selects);
  Session dense;
  if (flags.baseline) {
    Settings plain;
    plain.device = s.device;
    plain.predict = s.predict;
    plain.session.threads = s.session.threads;
    plain.session.context = s.session.context;
    thimble_session_options dense_options = session_options(plain, model, {}, longest);
    progress.attach(dense_options);
    dense = create_session(model, dense_options);
  }
  Asked asked_dense(s, model, std::move(dense), false);

  std::map<std::pair<std::string, uint64_t>, Row> rows;
  Row all;
  bool interrupted = false;
  for (size_t i = 0; i < samples.size(); ++i) {
    const Sample& sample = samples[i];
    const bool last = i + 1 == samples.size() || !same_text(sample, samples[i + 1]);
    const auto outcome = asked.ask(sample, last, progress);
    const auto baseline = outcome && asked_dense ? asked_dense.ask(sample, last, progress) : std::nullopt;
    interrupted = !outcome || (asked_dense && !baseline);
    if (interrupted) break;
    rows[{sample.task, sample.length}].add(*outcome, baseline ? &*baseline : nullptr);
    all.add(*outcome, baseline ? &*baseline : nullptr);
    std::fprintf(stderr, "[%llu/%zu] %s: %s, %.1f s\n", static_cast<unsigned long long>(all.samples),
                 samples.size(), sample.id.c_str(), outcome->correct ? "right" : "wrong", outcome->seconds);
    if (!s.json) continue;
    Json line = {{"id", sample.id},
                 {"task", sample.task},
                 {"tokens", sample.length},
                 {"prompt_tokens", sample.prompt.size()},
                 {"read_tokens", outcome->read},
                 {"correct", outcome->correct},
                 {"answer", outcome->answer},
                 {"expected", sample.answer},
                 {"retention", outcome->retention},
                 {"subject", outcome->subject},
                 {"gone", outcome->gone},
                 {"seconds", outcome->seconds}};
    if (baseline) {
      line["baseline_correct"] = baseline->correct;
      line["baseline_answer"] = baseline->answer;
    }
    print_json(line);
  }

  const thimble_memory held = memory(asked.session());
  warn_of_saturated(all.saturated);
  if (s.json) {
    Json summary = row_json(all, flags.baseline);
    summary["pool"] = held.pool;
    summary["saturated"] = all.saturated;
    summary["budget_bytes"] = held.budget;
    summary["allocated_bytes"] = held.allocated;
    summary["interrupted"] = interrupted;
    summary["rows"] = Json::array();
    for (const auto& [key, row] : rows) {
      Json json = {{"task", key.first}, {"tokens", key.second}};
      json.update(row_json(row, flags.baseline));
      summary["rows"].push_back(json);
    }
    print_json({{"summary", summary}});
  } else {
    std::printf("%-12s %8s %11s%s %15s\n", "task", "tokens", "recall", flags.baseline ? "       dense" : "",
                "needle held");
    for (const auto& [key, row] : rows) print_row(key.first, std::to_string(key.second), row, flags.baseline);
    print_row("all", "", all, flags.baseline);
  }
  return interrupted ? kExitInterrupted : 0;
}

}  // namespace

Command add_eval(CLI::App& root) {
  static Settings settings;
  static EvalFlags flags;
  settings.predict = 64;
  CLI::App* app = root.add_subcommand("eval", "Needle tests: recall, and what is still held of each needle");
  app->add_option(
         "FILE", flags.file,
         "JSON lines: id, task, tokens, text, question, answer, needle (the sentence that holds the answer)")
      ->required();
  add_model_flag(*app, settings);
  app->add_flag("--baseline", flags.baseline, "Run every sample with dense attention too, without budget");
  app->add_option("--limit", flags.limit, "The first N of every task and length (default: all)")
      ->type_name("N");
  app->add_option("--tasks", flags.tasks, "Only these tasks: a,b")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAMES");
  app->add_option("--length", flags.length, "Only samples of so many tokens")->type_name("N");
  add_predict_flag(*app, settings);
  add_chat_flags(*app, settings);
  add_json_flag(*app, settings);
  add_session_flags(*app, settings);
  app->footer(
      "An answer is right when it is exactly the expected one, but for white space around it. With a\n"
      "selection or adore the question is read token by token, as an answer is written. A text that\n"
      "lines behind each other share is read once where there is room for a clone.\n"
      "Decoding is greedy. With --json one object a sample, then one with \"summary\"; \"gone\" is\n"
      "where thimble serve would say that what the question asks about is no longer held.\n\n"
      "Examples:\n"
      "  thimble eval needles.jsonl -m model.gguf --heads heads.gguf --pool 1024 --baseline\n"
      "  thimble eval needles.jsonl -m model.gguf --retention window --pool 1024 --tasks passkey,kv --limit "
      "4 --json");
  return {app, [] { return eval(settings, flags); }};
}

}  // namespace app
