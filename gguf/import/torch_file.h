// Checkpoints of torch.save, in both of its layouts: a zip archive, and before torch 1.6 pickles with the
// tensors' bytes behind them.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "gguf/import/foreign.h"

namespace thimble {

// Whether bytes begin as such a file.
bool is_torch_file(std::span<const std::byte> bytes);

// All tensors of a file, by their paths through its dicts and lists; whatever else it holds is passed over.
// `file` is how error messages call it.
Result<std::vector<ForeignTensor>> read_torch_file(std::span<const std::byte> bytes, const std::string& file);

}  // namespace thimble
