// linear and glu of few rows: products of matrices and vectors (matvec_tiles.cuh).
#include <algorithm>

#include "backends/cuda/dense/matvec_any.h"
#include "backends/cuda/dense/matvec_tiles.cuh"

namespace thimble::cuda {
namespace {

using namespace matvec;

// Waits for the previous kernels if necessary; returns whether this row of x exists.
__device__ bool begin(const StepParams* step, const Products& p) {
  release_successor();
  if (blockIdx.y == 0) return true;  // the common case is one row: do not fetch weights in vain for others
  await_predecessor();
  return blockIdx.y < row_count(*step, p.rows);
}
// The matrix that a block of the launch computes.
__device__ uint32_t matrix_of(const Products& p) {
  uint32_t matrix = 0;
#pragma unroll
  for (uint32_t i = 1; i < kMostSiblings; ++i) matrix += blockIdx.x >= p.matrix[i].first_block;
  return matrix;
}

// Row blockIdx.y of x times matrices of these formats, or pairs of matrices of the same format.
template <uint32_t kPair, typename... Formats>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocksOfAMultiprocessor)
    multiply_vectors_kernel(const StepParams* step, const __grid_constant__ Products p) {
  if (!begin(step, p)) return;
  const Matrix& m = p.matrix[kPair ? 0 : matrix_of(p)];
  if constexpr (sizeof...(Formats) == 1)
    (multiply_tiles<Formats, kPair>(step, p, m), ...);
  else
    ((m.type == Formats::kType ? multiply_tiles<Formats, kPair>(step, p, m) : void()), ...);
}

using Kernel = void (*)(const StepParams*, Products);

template <typename... Formats>
struct KernelsOf {
  static bool know(DType type) { return ((type == Formats::kType) || ...); }
  static Kernel for_all() { return multiply_vectors_kernel<0, Formats...>; }
  static Kernel for_one(DType type, bool pair) {
    Kernel kernel = nullptr;
    ((type == Formats::kType
          ? void(kernel = pair ? multiply_vectors_kernel<1, Formats> : multiply_vectors_kernel<0, Formats>)
          : void()),
     ...);
    return kernel;
  }
};
// Kernels of one format, or of the formats that Q4_K_M and Q5_K_M files mix, keep the data of their loop in
// registers. A kernel of all formats does not.
using KFormats = KernelsOf<GroupsOf32<DType::kQ4_K>, GroupsOf32<DType::kQ5_K>, GroupsOf16>;
using AllFormats = KernelsOf<Plain<DType::kF32>, Plain<DType::kF16>, Plain<DType::kBF16>, Bytes,
                             BlocksOf32<DType::kQ4_0>, BlocksOf32<DType::kQ4_1>, BlocksOf32<DType::kQ5_0>,
                             BlocksOf32<DType::kQ5_1>, GroupsOf32<DType::kQ4_K>, GroupsOf32<DType::kQ5_K>,
                             GroupsOf16, Codes<DType::kIQ4_NL>, Codes<DType::kMXFP4>, CodesInGroups>;

// Tiles of eight rows begin at multiples of 16 bytes, except for an odd number of mxfp4 blocks.
bool has_format(const Weight& w) {
  return AllFormats::know(w.type) && dtype_bytes(w.type, w.cols) % 2 == 0 && w.scale == 1;
}

// Launches the products of p's first `count` matrices, after dividing the blocks among them.
void launch_products(const Launch& l, Products& p, uint32_t count) {
  bool same = true, k_formats = true;
  for (uint32_t i = 0; i < count; ++i) {
    const DType type = p.matrix[i].type;
    same &= type == p.matrix[0].type;
    k_formats &= KFormats::know(type);
  }
  const Shape shape = share_out(l, p, count);
  const Kernel kernel = same        ? AllFormats::for_one(p.matrix[0].type, p.glu)
                        : k_formats ? KFormats::for_all()
                                    : AllFormats::for_all();
  launch(l, kernel, shape.blocks, shape.threads, shape.shared_bytes, l.step, p);
}

// Products that read x, or the result of `norm` for its x.
Products products_of(const View& x, uint32_t x_stride, uint32_t cols, uint32_t rows, const RmsNorm* norm) {
  Products p{};
  p.x = data<float>(norm ? norm->x : x);
  p.x_stride = x_stride;
  p.cols = cols;
  p.rows = rows;
  if (norm) {
    p.norm_weight = data<float>(norm->weight);
    p.norm_y = data<float>(norm->y);
    p.norm_eps = norm->p.eps;
  }
  return p;
}

// Multiplies one by one, after the norm, if there is a matrix without a format.
void multiply_one_by_one(const Launch& l, std::span<const Linear> siblings, const RmsNorm* norm) {
  if (norm) rms_norm(l, *norm);
  for (const Linear& op : siblings) {
    if (has_format(op.w)) {
      multiply_vectors(l, {&op, 1}, nullptr);
      continue;
    }
    multiply_any(l, op.w,
                 {.rows = op.p.out_cols,
                  .cols = op.p.in_cols,
                  .x = data<float>(op.x),
                  .x_stride = op.p.x_stride,
                  .x_rows = op.p.rows,
                  .y = data<float>(op.y),
                  .y_stride = op.p.y_stride,
                  .bias = data<float>(op.bias),
                  .add = op.p.add != 0});
  }
}
void multiply_one_by_one(const Launch& l, const Glu& op, const RmsNorm* norm) {
  if (norm) rms_norm(l, *norm);
  AnyProduct p{.rows = op.p.out_cols,
               .cols = op.p.in_cols,
               .x = data<float>(op.x),
               .x_stride = op.p.in_cols,
               .y = data<float>(op.h),
               .y_stride = op.p.out_cols,
               .act = op.p.act};
  multiply_any(l, op.gate, p);
  p.activates = true;
  multiply_any(l, op.up, p);
}

}  // namespace

