// Files of safetensors: a header in JSON that says where each tensor lies, and the tensors.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "gguf/import/foreign.h"

namespace thimble {

// All tensors of a file. `file` is how error messages call it.
Result<std::vector<ForeignTensor>> read_safetensors(std::span<const std::byte> bytes,
                                                    const std::string& file);

}  // namespace thimble
