// Into how many parts the entries of a pool are cut at most: numbers that shaders and host share.
#ifndef THIMBLE_VULKAN_POOL_PARTS_H
#define THIMBLE_VULKAN_POOL_PARTS_H

#define kTileKeys 32u  // entries that attention scores at once, with four threads each; parts are whole tiles
#define kLeastPart 32u   // entries
#define kMostParts 96u   // of a head. Of 8 heads an H200 has room for about 400 of attention's at once: 96 are two turns and
                         // take 278 us for 131,072 entries, 64 take 398 and 128 take 316
#define kMostHeads 8u    // query heads that a workgroup works for

#ifdef __cplusplus
#include <algorithm>
#include <cstdint>

namespace thimble::vulkan {

// Of so many entries at most. Few entries are cut as small as they can be, since then only the slowest part
// counts; more than 64 parts of a head pay where each has enough to do for what it costs to start it.
inline uint32_t pool_parts(uint32_t entries) {
  constexpr uint32_t kFew = 64;
  const uint32_t small = (entries + kLeastPart - 1) / kLeastPart, large = small / 2;
  return std::clamp(std::max(std::min(small, kFew), large), 1u, kMostParts);
}

// The query heads of a KV head in passes of equal size.
struct HeadPasses {
  uint32_t count, heads;
  explicit HeadPasses(uint32_t group)
      : count((group + kMostHeads - 1) / kMostHeads), heads((group + count - 1) / count) {}
};

}  // namespace thimble::vulkan
#endif

#endif
