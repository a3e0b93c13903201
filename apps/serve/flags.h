// The flags that only `thimble serve` has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace app::serve {

// Slots of one size.
struct SlotKind {
  uint32_t count = 2;
  uint32_t pool = 0;  // entries; 0: as --pool says
};

struct ServeFlags {
  std::string host = "127.0.0.1", key;
  std::vector<std::string> allowed_hosts, allowed_origins;
  uint16_t port = 8080;
  std::vector<SlotKind> slots = {{}};  // the smallest first
  std::string cache_dir;               // "": states are not saved
  uint64_t cache_bytes = uint64_t{8} << 30;
  uint32_t slot_count() const {
    uint32_t count = 0;
    for (const SlotKind& kind : slots) count += kind.count;
    return count;
  }
};

}  // namespace app::serve
