// The experts' glu and linear of a single row, for the types that most expert weights have.
#include "backends/cuda/dense/matvec_tiles.cuh"

namespace thimble::cuda {
namespace {

using namespace matvec;

// Products of gate and up for the slots of a single row, or the sum over its slots.
template <typename Format, Of kOf>
__global__ void __launch_bounds__(kMostExpertWarps<Format, kOf>* kWarp,
                                  kMostExpertWarps<Format, kOf> <= kMostWarps ? kBlocksOfAMultiprocessor : 1)
    multiply_experts_kernel(const StepParams* step, const __grid_constant__ Products p) {
  if constexpr (kOf == Of::kSlotsSum) release_successor();  // a glu does so after its router
  multiply_tiles<Format, kOf == Of::kSlots, kOf>(step, p, p.matrix[0]);
}

// The same if the last slot's matrices have another type: for a glu they have their own blocks, for a sum
// their own warps.
template <typename Format, typename Last, Of kOf>
__global__ void __launch_bounds__(kMostExpertWarps<Format, kOf>* kWarp, kBlocksOfAMultiprocessor)
    multiply_mixed_experts_kernel(const StepParams* step, const __grid_constant__ Products p) {
  if constexpr (kOf == Of::kSlotsSum) {
    release_successor();
    if (threadIdx.x / kWarp < p.team[1].first_warp)
      multiply_tiles<Format, 0, kOf, 0>(step, p, p.matrix[0]);
    else
      multiply_tiles<Last, 0, kOf, 1>(step, p, p.matrix[0]);
  } else {
    if (blockIdx.y < p.chosen)
      multiply_tiles<Format, 1, kOf>(step, p, p.matrix[0]);
    else
      multiply_tiles<Last, 1, kOf>(step, p, p.matrix[0]);
  }
}

using Kernel = void (*)(const StepParams*, Products);

template <typename Format>
struct OneFormat {
  static bool has(DType type, DType last) { return type == Format::kType && last == Format::kType; }
  static Kernel of(bool sum) {
    return sum ? multiply_experts_kernel<Format, Of::kSlotsSum> : multiply_experts_kernel<Format, Of::kSlots>;
  }
  static constexpr uint32_t most_warps(bool sum) {
    return sum ? kMostExpertWarps<Format, Of::kSlotsSum> : kMostExpertWarps<Format, Of::kSlots>;
  }
};
template <typename Format, typename Last>
struct TwoFormats {
  static bool has(DType type, DType last) { return type == Format::kType && last == Last::kType; }
  static Kernel of(bool sum) {
    return sum ? multiply_mixed_experts_kernel<Format, Last, Of::kSlotsSum>
               : multiply_mixed_experts_kernel<Format, Last, Of::kSlots>;
  }
  static constexpr uint32_t most_warps(bool sum) { return OneFormat<Format>::most_warps(sum); }
};

struct KernelOf {
  Kernel kernel = nullptr;
  uint32_t most_warps = 0;
};
template <typename... Kernels>
struct KernelsOf {
  static KernelOf find(DType type, DType last, bool sum) {
    KernelOf found;
    ((Kernels::has(type, last) ? void(found = {Kernels::of(sum), Kernels::most_warps(sum)}) : void()), ...);
    return found;
  }
};
// Files whose experts have types of 4 to 6 bits often keep a shared expert, or its last matrix, in one of
// more.
using Kernels =
    KernelsOf<OneFormat<Bytes>, OneFormat<BlocksOf32<DType::kQ4_0>>, OneFormat<GroupsOf32<DType::kQ4_K>>,
              OneFormat<GroupsOf32<DType::kQ5_K>>, OneFormat<GroupsOf16>, OneFormat<Codes<DType::kIQ4_NL>>,
              OneFormat<Codes<DType::kMXFP4>>, OneFormat<CodesInGroups>,
              TwoFormats<GroupsOf32<DType::kQ4_K>, GroupsOf16>, TwoFormats<GroupsOf32<DType::kQ4_K>, Bytes>,
              TwoFormats<GroupsOf32<DType::kQ5_K>, GroupsOf16>, TwoFormats<GroupsOf32<DType::kQ5_K>, Bytes>,
              TwoFormats<GroupsOf16, Bytes>>;

void launch_products(const Launch& l, Products& p, Of of) {
  const DType type = p.matrix[0].type;
  const KernelOf found = Kernels::find(type, p.slots > p.chosen ? p.shared.type : type, of == Of::kSlotsSum);
  const Shape shape = share_out(l, p, 1, of, found.most_warps);
  launch(l, found.kernel, shape.blocks, shape.threads, shape.shared_bytes, l.step, p);
}

bool has_format(const Weight& w, uint32_t out_cols, uint32_t chosen) {
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols);
  return chosen < kWarp && Kernels::find(w.type, w.type, false).kernel && row_bytes % 2 == 0 &&
         row_bytes * out_cols % 16 == 0;
}
bool has_format(const Weight& w, const Weight& last) {
  const uint64_t row_bytes = dtype_bytes(last.type, last.cols);
  return last.scale == 1 && Kernels::find(w.type, last.type, false).kernel && row_bytes % 2 == 0;
}

}  // namespace

