#version 450
// linear, glu and experts with cooperative matrices, second part: converts rows of x to f16, each times a
// power of two, one workgroup per row.
//
// f16 keeps 11 bits of a number but ends at 65504, and real models reach 1e5 before ffn_down. The largest
// magnitude of a row is therefore scaled to [2^14, 2^15); f16 then rounds off at most 2^-11 of a number or
// 2^-39 of the row's largest.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../step.glsl"
#include "dense_params.h"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;
#include "../reduce.glsl"

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Scaled { uvec4 scaled[]; };  // [rows][depth] f16
layout(set = 0, binding = 3, std430) writeonly buffer Scales { float scales[]; };  // [rows]: the inverse factors
layout(push_constant) uniform Push {
  ScaleRowsParams p;
  uint base[3];
} push;

void main() {
  const uint row = gl_WorkGroupID.x, cols = push.p.in_cols, rows = row_count(push.p.rows) * push.p.each;
  if (push.p.first_row + row >= rows) return;
  const uint from = push.base[0] + row * push.p.x_stride;
  // As bits: infinities and NaN order above all numbers. The exponent of a finite row, which is all that
  // matters, is passed as a float.
  uint largest = 0;
  for (uint c = gl_LocalInvocationIndex; c < cols; c += kThreads)
    largest = max(largest, floatBitsToUint(x[from + c]) & 0x7fffffff);
  // A row below 2^-112, or of zeros, is scaled like a row of 2^-112, so that both factors are normal numbers.
  const uint exponent = max(uint(group_max(float(largest >> 23))), 15);
  const float scale = uintBitsToFloat((2 * 127 + 14 - exponent) << 23);
  if (gl_LocalInvocationIndex == 0) scales[push.base[2] + row] = uintBitsToFloat((exponent - 14) << 23);

  const uint eights = push.p.depth / 8, to = push.base[1] / 4 + row * eights;
  for (uint e = gl_LocalInvocationIndex; e < eights; e += kThreads) {
    uvec4 words;
    [[unroll]] for (uint i = 0; i < 4; ++i) {
      const uint c = 8 * e + 2 * i;
      words[i] = packHalf2x16(scale * vec2(c < cols ? x[from + c] : 0, c + 1 < cols ? x[from + c + 1] : 0));
    }
    scaled[to + e] = words;
  }
}
