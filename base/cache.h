// Files in the user's cache folder that only save time. They are written again if they are missing.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace thimble {

// Returns the bytes last written under this name ($XDG_CACHE_HOME/thimble/NAME, ~/.cache/thimble/NAME, on
// Windows %LOCALAPPDATA%\thimble\NAME); empty if the file is missing or incomplete.
std::vector<std::byte> read_cache(const std::string& name);
// Stores bytes under a name. Concurrent readers get the old or the new bytes. Failures are ignored.
void write_cache(const std::string& name, std::span<const std::byte> bytes);

}  // namespace thimble
