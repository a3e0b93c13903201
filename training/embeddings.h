// Rows of a model's embedding, as its file has them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/model/model.h"

namespace thimble {

// The rows of some tokens, [tokens][d_model], not scaled: the op `embed`.
Result<std::vector<float>> embeddings_of(const Model&, Device&, std::span<const int32_t> tokens);

}  // namespace thimble
