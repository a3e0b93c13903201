// lift_view: makes keys and values of every head from a view of latent rows.
#include <cstring>

#include "backends/cpu/dense/head_product.h"
#include "backends/cpu/entries.h"
#include "base/bits.h"

namespace thimble::cpu {

void lift_view(const Context& c, const LiftView& op) {
  const LiftViewParams& p = op.p;
  const uint32_t count = entry_list(c, op.list, 0, p.list_capacity, p.head_state).count;
  if (count <= p.first_entry) return;
  const uint32_t rows = std::min(count - p.first_entry, p.view_capacity), width = p.rotated + p.latent,
                 key_dim = p.rotated + p.key_cols;
  const float* const view = data<float>(op.view);
  const auto product = [&](bool keys, uint32_t head) {
    return HeadProduct{.x = view + p.rotated,
                       .x_stride = width,
                       .rows = rows,
                       .in_cols = p.latent,
                       .out_cols = keys ? p.key_cols : p.value_cols,
                       .w = keys ? op.k_up : op.v_up,
                       .first_row = keys ? p.k_first + uint64_t(head) * p.k_head_rows
                                         : p.v_first + uint64_t(head) * p.v_head_rows,
                       .transposed = keys && p.k_transposed,
                       .y = data<float>(keys ? op.k : op.v) + uint64_t(head) * p.view_capacity * key_dim,
                       .y_stride = key_dim};
  };
  const auto blocks = [](const HeadProduct& of) {
    return static_cast<uint32_t>(ceil_div(of.out_cols, head_block(of)));
  };
  const uint32_t of_key = blocks(product(true, 0)), of_head = of_key + blocks(product(false, 0));
  for_share(c, p.heads * of_head, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = item / of_head, block = item % of_head;
    const bool keys = block < of_key;
    const HeadProduct of = product(keys, head);
    multiply_head(of, (keys ? block : block - of_key) * head_block(of), dense_scratch(c, worker));
    for (uint32_t row = 0; row < rows && block == 0; ++row)
      std::memcpy(of.y + uint64_t(row) * key_dim + p.key_cols, view + uint64_t(row) * width,
                  p.rotated * sizeof(float));
  });
}

}  // namespace thimble::cpu
