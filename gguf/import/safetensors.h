// Reads safetensors files: a JSON header with the place of each tensor, then the tensors.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "gguf/import/foreign.h"

namespace thimble {

// Returns all tensors of a file. `file` identifies the file in errors.
Result<std::vector<ForeignTensor>> read_safetensors(std::span<const std::byte> bytes,
                                                    const std::string& file);

}  // namespace thimble
