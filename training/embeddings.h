// Rows of a model's embedding matrix, as stored in its file.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/model/model.h"

namespace thimble {

// The unscaled rows of some tokens, [tokens][d_model], computed with the op `embed`.
Result<std::vector<float>> embeddings_of(const Model&, Device&, std::span<const int32_t> tokens);

}  // namespace thimble
