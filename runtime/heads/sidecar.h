// What every retainer's file that the library writes begins with.
#pragma once

#include <string>
#include <vector>

#include "gguf/new_gguf.h"
#include "runtime/model/model.h"

namespace thimble {

// Sets what a sidecar is, of which kind, and the model that it belongs to. A controller (kAdore) is an
// adapter of a type of its own, whose keys begin with "adore." instead of "retainer.".
void begin_sidecar(NewGguf&, const Model&, const std::string& name, Retainer::Kind);

// What heads were trained on.
struct TrainedOn {
  uint64_t texts, tokens;  // tokens: of the texts, as far as they were learnt from
  uint32_t steps;          // of the optimizer; 0: it has none
  uint64_t seed;
  std::vector<std::string> data;  // paths, of which the names are told
};
void set_trained_on(NewGguf&, Retainer::Kind, const TrainedOn&);

}  // namespace thimble
