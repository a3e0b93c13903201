// Decides whether the sentence that a question asks about is still held in the KV cache. The server's page
// and `thimble eval` use the same rule; `thimble eval` measures it (docs/evaluation.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "apps/sentences.h"

namespace app {

// The number of positions from `first` to `first + count - 1` that are in `held`, which is ascending.
uint64_t count_held(const std::vector<int32_t>& held, uint64_t first, uint64_t count);

// The sentence that a question asks about. If it ends with a colon, the sentence after it belongs to it.
struct Subject {
  size_t sentence = 0;  // its index
  double held = 0;      // the largest share of its tokens that one (layer, KV head) pair holds
  double stored = 0;    // the share of its tokens that are in the store, as a mean over the pairs
  bool gone = false;    // both are less than half, which is too little to answer from
};

// Finds the subject by the words of the question, in a prompt that consists of the text and then the
// question. Returns nothing if no sentence has enough of these words. If several sentences have equally many,
// returns the one that is held best, or, if no pair holds any of them, the one that is stored best. `heads`
// has the ascending positions that each (layer, KV head) pair holds, also for layers with a window, and
// `stored` for each position the share of pairs that have it in the store.
std::optional<Subject> find_subject(std::span<const Sentence> prompt, std::string_view question,
                                    const std::vector<std::vector<int32_t>>& heads,
                                    std::span<const float> stored = {});

}  // namespace app
