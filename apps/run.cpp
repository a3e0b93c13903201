// Implements `thimble run`, which reads a text and answers a question about it.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <optional>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/questions.h"
#include "apps/saved_text.h"
#include "apps/sizes.h"

namespace app {

namespace {

struct RunFlags {
  std::string file, prompt, tokens, questions, session;
  uint32_t logits = 0;
  bool raw = false, predict_given = false;
};

// Makes the prompt. A model without a tokenizer takes only --tokens.
Prompt make_prompt(const Settings& s, const RunFlags& flags, const Model& model, const LongText* text) {
  if (!flags.tokens.empty()) return Prompt(parse_ids(flags.tokens));
  // A document is plain text. A raw prompt without a document may contain control tokens.
  const bool parses = s.chat.parses_content || !text;
  const uint32_t how = !flags.raw ? prompt_flags(s, model) : parses ? kPromptFlags : THIMBLE_TOKENIZE_ADD_BOS;
  const auto write = [&](std::string_view content) {
    return flags.raw ? std::string(content) + flags.prompt
                     : prompt_text(s, model, join_question(content, flags.prompt));
  };
  return text ? Prompt(model, *text, write, how) : Prompt(token_ids(model, write(""), how));
}

// The `count` largest logits, largest first; among equal logits, the lower id comes first.
std::vector<std::pair<int32_t, float>> largest_logits(const Session& session, uint32_t count) {
  const std::vector<float> values = logits(session);
  std::vector<int32_t> ids(values.size());
  std::iota(ids.begin(), ids.end(), 0);
  const size_t n = std::min<size_t>(count, ids.size());
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n), ids.end(),
                    [&](int32_t a, int32_t b) {
                      return values[static_cast<size_t>(a)] != values[static_cast<size_t>(b)]
                                 ? values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)]
                                 : a < b;
                    });
  std::vector<std::pair<int32_t, float>> largest;
  for (size_t i = 0; i < n; ++i) largest.emplace_back(ids[i], values[static_cast<size_t>(ids[i])]);
  return largest;
}

double rate(uint64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// Reads the rest of the prompt. If `path` is not empty, then saves the session there with the tokens that
// were read or queued. Returns false after Ctrl-C.
bool read_and_save(const Session& session, const std::string& path, const Prompt& prompt, uint64_t taken_up,
                   Progress& progress) {
  const uint64_t before = stats(session).prefill_tokens;
  const bool done = read_prompt(session, prompt, taken_up, progress);
  if (!path.empty() && (taken_up < prompt.size() || stats(session).prefill_tokens != before))
    save_text(session, path, prompt);
  return done;
}

int run(Settings& s, const RunFlags& flags) {
  const Model model = open_model(s.model);
  settle_seed(s);
  if (flags.tokens.empty()) {
    need_tokenizer(model);
    if (!flags.raw) note_continued_text(s, model);
  }
  std::optional<LongText> text;
  if (!flags.file.empty()) text.emplace(model, flags.file, s.chat.parses_content);
  if (!flags.questions.empty()) return ask_questions(s, model, *text, flags.questions, flags.session);

  const Grammar grammar = make_grammar(s, model);
  const Prompt prompt = make_prompt(s, flags, model, text ? &*text : nullptr);
  if (prompt.size() == 0)
    throw UsageError("the prompt is empty; give a text with -f FILE, a question with -p TEXT, or both");
  // --logits only shows what may come next. Generating as well requires -n.
  const bool generates = (flags.logits == 0 && flags.tokens.empty()) || flags.predict_given;
  const bool writes_ids = !flags.tokens.empty();

  Progress progress;
  // A saved session is continued with other texts and answers, so its options depend on neither.
  const bool saves = !flags.session.empty();
  const uint64_t expected = saves ? 0 : prompt.size();
  const Retention retention = choose_retention(s, model, expected);
  thimble_session_options options = session_options(s, model, retention, expected);
  if (saves) options.max_new = 0;
  progress.attach(options);
  const thimble_memory planned = plan(model, options);
  const Session session = create_session(model, options);
  const bool restores = saves && std::filesystem::exists(native_path(flags.session));
  const uint64_t taken_up = restores ? take_up(session, flags.session, prompt, prompt.size()) : 0;
  check_room(session, options, prompt.size());
  call(thimble_session_set_sampler, session.get(), &s.sampler);
  const Interruptible interruptible(session);

  Answer answer;
  std::vector<std::pair<int32_t, float>> largest;
  if (!read_and_save(session, flags.session, prompt, taken_up, progress)) {
    answer.finish = Finish::kInterrupted;
  } else {
    if (flags.logits) largest = largest_logits(session, flags.logits);
    if (!s.json) {
      for (const auto& [id, value] : largest) std::printf("%d %.6f\n", id, static_cast<double>(value));
    }
    if (generates) {
      const bool formatted = !flags.raw && !writes_ids;
      const std::string shape = formatted ? prompt_text(s, model, "x") : "";
      answer = generate(model, session, s.predict,
                        [&](std::string_view piece) {
                          if (!s.json && !writes_ids) write_answer(piece);
                        },
                        {grammar.get(), opened_thought(shape)});
    }
  }

  const thimble_stats seen = stats(session);
  warn_of_saturated(seen.saturated);
  if (s.json) {
    const thimble_memory held = memory(session);
    Json out = {{"text", answer.text},
                {"prompt_tokens", prompt.size()},
                {"generated_tokens", answer.tokens.size()},
                {"prefill_seconds", seen.prefill_seconds},
                {"decode_seconds", seen.decode_seconds},
                {"prefill_tps", rate(seen.prefill_tokens, seen.prefill_seconds)},
                {"decode_tps", rate(answer.tokens.size(), seen.decode_seconds)},
                {"memory",
                 {{"budget", held.budget},
                  {"planned", memory_json(planned)},
                  {"held", memory_json(held)},
                  {"allocated", held.allocated},
                  {"pool", held.pool},
                  {"capacity", held.capacity}}},
                {"entries",
                 {{"seen", seen.position - seen.waiting},
                  {"kept", seen.entries},
                  {"evicted", seen.evicted},
                  {"selected", seen.selected},
                  {"stored", seen.stored},
                  {"recalled", seen.recalled}}},
                {"saturated", seen.saturated},
                {"finish_reason", finish_name(answer.finish)},
                {"seed", s.seed}};
    if (saves) out["restored_tokens"] = taken_up;
    if (flags.logits) {
      out["logits"] = Json::array();
      for (const auto& [id, value] : largest) out["logits"].push_back({{"id", id}, {"logit", value}});
    }
    if (writes_ids) out["tokens"] = answer.tokens;
    print_json(out);
  } else {
    for (size_t i = 0; writes_ids && i < answer.tokens.size(); ++i)
      std::printf("%s%d", i ? " " : "", answer.tokens[i]);
    if (generates) std::printf("\n");
  }
  if (answer.finish == Finish::kContext) {
    std::fprintf(stderr,
                 "thimble: the pool is full, so the answer stops here; raise --pool, --mem-budget or -c, "
                 "or choose a --retention that evicts\n");
  }
  return answer.finish == Finish::kInterrupted ? kExitInterrupted : 0;
}

}  // namespace

