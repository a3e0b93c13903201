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

template <typename... Formats>
struct KernelsOf {
  static uint32_t most_warps(DType type, Of of) {
    uint32_t most = 0;
    ((type == Formats::kType ? void(most = of == Of::kSlots ? kMostExpertWarps<Formats, Of::kSlots>
                                                            : kMostExpertWarps<Formats, Of::kSlotsSum>)
                             : void()),
     ...);
    return most;
  }
  static auto of(DType type, Of of) {
    void (*kernel)(const StepParams*, Products) = nullptr;
    ((type == Formats::kType
          ? void(kernel = of == Of::kSlots ? multiply_experts_kernel<Formats, Of::kSlots>
                                           : multiply_experts_kernel<Formats, Of::kSlotsSum>)
          : void()),
     ...);
    return kernel;
  }
};
using Kernels = KernelsOf<Bytes, BlocksOf32<DType::kQ4_0>, GroupsOf32<DType::kQ4_K>, GroupsOf32<DType::kQ5_K>,
                          GroupsOf16, Codes<DType::kIQ4_NL>, Codes<DType::kMXFP4>, CodesInGroups>;

void launch_products(const Launch& l, Products& p, Of of) {
  const DType type = p.matrix[0].type;
  const Shape shape = share_out(l, p, 1, of, Kernels::most_warps(type, of));
  launch(l, Kernels::of(type, of), shape.blocks, shape.threads, shape.shared_bytes, l.step, p);
}

bool has_format(const Weight& w, uint32_t out_cols, uint32_t chosen) {
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols);
  return chosen < kWarp && Kernels::of(w.type, Of::kSlots) && row_bytes % 2 == 0 &&
         row_bytes * out_cols % 16 == 0;
}

}  // namespace

bool multiplies_vectors(const Launch& l, const ExpertGlu& op) {
  return l.max_rows == 1 && op.gate.type == op.up.type && !op.gate_scale && !op.up_scale &&
         has_format(op.gate, op.p.out_cols, op.p.chosen);
}
bool multiplies_vectors(const Launch& l, const ExpertLinear& op) {
  return l.max_rows == 1 && !op.scale && has_format(op.w, op.p.out_cols, op.p.chosen);
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
    p.shared = {{data<std::byte>(shared.glu->gate), data<std::byte>(shared.glu->up)}, nullptr};
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
