// How many questions about a text are answered when it was read within less memory.
#pragma once

#include <memory>

#include "runtime/session.h"
#include "training/texts.h"

namespace thimble {

struct Recall {
  uint32_t asked = 0, answered = 0;
  double share() const { return asked ? double(answered) / asked : 0; }
};

// Reads a text and asks each of its questions but those about quotes, at most `most`, as the first one. An
// answer counts where all of its tokens are the likeliest. `pool`: entries that a head keeps on average; 0:
// all are kept.
Result<Recall> ask_about(const TrainingText&, std::shared_ptr<const Model>, std::shared_ptr<Device>,
                         Retention, std::shared_ptr<const Retainer>, uint32_t pool, uint32_t most);
// What that takes, with the model's weights: the text's session, and one beside it for a question at a time.
Result<uint64_t> bytes_to_ask(const TrainingText&, const Model&, const Device&, Retention,
                              std::shared_ptr<const Retainer>, uint32_t pool);

}  // namespace thimble
