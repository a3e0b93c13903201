// The engine: moving, copying and listing a sequence's data in the pool, and making the pool smaller.
#include <algorithm>

#include "runtime/engine.h"
#include "runtime/plan/dimensions.h"

namespace thimble {

Status Engine::forget() {
  THIMBLE_TRY(set_saturated(0));
  if (store_) store_->clear();
  return policies_.selection->clear(*device_);
}

Status Engine::positions(const SequenceFields& state, size_t head, std::span<int32_t> positions) const {
  const uint64_t first = plan_.dimensions.runs_in(state.placed)[head].first;
  const View& all = layout_.layers[model_->layer_of_run[head]].pos;
  return device_->read(positions.data(), all.slice(first * sizeof(int32_t), positions.size_bytes()));
}

Result<uint32_t> Engine::saturated() const {
  uint32_t saturated;
  THIMBLE_TRY(device_->read(&saturated, layout_.saturated));
  return saturated;
}

// ---- moving ----

// Runs have the same order in every division. No run is overwritten before it has moved: the runs that move
// down are moved first, in ascending order, and then the runs that move up, in descending order.
Result<bool> Engine::move_runs(SequenceState& state) {
  const std::vector<HeadRun>&from = plan_.dimensions.runs_in(state.placed), &to = runs(state);
  bool moved = false;
  const auto move = [&](size_t head) -> Status {
    moved = true;
    return move_head(head, from[head].first, to[head].first, state.entries[head]);
  };
  for (size_t i = 0; i < to.size(); ++i)
    if (to[i].first < from[i].first) THIMBLE_TRY(move(i));
  for (size_t i = to.size(); i-- > 0;)
    if (to[i].first > from[i].first) THIMBLE_TRY(move(i));
  state.placed = state.division;
  return moved;
}

Status Engine::move_head(size_t head, uint64_t from, uint64_t to, uint64_t entries) const {
  const size_t layer = model_->layer_of_run[head];
  const LayerPool& pool = layout_.layers[layer];
  for (const View& array : {pool.k.values, pool.v.values, pool.pos, pool.cis}) {
    if (!array) continue;
    THIMBLE_TRY(move_entries(array, array.bytes / plan_.dimensions.layer_entries[layer], from, to, entries));
  }
  return {};
}

// Moves entries of one array of a layer. The view of chunks serves as scratch memory, since it is unused
// between steps.
Status Engine::move_entries(const View& array, uint64_t entry_bytes, uint64_t from, uint64_t to,
                            uint64_t entries) const {
  const View& scratch = layout_.view_k.values;
  const uint64_t at_once = std::max<uint64_t>(scratch.bytes / entry_bytes, 1);
  for (uint64_t done = 0; done < entries;) {
    const uint64_t now = std::min(at_once, entries - done),
                   at = to < from ? done : entries - done - now;  // overwrites only entries already copied
    const View piece = scratch.slice(0, now * entry_bytes);
    THIMBLE_TRY(device_->copy(piece, array.slice((from + at) * entry_bytes, piece.bytes)));
    THIMBLE_TRY(device_->copy(array.slice((to + at) * entry_bytes, piece.bytes), piece));
    done += now;
  }
  return {};
}

// ---- listing and copying ----

std::vector<Engine::Array> Engine::arrays(const SequenceFields& state, bool logits) const {
  const Held held = this->held(state);
  std::vector<Array> all;
  for (uint32_t i = 0; i < held.entries.size(); ++i) {
    const LayerPool& pool = layout_.layers[model_->layer_of_run[i]];
    const uint32_t head_dim = model_->owner_of_run(i).head_dim;
    const uint64_t first = held.runs[i].first, entries = held.entries[i];
    const auto add = [&](const View& array, uint64_t entry_bytes, Array::Kind kind) {
      if (array && entries) all.push_back({array.slice(first * entry_bytes, entries * entry_bytes), kind});
    };
    add(pool.k.values, kv_bytes(pool.k.type, head_dim), Array::kPlain);
    add(pool.v.values, kv_bytes(pool.v.type, head_dim), Array::kPlain);
    add(pool.pos, sizeof(int32_t), Array::kPositions);
    add(pool.cis, sizeof(float), Array::kPlain);
  }
  for (const StateArray& layer : layout_.states)
    for (const uint32_t slot : layer.slots ? state.used_slots() : std::vector<uint32_t>())
      all.push_back(slot == kNoState ? Array{{nullptr, 0, layer.slot(0).bytes}, Array::kWithoutRoom}
                                     : Array{layer.slot(slot), Array::kPlain});
  for (const View& queries : layout_.recall.queries)
    if (queries) all.push_back({queries, Array::kPlain});
  if (logits)
    all.push_back({layout_.logits.slice(0, uint64_t(model_->output.rows) * sizeof(float)), Array::kLogits});
  std::vector<View> carried;
  policies_.retention->carry(held, carried);
  for (const View& view : carried) all.push_back({view, Array::kOfRetention});
  carried.clear();
  policies_.selection->carry(held, carried);
  for (const View& view : carried) all.push_back({view, Array::kOfSelection});
  return all;
}

// Copies the pool. If the pool was made smaller, only the held entries are copied, since copying to memory
// that was given back would allocate it again.
Status Engine::copy_to(Engine& twin, const SequenceState& state) const {
  const auto copy_pool = [&]() -> Status {
    if (!plan_.released)
      return device_->copy({twin.pool_.get(), 0, pool_->size}, {pool_.get(), 0, pool_->size});
    // The twin's pool is still empty. This call gives back only the request for huge pages, because a huge
    // page would reach into the released memory.
    THIMBLE_TRY(device_->release({twin.pool_.get(), 0, twin.pool_->size}));
    const std::vector<Array> from = arrays(state, false), to = twin.arrays(state, false);
    for (size_t i = 0; i < from.size(); ++i) THIMBLE_TRY(device_->copy(to[i].view, from[i].view));
    return device_->copy(twin.layout_.saturated, layout_.saturated);
  };
  THIMBLE_TRY(copy_pool());
  if (store_) THIMBLE_TRY(twin.store_->copy_from(*store_));
  THIMBLE_TRY(device_->copy({twin.io_.get(), 0, io_->size}, {io_.get(), 0, io_->size}));
  // If there are no host_logits, the logits are in io.
  return layout_.host_logits ? device_->copy(twin.layout_.logits, layout_.logits) : Status();
}

// ---- a smaller pool ----

std::vector<HeadRun>& Engine::own_runs(const SequenceFields& state) {
  Dimensions& d = plan_.dimensions;
  return d.divisions.empty() ? d.runs : d.divisions[state.division].runs;
}

Result<MemoryPlan> Engine::smaller_plan(uint32_t pool, const SequenceState& state) const {
  if (!pool || pool > plan_.options.pool)
    return error(Code::kInvalidArgument, "a pool of %u is not smaller than the %u that the session has", pool,
                 plan_.options.pool);
  THIMBLE_TRY(device_->release({pool_.get(), 0, 0}));
  SessionOptions options = plan_.asked;
  if (!options.keeps.empty())
    return error(
        Code::kUnsupported,
        "the session was given a pool for each head, which cannot shrink together; make a smaller one");
  options.pool = pool;
  THIMBLE_LET(smaller, make_plan(*model_, *device_, options));
  const Dimensions& d = plan_.dimensions;
  const std::vector<HeadRun>& now = runs(state);
  std::vector<HeadRun>& then = smaller.dimensions.runs;
  if (d.moves) {  // runs no longer move; they are divided as for the text so far
    const uint64_t text = d.divisions.empty() ? d.text : d.divisions[state.division].text;
    then = runs_for(*model_, smaller.options, text);
    for (size_t i = 0; i < now.size(); ++i) {  // rounding may make a share one entry larger
      then[i].keep = std::min(then[i].keep, now[i].keep);
      then[i].capacity = std::min(then[i].capacity, now[i].capacity);
    }
  }
  THIMBLE_TRY(check_smaller(pool, then, state));
  return smaller;
}

// Checks that each head can continue with its run of a smaller pool.
Status Engine::check_smaller(uint32_t pool, std::span<const HeadRun> then, const SequenceState& state) const {
  const std::vector<HeadRun>& now = runs(state);
  for (size_t i = 0; i < now.size(); ++i) {
    if (then[i].capacity > now[i].capacity || then[i].keep > now[i].keep)
      return error(
          Code::kUnsupported,
          "with a pool of %u a head would keep more than now, for which it has no room; make a smaller "
          "session",
          pool);
    const size_t layer_head = model_->owner_of_run(i).first_run;
    if (!plan_.dimensions.moves && now[i].keep == now[layer_head].keep &&
        then[i].keep != then[layer_head].keep)  // programs were recorded for equal heads
      return error(Code::kUnsupported,
                   "a pool of %u does not divide evenly among heads that keep equally many; choose another",
                   pool);
    const uint64_t tokens = state.entries[i] + state.waiting.size();
    if (!then[i].evicts && tokens > then[i].capacity)
      return error(Code::kUnsupported,
                   "the session holds %llu tokens, a pool of %u has room for %u, and its retention evicts "
                   "nothing; choose a larger one",
                   static_cast<unsigned long long>(tokens), pool, then[i].capacity);
  }
  return {};
}

bool Engine::keep_less(const MemoryPlan& smaller, const SequenceState& state) {
  std::vector<HeadRun>& runs = own_runs(state);
  bool evicts = false;
  for (size_t i = 0; i < runs.size(); ++i) {
    const HeadRun& then = smaller.dimensions.runs[i];
    runs[i].keep = then.keep;
    runs[i].protect_first = then.protect_first;
    runs[i].protect_last = then.protect_last;
    evicts |= runs[i].evicts && then.capacity < runs[i].capacity && state.entries[i] > runs[i].keep;
  }
  return evicts;
}

Result<uint64_t> Engine::release(const MemoryPlan& smaller, SequenceState& state) {
  Dimensions& d = plan_.dimensions;
  std::vector<HeadRun>& runs = own_runs(state);
  uint64_t freed = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const size_t layer = model_->layer_of_run[i];
    const LayerPool& arrays = layout_.layers[layer];
    const uint32_t capacity = smaller.dimensions.runs[i].capacity;
    const uint64_t first = runs[i].first + capacity, end = runs[i].first + runs[i].capacity;
    for (const View& array : {arrays.k.values, arrays.v.values, arrays.pos, arrays.cis}) {
      if (!array) continue;
      const uint64_t entry_bytes = array.bytes / d.layer_entries[layer];
      THIMBLE_LET(bytes, device_->release(array.slice(first * entry_bytes, (end - first) * entry_bytes)));
      freed += bytes;
    }
    runs[i].capacity = capacity;
  }
  if (!d.divisions.empty()) {
    d.text = d.divisions[state.division].text;
    d.runs = runs;
    d.divisions.clear();
    state.division = state.placed = 0;
  }
  plan_.asked = smaller.asked;
  plan_.options = smaller.options;
  plan_.capacity = d.capacity = smaller.capacity;
  plan_.largest_position = smaller.largest_position;
  plan_.selection_pays = smaller.selection_pays;
  plan_.pool -= freed;
  plan_.total -= freed;
  plan_.released += freed;
  reservation_.reserved -= freed;
  reservation_.allocated -= freed;
  reservation_.ledger->reserved -= freed;
  reservation_.ledger->allocated -= freed;
  return freed;
}

}  // namespace thimble
