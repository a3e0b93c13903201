// The flags that subcommands share, and the session options that follow from them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "apps/library.h"

namespace app {

// A subcommand and its flags. `run` returns the exit code or throws.
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

// The values of the flags.
struct Settings {
  Settings();
  std::string model, heads, device = "auto", system;
  ChatStyle chat;
  // Complete except for heads, device, max_new and the values that depend on the text. Its retention is the
  // one that the user asked for; THIMBLE_RETENTION_DEFAULT stands for "auto".
  thimble_session_options session;
  bool kv_given = false;  // whether the formats of keys and values in `session` are the user's
  std::shared_ptr<thimble_model> draft_model;  // of --draft; `session` points to it
  thimble_sampler_options sampler;
  int64_t predict = 256;  // -1: until the model ends the answer
  int64_t seed = 0;
  bool json = false;
  std::string json_schema, grammar;  // files
};

// The word of --kv for one of THIMBLE_KV_*.
const char* kv_format_name(int32_t format);
void add_model_flag(CLI::App& app, Settings& settings);
void add_json_flag(CLI::App& app, Settings& settings);
// Flags for memory, retention and selection, which /policy of `chat` can also change.
void add_policy_flags(CLI::App& app, Settings& settings);
// Changes settings by words such as {"--pool", "512"}. Throws a CLI::ParseError or a UsageError.
void change_policies(Settings& settings, std::vector<std::string> words);
// Adds the flags of add_policy_flags, and the flags that are fixed for one process: device, threads, seed.
void add_session_flags(CLI::App& app, Settings& settings);
void add_predict_flag(CLI::App& app, Settings& settings);
void add_draft_flags(CLI::App& app, Settings& settings);
void add_sampling_flags(CLI::App& app, Settings& settings);
void add_chat_flags(CLI::App& app, Settings& settings);
void add_grammar_flags(CLI::App& app, Settings& settings);
// The grammar that the flags name, or null.
Grammar make_grammar(const Settings& settings, const Model& model);

// The retention of a session, the heads that it uses, and the format of keys and values if it chose one.
struct Retention {
  int32_t policy = THIMBLE_RETENTION_NONE;
  Heads heads;
  int32_t kv_format = THIMBLE_KV_F16;
};
// Whether a retention needs heads. The second function says whether `heads` serve it
// (thimble_heads_retention).
bool needs_heads(int32_t retention);
bool can_score(int32_t heads, int32_t retention);
// Returns the retention of --retention. For "auto", chooses one and reports it on standard error. If a budget
// has no room for the whole text in f16, and neither pool nor formats are the user's, "auto" also chooses
// q8_0: with twice the entries a model answers more (docs/evaluation.md). `tokens` is the length of the
// longest prompt, or 0 if it is not known. The budget is also that of so many clones.
Retention choose_retention(const Settings& settings, const Model& model, uint64_t tokens,
                           uint32_t clones = 0);
// The file in which "auto" looks for a model's heads first: MODEL.heads.gguf next to MODEL.gguf.
std::string heads_path(const std::string& model_path);
// The session options for these settings. They point to strings of `settings`.
thimble_session_options session_options(const Settings& settings, const Model& model,
                                        const Retention& retention, uint64_t tokens);
// The bytes of a clone that it does not share with its original: everything but the weights and the device's
// own memory.
uint64_t clone_bytes(const thimble_memory& memory);
// Without --pool, the library takes the largest pool that fits the budget, which leaves no room for clones.
// This finds the largest pool with which the clones fit too.
void leave_room_for_clones(const Model& model, thimble_session_options& options, uint32_t clones);
// The token that ends an answer. It is the last end token of a rendered exchange of messages, so this works
// for every chat format.
int32_t end_of_turn(const Model& model, const ChatStyle& style);
// Replaces the seed -1 by a random one, which --json then prints.
void settle_seed(Settings& settings);

// Whether the model continues a text without a chat format: the model's file has no chat template, and no
// flag names a format.
bool continues_text(const Settings& settings, const Model& model);
// Reports on standard error, in one line, that the text is continued without a chat format.
void note_continued_text(const Settings& settings, const Model& model);
// The system prompt and one user message, up to where the answer begins, or the text to continue.
// prompt_flags() returns the tokenizer flags for it.
std::string prompt_text(const Settings& settings, const Model& model, std::string_view content);
// Joins a text and a question to one message, with an empty line between them. If one is empty, returns the
// other.
std::string join_question(std::string_view text, std::string_view question);

inline constexpr uint32_t kPromptFlags = THIMBLE_TOKENIZE_ADD_BOS | THIMBLE_TOKENIZE_PARSE_SPECIAL;
// The tokenizer flags for the result of prompt_text(). Text that is continued contains no control tokens.
uint32_t prompt_flags(const Settings& settings, const Model& model);

// Formats help in two columns, 100 characters wide.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool positional) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
};

}  // namespace app
