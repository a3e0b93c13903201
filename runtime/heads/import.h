// Converts published retainers to sidecars.
#pragma once

#include <string>

#include "base/status.h"
#include "runtime/model/model.h"

namespace thimble {

// Reads the retainer in `input`, checks that it has the model's shapes, and writes the sidecar `output`,
// which must not exist. `input` is a torch.save file, a safetensors file, or a folder with model.safetensors.
// `kind` is locret, linear, mlp or sink; if it is empty, the names of the tensors decide. Mismatch: the
// retainer belongs to another model; the message says what differs.
Status import_heads(const Model& model, const std::string& input, const std::string& kind,
                    const std::string& output);

}  // namespace thimble
