// Which ops have shaders for their types and parameters.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

bool is_half(const KvArray& a) { return !a || a.type == DType::kF16; }
bool attends(uint32_t head_dim, const Limits& l) {
  return head_dim % 2 == 0 && head_dim <= most_attention_head_dim(l);
}
bool scores(uint32_t head_dim, const Limits& l) {
  return head_dim % 2 == 0 && head_dim <= std::min(kMostScoreHeadDim, most_attention_head_dim(l));
}

struct Supports {
  const Limits& limits;
  bool operator()(const KvAppend& o) const { return is_half(o.k) && is_half(o.v); }
  bool operator()(const KvView& o) const {
    return o.p.head_dim % 2 == 0 && is_half(o.pool_k) && is_half(o.pool_v) && is_half(o.chunk_k) &&
           is_half(o.chunk_v);
  }
  bool operator()(const Attention& o) const {
    return attends(o.p.head_dim, limits) && is_half(o.k) && is_half(o.v);
  }
  bool operator()(const KvCompact& o) const {
    return o.p.head_dim % 2 == 0 && is_half(o.chunk_k) && is_half(o.chunk_v) && is_half(o.k) && is_half(o.v);
  }
  bool operator()(const KvMerge& o) const { return o.p.head_dim % 2 == 0 && is_half(o.k) && is_half(o.v); }
  bool operator()(const TokenScore& o) const { return scores(o.p.head_dim, limits) && is_half(o.k); }
  bool operator()(const PageBounds& o) const { return o.p.head_dim % 2 == 0 && is_half(o.k); }
  bool operator()(const PageScore& o) const { return scores(o.p.head_dim, limits); }
  bool operator()(const Label& o) const {
    return o.p.head_dim % 2 == 0 && is_half(o.k) && is_half(o.chunk_k);
  }
  bool operator()(const KeyDiff& o) const {
    return scores(o.p.head_dim, limits) && is_half(o.k) && is_half(o.chunk_k);
  }
  bool operator()(const QueryScore& o) const {
    return scores(o.p.head_dim, limits) && is_half(o.k) && is_half(o.chunk_k);
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
