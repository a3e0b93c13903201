#version 450
// linear, glu and experts with cooperative matrices, third part: a workgroup of four subgroups computes a
// tile of 128 x 128 of x W^T, 64 x 64 per subgroup, from rows of x and W in f16, summed in f32. For experts,
// a tile's rows are slots of one expert.
//
// If there are few tiles, several workgroups share the depth of a tile, and add_parts.comp then adds up their
// results.
//
// Slices of 32 columns pass through shared memory: while one is multiplied, the next one is loaded into
// registers.
//
// Each matrix is a separate variable, and macros repeat the code for each: NVIDIA's compiler keeps arrays of
// matrices in memory, whether loops are unrolled or not, and an H200 then multiplies at 32 TFLOP/s instead of
// 216.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#pragma use_vulkan_memory_model

#ifdef EXPERTS
#define kOperands 8
#include "experts.glsl"
#else
#define kOperands 6
#include "product.glsl"
#endif

layout(local_size_x_id = 2) in;  // four subgroups
const uint kThreads = gl_WorkGroupSize.x;

// An eight is eight f16 in 16 bytes. Rows of both matrices hold push.p.in_cols f16, a multiple of 32. If a
// tile has more rows than exist, it reads whatever follows, and those results are dropped.
layout(set = 0, binding = 1, std430) readonly buffer X { uvec4 x_eights[]; };
layout(set = 0, binding = 2, std430) readonly buffer W { uvec4 w_eights[]; };
layout(set = 0, binding = 5, std430) readonly buffer Scales { float scales[]; };  // of rows of x
#ifndef EXPERTS
layout(set = 0, binding = 6, std430) writeonly buffer Parts { float all_parts[]; };  // [parts][rows][columns], in whole tiles
#endif

// Size of a workgroup's tile, of a subgroup's part, and of a matrix
const uint kTile = 128, kPart = 64, kSize = 16;
const uint kSlice = 4;                           // eights per row
// So that the same eight of eight neighbouring rows is in 32 different banks
const uint kStride = kSlice + 1;
const uint kBuffer = 2 * kTile * kStride;        // 128 rows of x, then 128 of W
const uint kCopies = kTile * kSlice / kThreads;  // of each operand, per thread
// Stride of a row of results, which pass through the same memory
const uint kResultStride = kPart / 4 + 1;

shared uvec4 slices[2 * kBuffer];

#define SumMatrix coopmat<float, gl_ScopeSubgroup, kSize, kSize, gl_MatrixUseAccumulator>
#define XMatrix coopmat<float16_t, gl_ScopeSubgroup, kSize, kSize, gl_MatrixUseA>
#define WMatrix coopmat<float16_t, gl_ScopeSubgroup, kSize, kSize, gl_MatrixUseB>

#define EACH(DO) DO(0) DO(1) DO(2) DO(3)
#define EACH_SUM(DO) IN_ROW(DO, 0) IN_ROW(DO, 1) IN_ROW(DO, 2) IN_ROW(DO, 3)
#define IN_ROW(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)

