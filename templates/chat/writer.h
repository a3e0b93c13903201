// How the conversations of a model are written: by its chat template, which is run, or in a known format.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "templates/chat/chat.h"
#include "templates/jinja/template.h"

namespace thimble {

class Tokenizer;

// Everything here is lent.
struct Conversation {
  std::vector<ChatMessage> messages;
  std::string_view messages_json;   // an array of objects that stands for `messages`, where it is not empty
  std::string_view variables_json;  // an object of further variables of a template, or empty
  bool parses_content = false;      // what spells a control token in a message is one, else it is text
  bool add_assistant = false;       // ends where the answer begins
  uint64_t held = 0;                // that many messages, the last an answer, are in the context already
  bool continues = false;           // messages that are not given are, the last an answer
  int64_t now = 0;                  // of strftime_now: seconds since 1970 of the clock on the wall
};

class ChatWriter {
 public:
  // For a model whose file has this template, which may be empty: one that parses is run; else a known format
  // that is recognised in it serves; else write() is refused.
  static ChatWriter choose(std::string_view source);
  // Runs this template; Unsupported, with line and construct, where it cannot be.
  static Result<ChatWriter> from_source(std::string_view source);
  // Writes a format by its name.
  static Result<ChatWriter> from_name(std::string_view name);

  // "jinja" for a template that is run, the name of a format, or "" where nothing is known.
  const char* format_name() const;
  // Why the template is not run, one sentence; empty where it is.
  const std::string& problem() const { return problem_; }

  // The text, to be tokenised with special tokens parsed; those that messages spell are guarded (kGuard). BOS
  // is left to a tokenizer that puts it in front itself.
  Result<std::string> write(const Conversation&, const Tokenizer&) const;

  uint64_t host_bytes() const { return problem_.capacity() + (template_ ? template_->host_bytes() : 0); }

 private:
  std::optional<jinja::Template> template_;
  std::optional<ChatFormat> format_;
  std::string problem_;
};

}  // namespace thimble
