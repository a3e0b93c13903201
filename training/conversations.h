// Reads prompts and answers from JSON lines files. Each line is an object in one of several published
// formats.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble {

struct AnsweredPrompt {
  std::string prompt;
  // Replies to the prompt, each independent of the others. A reply is an answer, then alternating user turns
  // and answers.
  std::vector<std::vector<std::string>> replies;
};

// Whether a file contains JSON lines: its first line begins with '{'.
bool is_json_lines(std::string_view text);

// The non-empty lines of a text, with their line numbers, which start at 1.
struct NumberedLine {
  std::string_view text;
  uint32_t number;
};
std::vector<NumberedLine> lines_of(std::string_view text);

// Reads one line in any of these formats:
// {"prompt", "answer" or "answers"},
// {"instruction", "input", "output"} (LongAlpaca),
// {"conversations": [{"from", "value"}]} (ShareGPT),
// {"messages": [{"role", "content"}]} (common chat logs). `content` may be an array of parts; only parts with
// "text" count.
// Turns before the first human turn are dropped, and other members are ignored. A conversation without a
// prompt or an answer gives an empty result. Any other line gives Format, with `where` in the message.
Result<AnsweredPrompt> read_conversation(std::string_view line, const std::string& where);

}  // namespace thimble
