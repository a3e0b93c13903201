// The flags that only `thimble serve` has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace app::serve {

struct ServeFlags {
  std::string host = "127.0.0.1", key;
  std::vector<std::string> allowed_hosts, allowed_origins;
  uint16_t port = 8080;
  uint32_t slots = 2;
};

}  // namespace app::serve
