#include "runtime/sequence_state.h"

#include <algorithm>
#include <cmath>

namespace thimble {

uint32_t SequenceFields::most_entries() const { return *std::max_element(entries.begin(), entries.end()); }

void SequenceFields::forget_logits() {
  has_logits = 0;
  arg_max = -1;
}

const char* SequenceFields::fault(const Setting& setting, const Policies& policies,
                                  std::span<const HeadRun> runs) const {
  const SessionOptions& o = setting.options;
  const Model& model = setting.model;
  const uint64_t bound = o.context ? o.context : INT32_MAX;
  const auto unknown = [&](int32_t t) { return t < 0 || static_cast<uint32_t>(t) >= model.shape.vocab; };
  if (generation > INT32_MAX) return "it was evicted from more often than it may be";
  if (read > bound || last_eviction > read || waiting.size() > uint64_t(o.chunk) + o.local + 1 ||
      position() > bound)
    return "it has more tokens than there may be";
  if (std::any_of(waiting.begin(), waiting.end(), unknown) ||
      std::any_of(unscored_tokens.begin(), unscored_tokens.end(), unknown))
    return "it has tokens that are not in the vocabulary";
  if (unscored > policies.retention->upkeep_rows(o) || unscored > read ||
      unscored_tokens.size() != (policies.retention->reads_again() ? unscored : 0))
    return "it has more tokens without scores than there may be";
  const uint64_t unbroken = read - last_eviction;  // entries that rewind() may drop
  for (size_t i = 0; i < entries.size(); ++i) {
    const HeadRun& run = runs[i];
    const AttentionMixer& owner = model.owner_of_run(i);
    const bool windowed = owner.window;
    const HeadRun& other = runs[owner.first_run];
    const bool alike =
        (windowed || !setting.dimensions.moves) && run.keep == other.keep && run.capacity == other.capacity;
    if (entries[i] > run.capacity || entries[i] > read || entries[i] < unbroken ||
        (!run.evicts && (entries[i] != read || entries[i] + waiting.size() > run.capacity)) ||
        (!windowed && entries[i] < unscored) || (alike && entries[i] != entries[owner.first_run]))
      return "its heads hold what they cannot";
  }
  if (has_logits > 1 || arg_max < -1 ||
      (arg_max >= 0 && static_cast<uint32_t>(arg_max) >= model.output.rows) ||
      (has_logits && (read == 0 || !waiting.empty())))
    return "its logits cannot be";
  for (const double value : {prefill_seconds, decode_seconds, prefill.bytes, prefill.flop, decode.bytes,
                             decode.flop, selecting.bytes, selecting.flop})
    if (!(value >= 0) || !std::isfinite(value)) return "its statistics cannot be";
  return nullptr;
}

SequenceState::SequenceState(size_t heads, Sampler its_sampler) : sampler(std::move(its_sampler)) {
  entries.resize(heads);
}

void SequenceState::reset() {
  std::vector<uint32_t> none = std::move(entries);
  std::fill(none.begin(), none.end(), 0);
  const SequenceFields nothing;
  SequenceFields::operator=(nothing);  // copied, so that the lists keep their memory
  entries = std::move(none);
  sampler.reset();
}

void SequenceState::rewind(uint64_t position) {
  const auto dropped = static_cast<uint32_t>(read - position);
  read = position;
  waiting.clear();
  for (uint32_t& count : entries) count -= dropped;
  unscored -= std::min(unscored, dropped);
  unscored_tokens.resize(std::min<size_t>(unscored_tokens.size(), unscored));
  ++generation;
  attended = Attended::kUnknown;
  forget_logits();
  sampler.rewind(position);
}

void SequenceState::restore(const SequenceFields& fields, const Sampler::Saved& saved) {
  SequenceFields::operator=(fields);
  sampler.restore(saved);
}

uint64_t SequenceState::host_bytes() const {
  return sampler.bytes() + (waiting.capacity() + unscored_tokens.capacity()) * sizeof(int32_t) +
         entries.size() * sizeof(uint32_t);
}

}  // namespace thimble
