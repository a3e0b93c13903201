// OpenAI's wire format: chat completions, completions, errors.
#pragma once

#include <memory>

#include "apps/serve/task.h"

namespace app::serve {

// The body of a request, checked; what would be ignored and change the answer is refused.
Asked read_chat_completion(const Json& body);
Asked read_completion(const Json& body);

std::unique_ptr<AnswerWriter> write_chat_completion(const Identity& who, const Asked& asked);
std::unique_ptr<AnswerWriter> write_completion(const Identity& who, const Asked& asked);

// The body of an error.
std::string openai_error(const Refusal& refusal);

}  // namespace app::serve
