// Programs as CUDA graphs, recorded and replayed on their own stream.
#pragma once

#include <memory>

#include "backends/cuda/host/card_state.h"

namespace thimble::cuda {

// `scratch` is the workspace of the ops, and must outlive the stream. `heads` is the number of rows of the
// table of HeadState.
Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<const CardState>, const DeviceInfo&, View scratch,
                                            uint32_t heads);

// Device memory that the programs of one session take, in addition to the arenas.
uint64_t program_bytes(const ModelShape&);

}  // namespace thimble::cuda
