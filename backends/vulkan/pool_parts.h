// Into how many parts decode attention and token_score cut the entries of a head at most: numbers that
// shaders and host share.
#ifndef THIMBLE_VULKAN_POOL_PARTS_H
#define THIMBLE_VULKAN_POOL_PARTS_H

// Attention's smallest tile, and token_score's smallest part.
#define kLeastTile 32u
// Parts of a head in attention, and of each of equal heads. Of 8 heads 96 take an H200 218 us for 131,072
// entries, and 64 take 308.
#define kMostParts 96u
// And in token_score: 64 of 8 heads all run at once on the largest cards; a second turn would take as long as
// the first.
#define kMostScoreParts 64u
#define kMostHeads 8u  // query heads that a workgroup works for

#ifdef __cplusplus
#include <cstdint>

namespace thimble::vulkan {

// The query heads of a KV head in passes of equal size, of `most` or fewer.
struct HeadPasses {
  uint32_t count, heads;
  explicit HeadPasses(uint32_t group, uint32_t most = kMostHeads)
      : count((group + most - 1) / most), heads((group + count - 1) / count) {}
};

}  // namespace thimble::vulkan
#endif

#endif
