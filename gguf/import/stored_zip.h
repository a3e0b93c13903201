// Reads zip archives with uncompressed entries, which torch.save writes.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/status.h"

namespace thimble {

using ZipEntries = std::unordered_map<std::string_view, std::span<const std::byte>>;

// Returns the entries by name; names and contents point into `archive`. `file` identifies the file in errors.
// Unsupported if an entry is compressed or encrypted, and for archives above 4 GiB.
Result<ZipEntries> read_stored_zip(std::span<const std::byte> archive, const std::string& file);

}  // namespace thimble
