// Wraps the C library for app code: handles free themselves, errors become exceptions, and two-call functions
// return containers.
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

// One sentence for the user, and the code that names the kind of error. main() prints it and exits with
// kExitFailure.
struct Failure : std::runtime_error {
  Failure(thimble_status status_, const std::string& message, uint64_t bytes_missing_ = 0)
      : std::runtime_error(message), status(status_), bytes_missing(bytes_missing_) {}
  thimble_status status;
  uint64_t bytes_missing;  // for THIMBLE_BUDGET: the bytes that the budget lacks
};

// An invalid command line. main() handles it as it does a Failure, but exits with kExitUsage and points to
// --help.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void raise(const thimble_error& error);

// Calls a library function with `arguments` and an error struct. Throws a Failure with the reported error.
template <typename Function, typename... Arguments>
void call(Function function, Arguments... arguments) {
  thimble_error error = {};
  error.struct_size = sizeof error;
  if (function(arguments..., &error) != THIMBLE_OK) raise(error);
}

// The same for functions that Ctrl-C may stop. Returns false if it did.
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
using Grammar = std::unique_ptr<thimble_grammar, Free<thimble_grammar_free>>;
using Session = std::unique_ptr<thimble_session, Free<thimble_session_free>>;

// Writes warnings about the file to standard error, or appends them to `warnings`, which must outlive the
// model.
Model open_model(const std::string& path, std::vector<std::string>* warnings = nullptr);
Heads open_heads(const Model& model, const std::string& path);
Session create_session(const Model& model, const thimble_session_options& options);
Session clone(const Session& session);
// Stores `note` in the file. Finishes a call that Ctrl-C stopped before it saves.
void save_session(const Session& session, const std::string& path, const std::string& note);
void restore_session(const Session& session, const std::string& path);
std::string session_note(const std::string& path);
// Returns the text of thimble_session_file_info.
std::string session_info(const std::string& path);

thimble_model_info model_info(const Model& model);
// Returns the text of thimble_heads_info; `model` may be null.
std::string heads_info(const std::string& path, const Model& model);
// Returns the text of thimble_training_report.
std::string training_report(const thimble_training* training);
// A key of the file's metadata and its value, in which lists are shortened.
std::pair<std::string, std::string> model_metadata(const Model& model, uint64_t index);
// Whether the file has a chat template, even one that this program cannot run. Base models have none.
bool has_chat_template(const Model& model);
// Why the model cannot turn text into tokens, or "" if it can.
std::string tokenizer_problem(const Model& model);
// For commands that read text: throws a Failure that says why there is no tokenizer, and what to do instead.
void need_tokenizer(const Model& model);
thimble_memory plan(const Model& model, const thimble_session_options& options);
// The number of KV heads of each layer.
std::vector<uint32_t> kv_heads(const Model& model);
// The number of entries that each KV head keeps, layer by layer; 0 for layers with a window.
std::vector<uint32_t> plan_heads(const Model& model, const thimble_session_options& options);
thimble_memory memory(const Session& session);
// The session's options with every default decided.
thimble_session_options decided_options(const Session& session);
thimble_stats stats(const Session& session);
thimble_device_rates measure_device(const std::string& device, uint32_t threads);

struct Tokens {
  std::vector<int32_t> ids;
  std::vector<uint64_t> offsets;  // where each token starts in the text
};
Tokens tokenize(const Model& model, std::string_view text, uint32_t flags);
std::vector<int32_t> token_ids(const Model& model, std::string_view text, uint32_t flags);
std::string detokenize(const Model& model, const std::vector<int32_t>& ids, uint32_t flags);
// The flags that say how conversations are written. Empty fields mean: as the model's file says.
struct ChatStyle {
  std::string format;           // the name of a known format
  std::string source;           // a template in Jinja
  std::string variables;        // JSON
  bool parses_content = false;  // text in a message that spells a control token becomes that token
};
std::string chat_text(const Model& model, const ChatStyle& style,
                      const std::vector<thimble_message>& messages, uint32_t flags);
// The same for an array of messages as JSON, up to the place where the answer begins. The session already
// holds the first `held` messages, the last of which is an answer.
std::string chat_text(const Model& model, const ChatStyle& style, const std::string& messages_json,
                      uint64_t held);
thimble_message message(const char* role, std::string_view content);  // the result points into `content`

// The bytes of a token, which may be part of a code point; "" if it has no text.
std::string token_bytes(const Model& model, int32_t token);
// The text that a token of this stream completes.
std::string token_text(const Session& session, int32_t token);
std::vector<float> logits(const Session& session);
std::vector<int32_t> kept(const Session& session, uint32_t layer, uint32_t kv_head);
// For each (layer, KV head) pair, in the order of layers: the positions that it holds.
std::vector<std::vector<int32_t>> kept_by_head(const Model& model, const Session& session);
// For each position: the share of the (layer, KV head) pairs that hold it. The second function returns the
// attention that the last token paid to each position.
std::vector<float> kept_shares(const Session& session);
// For each position: the share of the same pairs that have it in the store of evicted entries and not in the
// pool.
std::vector<float> stored_shares(const Session& session);
std::vector<float> attended(const Session& session);

// Opens a file to be read; the caller closes it.
FILE* open_file(const std::string& path);
// Reads all bytes of a file, or of standard input for "-".
std::string read_file(const std::string& path);
// Paths are UTF-8 here and in the library. This converts a path to the encoding that streams and the file
// system expect.
std::filesystem::path native_path(const std::string& path);
std::string utf8_path(const std::filesystem::path& path);

// Removes the white space around a text.
std::string_view strip(std::string_view text);
// Parses ids from a list such as "1, 2 3".
std::vector<int32_t> parse_ids(const std::string& text);

}  // namespace app
