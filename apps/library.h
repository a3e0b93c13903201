// The C library for app code: handles that free themselves, errors as exceptions, two-call functions as
// containers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "thimble/thimble.h"

namespace app {

inline constexpr int kExitFailure = 1, kExitUsage = 2, kExitInterrupted = 130;

// One sentence for the user and the code that names its kind. main() prints it and exits with kExitFailure.
struct Failure : std::runtime_error {
  Failure(thimble_status status_, const std::string& message, uint64_t bytes_missing_ = 0)
      : std::runtime_error(message), status(status_), bytes_missing(bytes_missing_) {}
  thimble_status status;
  uint64_t bytes_missing;  // THIMBLE_BUDGET: what the budget lacks
};

// A command line that makes no sense: as Failure, but exits with kExitUsage and points to --help.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void raise(const thimble_error& error);

// Calls a library function with `arguments` and an error struct; throws a Failure with what it reports.
template <typename Function, typename... Arguments>
void call(Function function, Arguments... arguments) {
  thimble_error error = {};
  error.struct_size = sizeof error;
  if (function(arguments..., &error) != THIMBLE_OK) raise(error);
}

// The same for functions that a user's Ctrl-C may stop: false then.
template <typename Function, typename... Arguments>
bool call_unless_interrupted(Function function, Arguments... arguments) {
  thimble_error error = {};
  error.struct_size = sizeof error;
  const thimble_status status = function(arguments..., &error);
  if (status != THIMBLE_OK && status != THIMBLE_INTERRUPTED) raise(error);
  return status == THIMBLE_OK;
}

template <auto free_function>
struct Free {
  template <typename T>
  void operator()(T* handle) const {
    free_function(handle);
  }
};
using Model = std::unique_ptr<thimble_model, Free<thimble_model_free>>;
using Heads = std::unique_ptr<thimble_heads, Free<thimble_heads_free>>;
using Session = std::unique_ptr<thimble_session, Free<thimble_session_free>>;

// Warnings about the file go to standard error, or to `warnings`, which outlives the model.
Model open_model(const std::string& path, std::vector<std::string>* warnings = nullptr);
Heads open_heads(const Model& model, const std::string& path);
Session create_session(const Model& model, const thimble_session_options& options);
Session clone(const Session& session);
// `note` travels with the file. What Ctrl-C stopped is finished first.
void save_session(const Session& session, const std::string& path, const std::string& note);
void restore_session(const Session& session, const std::string& path);
std::string session_note(const std::string& path);
// What thimble_session_file_info says.
std::string session_info(const std::string& path);

thimble_model_info model_info(const Model& model);
// What thimble_heads_info says; `model` may be null.
std::string heads_info(const std::string& path, const Model& model);
// What thimble_training_report says.
std::string training_report(const thimble_training* training);
// Key and value of the file's metadata; lists are shortened.
std::pair<std::string, std::string> model_metadata(const Model& model, uint64_t index);
// Whether the file brings a chat template, one that can be run or not: base models have none.
bool has_chat_template(const Model& model);
// Why the model cannot turn text into tokens, or "" where it can.
std::string tokenizer_problem(const Model& model);
// For commands that read text: a Failure that says why there is no tokenizer, and the way out.
void need_tokenizer(const Model& model);
thimble_memory plan(const Model& model, const thimble_session_options& options);
// Entries that each KV head keeps, by layers; 0 where the layer has a window.
std::vector<uint32_t> plan_heads(const Model& model, const thimble_session_options& options);
thimble_memory memory(const Session& session);
thimble_stats stats(const Session& session);
thimble_device_rates measure_device(const std::string& device, uint32_t threads);

struct Tokens {
  std::vector<int32_t> ids;
  std::vector<uint64_t> offsets;  // where each starts in the text, in bytes
};
Tokens tokenize(const Model& model, std::string_view text, uint32_t flags);
std::vector<int32_t> token_ids(const Model& model, std::string_view text, uint32_t flags);
std::string detokenize(const Model& model, const std::vector<int32_t>& ids, uint32_t flags);
// How conversations are written, as the flags say; empty: as the model's file says.
struct ChatStyle {
  std::string format;           // a known format's name
  std::string source;           // a template in Jinja
  std::string variables;        // JSON
  bool parses_content = false;  // what spells a control token in a message is one, else it is text
};
std::string chat_text(const Model& model, const ChatStyle& style,
                      const std::vector<thimble_message>& messages, uint32_t flags);
// The same from an array of messages as JSON, up to where the answer begins; the first `held` of them, the
// last of these an answer, the session holds already.
std::string chat_text(const Model& model, const ChatStyle& style, const std::string& messages_json,
                      uint64_t held);
thimble_message message(const char* role, std::string_view content);  // lends `content`

// A token's bytes, maybe part of a code point; "" where it has none.
std::string token_bytes(const Model& model, int32_t token);
// The text that a token of this stream completes.
std::string token_text(const Session& session, int32_t token);
std::vector<float> logits(const Session& session);
std::vector<int32_t> kept(const Session& session, uint32_t layer, uint32_t kv_head);
// Of all (layer, KV head) pairs, by layer: the positions that each holds.
std::vector<std::vector<int32_t>> kept_by_head(const Model& model, const Session& session);
// By position: the share of the (layer, KV head) pairs that hold it, and what the last token paid to it.
std::vector<float> kept_shares(const Session& session);
std::vector<float> attended(const Session& session);

// Opens a file to be read; the caller closes it.
FILE* open_file(const std::string& path);
// All bytes of a file, or of standard input for "-".
std::string read_file(const std::string& path);
// Paths are UTF-8 here and in the library; streams and the file system take what the system has.
std::filesystem::path native_path(const std::string& path);
std::string utf8_path(const std::filesystem::path& path);

// Without the white space around it.
std::string_view strip(std::string_view text);
// "1, 2 3" as ids.
std::vector<int32_t> parse_ids(const std::string& text);

}  // namespace app
