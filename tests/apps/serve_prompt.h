// Prompts for tests of what a slot of thimble serve has read.
#pragma once

#include <numeric>
#include <utility>
#include <vector>

#include "apps/serve/history.h"

namespace app::serve {

inline constexpr uint32_t kChunk = 10, kLocal = 3;

inline Json message(const char* role, const char* content) { return {{"role", role}, {"content", content}}; }

// A prompt of these messages with the ids 0 to tokens - 1.
inline Prompt prompt_of(std::vector<Json> messages, int32_t tokens) {
  Prompt prompt;
  prompt.messages = Json(std::move(messages));
  prompt.ids.resize(static_cast<size_t>(tokens));
  std::iota(prompt.ids.begin(), prompt.ids.end(), 0);
  return prompt;
}

}  // namespace app::serve