#define CLEAR(r, c) SumMatrix sum_##r##c = SumMatrix(0.0);
#define LOAD_X(r) \
  XMatrix x_##r;  \
  coopMatLoad(x_##r, slices, x_at + r * kSize * kStride, kStride, gl_CooperativeMatrixLayoutRowMajor);
// A row of W is a column of the second factor.
#define LOAD_W(c) \
  WMatrix w_##c;  \
  coopMatLoad(w_##c, slices, w_at + c * kSize * kStride, kStride, gl_CooperativeMatrixLayoutColumnMajor);
#define MULTIPLY(r, c) sum_##r##c = coopMatMulAdd(x_##r, w_##c, sum_##r##c);
// Which lane holds which element of a matrix depends on the device, so 16 rows of results at a time pass
// through shared memory.
#define PASS(r, c) \
  coopMatStore(sum_##r##c, slices, results + c * kSize / 4, kResultStride, gl_CooperativeMatrixLayoutRowMajor);
#define STORE(r)    \
  subgroupBarrier(); \
  IN_ROW(PASS, r)    \
  subgroupBarrier(); \
  store_rows(results, first_row + part_row + r * kSize, first_col + part_col, rows);

#define LEAVE(r, c) \
  coopMatStore(sum_##r##c, all_parts, part_at + r * kSize * part_stride + c * kSize, part_stride, gl_CooperativeMatrixLayoutRowMajor);

const uint kLanes = kThreads / 4;

#ifdef EXPERTS
#include "find_expert.glsl"

bool find_rows(out uint first_row, out uint rows) { return find_seen_tile(gl_WorkGroupID.y, kTile, first_row, rows); }
uint up_row() { return push.p.seen_experts * push.p.matrix_rows; }
#else
bool find_rows(out uint first_row, out uint rows) {
  first_row = gl_WorkGroupID.y * kTile;
  rows = product_rows();
  return first_row < rows;
}
uint up_row() { return push.p.up_row; }
uint x_row(uint row) { return row; }
#endif

// For a glu, W holds both matrices. In a tile, 16 rows of each alternate, so that a subgroup has both results
// for a column of y.
uint w_row(uint row) {
  if (!kActivates) return matrix_row(row);
  return matrix_row(row / (2 * kSize) * kSize + row % kSize + row / kSize % 2 * up_row());
}

const uint kCols = kActivates ? kPart / 2 : kPart;
void store_rows(uint results, uint first_row, uint first_col, uint rows) {
  [[unroll]] for (uint i = 0; i < kSize * kCols / kLanes; ++i) {
    const uint e = i * kLanes + gl_SubgroupInvocationID, row = first_row + e / kCols, from = results + e / kCols * kResultStride;
    const uint part_col = e % kCols, col = first_col * kCols / kPart + part_col;
    if (row >= rows || col >= push.p.out_cols) continue;
    const float scale = scales[push.base[4] + x_row(row)];
    if (kActivates) {
      const uint gate = part_col / kSize * 2 * kSize + part_col % kSize, up = gate + kSize;
      store_glu(row, col, scale * uintBitsToFloat(slices[from + gate / 4][gate % 4]),
                scale * uintBitsToFloat(slices[from + up / 4][up % 4]));
    } else {
      store(row, col, scale * uintBitsToFloat(slices[from + part_col / 4][part_col % 4]));
    }
  }
}

void main() {
  const uint first_col = gl_WorkGroupID.x * kTile;
  uint first_row, rows;
  if (!find_rows(first_row, rows)) return;
  const uint thread = gl_LocalInvocationIndex, eights = push.p.in_cols / 8;
#ifdef EXPERTS
  const uint first = 0, end = eights;
#else
  const uint first = gl_WorkGroupID.z * push.p.depth_each / 8, end = min(first + push.p.depth_each / 8, eights);
#endif
  const uint part_row = gl_SubgroupID / 2 * kPart, part_col = gl_SubgroupID % 2 * kPart;  // in the tile

  // Where a thread copies from and to; its other copies are kThreads / kSlice rows apart.
  const uint line = thread / kSlice, lines = kThreads / kSlice;
#ifdef EXPERTS
  uint x_from[kCopies];
  [[unroll]] for (uint i = 0; i < kCopies; ++i)
    x_from[i] = push.base[0] / 4 + x_row(min(first_row + line + i * lines, rows - 1)) * eights + thread % kSlice;
#define X_FROM(i) x_from[i]
#else
  const uint x_from = push.base[0] / 4 + (first_row + line) * eights + first + thread % kSlice;
#define X_FROM(i) (x_from + i * lines * eights)
#endif
  const uint to = line * kStride + thread % kSlice;

  EACH_SUM(CLEAR)

  uvec4 of_x[kCopies], of_w[kCopies];
  uint w_from[kCopies];
  [[unroll]] for (uint i = 0; i < kCopies; ++i) {
    w_from[i] = push.base[1] / 4 + w_row(first_col + line + i * lines) * eights + first + thread % kSlice;
    slices[to + i * lines * kStride] = x_eights[X_FROM(i)];
    slices[to + (kTile + i * lines) * kStride] = w_eights[w_from[i]];
  }
  barrier();
  uint buffer_at = 0;
  for (uint next = kSlice; next <= end - first; next += kSlice) {
    if (next < end - first)
      [[unroll]] for (uint i = 0; i < kCopies; ++i) {
        of_x[i] = x_eights[X_FROM(i) + next];
        of_w[i] = w_eights[w_from[i] + next];
      }
    [[unroll]] for (uint k = 0; k < kSlice; k += kSize / 8) {
      const uint x_at = buffer_at + part_row * kStride + k, w_at = buffer_at + (kTile + part_col) * kStride + k;
      EACH(LOAD_X)
      EACH(LOAD_W)
      EACH_SUM(MULTIPLY)
    }
    buffer_at = kBuffer - buffer_at;
    if (next < end - first)
      [[unroll]] for (uint i = 0; i < kCopies; ++i) {
        slices[buffer_at + to + i * lines * kStride] = of_x[i];
        slices[buffer_at + to + (kTile + i * lines) * kStride] = of_w[i];
      }
    barrier();
  }

#ifndef EXPERTS
  if (gl_NumWorkGroups.z > 1) {
    const uint part_stride = gl_NumWorkGroups.x * kTile, part_rows = gl_NumWorkGroups.y * kTile;
    const uint part_at =
        push.base[5] + (gl_WorkGroupID.z * part_rows + first_row + part_row) * part_stride + first_col + part_col;
    EACH_SUM(LEAVE)
    return;
  }
#endif
  const uint results = gl_SubgroupID * kSize * kResultStride;
  EACH(STORE)
}
