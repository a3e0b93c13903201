// Retainers in the files that they are published in, made a sidecar of a model.
#pragma once

#include <string>

#include "base/status.h"
#include "runtime/model/model.h"

namespace thimble {

// Reads the retainer in `input`, a file of torch.save or safetensors or a folder with model.safetensors,
// checks that it has the model's shapes, and writes the sidecar `output`, which must not exist. `kind` is
// locret, linear, mlp or sink, or empty: then the names of the tensors decide. Mismatch, saying what differs,
// where the retainer is that of another model.
Status import_heads(const Model& model, const std::string& input, const std::string& kind,
                    const std::string& output);

}  // namespace thimble
