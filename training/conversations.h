// Prompts and answers to learn from: files of JSON lines, each an object in one of the shapes in which they
// are published.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble {

struct AnsweredPrompt {
  std::string prompt;
  // What may follow the prompt, each by itself: an answer, then in turn what is said next and the answer to
  // that.
  std::vector<std::vector<std::string>> replies;
};

// Whether a file is of JSON lines: its first line begins with '{'.
bool is_json_lines(std::string_view text);

// The lines that are not empty, and their numbers, from 1.
struct NumberedLine {
  std::string_view text;
  uint32_t number;
};
std::vector<NumberedLine> lines_of(std::string_view text);

// {"prompt", "answer" or "answers"}, {"instruction", "input", "output"} (LongAlpaca), or {"conversations":
// [{"from", "value"}]} (ShareGPT), or {"messages": [{"role", "content"}]} (chats as programs keep them, where
// `content` may be an array of parts, of which those with "text" count). Of turns, what comes before the
// first human one is left out. Other members are passed over. A conversation without prompt or answer is
// empty; Format, naming `where`, for what is none of these.
Result<AnsweredPrompt> read_conversation(std::string_view line, const std::string& where);

}  // namespace thimble