bool multiplies_vectors(const Launch& l, const ExpertGlu& op) {
  return l.max_rows == 1 && op.gate.type == op.up.type && !op.gate_scale && !op.up_scale &&
         has_format(op.gate, op.p.out_cols, op.p.chosen);
}
bool multiplies_vectors(const Launch& l, const ExpertLinear& op) {
  return l.max_rows == 1 && !op.scale && has_format(op.w, op.p.out_cols, op.p.chosen);
}
bool multiplies_shared(const ExpertGlu& op, const ExpertLinear& sum, const SharedExpert& shared) {
  return shared.glu && shared.glu->gate.type == shared.glu->up.type &&
         has_format(op.gate, shared.glu->gate) && has_format(op.gate, shared.glu->up) &&
         has_format(sum.w, shared.linear->w);
}
bool chooses_experts(const Route& router) {
  return router_words(router.p.experts) * sizeof(uint32_t) <= kMostRouterBytes;
}

void multiply_vectors(const Launch& l, const ExpertGlu& op, const Route* router, const SharedExpert& shared) {
  Products p{};
  if (router) p.router = router_of(*router);
  p.x = data<float>(op.x);
  p.cols = op.p.in_cols;
  p.glu = 1;
  p.act = op.p.act;
  p.first = data<uint32_t>(op.first);
  p.experts = op.p.experts;
  p.chosen = p.slots = op.p.chosen;
  if (shared.glu) {
    ++p.slots;
    p.shared = {
        {data<std::byte>(shared.glu->gate), data<std::byte>(shared.glu->up)}, shared.glu->gate.type, nullptr};
  }
  Matrix& m = p.matrix[0];
  m.w[0] = data<std::byte>(op.gate);
  m.w[1] = data<std::byte>(op.up);
  m.type = op.gate.type;
  m.expert_bytes = (op.p.out_cols + op.p.rows_between) * dtype_bytes(op.gate.type, op.p.in_cols);
  m.bias[0] = data<float>(op.gate_bias);
  m.bias[1] = data<float>(op.up_bias);
  m.y = data<float>(op.h);
  m.rows = m.y_stride = op.p.out_cols;
  launch_products(l, p, Of::kSlots);
}

void multiply_vectors(const Launch& l, const ExpertLinear& op, const Route* router,
                      const SharedExpert& shared) {
  Products p{};
  if (router) p.router = router_of(*router);
  p.x = data<float>(op.h);
  p.x_stride = p.cols = op.p.in_cols;
  p.first = data<uint32_t>(op.first);
  p.weight = data<float>(op.weight);
  p.experts = op.p.experts;
  p.chosen = p.slots = op.p.chosen;
  if (shared.linear) {
    ++p.slots;
    p.shared = {{data<std::byte>(shared.linear->w)},
                shared.linear->w.type,
                shared.gate ? data<float>(shared.gate->g) + shared.gate->p.g_column : nullptr};
  }
  Matrix& m = p.matrix[0];
  m.w[0] = data<std::byte>(op.w);
  m.type = op.w.type;
  m.expert_bytes = op.p.out_cols * dtype_bytes(op.w.type, op.p.in_cols);
  m.bias[0] = data<float>(op.bias);
  m.y = data<float>(op.y);
  m.rows = m.y_stride = op.p.out_cols;
  m.add = 1;
  launch_products(l, p, Of::kSlotsSum);
}

}  // namespace thimble::cuda
