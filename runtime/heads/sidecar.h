// Writes the first keys of a sidecar, which are the same for every retainer.
#pragma once

#include <string>
#include <vector>

#include "gguf/new_gguf.h"
#include "runtime/model/model.h"

namespace thimble {

// Sets the type and the kind of a sidecar, and the model that it belongs to. A controller (kAdore) is an
// adapter of its own type, whose keys begin with "adore." instead of "retainer.".
void begin_sidecar(NewGguf&, const Model&, const std::string& name, Retainer::Kind);

// The training of a retainer.
struct TrainedOn {
  // `texts`: the number of texts. `tokens`: the number of their tokens that were used.
  uint64_t texts, tokens;
  uint32_t steps;  // steps of the optimizer; 0: there was no optimizer
  uint64_t seed;
  std::vector<std::string> data;  // paths; only the file names are stored
};
void set_trained_on(NewGguf&, Retainer::Kind, const TrainedOn&);

}  // namespace thimble
