// Zip archives whose entries are stored as they are, which is how torch.save writes them.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/status.h"

namespace thimble {

using ZipEntries = std::unordered_map<std::string_view, std::span<const std::byte>>;

// The entries by their names; names and contents lie in `archive`. `file` is how error messages call it.
// Unsupported where an entry is compressed or encrypted, and for archives beyond 4 GiB.
Result<ZipEntries> read_stored_zip(std::span<const std::byte> archive, const std::string& file);

}  // namespace thimble
