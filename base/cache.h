// Files that only save time: kept from run to run in the user's cache folder, and made anew where they are
// gone.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace thimble {

// The bytes that were last written under that name ($XDG_CACHE_HOME/thimble/NAME, ~/.cache/thimble/NAME, on
// Windows %LOCALAPPDATA%\thimble\NAME); empty where there are none, or not all of them.
std::vector<std::byte> read_cache(const std::string& name);
// Keeps bytes under a name; whoever reads meanwhile gets the old or the new ones. Silent where it cannot.
void write_cache(const std::string& name, std::span<const std::byte> bytes);

}  // namespace thimble
