// Flags that subcommands share, and what they mean for a session.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "apps/library.h"

namespace app {

// A subcommand: its flags, and what it does with them. `run` gives the exit code or throws.
struct Command {
  CLI::App* app;
  std::function<int()> run;
};

Command add_run(CLI::App& root);
Command add_chat(CLI::App& root);
Command add_plan(CLI::App& root);
Command add_eval(CLI::App& root);
Command add_bench(CLI::App& root);
Command add_inspect(CLI::App& root);
Command add_heads(CLI::App& root);
Command add_heads_train(CLI::App& heads);
Command add_heads_budgets(CLI::App& heads);
Command add_tokenize(CLI::App& root);
Command add_devices(CLI::App& root);
Command add_serve(CLI::App& root);

// What the user asked for.
struct Settings {
  Settings();
  std::string model, heads, device = "auto", system;
  ChatStyle chat;
  thimble_session_options session;  // complete but for heads, device, max_new and what depends on the text;
                                    // its retention is what was asked for, THIMBLE_RETENTION_DEFAULT: auto
  thimble_sampler_options sampler;
  int64_t predict = 256;  // -1: until the end of generation
  int64_t seed = 0;
  bool json = false;
};

void add_model_flag(CLI::App& app, Settings& settings);
void add_json_flag(CLI::App& app, Settings& settings);
// Memory, retention, selection: what /policy of `chat` changes too.
void add_policy_flags(CLI::App& app, Settings& settings);
// Changes settings by such flags, {"--pool", "512"}. Throws a CLI::ParseError or a UsageError.
void change_policies(Settings& settings, std::vector<std::string> words);
// add_policy_flags, and what one process decides once: device, threads, seed.
void add_session_flags(CLI::App& app, Settings& settings);
void add_predict_flag(CLI::App& app, Settings& settings);
void add_sampling_flags(CLI::App& app, Settings& settings);
void add_chat_flags(CLI::App& app, Settings& settings);

// The retention of a session, and the heads that it takes.
struct Retention {
  int32_t policy = THIMBLE_RETENTION_NONE;
  Heads heads;
};
// Whether a retention scores by heads, and by these: `heads` is what they serve (thimble_heads_retention).
bool needs_heads(int32_t retention);
bool can_score(int32_t heads, int32_t retention);
// What --retention says, or auto chooses, which is then told on standard error. `tokens` is the longest
// prompt, 0 where it is not known.
Retention choose_retention(const Settings& settings, const Model& model, uint64_t tokens);
// Where auto looks for a model's heads first: MODEL.heads.gguf beside MODEL.gguf.
std::string heads_path(const std::string& model_path);
// The options of a session for these settings, which lend their strings.
thimble_session_options session_options(const Settings& settings, const Model& model,
                                        const Retention& retention, uint64_t tokens);
// What a clone holds besides the session that it came from: all but weights and the device's own.
uint64_t clone_bytes(const thimble_memory& memory);
// Without --pool the library takes the largest pool that fits the budget, which leaves no room for clones:
// finds the largest that does.
void leave_room_for_clones(const Model& model, thimble_session_options& options, uint32_t clones);
// The token that ends an answer: the last ending one of a whole exchange, in whatever format this is.
int32_t end_of_turn(const Model& model, const ChatStyle& style);
// -1 becomes a random seed, which --json then shows.
void settle_seed(Settings& settings);

// Whether text is continued as it is: the model's file has no chat template, and no flag names a format.
bool continues_text(const Settings& settings, const Model& model);
// Says so on standard error, in one line.
void note_continued_text(const Settings& settings, const Model& model);
// One user message (and the system prompt) up to where the answer begins, or the text to continue; its flags
// are those below.
std::string prompt_text(const Settings& settings, const Model& model, std::string_view content);
// Text and question as one message: "text\n\nquestion", or the one that there is.
std::string join_question(std::string_view text, std::string_view question);

inline constexpr uint32_t kPromptFlags = THIMBLE_TOKENIZE_ADD_BOS | THIMBLE_TOKENIZE_PARSE_SPECIAL;
// How what prompt_text gives becomes tokens: text that is continued holds no control tokens.
uint32_t prompt_flags(const Settings& settings, const Model& model);

// Help as two columns, 100 wide.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
};

}  // namespace app
