// Implements `thimble eval`, which asks questions about long texts. It measures how well they are answered
// and how much of each needle is still held.
//
// With a selection, and with adore, the question is fed token by token, like generated tokens. A program
// would read the text ahead, and for each token of the question the policy chooses which entries it attends
// to.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <tuple>

#include "apps/generation.h"
#include "apps/held.h"
#include "apps/options.h"
#include "apps/score.h"
#include "apps/sizes.h"

namespace app {

namespace {

enum class Scoring { kByLine, kExact, kContains };  // kByLine: kContains if a line has "answers", else kExact

struct EvalFlags {
  std::string file;
  Scoring scoring = Scoring::kByLine;
  std::vector<std::string> tasks;
  uint64_t length = 0, limit = 0;
  bool baseline = false;
};

struct Sample {
  std::string id, task, asked;
  std::vector<std::string> expected;
  bool exact = true;    // true: the answer equals the expected text; false: it contains all expected texts
  uint64_t length = 0;  // as given in the file
  std::vector<int32_t> prompt;
  std::ptrdiff_t question = 0;  // index of the first token of the question
  std::vector<int32_t> needle;  // positions of the needle's tokens in the prompt; empty without a needle
};

// The expected texts of a line, and whether the answer must equal the text or only contain it.
std::pair<std::vector<std::string>, bool> expectation(const EvalFlags& flags, const Json& json,
                                                      const std::string& where) {
  const bool many = json.contains("answers");
  const bool exact = flags.scoring == Scoring::kByLine ? !many : flags.scoring == Scoring::kExact;
  if (exact || !many) {
    if (!json.contains("answer") || !json["answer"].is_string())
      throw Failure(THIMBLE_FORMAT, where + " has no text \"answer\"");
    std::string answer = json["answer"].get<std::string>();
    if (!exact && comparable(answer).empty())
      throw Failure(
          THIMBLE_FORMAT,
          where + ": \"answer\" is empty, so every answer would contain it; write the expected answer");
    return {{std::move(answer)}, exact};
  }
  std::vector<std::string> expected;
  if (json["answers"].is_array()) {
    for (const Json& text : json["answers"])
      expected.push_back(text.is_string() ? text.get<std::string>() : std::string());
  }
  if (expected.empty() || std::any_of(expected.begin(), expected.end(),
                                      [](const std::string& text) { return comparable(text).empty(); }))
    throw Failure(THIMBLE_FORMAT, where + ": \"answers\" must be an array of texts that are not empty");
  return {std::move(expected), false};
}

// Reads and tokenises one line of the file. Returns nothing if a filter excludes it.
std::optional<Sample> read_sample(const Settings& s, const EvalFlags& flags, const Model& model,
                                  const std::string& line, const std::string& where,
                                  std::map<std::pair<std::string, uint64_t>, uint64_t>& taken) {
  const Json json = Json::parse(line, nullptr, false);
  if (json.is_discarded() || !json.is_object())
    throw Failure(THIMBLE_FORMAT, where + " is not a JSON object");
  auto text_of = [&](const char* key) -> const std::string& {
    if (!json.contains(key) || !json[key].is_string()) {
      throw Failure(THIMBLE_FORMAT, where + " has no text \"" + key + "\"");
    }
    return json[key].get_ref<const std::string&>();
  };
  if (!json.contains("tokens") || !json["tokens"].is_number_unsigned()) {
    throw Failure(THIMBLE_FORMAT, where + " has no number \"tokens\"");
  }
  Sample sample;
  sample.id = text_of("id");
  sample.task = text_of("task");
  sample.asked = text_of("question");
  std::tie(sample.expected, sample.exact) = expectation(flags, json, where);
  sample.length = json["tokens"].get<uint64_t>();
  const std::string &text = text_of("text"), &question = sample.asked,
                    needle = json.contains("needle") ? text_of("needle") : "";
  if (text.find(needle) == std::string::npos) {
    throw Failure(THIMBLE_FORMAT, where + ": \"needle\" does not occur in \"text\"");
  }
  const bool of_task = flags.tasks.empty() || std::count(flags.tasks.begin(), flags.tasks.end(), sample.task);
  if (!of_task || (flags.length && flags.length != sample.length)) return std::nullopt;
  uint64_t& count = taken[{sample.task, sample.length}];
  if (flags.limit && count == flags.limit) return std::nullopt;
  ++count;

  const std::string prompt = prompt_text(s, model, join_question(text, question));
  const Tokens tokens = tokenize(model, prompt, prompt_flags(s, model));
  sample.prompt = tokens.ids;
  const uint64_t asked_at = prompt.rfind(question);
  sample.question =
      std::lower_bound(tokens.offsets.begin(), tokens.offsets.end(), asked_at) - tokens.offsets.begin();
  const size_t begin = prompt.find(needle), end = begin + needle.size();
  for (size_t i = 0; !needle.empty() && i < tokens.ids.size(); ++i) {
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
    throw Failure(THIMBLE_FORMAT,
                  "'" + flags.file + "' has no sample that matches --tasks and --length; change them");
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
  double score = 0;   // 0 to 1
  Json subject;       // the sentence that `thimble serve` would find for the question; null: none
  bool gone = false;  // whether `thimble serve` would say that the subject is no longer held
  std::optional<double> retention;  // of the needle, if there is one
  double seconds = 0;
  uint64_t read = 0;  // tokens of the prompt that were read in chunks and not stepped
  uint64_t saturated = 0;
  bool correct() const { return score == 1; }
};

// Notes the subject of the question, as `thimble serve` finds it, and whether it is still held.
void note_subject(const Model& model, const Sample& sample, const std::vector<std::vector<int32_t>>& heads,
                  std::span<const float> stored, Outcome& outcome) {
  const std::vector<Sentence> stream =
      cut_sentences(sample.prompt.size(), [&](uint64_t i) { return token_bytes(model, sample.prompt[i]); });
  const auto subject = find_subject(stream, sample.asked, heads, stored);
  if (!subject) return;
  outcome.subject = {
      {"text", strip(stream[subject->sentence].text)}, {"held", subject->held}, {"stored", subject->stored}};
  outcome.gone = subject->gone;
}

bool same_text(const Sample& a, const Sample& b) {
  return a.question == b.question &&
         std::equal(a.prompt.begin(), a.prompt.begin() + a.question, b.prompt.begin());
}

// A session that is asked one sample after the other. If consecutive samples share a text, the session reads
// it once. All of these questions but the last are asked on clones, if the clones fit.
class Asked {
 public:
  // `selects`: questions are stepped token by token. `session` may be null.
  Asked(const Settings& s, const Model& model, Session session, bool selects)
      : settings_(s), model_(model), session_(std::move(session)), selects_(selects) {}

  explicit operator bool() const { return session_ != nullptr; }
  const Session& session() const { return session_; }

  // Returns nothing after Ctrl-C. `last`: no further sample of this text follows.
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
    if (copy) outcome->saturated -= stats(session_).saturated;  // a clone continues its original's count
    outcome->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return outcome;
  }

 private:
  // Returns null if the budget or the device has no room for a clone. The text is then read again for the
  // next question.
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
    if (!sample.needle.empty()) outcome.retention = needle_retention(heads, sample.needle);
    note_subject(model_, sample, heads, stored_shares(session), outcome);
    const Answer answer = generate(model_, session, settings_.predict, [](std::string_view) {});
    if (answer.finish == Finish::kInterrupted) return std::nullopt;
    outcome.answer = strip(answer.text);
    const bool same = outcome.answer == strip(sample.expected.front());
    outcome.score = sample.exact ? (same ? 1 : 0) : share_found(outcome.answer, sample.expected);
    const thimble_stats seen = stats(session);
    outcome.read = seen.prefill_tokens;
    outcome.saturated = seen.saturated;
    return outcome;
  }

