// Describes the sidecar of a retainer.
#pragma once

#include <string>

#include "base/status.h"
#include "runtime/model/model.h"

namespace thimble {

// Describes the file `path` as a JSON object (see thimble_heads_info in thimble.h). If a model is given, the
// object also says whether the file fits it.
Result<std::string> describe_heads(const std::string& path, const Model* model);

}  // namespace thimble
