// Reads x and W for matvec and product, in f32.
#ifdef EXPERTS
#include "experts.glsl"
#else
#include "product.glsl"
#endif
#include "formats.glsl"

// Rows of x begin at whole quads and consist of whole quads
layout(constant_id = 2) const bool kInQuads = false;

layout(set = 0, binding = 1, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = 1, std430) readonly buffer XQuads { vec4 x_quads[]; };
layout(set = 0, binding = 2, std430) readonly buffer W { uint w[]; };
#ifdef BOOKS
layout(set = 0, binding = kOperands, std430) readonly buffer Books { uint books[]; };
uint book_word(uint i) { return books[push.base[kOperands - 1] + i]; }
#endif

// Elements `column` to `column` + 3 of a row of x, with zeros after its end.
vec4 x_at(uint row, uint column) {
  const uint at = push.base[0] + row * push.p.x_stride + column;
  if (kInQuads) return x_quads[at / 4];
  vec4 v = vec4(0);
  [[unroll]] for (uint i = 0; i < 4; ++i)
    if (column + i < push.p.in_cols) v[i] = x[at + i];
  return v;
}

// sum + a b, for four products.
float add_products(float sum, vec4 a, vec4 b) { return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum)))); }