  const Settings& settings_;
  const Model& model_;
  const Session session_;
  const bool selects_;
  bool reads_ = false;  // the session holds the text of the next sample
};

// A row of the table: the samples of one task and length, or all samples.
struct Row {
  Mean score, baseline, retention;
  uint64_t correct = 0, baseline_correct = 0;
  uint64_t saturated = 0;
  // Answers whose subject was reported as no longer held; of these, the wrong answers.
  uint64_t gone = 0, gone_wrong = 0;
  void add(const Outcome& outcome, const Outcome* dense) {
    score.add(outcome.score);
    correct += outcome.correct();
    if (outcome.retention) retention.add(*outcome.retention);
    saturated += outcome.saturated;
    gone += outcome.gone;
    gone_wrong += outcome.gone && !outcome.correct();
    if (!dense) return;
    baseline.add(dense->score);
    baseline_correct += dense->correct();
  }
};

Json row_json(const Row& row) {
  const double n = static_cast<double>(std::max<uint64_t>(row.score.count(), 1));
  Json json = {{"samples", row.score.count()},
               {"correct", row.correct},
               {"recall", static_cast<double>(row.correct) / n},
               {"score", row.score.mean()},
               {"standard_error", row.score.standard_error()},
               {"retention", row.retention.count() ? Json(row.retention.mean()) : Json()},
               {"gone", row.gone},
               {"gone_wrong", row.gone_wrong}};
  if (row.baseline.count()) {
    json["baseline_correct"] = row.baseline_correct;
    json["baseline_recall"] = static_cast<double>(row.baseline_correct) / n;
    json["baseline_score"] = row.baseline.mean();
    json["baseline_standard_error"] = row.baseline.standard_error();
  }
  return json;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * share);
  return text;
}