void multiply_vectors(const Launch& l, std::span<const Linear> siblings, const RmsNorm* norm) {
  if (multiplies_by_rows(l, siblings)) return multiply_by_rows(l, siblings, norm);
  if (!std::all_of(siblings.begin(), siblings.end(), [](const Linear& op) { return has_format(op.w); }))
    return multiply_one_by_one(l, siblings, norm);
  const LinearParams& first = siblings[0].p;
  Products p = products_of(siblings[0].x, first.x_stride, first.in_cols, first.rows, norm);
  uint32_t count = 0;
  for (const Linear& op : siblings) {
    Matrix& m = p.matrix[count++];
    m.w[0] = data<std::byte>(op.w);
    m.type = op.w.type;
    m.bias[0] = data<float>(op.bias);
    m.y = data<float>(op.y);
    m.rows = op.p.out_cols;
    m.y_stride = op.p.y_stride;
    m.add = op.p.add;
  }
  launch_products(l, p, count);
}

void multiply_vectors(const Launch& l, const Glu& op, const RmsNorm* norm) {
  if (!has_format(op.gate) || !has_format(op.up)) return multiply_one_by_one(l, op, norm);
  Products p = products_of(op.x, op.p.in_cols, op.p.in_cols, kStepRows, norm);
  p.act = op.p.act;
  Matrix& m = p.matrix[0];
  m.w[0] = data<std::byte>(op.gate);
  m.w[1] = data<std::byte>(op.up);
  m.type = op.gate.type;
  m.y = data<float>(op.h);
  m.rows = m.y_stride = op.p.out_cols;
  p.glu = op.gate.type == op.up.type;
  launch_products(l, p, 1);
  if (p.glu) return;
  // A kernel for two types would contain the code of all of them, with 1 KiB of memory per thread.
  m.w[0] = m.w[1];
  m.type = op.up.type;
  m.activates = 1;
  launch_products(l, p, 1);
}

}  // namespace thimble::cuda
