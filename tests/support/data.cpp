// The only test source that is compiled with the path of the checkout, so that a compiler cache works across
// checkouts.
#include "tests/support/data.h"

namespace thimble {

std::string project_file(const std::string& path) { return THIMBLE_SOURCE_DIR "/" + path; }

std::string shared_file(const std::string& path) {
  const char* root = std::getenv("THIMBLE_SHARED");
  return (root ? std::string(root) : project_file("../shared")) + "/" + path;
}

}  // namespace thimble