// "3/4", or "62.5 %" if answers may be partly right.
std::string cell(const Mean& score, uint64_t correct, bool in_part) {
  if (in_part) return percent(score.mean());
  return std::to_string(correct) + "/" + std::to_string(score.count());
}

void print_row(const std::string& task, const std::string& length, const Row& row, bool in_part) {
  if (row.score.count() == 0) return;
  std::printf("%-12s %8s %11s", visible(task).c_str(), length.c_str(),
              cell(row.score, row.correct, in_part).c_str());
  if (row.baseline.count()) std::printf(" %11s", cell(row.baseline, row.baseline_correct, in_part).c_str());
  std::printf(" %15s", row.retention.count() ? percent(row.retention.mean()).c_str() : "");
  if (length.empty()) std::printf("   standard error %s", percent(row.score.standard_error()).c_str());
  std::printf("\n");
}

// "right", "wrong", or "62.5 %".
std::string verdict(const Outcome& outcome) {
  return outcome.correct() ? "right" : outcome.score == 0 ? "wrong" : percent(outcome.score);
}

int eval(Settings& s, const EvalFlags& flags) {
  const Model model = open_model(s.model);
  need_tokenizer(model);
  note_continued_text(s, model);
  settle_seed(s);
  const std::vector<Sample> samples = read_samples(s, flags, model);
  uint64_t longest = 0, question = 0;
  for (const Sample& sample : samples) {
    longest = std::max<uint64_t>(longest, sample.prompt.size());
    question = std::max<uint64_t>(question, sample.prompt.size() - static_cast<uint64_t>(sample.question));
  }

  Progress progress;
  // If the step of a generated token differs from the step of a chunk, the question is read in steps, as an
  // answer is written. If each token evicts one, the question takes no room in the pool.
  bool selects = s.session.selection != THIMBLE_SELECTION_DENSE;
  Settings asking = s;  // the question takes room in the pool, as an answer does
  if (selects && s.predict >= 0) asking.predict += static_cast<int64_t>(question);
  const Retention retention = choose_retention(asking, model, longest);
  selects = selects || thimble_retention_traits(retention.policy) & THIMBLE_TRAIT_EVICTS_EACH;
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
  const bool in_part = std::any_of(samples.begin(), samples.end(),
                                   [](const Sample& sample) { return sample.expected.size() > 1; });
  bool interrupted = false;
  uint64_t tokens_left = 0, tokens_done = 0;  // tokens of prompts
  for (const Sample& sample : samples) tokens_left += sample.prompt.size();
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < samples.size(); ++i) {
    const Sample& sample = samples[i];
    const bool last = i + 1 == samples.size() || !same_text(sample, samples[i + 1]);
    const auto outcome = asked.ask(sample, last, progress);
    const auto baseline = outcome && asked_dense ? asked_dense.ask(sample, last, progress) : std::nullopt;
    interrupted = !outcome || (asked_dense && !baseline);
    if (interrupted) break;
    rows[{sample.task, sample.length}].add(*outcome, baseline ? &*baseline : nullptr);
    all.add(*outcome, baseline ? &*baseline : nullptr);
    tokens_done += sample.prompt.size();
    tokens_left -= sample.prompt.size();
    const double so_far = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::fprintf(stderr, "[%zu/%zu] %s: %s, %.1f s, %s left\n", i + 1, samples.size(),
                 visible(sample.id).c_str(), verdict(*outcome).c_str(), outcome->seconds,
                 format_duration(so_far * static_cast<double>(tokens_left) / static_cast<double>(tokens_done))
                     .c_str());
    if (!s.json) continue;
    Json line = {{"id", sample.id},
                 {"task", sample.task},
                 {"tokens", sample.length},
                 {"prompt_tokens", sample.prompt.size()},
                 {"read_tokens", outcome->read},
                 {"correct", outcome->correct()},
                 {"score", outcome->score},
                 {"answer", outcome->answer},
                 {"expected", sample.expected.size() == 1 ? Json(sample.expected[0]) : Json(sample.expected)},
                 {"retention", outcome->retention ? Json(*outcome->retention) : Json()},
                 {"subject", outcome->subject},
                 {"gone", outcome->gone},
                 {"seconds", outcome->seconds}};
    if (baseline) {
      line["baseline_correct"] = baseline->correct();
      line["baseline_score"] = baseline->score;
      line["baseline_answer"] = baseline->answer;
    }
    print_json(line);
  }

  const thimble_memory held = memory(asked.session());
  warn_of_saturated(all.saturated);
  if (s.json) {
    Json summary = row_json(all);
    summary["pool"] = held.pool;
    summary["pool_bytes"] = held.pool_bytes;
    summary["saturated"] = all.saturated;
    summary["budget_bytes"] = held.budget;
    summary["allocated_bytes"] = held.allocated;
    summary["interrupted"] = interrupted;
    summary["rows"] = Json::array();
    for (const auto& [key, row] : rows) {
      Json json = {{"task", key.first}, {"tokens", key.second}};
      json.update(row_json(row));
      summary["rows"].push_back(json);
    }
    print_json({{"summary", summary}});
  } else {
    std::printf("%-12s %8s %11s%s %15s\n", "task", "tokens", in_part ? "score" : "recall",
                flags.baseline ? "       dense" : "", "needle held");
    for (const auto& [key, row] : rows) print_row(key.first, std::to_string(key.second), row, in_part);
    print_row("all", "", all, in_part);
  }
  return interrupted ? kExitInterrupted : 0;
}

}  // namespace

