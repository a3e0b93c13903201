// Retention: which score an entry gets, and what an eviction keeps.
#pragma once

#include "runtime/session_options.h"

namespace thimble {

// The score that cis_store writes for this policy: kCisHead, kCisPosition or kCisHash.
uint32_t retention_score(Retention);

// Fills in what an eviction down to the pool's size keeps. `last`: the chunk ends the prompt, so nothing
// stands in for the tokens to come and the stabilizers are scored like the others (methods 2.5).
void keep_pool(const SessionOptions&, bool last, StepParams&);
// Fills in an eviction that keeps everything.
void keep_all(StepParams&);

}  // namespace thimble
