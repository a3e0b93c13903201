#pragma once

#include "backends/backend.h"
#include "base/thread_pool.h"

namespace thimble::cpu {

// Measures how much all workers together copy in a second, and how fast they multiply as in prefill.
Result<Rates> measure_rates(ThreadPool&);

}  // namespace thimble::cpu
