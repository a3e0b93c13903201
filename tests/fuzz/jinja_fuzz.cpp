// Any bytes as a chat template: they are refused with one sentence, or run within small limits.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "templates/jinja/json.h"
#include "templates/jinja/template.h"

// Input: a template, optionally followed by a NUL byte and a JSON object of its variables.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace thimble;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t end = bytes.find('\0');
  const auto parsed = jinja::Template::parse(bytes.substr(0, end));
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  jinja::Heap heap(jinja::Limits{200'000, 4 << 20, 1 << 20});
  const auto variables = jinja::read_json(
      heap,
      end == std::string_view::npos
          ? R"({"messages": [{"role": "user", "content": "Hi"}], "bos_token": "<s>", "tools": [{"a": [1, 2.5, null]}]})"
          : bytes.substr(end + 1),
      "the variables");
  if (!variables.ok() || !jinja::is<jinja::Dict*>(*variables)) return 0;
  const auto text = parsed->render(heap, **jinja::as<jinja::Dict*>(*variables), 0);
  if (!text.ok() && text.status().message().empty()) std::abort();
  if (text.ok() && text->size() > 1 << 20) std::abort();
  return 0;
}
