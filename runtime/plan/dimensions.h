// The number of entries that each head gets, and the buffer sizes of a step that follow from it.
#pragma once

#include "runtime/policy/policy.h"

namespace thimble {

// Computes the dimensions from the model and the resolved options.
Dimensions dimensions(const Model&, const SessionOptions& resolved, const Policies&);
// The runs that heads would get if the pool were divided only for texts of at most `text` tokens.
std::vector<HeadRun> runs_for(const Model&, const SessionOptions& resolved, uint64_t text);

}  // namespace thimble
