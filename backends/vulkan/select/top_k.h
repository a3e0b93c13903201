// How top_k divides the work on a head's scores among workgroups: constants that shaders and host share.
#ifndef THIMBLE_VULKAN_TOP_K_H
#define THIMBLE_VULKAN_TOP_K_H

#define kListParts 16u         // workgroups that make a head's list together
#define kListBins 2048u        // bins of a histogram of keys
#define kListDigits 3u         // digits of a key; each value of a digit is a bin
#define kMostCountedGroup 64u  // the largest group (query heads per KV head) whose votes are counted
#define kVoteBins 512u         // bins of the histogram that vote makes for top_k of a group's votes

// The histogram for a layer's votes. The exponentials of all votes sum to the number of query heads, so the
// k-th largest vote is at most log(query heads / k). Votes are counted by their distance below that bound:
// from 2^-6 to 2^10, with 512 bins per power of two, so that bins are narrow where many votes are.
#define kLayerBins 8192u
#define kLayerCounted kLayerBins     // index of the flag that votes were counted
#define kLayerMost (kLayerBins + 1)  // index of the bits of that bound
#define kLayerCounts (kLayerBins + 2)
#define kLayerShift 14  // shift from the bits of a distance to its bin
// (bits of 2^-6) >> kLayerShift: the last bin, which also gets all nearer votes
#define kLayerNearest 0xf200
#define kMostLayerQueries 256u  // the most query heads in a layer whose votes are counted

#ifdef __cplusplus
#include "backends/vulkan/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

inline uint32_t list_threads(const Limits& l) { return l.threads(1024); }

// The most scores that compete for a head's list; for scores in runs, the average.
inline uint64_t candidates(const TopK& op) {
  const uint64_t scores =
      op.p.in_runs ? ceil_div(op.scores.bytes / sizeof(float), op.p.heads) : op.p.score_capacity;
  return scores + (op.chunk_scores ? op.p.chunk_capacity : 0);
}
// A single workgroup finds a head's threshold among this many candidates, 32 per thread. With more, several
// workgroups count together, digit by digit. On an H200 that takes 37 us for 16,740 candidates (one
// workgroup: 20) and 65 for 131,072.
inline uint64_t most_of_one_group(const Limits& l) { return uint64_t(32) * list_threads(l); }
inline bool takes_one_group(const Limits& l, uint64_t candidates) {
  return candidates <= most_of_one_group(l);
}

}  // namespace thimble::vulkan
#endif

#endif