Command add_run(CLI::App& root) {
  static Settings settings;
  static RunFlags flags;
  CLI::App* app = root.add_subcommand("run", "Read a text and answer a question about it");
  add_model_flag(*app, settings);
  auto* file =
      app->add_option("-f,--file", flags.file, "The text to read, - for standard input")->type_name("FILE");
  auto* prompt = app->add_option("-p,--prompt", flags.prompt, "The question, which is put after the text")
                     ->type_name("TEXT");
  auto* questions =
      app->add_option("--questions", flags.questions,
                      "Read the text once, then ask each question of this JSON file: an array of "
                      "{\"question\", \"answer\", \"depth\"}; \"answer\" and \"depth\" are optional")
          ->type_name("FILE")
          ->needs(file)
          ->excludes(prompt);
  auto* raw =
      app->add_flag("--raw", flags.raw,
                    "Continue text and prompt as they are, without a chat format. Control tokens are parsed "
                    "without -f or with --parse-special")
          ->excludes(questions);
  auto* ids = app->add_option("--tokens", flags.tokens, "Read these token ids instead of a text: \"1,2,3\"")
                  ->type_name("IDS")
                  ->excludes(file)
                  ->excludes(prompt)
                  ->excludes(raw);
  app->add_option("--logits", flags.logits,
                  "Print the N largest logits of the next token; generates only with -n")
      ->type_name("N")
      ->excludes(questions);
  app->add_option(
         "--session", flags.session,
         "Save the session to this file before the answer, and at Ctrl-C. If the file exists, the run "
         "continues from it. The text must begin as before. Its end, such as a question, may differ "
         "within the last --local tokens. The flags of memory, retention and selection must stay the "
         "same. The size of the pool does not depend on the text. With --questions, every question continues "
         "from the file instead of a clone, so only one session needs memory")
      ->type_name("FILE");
  add_predict_flag(*app, settings);
  add_chat_flags(*app, settings);
  add_grammar_flags(*app, settings);
  for (const char* flag : {"--json-schema", "--grammar"}) app->get_option(flag)->excludes(questions);
  add_json_flag(*app, settings);
  add_session_flags(*app, settings);
  add_draft_flags(*app, settings);
  add_sampling_flags(*app, settings);
  app->footer(
      "The answer is written to standard output while it is generated. Progress is written to standard\n"
      "error if that is a terminal. Ctrl-C stops the run and keeps the answer so far (exit code 130). With\n"
      "--session the same command continues from there. A model whose file has no chat template\n"
      "continues the text, as with --raw.\n\n"
      "Examples:\n"
      "  thimble run -m model.gguf --heads heads.gguf --mem-budget 64MiB -f book.txt -p \"Who sold the "
      "house?\"\n"
      "  thimble run -m model.gguf --mem-budget 64MiB --session book.session -f book.txt -p \"And who bought "
      "it?\"\n"
      "  git log | thimble run -m model.gguf --retention window --pool 4096 -f - -p \"What changed last "
      "week?\" --json");
  return {app, [app, file, prompt, ids, raw] {
            flags.predict_given = app->count("--predict") > 0;
            if (!file->count() && !prompt->count() && !ids->count()) {
              throw UsageError(
                  "there is nothing to read; give a text with -f FILE, a question with -p TEXT, or both");
            }
            if (raw->count() && (app->count("--system-prompt") || app->count("--chat-template") ||
                                 app->count("--chat-vars"))) {
              throw UsageError(
                  "--raw uses no chat format; leave out --system-prompt, --chat-template and --chat-vars, or "
                  "--raw");
            }
            return run(settings, flags);
          }};
}

}  // namespace app
