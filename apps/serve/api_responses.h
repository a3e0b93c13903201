// OpenAI's wire format for responses. Nothing of a response is stored: a client sends all items again.
#pragma once

#include <memory>

#include "apps/serve/task.h"

namespace app::serve {

Asked read_response(const Json& body);
std::unique_ptr<AnswerWriter> write_response(const Identity& who, const Asked& asked);

}  // namespace app::serve
