// Anthropic's wire format: messages, their events, errors.
#pragma once

#include <memory>

#include "apps/serve/task.h"

namespace app::serve {

// The body of a request, checked. Its blocks become messages as OpenAI writes them, which is what chat
// templates know: a tool's result is a message of its own with the role "tool".
Asked read_message(const Json& body);
// The same where no answer is wanted, but the prompt's tokens are counted.
Asked read_message_to_count(const Json& body);
std::unique_ptr<AnswerWriter> write_message(const Identity& who, const Asked& asked);
// The body of an error.
std::string anthropic_error(const Refusal& refusal);

}  // namespace app::serve
