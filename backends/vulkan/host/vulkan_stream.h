// A session's queue: records ops into command buffers, and submits them.
#pragma once

#include <memory>

#include "backends/vulkan/host/context.h"

namespace thimble::vulkan {

// `scratch` is what ops use between their steps, as large as needs() said; `heads`: rows of the table of
// HeadState.
Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<Context>, View scratch, uint32_t heads);

// Bytes that the recorded programs of a session take.
uint64_t program_bytes(const ModelShape&);

}  // namespace thimble::vulkan
