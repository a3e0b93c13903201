// What every retainer's file that the library writes begins with.
#pragma once

#include <string>

#include "runtime/model/model.h"
#include "runtime/model/new_gguf.h"

namespace thimble {

// Sets what a sidecar is, of which kind, and the model that it belongs to. A controller (kAdore) is an
// adapter of a type of its own, whose keys begin with "adore." instead of "retainer.".
void begin_sidecar(NewGguf&, const Model&, const std::string& name, Retainer::Kind);

}  // namespace thimble
