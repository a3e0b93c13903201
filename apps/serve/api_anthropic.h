// Anthropic's wire format: message requests, events, errors.
#pragma once

#include <memory>

#include "apps/serve/task.h"

namespace app::serve {

// Checks and reads the body of a request. Its blocks become messages in OpenAI's form, which chat templates
// expect: the result of a tool becomes a message of its own with the role "tool".
Asked read_message(const Json& body);
// The same for a request that wants the number of the prompt's tokens instead of an answer.
Asked read_message_to_count(const Json& body);
std::unique_ptr<AnswerWriter> write_message(const Identity& who, const Asked& asked);
// The body of an error.
std::string anthropic_error(const Refusal& refusal);

}  // namespace app::serve
