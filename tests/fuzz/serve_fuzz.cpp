// Any bytes as request bodies, and as answers with thoughts and tool calls: they are read or refused, and
// written as JSON.
#include "apps/serve/answer.h"
#include "apps/serve/api_anthropic.h"
#include "apps/serve/api_openai.h"
#include "apps/serve/api_responses.h"
#include "apps/serve/call_grammar.h"
#include "apps/serve/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace app::serve;
  const std::string text(reinterpret_cast<const char*>(data), size);
  for (const auto read : {read_chat_completion, read_completion, read_message, read_response}) {
    try {
      const Asked asked = read(parse_object(text));
      write_json(with_calls_as_text(asked.task.messages));
      if (!asked.task.tools.empty()) write_json(call_schema(asked.task.tools, "", true));
    } catch (const Refusal& refusal) {
      openai_error(refusal);
    }
  }
  for (const char* prompt : {"", "<think>", "<|start|>assistant", "<|begin|>assistant", ">>>"}) {
    Asked asked;
    asked.task.tools = app::Json::array();
    asked.task.opening = opening_of(prompt);
    for (const auto write : {write_chat_completion, write_message, write_response}) {
      const auto writer = write({"1", 0, "m"}, asked);
      writer->piece({text.substr(0, size / 2), {}});
      writer->piece({text.substr(size / 2), {}});
      if (!app::Json::accept(writer->end(Ending::kEnd, "", {}))) __builtin_trap();
    }
  }
  return 0;
}
