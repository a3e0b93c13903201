// page_bounds: the smallest and largest key of every page that changed, channel by channel.
#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void page_bounds(Recording& r, const PageBounds& op) {
  constexpr uint32_t kThreads = 128;
  const PageBoundsParams& p = op.p;
  const View& k = op.k.values;
  const uint64_t entry_bytes = kv_bytes(op.k.type, p.head_dim);
  // Pages that a head's step may touch, or an estimate of all its pages; if a head has more, threads process
  // several.
  const uint64_t entries = p.all ? mean_entries(op.k, p.head_dim, p.first_head + p.heads) : r.most_rows();
  const uint64_t threads = (ceil_div(entries, p.page) + 1) * p.head_dim / 2;
  const uint32_t groups =
      static_cast<uint32_t>(std::min<uint64_t>(ceil_div(threads, kThreads), r.limits().max_groups));
  for_run_windows(r.limits(), k, entry_bytes, [&](const RunWindow& window) {
    const struct {
      PageBoundsParams p;
      RunWindow window;
    } push{p, window};
    r.dispatch(has_kv_blocks(op.k.type) ? Shader::kPageBoundsBlocks : Shader::kPageBounds,
               {kv_format_number(op.k.type)}, {reads(window.of(k, entry_bytes)), writes(op.bounds)}, push,
               groups, p.heads);
  });
}

}  // namespace thimble::vulkan
