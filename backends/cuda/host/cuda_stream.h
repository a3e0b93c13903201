// Programs as CUDA graphs, recorded and replayed on a stream of their own.
#pragma once

#include <memory>

#include "backends/cuda/host/card_state.h"

namespace thimble::cuda {

// `scratch` is what the ops work in; it outlives the stream. `heads`: rows of the table of HeadState.
Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<const CardState>, const DeviceInfo&, View scratch,
                                            uint32_t heads);

// Device memory that the programs of one session take, beside the arenas.
uint64_t program_bytes(const ModelShape&);

}  // namespace thimble::cuda
