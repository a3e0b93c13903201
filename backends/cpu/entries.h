// Which entries a step works on: the pool's, the chunk's behind them, and lists of both.
#pragma once

#include <cstdint>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

// One KV head's list, or everything where the op has no list.
struct EntryList {
  uint32_t count;
  const uint32_t* entries;  // null: entry i is i

  uint32_t operator[](uint32_t i) const { return entries ? entries[i] : i; }
};

inline uint32_t step_entries(const StepParams& s) { return s.n_entries + s.n_rows; }

inline EntryList entry_list(const In& list, uint32_t head, uint32_t list_capacity, const StepParams& s) {
  if (!list) return {step_entries(s), nullptr};
  const uint32_t* l = data<uint32_t>(list) + uint64_t(head) * list_capacity;
  return {l[0], l + 1};
}

// Whether this step selects: below that everything is attended (backend.h).
inline bool selects(const StepParams& s) {
  return step_entries(s) > uint64_t(s.n_init) + s.select_k + s.n_local;
}
// The entries that a selection picks from: [n_init, middle_end).
inline uint32_t middle_end(const StepParams& s) { return step_entries(s) - s.n_local; }

// Whether this step uses the selection that an earlier one made.
inline bool selection_cached(const In& gate) { return gate && data<GateState>(gate)->hit; }

// Element `index` of head `head` in [heads][capacity][width]; null for an empty view.
template <typename T>
T* at(const View& v, uint32_t head, uint64_t capacity, uint64_t index, uint64_t width = 1) {
  return v ? data<T>(v) + (head * capacity + index) * width : nullptr;
}

}  // namespace thimble::cpu
