// Ops whose KV heads may not all fit one operand: ranges of heads that do, and their parts of an array.
#pragma once

#include <algorithm>

#include "backends/vulkan/host/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

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
  most = std::max<uint64_t>(std::min((limits.max_range - limits.offset_alignment) / head_bytes, most), 1);
  const uint64_t each = ceil_div(heads, ceil_div(heads, most));
  for (uint32_t done = 0; done < heads;) {
    const uint32_t now = static_cast<uint32_t>(std::min<uint64_t>(heads - done, each));
    record(first + done, now);
    done += now;
  }
}

}  // namespace thimble::vulkan
