// Selection: which entries a step attends to.
#pragma once

#include "runtime/session_options.h"

namespace thimble {

// Fills in what TokenSelect picks. While nothing was evicted the automatic vote is the published one, over
// the layer; afterwards the heads hold different tokens and each KV head votes for itself (methods 6.1).
void select_entries(const SessionOptions&, bool evicted, uint32_t generation, StepParams&);

}  // namespace thimble
