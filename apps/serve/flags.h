// What thimble serve is asked for beside what other commands are.
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
