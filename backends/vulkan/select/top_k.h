// How top_k shares the work on a head's scores among workgroups: numbers that shaders and host share.
#ifndef THIMBLE_VULKAN_TOP_K_H
#define THIMBLE_VULKAN_TOP_K_H

#define kListParts 16u         // workgroups that make a head's list together
#define kListBins 2048u        // of a histogram of keys
#define kListDigits 3u         // of a key, each a bin
#define kMostCountedGroup 64u  // query heads of a KV head whose votes are counted
#define kVoteBins 512u         // of the histogram that vote makes for top_k of a group's votes

// And of a layer's: bin b has the keys from kLayerLow + (b << kLayerShift) on, the first one all below it
// too, the last one all above. They are those of the numbers from -2^11 to -2^-5, 512 bins from a power of
// two to the next. The exponentials of all votes add up to the number of query heads, so the k-th largest is
// at most a k-th of that: the last bin can be the one that is looked for only where hardly more entries are
// picked than there are query heads.
#define kLayerBins 8192u
#define kLayerShift 14u
#define kLayerLow 0x3b000000u
#define kMostLayerQueries 256u  // query heads of a layer whose votes are counted

#ifdef __cplusplus
#include <algorithm>
#include <bit>

#include "backends/vulkan/host/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

inline uint32_t list_threads(const Limits& l) { return std::min(1024u, std::bit_floor(l.max_group_threads)); }

// The scores that compete for a head's list, at most; of runs, on average.
inline uint64_t candidates(const TopK& op) {
  const uint64_t scores =
      op.p.in_runs ? ceil_div(op.scores.bytes / sizeof(float), op.p.heads) : op.p.score_capacity;
  return scores + (op.chunk_scores ? op.p.chunk_capacity : 0);
}
// A workgroup finds a head's threshold alone among so many candidates, 32 a thread. Of more, several
// workgroups count together, digit by digit: on an H200 37 us for 16,740, which take the one 20, and 65 for
// 131,072.
inline uint64_t most_of_one_group(const Limits& l) { return uint64_t(32) * list_threads(l); }
inline bool takes_one_group(const Limits& l, uint64_t candidates) {
  return candidates <= most_of_one_group(l);
}

}  // namespace thimble::vulkan
#endif

#endif
