#include <cstring>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

void stage(const Context&, const Stage& op) {
  std::memcpy(data<std::byte>(op.to), data<std::byte>(op.from), op.from.bytes);
}

}  // namespace thimble::cpu
