// Jinja templates; supports the parts that chat templates use (docs/chat-templates.md lists them).
//
// A template comes with a model file from an untrusted source. It runs in a sandbox: it sees only the values
// that it is given, and its time, memory, output and nesting are bounded.
//
//   THIMBLE_LET(chat, jinja::Template::parse(source));
//   jinja::Heap heap{jinja::Limits()};
//   THIMBLE_LET(variables, heap.dict());
//   THIMBLE_LET(messages, jinja::read_json(heap, json, "the messages"));
//   THIMBLE_TRY(heap.set(*variables, name, messages));
//   THIMBLE_LET(text, chat.render(heap, *variables, now));
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "templates/jinja/value.h"

namespace thimble::jinja {

struct Statement;

class Template {
 public:
  // Returns Unsupported, with line and construct, if the source is not a template or uses something unknown.
  static Result<Template> parse(std::string_view source);

  // The text that the template writes with these variables. `now` is what strftime_now returns, as wall-clock
  // seconds since 1970. InvalidArgument if the template refuses the variables (raise_exception) or needs
  // others; Unsupported if it exceeds the heap's limits.
  Result<std::string> render(Heap& heap, const Dict& variables, int64_t now) const;

  uint64_t host_bytes() const { return host_bytes_; }

 private:
  std::shared_ptr<const std::vector<Statement>> block_;
  uint64_t host_bytes_ = 0;
};

}  // namespace thimble::jinja
