// The entries that a step works on: those of a KV head's run, those of the chunk after them, and lists of
// both.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/kv_kernels.h"
#include "backends/cpu/ops.h"
#include "backends/regions.h"

namespace thimble::cpu {

// The list of one KV head, or all entries if the op has no list.
struct EntryList {
  uint32_t count;
  const uint32_t* entries;  // null means that entry i is i

  uint32_t operator[](uint32_t i) const { return entries ? entries[i] : i; }
};

// `head` counts from KV head 0 of the layer, whose row of the head table is `first_state`.
inline EntryList entry_list(const Context& c, const In& list, uint32_t head, uint32_t list_capacity,
                            uint32_t first_state) {
  if (!list) return {step_entries(c.step, c.heads[first_state + head]), nullptr};
  const uint32_t* l = data<uint32_t>(list) + uint64_t(head) * list_capacity;
  return {l[0], l + 1};
}

// Whether this step reuses the selection of an earlier step.
inline bool selection_cached(const In& gate) { return gate && data<GateState>(gate)->hit; }

// The end of a head's scored units, which begin at n_init; it equals n_init if nothing is selected from the
// head.
inline uint32_t scored_end(const StepParams& step, const HeadState& head, uint32_t page) {
  const uint32_t n = units(step_entries(step, head), page);
  return selects(step, n) ? middle_end(step, n) : step.n_init;
}

// Element `index` of head `head` in [heads][capacity][width]; null for an empty view.
template <typename T>
T* at(const View& v, uint32_t head, uint64_t capacity, uint64_t index, uint64_t width = 1) {
  return v ? data<T>(v) + (head * capacity + index) * width : nullptr;
}
// Entry `index` of a head's run in [run][width]; null for an empty view.
template <typename T>
T* in_run(const View& v, const HeadState& head, uint64_t index, uint64_t width = 1) {
  return v ? data<T>(v) + (head.first + index) * width : nullptr;
}

// The rows of an array of keys or values, [run] or [heads][capacity].
struct KvRows {
  std::byte* const first;  // null for an empty array
  const uint64_t bytes;    // of a row
  const KvFormat& format;

  KvRows(const KvArray& a, uint32_t head_dim)
      : first(a ? data<std::byte>(a.values) : nullptr),
        bytes(kv_bytes(a.type, head_dim)),
        format(*kv_format(a.type)) {}
  std::byte* operator[](uint64_t index) const { return first + index * bytes; }
  std::byte* at(uint32_t head, uint64_t capacity, uint64_t index) const {
    return (*this)[head * capacity + index];
  }
  std::byte* in_run(const HeadState& head, uint64_t index) const { return (*this)[head.first + index]; }
};

// Prefetches a row. The processor's own prefetcher cannot keep up when rows are read tile by tile
// (docs/benchmarks.md).
inline void prefetch_row(const std::byte* row, uint64_t bytes) {
  constexpr uint64_t kLine = 64;
  for (uint64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at);
}

// The bounds of page `index` of a head's run, in [pages][2][head_dim] (op_params.h).
template <typename T>
T* page_of(const View& v, const HeadState& state, uint32_t head, uint32_t page, uint32_t index,
           uint32_t head_dim) {
  return data<T>(v) + (uint64_t(state.first / page) + head + index) * 2 * head_dim;
}

// Index of a head's first row of this step, in arrays of [run] or of [heads][chunk_capacity].
inline uint64_t first_row(const Context& c, uint32_t into, uint32_t head, uint32_t chunk_capacity,
                          uint32_t first_state) {
  if (into == kIntoChunk) return uint64_t(head) * chunk_capacity;
  const HeadState& state = c.heads[first_state + head];
  return uint64_t(state.first) + state.n_entries - (into == kIntoRing ? c.step.n_rows : 0);
}

}  // namespace thimble::cpu
