// Whether what a question asks about is still held: one rule, for the server's page and for `thimble eval`,
// which measures it (docs/evaluation.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "apps/sentences.h"

namespace app {

// How many of `count` positions from `first` on are among `held`, which are ascending.
uint64_t count_held(const std::vector<int32_t>& held, uint64_t first, uint64_t count);

// The sentence that a question asks about; where it ends with a colon, what follows belongs to it.
struct Subject {
  size_t sentence = 0;  // its index
  double held = 0;      // the largest share of its tokens that one (layer, KV head) pair holds
  bool gone = false;    // that is less than half: too little to answer from
};

// Finds it by words, in a prompt: the text and behind it the question. Nothing where no sentence has enough
// of them. Of several that have as many, the one that is held best. `heads`: for each (layer, KV head) pair
// the positions that it holds, ascending; those of layers with a window count as well.
std::optional<Subject> find_subject(std::span<const Sentence> prompt, std::string_view question,
                                    const std::vector<std::vector<int32_t>>& heads);

}  // namespace app
