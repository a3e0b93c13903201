// Which ops have shaders for their types and parameters.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

// Whether there are shaders for arrays of a layer, which have one format; a chunk may be empty.
template <typename... Arrays>
bool stores(const KvArray& a, const Arrays&... others) {
  return has_kv_format(a.type) && ((!others || others.type == a.type) && ...);
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
  bool operator()(const KvAppend& o) const { return stores(o.k, o.v); }
  bool operator()(const KvView& o) const {
    return o.p.head_dim % 2 == 0 && stores(o.pool_k, o.pool_v, o.chunk_k, o.chunk_v);
  }
  bool operator()(const Attention& o) const {
    const bool is_view = o.p.source == kFromView;
    return attends(o.p.head_dim, limits) && o.value_cols() <= kMostValueCols && stores(o.k, o.v) &&
           (!is_view || o.k.type == DType::kF16);
  }
  bool operator()(const KvCompact& o) const {
    return o.p.head_dim % 2 == 0 && stores(o.k, o.v, o.chunk_k, o.chunk_v);
  }
  bool operator()(const KvMerge& o) const { return o.p.head_dim % 2 == 0 && stores(o.k, o.v); }
  bool operator()(const TokenScore& o) const { return attends(o.p.head_dim, limits) && stores(o.k); }
  // f16 bounds would round those of other formats
  bool operator()(const PageBounds& o) const { return o.p.head_dim % 2 == 0 && o.k.type == DType::kF16; }
  bool operator()(const PageScore& o) const { return attends(o.p.head_dim, limits); }
  bool operator()(const Label& o) const { return o.p.head_dim % 2 == 0 && stores(o.k, o.chunk_k); }
  bool operator()(const KeyDiff& o) const { return attends(o.p.head_dim, limits) && stores(o.k, o.chunk_k); }
  bool operator()(const QueryScore& o) const {
    return attends(o.p.head_dim, limits) && stores(o.k, o.chunk_k);
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
