#pragma once

#include "backends/backend.h"
#include "base/thread_pool.h"

namespace thimble::cpu {

// What all workers together copy, and multiply as prefill does, in a second.
Result<Rates> measure_rates(ThreadPool&);

}  // namespace thimble::cpu
