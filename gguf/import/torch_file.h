// Reads torch.save checkpoints in both layouts: a zip archive, and before torch 1.6 pickles followed by the
// tensors' bytes.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "gguf/import/foreign.h"

namespace thimble {

// Whether the bytes begin like such a file.
bool is_torch_file(std::span<const std::byte> bytes);

// Returns all tensors of a file, named by their path through its dicts and lists. Other contents are ignored.
// `file` identifies the file in errors.
Result<std::vector<ForeignTensor>> read_torch_file(std::span<const std::byte> bytes, const std::string& file);

}  // namespace thimble
