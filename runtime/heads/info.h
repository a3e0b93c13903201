// What the sidecar of a retainer says about itself.
#pragma once

#include <string>

#include "base/status.h"
#include "runtime/model/model.h"

namespace thimble {

// The file `path` as a JSON object (see thimble_heads_info in thimble.h). With a model also whether it fits
// it.
Result<std::string> describe_heads(const std::string& path, const Model* model);

}  // namespace thimble
