#include "runtime/sequence_state.h"

#include <algorithm>
#include <cmath>

#include "runtime/kv/page_votes.h"

namespace thimble {

uint32_t SequenceFields::most_entries() const { return *std::max_element(entries.begin(), entries.end()); }

uint64_t SequenceFields::earliest() const {
  return snapshots.empty() || !last_eviction ? last_eviction : snapshots.front().position;
}

void SequenceFields::forget_logits() {
  has_logits = 0;
  arg_max = -1;
}

uint32_t SequenceFields::free_slot() const {
  const auto is_used = [&](uint32_t slot) {
    return slot == state_slot ||
           std::any_of(snapshots.begin(), snapshots.end(), [&](const Snapshot& s) { return s.slot == slot; });
  };
  uint32_t slot = 0;
  while (is_used(slot)) ++slot;
  return slot;
}

std::vector<uint32_t> SequenceFields::used_slots() const {
  std::vector<uint32_t> slots;
  if (state_slot != kNoState) slots.push_back(state_slot);
  for (const Snapshot& s : snapshots)
    if (s.slot != state_slot) slots.push_back(s.slot);
  return slots;
}

namespace {

// The snapshot whose neighbours are closest together, but never the latest end of a prompt. After an
// eviction, no snapshot but the first one makes the positions after it reachable, so it goes only if all
// others are such ends.
size_t least_useful(const std::vector<Snapshot>& snapshots, uint64_t last_eviction) {
  size_t end_of_prompt = snapshots.size(), least = snapshots.size() - 1;
  for (size_t i = 0; i < snapshots.size(); ++i)
    if (snapshots[i].ends_prompt) end_of_prompt = i;
  uint64_t closest = UINT64_MAX;
  for (size_t i = last_eviction && snapshots.size() > 2 ? 1 : 0; i + 1 < snapshots.size(); ++i) {
    const uint64_t before = i ? snapshots[i - 1].position : last_eviction;
    const uint64_t apart = snapshots[i + 1].position - before;
    if (i != end_of_prompt && apart < closest) closest = apart, least = i;
  }
  return least;
}

}  // namespace

void SequenceFields::number_slots(size_t most) {
  std::vector<Snapshot> kept = snapshots;
  while (kept.size() > most) kept.erase(kept.begin() + ptrdiff_t(least_useful(kept, last_eviction)));
  state_slot = read ? 0 : kNoState;
  uint32_t next = 1;
  for (Snapshot& s : snapshots) {
    const bool stays = std::find(kept.begin(), kept.end(), s) != kept.end();
    s.slot = s.position == read ? 0 : stays ? next++ : kNoState;
  }
}

void SequenceFields::forget_snapshots_without_slot() {
  std::erase_if(snapshots, [](const Snapshot& s) { return s.slot == kNoState; });
}

constexpr uint64_t kSnapshotEvery = 4096;  // tokens

uint64_t SequenceFields::until_snapshot() const {
  const uint64_t last = snapshots.empty() ? last_eviction : snapshots.back().position;
  return std::max<uint64_t>(last + kSnapshotEvery, read + 1) - read;
}

void SequenceFields::keep_states(bool ends_prompt, size_t most) {
  const uint64_t last = snapshots.empty() ? last_eviction : snapshots.back().position;
  if (last == read && !snapshots.empty()) return;  // an eviction made one
  if (!ends_prompt && read - last < kSnapshotEvery) return;
  add_snapshot({read, state_slot, ends_prompt}, most);
}

void SequenceFields::keep_states_before(uint32_t rows, size_t most) {
  const uint64_t position = read - rows;
  if (state_slot == kNoState || (!snapshots.empty() && snapshots.back().position >= position)) return;
  add_snapshot({position, state_slot, 0}, most);
}

void SequenceFields::add_snapshot(const Snapshot& snapshot, size_t most) {
  snapshots.push_back(snapshot);
  if (snapshots.size() > most)
    snapshots.erase(snapshots.begin() + ptrdiff_t(least_useful(snapshots, last_eviction)));
}

void SequenceFields::drop_snapshots() {
  snapshots.assign(read ? 1 : 0, {read, state_slot, 1});
  recent.clear();
}

const char* SequenceFields::fault(const Setting& setting, std::span<const HeadRun> runs) const {
  const SessionOptions& o = setting.options;
  const Model& model = setting.model;
  const uint64_t bound = o.context ? o.context : INT32_MAX;
  const auto unknown = [&](int32_t t) { return t < 0 || static_cast<uint32_t>(t) >= model.shape.vocab; };
  if (generation > INT32_MAX) return "its number of evictions is too large";
  const Dimensions& d = setting.dimensions;
  if (read > bound || last_eviction > read || waiting.size() > d.most_waiting || position() > bound)
    return "it has too many tokens";
  if (std::any_of(waiting.begin(), waiting.end(), unknown) ||
      std::any_of(unscored_tokens.begin(), unscored_tokens.end(), unknown))
    return "it has tokens that are not in the vocabulary";
  if (const char* wrong = fault_of_states(d)) return wrong;
  if (unscored > unscored_rows(o) || unscored > read ||
      unscored_tokens.size() != (again_rows(o) ? unscored : 0))
    return "it has too many tokens without scores";
  if (asking > std::min<uint64_t>(o.most_recalled() ? kAskingTokens : 0, read) ||
      ahead > std::min<uint64_t>(o.most_recalled() ? o.chunk : 0, waiting.size()))
    return "it has too many queries";
  const uint64_t unbroken = read - last_eviction;  // entries that rewind() may drop
  for (size_t i = 0; i < entries.size(); ++i) {
    const HeadRun& run = runs[i];
    const AttentionMixer& owner = model.owner_of_run(i);
    const bool windowed = owner.window;
    const HeadRun& other = runs[owner.first_run];
    const bool alike =
        (windowed || !setting.dimensions.moves) && run.keep == other.keep && run.capacity == other.capacity;
    if (entries[i] > run.capacity || recalled[i] > std::min(run.recall, entries[i]) ||
        own(i) > run.capacity - run.recall || entries[i] > read || own(i) < unbroken ||
        (!run.evicts && (entries[i] != read || entries[i] + waiting.size() > run.capacity)) ||
        (!windowed && entries[i] < unscored) || (alike && own(i) != own(owner.first_run)))
      return "its heads hold invalid entries";
  }
  if (has_logits > 1 || arg_max < -1 ||
      (arg_max >= 0 && static_cast<uint32_t>(arg_max) >= model.output.rows) ||
      (has_logits && (read == 0 || !waiting.empty())))
    return "its logits are invalid";
  for (const double value : {prefill_seconds, decode_seconds, prefill.bytes, prefill.flop, decode.bytes,
                             decode.flop, selecting.bytes, selecting.flop})
    if (!(value >= 0) || !std::isfinite(value)) return "its statistics are invalid";
  return nullptr;
}

const char* SequenceFields::fault_of_states(const Dimensions& d) const {
  if (!d.state_slots)
    return state_slot == kNoState && snapshots.empty() && recent.empty()
               ? nullptr
               : "it has states, and the model has none";
  if (recent.size() != read - last_eviction) return "its recent tokens are not those since its last eviction";
  if (snapshots.size() > kMostSnapshots) return "it has more states than a session keeps";
  for (size_t i = 0; i < snapshots.size(); ++i)
    if (snapshots[i].position > read || snapshots[i].ends_prompt > 1 ||
        snapshots[i].position < (i ? snapshots[i - 1].position + 1 : std::max<uint64_t>(last_eviction, 1)))
      return "the positions of its states do not ascend";
  if (last_eviction && snapshots.empty()) return "it has no states since its last eviction";
  return nullptr;
}

SequenceState::SequenceState(size_t heads, Sampler its_sampler) : sampler(std::move(its_sampler)) {
  entries.resize(heads);
  recalled.resize(heads);
}

void SequenceState::reset() {
  std::vector<uint32_t> none = std::move(entries), none_recalled = std::move(recalled);
  std::fill(none.begin(), none.end(), 0);
  std::fill(none_recalled.begin(), none_recalled.end(), 0);
  const SequenceFields nothing;
  SequenceFields::operator=(nothing);  // copied, so that the lists keep their memory
  entries = std::move(none);
  recalled = std::move(none_recalled);
  sampler.reset();
  constraint.reset();
}

// States cannot go back token by token. The tokens between the snapshot and the position wait to be read
// again.
void SequenceState::rewind_states(uint64_t position) {
  while (!snapshots.empty() && snapshots.back().position > position) snapshots.pop_back();
  const uint64_t restored = snapshots.empty() ? 0 : snapshots.back().position;
  state_slot = snapshots.empty() ? kNoState : snapshots.back().slot;
  const auto first = recent.begin() + static_cast<ptrdiff_t>(restored - last_eviction),
             end = recent.begin() + static_cast<ptrdiff_t>(position - last_eviction);
  waiting.assign(first, end);
  recent.erase(first, recent.end());
  drop_to(restored);
}

void SequenceState::rewind(uint64_t position) {
  if (state_slot != kNoState) {
    rewind_states(position);
  } else {
    waiting.clear();
    drop_to(position);
  }
  sampler.rewind(position);
  constraint.rewind(position);
}

// Drops the entries of the tokens from this position on.
void SequenceState::drop_to(uint64_t position) {
  const auto dropped = static_cast<uint32_t>(read - position);
  read = position;
  for (uint32_t& count : entries) count -= dropped;
  unscored -= std::min(unscored, dropped);
  asking -= std::min(asking, dropped);
  ahead = 0;
  unscored_tokens.resize(std::min<size_t>(unscored_tokens.size(), unscored));
  ++generation;
  attended = Attended::kUnknown;
  forget_logits();
}

void SequenceState::restore(const SequenceFields& fields, const Sampler::Saved& saved) {
  SequenceFields::operator=(fields);
  sampler.restore(saved);
  constraint.reset();
}

uint64_t SequenceState::host_bytes() const {
  return sampler.bytes() +
         (waiting.capacity() + unscored_tokens.capacity() + recent.capacity()) * sizeof(int32_t) +
         snapshots.capacity() * sizeof(Snapshot) + (entries.size() + recalled.size()) * sizeof(uint32_t);
}

}  // namespace thimble
