// OpenAI's wire format: chat completions, completions, errors.
#pragma once

#include <memory>

#include "apps/serve/task.h"

namespace app::serve {

// Checks and reads the body of a request. Refuses fields that would change the answer and are not
// implemented.
Asked read_chat_completion(const Json& body);
Asked read_completion(const Json& body);

std::unique_ptr<AnswerWriter> write_chat_completion(const Identity& who, const Asked& asked);
std::unique_ptr<AnswerWriter> write_completion(const Identity& who, const Asked& asked);

// The body of an error.
std::string openai_error(const Refusal& refusal);

}  // namespace app::serve
