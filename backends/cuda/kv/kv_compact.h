// kv_compact as a part of another op.
#pragma once

#include "backends/cuda/launch.h"

namespace thimble::cuda {

// kv_compact with lists in device memory instead of its operand.
void compact(const Launch&, const KvCompact&, const uint32_t* lists);

}  // namespace thimble::cuda
