// Adds up the results that product_cooperative.comp leaves for tiles whose depth several workgroups shared. A
// thread computes one column of y.
#version 450
#extension GL_GOOGLE_include_directive : require
#define kOperands 6
#include "product.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 5, std430) readonly buffer Scales { float scales[]; };  // of rows of y
layout(set = 0, binding = 6, std430) readonly buffer Parts { float all_parts[]; };

const uint kTile = 128, kSize = 16;  // size of a tile, and of a matrix

void main() {
  const uint row = gl_WorkGroupID.y, col = gl_GlobalInvocationID.x;
  if (row >= product_rows() || col >= push.p.out_cols) return;
  // For a glu, 16 columns of each matrix alternate.
  const uint part_col = kActivates ? col / kSize * 2 * kSize + col % kSize : col;
  const uint stride = (push.p.out_cols * (kActivates ? 2 : 1) + kTile - 1) / kTile * kTile;
  const uint rows = (gl_NumWorkGroups.y + kTile - 1) / kTile * kTile;
  const uint parts = (push.p.in_cols + push.p.depth_each - 1) / push.p.depth_each;
  float sum = 0, up = 0;
  for (uint part = 0; part < parts; ++part) {
    const uint at = push.base[5] + (part * rows + row) * stride + part_col;
    sum += all_parts[at];
    if (kActivates) up += all_parts[at + kSize];
  }
  const float scale = scales[push.base[4] + row];
  if (kActivates)
    store_glu(row, col, scale * sum, scale * up);
  else
    store(row, col, scale * sum);
}
