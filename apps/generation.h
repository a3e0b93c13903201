// Functions that read a prompt and generate its answer, both of which Ctrl-C interrupts; and functions that
// write a session's numbers as JSON.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/library.h"
#include "apps/prompt.h"
#include "apps/terminal.h"

namespace app {

using Json = nlohmann::ordered_json;

enum class Finish { kStop, kLength, kInterrupted, kContext };
const char* finish_name(Finish finish);

struct Answer {
  std::string text;             // without the token that ended the answer
  std::vector<int32_t> tokens;  // with the token that ended the answer
  Finish finish = Finish::kLength;
};

// Receives text while it is generated.
using Sink = std::function<void(std::string_view)>;

// Reads all tokens that were fed, and then `tokens`. Returns false if Ctrl-C stopped it; the next call
// continues.
bool read_prompt(const Session& session, std::span<const int32_t> tokens, Progress& progress);
// The same with the ids of a prompt from index `first` on, which the session has not been given yet.
bool read_prompt(const Session& session, const Prompt& prompt, uint64_t first, Progress& progress);
// Feeds ids `first` to `last` - 1 of a prompt to the session. Returns false after Ctrl-C.
bool feed_prompt(const Session& session, const Prompt& prompt, uint64_t first, uint64_t last,
                 Progress& progress);

// Throws a Failure if a prompt of `tokens` tokens does not fit. Prompts are fed in pieces, so the session
// itself would report this only after it has read a part. `options` are the options of the session.
void check_room(const Session& session, const thimble_session_options& options, uint64_t tokens);

// A grammar that an answer must follow. Null: none.
struct AnswerGrammar {
  const thimble_grammar* grammar = nullptr;
  std::string_view thought_end;  // the mark that ends a thought which the prompt has opened; empty: none
};
// The mark that ends the thought which a prompt opens at its end, or an empty text.
std::string_view opened_thought(std::string_view prompt);

// Generates at most `limit` tokens (-1: until the model ends). A model that thinks first does so freely; the
// grammar begins after the thought. It stays set on the session.
Answer generate(const Model& model, const Session& session, int64_t limit, const Sink& sink,
                const AnswerGrammar& grammar = {});

// Warns on standard error if numbers of keys and values were too large for the data type of the pool.
void warn_of_saturated(uint64_t numbers);

// The bytes of each kind of memory.
Json memory_json(const thimble_memory& memory);
// Prints one line of valid UTF-8, even if strings in `json` are not valid UTF-8.
void print_json(const Json& json);
// The bytes of each kind of memory as lines of text: kind, bytes, size.
std::string memory_table(const thimble_memory& memory);

}  // namespace app
