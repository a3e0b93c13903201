// Ops whose KV heads may not all fit one operand: ranges of heads that do, and their parts of an array.
#pragma once

#include <algorithm>

#include "backends/vulkan/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

// ---- arrays with as many bytes for each KV head: of a chunk, of the view, of scratch ----

// The part of an array of `head_bytes` for each KV head that belongs to the heads [first, first + heads).
inline View of_heads(const View& all, uint64_t head_bytes, uint32_t first, uint32_t heads) {
  return all ? all.slice(first * head_bytes, std::min(heads * head_bytes, all.bytes - first * head_bytes))
             : all;
}

// Calls record(first head, heads) for ranges of [first, first + heads), of `most` or fewer, whose arrays, of
// `head_bytes` for each head, fit an operand. needs() has refused heads that do not fit one by one.
template <typename Record>
void for_head_ranges(const Limits& limits, uint64_t head_bytes, uint32_t first, uint32_t heads,
                     const Record& record, uint64_t most = UINT32_MAX) {
  most = std::max<uint64_t>(
      std::min((limits.max_range - limits.offset_alignment) / std::max<uint64_t>(head_bytes, 1), most), 1);
  const uint64_t each = ceil_div(heads, ceil_div(heads, most));
  for (uint32_t done = 0; done < heads;) {
    const uint32_t now = static_cast<uint32_t>(std::min<uint64_t>(heads - done, each));
    record(first + done, now);
    done += now;
  }
}

// ---- arrays in which each KV head has its run, wherever a step's table says that it begins ----

// A dispatch works for the heads whose runs begin at the entries [first, first + entries) of the layer, and
// is given the layer's arrays from `first` on.
struct RunWindow {
  uint32_t first = 0, entries = UINT32_MAX;
  // The part of an array of so many bytes an entry that the dispatch is given: twice the window, as a run may
  // begin at its end.
  View of(const View& all, uint64_t entry_bytes) const {
    const uint64_t begin = first * entry_bytes;
    return all ? all.slice(begin, std::min(2 * entry_bytes * entries, all.bytes - begin)) : all;
  }
};

// Entries that an operand can show.
inline uint64_t most_entries(const Limits& limits, uint64_t entry_bytes) {
  return (limits.max_range - limits.offset_alignment) / std::max<uint64_t>(entry_bytes, 1);
}
// And those of the longest run, in a layer of so many.
inline uint64_t most_run_entries(const Limits& limits, uint64_t entry_bytes, uint64_t layer_entries) {
  const uint64_t most = most_entries(limits, entry_bytes);
  return layer_entries > most ? most / 2 : most;
}

// Calls record(window) until all of a layer's runs have had their dispatch: once, but for arrays that do not
// fit an operand.
template <typename Record>
void for_run_windows(const Limits& limits, const View& all, uint64_t entry_bytes, const Record& record) {
  const uint64_t entries = all.bytes / entry_bytes;
  if (entries <= most_entries(limits, entry_bytes)) return record(RunWindow());
  const uint32_t each = static_cast<uint32_t>(most_run_entries(limits, entry_bytes, entries));
  for (uint64_t first = 0; first < entries; first += each)
    record(RunWindow{static_cast<uint32_t>(first), each});
}

// The same for a layer's keys and values, of which an operand shows equally many entries.
template <typename Record>
void for_run_windows(const Limits& limits, const KvArray& k, const KvArray& v, uint32_t head_dim,
                     const Record& record) {
  const uint64_t of_k = kv_bytes(k.type, head_dim), of_v = kv_bytes(v.type, head_dim);
  const bool wide_values = v && of_v > of_k;
  for_run_windows(limits, wide_values ? v.values : k.values, wide_values ? of_v : of_k, record);
}

// Entries that a head of the layer has on average: what its work is shared among workgroups for.
inline uint32_t mean_entries(const KvArray& k, uint32_t head_dim, uint32_t kv_heads) {
  return static_cast<uint32_t>(ceil_div(k.values.bytes / kv_bytes(k.type, head_dim), kv_heads));
}

}  // namespace thimble::vulkan
