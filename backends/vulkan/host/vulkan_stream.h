// The queue of a session. It records ops into command buffers, and submits them.
#pragma once

#include <memory>

#include "backends/vulkan/host/context.h"

namespace thimble::vulkan {

// `scratch` is the workspace of the ops, as large as needs() said. `heads` is the number of rows of the table
// of HeadState.
Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<Context>, View scratch, uint32_t heads);

// Bytes that the recorded programs of a session take.
uint64_t program_bytes(const ModelShape&);

}  // namespace thimble::vulkan
