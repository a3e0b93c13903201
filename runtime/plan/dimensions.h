// How many entries every head is given, and what follows from that for the buffers of a step.
#pragma once

#include "runtime/policy/policy.h"

namespace thimble {

// From the model and the resolved options.
Dimensions dimensions(const Model&, const SessionOptions& resolved, const Policies&);
// What each head is given for a text of at most so many tokens, were its pool made for that alone.
std::vector<HeadRun> runs_for(const Model&, const SessionOptions& resolved, const Policies&, uint64_t text);

}  // namespace thimble