Command add_eval(CLI::App& root) {
  static Settings settings;
  static EvalFlags flags;
  settings.predict = 64;
  CLI::App* app = root.add_subcommand(
      "eval", "Measure recall on questions about long texts, and how much of each needle is still held");
  app->add_option(
         "FILE", flags.file,
         "JSON lines: id, task, tokens, text, question; answer, or answers, which must all be found; needle "
         "(the sentence that holds the answer), if there is one")
      ->required();
  add_model_flag(*app, settings);
  app->add_flag("--baseline", flags.baseline,
                "Also run every sample with dense attention and without a budget");
  app->add_option("--limit", flags.limit,
                  "Run only the first N samples of every task and length (default: all)")
      ->type_name("N");
  app->add_option("--tasks", flags.tasks, "Run only these tasks: a,b")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAMES");
  app->add_option("--length", flags.length, "Run only samples with N tokens")->type_name("N");
  const auto score = [](const std::string& word) {
    flags.scoring = word == "exact" ? Scoring::kExact : Scoring::kContains;
  };
  app->add_option_function<std::string>(
         "--score", score,
         "exact: an answer is right if it is the expected one; contains: its score is the share of the "
         "expected texts that it contains (default: contains for lines with answers, else exact)")
      ->check(CLI::IsMember({"exact", "contains"}).description(""))
      ->type_name("exact|contains");
  add_predict_flag(*app, settings);
  add_chat_flags(*app, settings);
  add_json_flag(*app, settings);
  add_session_flags(*app, settings);
  app->footer(
      "--score exact ignores white space around an answer. --score contains also ignores case, white space\n"
      "and marks that group digits (1,234). With a selection or adore the question is read token by token,\n"
      "as an answer is generated. A text that consecutive lines share is read once if there is room for a\n"
      "clone. Decoding is greedy. --json prints one object for each sample, then one with \"summary\":\n"
      "scores and their standard errors from 0 to 1. \"gone\": the passage that a question asks about\n"
      "was evicted, as thimble serve would say.\n\n"
      "Examples:\n"
      "  thimble eval needles.jsonl -m model.gguf --heads heads.gguf --pool 1024 --baseline\n"
      "  thimble eval needles.jsonl -m model.gguf --retention window --pool 1024 --tasks passkey,kv --limit "
      "4 --json");
  return {app, [] { return eval(settings, flags); }};
}

}  // namespace app
