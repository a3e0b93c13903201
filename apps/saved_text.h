// Texts that `thimble run --session` has read and saved.
#pragma once

#include <cstdint>
#include <string>

#include "apps/library.h"
#include "apps/prompt.h"

namespace app {

// Continues from a saved session, as far as it holds the first `count` tokens of the prompt. Returns the
// number of tokens that it holds.
uint64_t take_up(const Session& session, const std::string& path, const Prompt& prompt, uint64_t count);
// Saves the session, which has read or queued the first tokens of the prompt.
void save_text(const Session& session, const std::string& path, const Prompt& prompt);

}  // namespace app
