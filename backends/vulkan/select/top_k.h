// How top_k shares the work on a head's scores among workgroups: numbers that shaders and host share.
#ifndef THIMBLE_VULKAN_TOP_K_H
#define THIMBLE_VULKAN_TOP_K_H

#define kListParts 16u         // workgroups that make a head's list together
#define kListBins 2048u        // of a histogram of keys
#define kListDigits 3u         // of a key, each a bin
#define kMostCountedGroup 64u  // query heads of a KV head whose votes are counted
#define kVoteBins 512u         // of the histogram that vote makes for top_k of a group's votes

// And of a layer's. The exponentials of all votes add up to the number of query heads, so the k-th largest
// vote is at most log(query heads / k). Votes are counted by how far they lie below that: from 2^-6 to 2^10,
// 512 bins from a power of two to the next, so that they are narrow where many votes are.
#define kLayerBins 8192u
#define kLayerCounted kLayerBins     // behind the counts: whether there are any
#define kLayerMost (kLayerBins + 1)  // and that bound's bits
#define kLayerCounts (kLayerBins + 2)
#define kLayerShift 14          // from the bits of a distance to its bin
#define kLayerNearest 0xf200    // (bits of 2^-6) >> kLayerShift: the last bin, and all nearer votes
#define kMostLayerQueries 256u  // query heads of a layer whose votes are counted

#ifdef __cplusplus
#include "backends/vulkan/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

inline uint32_t list_threads(const Limits& l) { return l.threads(1024); }

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
