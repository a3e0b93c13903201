// Reading a prompt and generating its answer, with Ctrl-C; and sessions as JSON.
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
  std::string text;             // without the token that ended it
  std::vector<int32_t> tokens;  // with it
  Finish finish = Finish::kLength;
};

// Takes text as it is generated.
using Sink = std::function<void(std::string_view)>;

// Reads what was fed and `tokens`, all of it. False where Ctrl-C stopped it; the next call goes on.
bool read_prompt(const Session& session, std::span<const int32_t> tokens, Progress& progress);
// The same with the ids of a prompt from `first` on, which the session does not hold yet.
bool read_prompt(const Session& session, const Prompt& prompt, uint64_t first, Progress& progress);
// Feeds the session with the ids of a prompt that are numbered `first` to `last` - 1. False after Ctrl-C.
bool feed_prompt(const Session& session, const Prompt& prompt, uint64_t first, uint64_t last,
                 Progress& progress);

// A Failure where a prompt of so many tokens does not fit. It is fed in pieces, so the session itself would
// say so after a part was read in vain. `options` are the session's.
void check_room(const Session& session, const thimble_session_options& options, uint64_t tokens);

// Generates at most `limit` tokens (-1: until the model ends).
Answer generate(const Model& model, const Session& session, int64_t limit, const Sink& sink);

// Says on standard error that numbers of keys and values were too large for the pool, where any were.
void warn_of_saturated(uint64_t numbers);

// Bytes by kind.
Json memory_json(const thimble_memory& memory);
// One line and valid UTF-8, whatever bytes the strings hold.
void print_json(const Json& json);
// The same as lines for people: kind, bytes, size.
std::string memory_table(const thimble_memory& memory);

}  // namespace app
