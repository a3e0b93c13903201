// Known chat formats: recognises which one a model's template asks for, and formats messages in it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace thimble {

enum class ChatFormat { kChatml, kLlama3, kLlama2, kPhi3, kMistral, kZephyr, kThimble };

struct ChatMessage {
  std::string_view role;  // "system", "user", "assistant"
  std::string_view content;
};

// The names that --chat-template takes: "chatml", "llama3", ...
const char* chat_format_name(ChatFormat);
std::vector<const char*> chat_format_names();
Result<ChatFormat> find_chat_format(std::string_view name);

// Recognises a Jinja template by the marks it contains. If none matches: Unsupported, with the names of the
// formats.
Result<ChatFormat> recognise_chat_format(std::string_view chat_template);

// The text of these messages, to be tokenized with special tokens parsed. With `add_assistant` it ends where
// the answer begins. `first`: the messages begin the conversation (the tokenizer adds BOS); otherwise they
// follow an answer whose end-of-turn token is already in the context.
Result<std::string> format_chat(ChatFormat, const std::vector<ChatMessage>&, bool add_assistant, bool first);

}  // namespace thimble
