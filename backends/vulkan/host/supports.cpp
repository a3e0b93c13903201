// Which ops have shaders for their types and parameters.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

// Whether there are shaders for keys, or for keys and values, of heads of so many channels. Of keys and
// values, one may have blocks and the other f16, or other blocks.
bool stores(const KvArray& a, uint32_t head_dim) {
  return has_kv_format(a.type) && kv_fits(a.type, head_dim);
}
bool mixes(const KvArray& a) { return a.type == DType::kF16 || has_kv_blocks(a.type); }
bool stores(const KvArray& k, const KvArray& v, uint32_t head_dim) {
  if (!v) return stores(k, head_dim);
  return stores(k, head_dim) && stores(v, head_dim) && (k.type == v.type || (mixes(k) && mixes(v)));
}
// Whether values are channels of keys in blocks, which no shader reads.
bool are_in_blocks(const KvArray& k, const KvArray& v) { return !v && has_kv_blocks(k.type); }
// A chunk has the format of its pool; it may be empty.
bool alike(const KvArray& pool, const KvArray& chunk) { return !chunk || pool.type == chunk.type; }
// Rows are copied between formats if one is f16, or to the same format; `pool` is one of the two.
bool copies(const KvArray& pool, const KvArray& rows, uint32_t head_dim) {
  return head_dim % 2 == 0 && stores(pool, head_dim) && stores(rows, head_dim) &&
         (pool.type == rows.type || (pool.type == DType::kF16 && has_kv_blocks(rows.type)));
}
bool attends(uint32_t head_dim, const Limits& l) { return head_dim % 2 == 0 && head_dim <= most_head_dim(l); }

struct Supports {
  const Limits& limits;
  // The shaders of experts read scales where biases would be, and matrices from multiples of 16 bytes on.
  bool operator()(const ExpertGlu& o) const {
    const bool aligned =
        o.p.rows_between == 0 || dtype_bytes(o.up.type, uint64_t(o.p.out_cols) * o.p.in_cols) % 16 == 0;
    return aligned && !(o.gate_scale && o.gate_bias) && !(o.up_scale && o.up_bias);
  }
  bool operator()(const ExpertLinear& o) const { return !(o.scale && o.bias); }
  bool operator()(const KvAppend& o) const { return stores(o.k, o.v, o.p.head_dim); }
  bool operator()(const KvView& o) const {
    return o.p.head_dim % 2 == 0 && stores(o.pool_k, o.pool_v, o.p.head_dim) && alike(o.pool_k, o.chunk_k) &&
           alike(o.pool_v, o.chunk_v) && !are_in_blocks(o.pool_k, o.pool_v);
  }
  bool operator()(const Attention& o) const {
    const bool is_view = o.p.source == kFromView;
    return attends(o.p.head_dim, limits) && o.value_cols() <= kMostValueCols &&
           stores(o.k, o.v, o.p.head_dim) && !are_in_blocks(o.k, o.v) &&
           (!is_view || o.k.type == DType::kF16);
  }
  bool operator()(const AttendAll& o) const {
    const auto reads = [&](const KvArray& a) { return mixes(a) && stores(a, o.p.head_dim); };
    return o.p.head_dim % 8 == 0 && attend_all_shared_bytes(o.p.head_dim) <= limits.max_shared_bytes &&
           reads(o.k) && reads(o.v) && reads(o.stored_k) && reads(o.stored_v) && alike(o.k, o.chunk_k) &&
           alike(o.v, o.chunk_v);
  }
  bool operator()(const KvCompact& o) const {
    return o.p.head_dim % 2 == 0 && stores(o.k, o.v, o.p.head_dim) && alike(o.k, o.chunk_k) &&
           alike(o.v, o.chunk_v);
  }
  bool operator()(const KvMerge& o) const { return o.p.head_dim % 2 == 0 && stores(o.k, o.v, o.p.head_dim); }
  bool operator()(const KvSpill& o) const {
    return copies(o.pool_k, o.k, o.p.head_dim) && copies(o.pool_v, o.v, o.p.head_dim) &&
           alike(o.pool_k, o.chunk_k) && alike(o.pool_v, o.chunk_v);
  }
  bool operator()(const KvRecall& o) const {
    return copies(o.k, o.row_k, o.p.head_dim) && copies(o.v, o.row_v, o.p.head_dim);
  }
  bool operator()(const TokenScore& o) const {
    return attends(o.p.head_dim, limits) && stores(o.k, o.p.head_dim);
  }
  // f16 bounds would round those of bf16
  bool operator()(const PageBounds& o) const {
    return o.p.head_dim % 2 == 0 && (o.k.type == DType::kF16 || has_kv_blocks(o.k.type)) &&
           stores(o.k, o.p.head_dim);
  }
  bool operator()(const PageScore& o) const { return attends(o.p.head_dim, limits); }
  bool operator()(const Label& o) const {
    return o.p.head_dim % 2 == 0 && stores(o.k, o.p.head_dim) && alike(o.k, o.chunk_k);
  }
  bool operator()(const KeyDiff& o) const {
    return attends(o.p.head_dim, limits) && stores(o.k, o.p.head_dim) && alike(o.k, o.chunk_k);
  }
  bool operator()(const QueryScore& o) const {
    return attends(o.p.head_dim, limits) && stores(o.k, o.p.head_dim) && alike(o.k, o.chunk_k);
  }
  template <typename Any>
  bool operator()(const Any&) const {
    return true;
  }
};

}  // namespace

bool supports(const Op& op, const Limits& limits) {
  return has_op(op, kOnVulkan) && std::visit(Supports{limits}, op);
}

}  // namespace thimble::vulkan
