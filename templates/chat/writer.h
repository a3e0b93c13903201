// Formats the conversations of a model: with its chat template, or in a known format.
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

// A conversation to format. All its data is lent by the caller.
struct Conversation {
  std::vector<ChatMessage> messages;
  std::string_view messages_json;   // an array of objects that replaces `messages` unless it is empty
  std::string_view variables_json;  // an object of further template variables, or empty
  // Text in a message that spells a control token becomes the token; otherwise it stays text
  bool parses_content = false;
  bool add_assistant = false;  // ends where the answer begins
  // Number of leading messages that are in the context already; the last of them is an answer
  uint64_t held = 0;
  // Messages that are not given are in the context already; the last of them is an answer
  bool continues = false;
  int64_t now = 0;  // for strftime_now: wall-clock seconds since 1970
};

class ChatWriter {
 public:
  // The writer for a model whose file has this template, which may be empty. A template that parses is run.
  // Otherwise a known format that is recognised in it is used; without one, write() fails.
  static ChatWriter choose(std::string_view source);
  // A writer that runs this template. Unsupported, with line and construct, if it cannot be run.
  static Result<ChatWriter> from_source(std::string_view source);
  // A writer for a known format.
  static Result<ChatWriter> from_name(std::string_view name);

  // "jinja" for a template that is run, the name of a known format, or "" if there is neither.
  const char* format_name() const;
  // One sentence on why the template is not run; empty if it is run.
  const std::string& problem() const { return problem_; }

  // The text, to be tokenized with special tokens parsed. Special tokens that messages spell are guarded
  // (kGuard). BOS is left out if the tokenizer adds it.
  Result<std::string> write(const Conversation&, const Tokenizer&) const;

  uint64_t host_bytes() const { return problem_.capacity() + (template_ ? template_->host_bytes() : 0); }

 private:
  std::optional<jinja::Template> template_;
  std::optional<ChatFormat> format_;
  std::string problem_;
};

}  // namespace thimble
