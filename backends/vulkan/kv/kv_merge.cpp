// kv_merge: sorts a run by position after entries were appended out of order; one dispatch per array.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void kv_merge(Recording& r, const KvMerge& op) {
  constexpr uint32_t kWidth = 8;  // words of a row per workgroup, as in kv_compact
  const uint32_t threads = std::min(256u, r.limits().max_group_threads);
  // `pos` is empty when the positions themselves are merged.
  const auto merge = [&](const Out& all, const In& pos, uint32_t words) {
    if (!all) return;
    const uint64_t row = words * sizeof(uint32_t);
    const uint32_t width = std::min(words, kWidth);
    for_run_windows(r.limits(), all, row, [&](const RunWindow& window) {
      const struct {
        KvMergeParams p;
        RunWindow window;
        uint32_t words;
      } push{op.p, window, words};
      r.dispatch(Shader::kKvMerge, {threads / width * width, width, pos ? 0u : 1u},
                 {reads(pos), writes(window.of(all, row))}, push,
                 static_cast<uint32_t>(ceil_div(words, width)), op.p.heads);
    });
  };
  const auto row_words = [&](const KvArray& a) {
    return static_cast<uint32_t>(kv_bytes(a.type, op.p.head_dim) / sizeof(uint32_t));
  };
  merge(op.k.values, op.pos, row_words(op.k));
  merge(op.v.values, op.pos, row_words(op.v));
  merge(op.cis, op.pos, 1);
  merge(op.pos, {}, 1);  // last, because the other dispatches read them
}

}  // namespace thimble::vulkan
