// delta_net: everything that delta_chunks needs of a chunk and a head except the state. (I + A)^-1 is computed
// column by column.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../step.glsl"
#include "gates.glsl"
#include "delta_chunk.glsl"

layout(set = 0, binding = 2, std430) readonly buffer Gates { float gates[]; };
layout(set = 0, binding = 3, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = 4, std430) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Prepared { float prepared[]; };
layout(push_constant) uniform Push {
  DeltaNetParams p;
  uint first;  // row of the first chunk
  uint base[5];
} push;

const uint kTileCols = 4, kTileRows = 2 * kChunk * kChunk / kTileCols / kThreads;
const uint kColThreads = kChunk / kTileCols;
const uint kPitch = kChunk + 1;  // floats between rows, so that rows begin in different banks

shared float pairs[2 * kChunk * kPitch];  // products of keys and keys, then of queries and keys
shared float inverse[kChunk * kPitch];    // (I + A)^-1 diag(beta)
shared float gammas[kChunk], betas[kChunk], lengths[2 * kChunk], squares[kThreads];
// Sums of gamma, as a float and what it lacks: differences of floats would lose bits of small gammas.
shared vec2 sums[kChunk];

float decay_between(vec2 sum, vec2 earlier) {
  precise const float gamma = (sum.x - earlier.x) + (sum.y - earlier.y);
  return keep_nan(gamma, exp_ulp(gamma));
}

void main() {
  const DeltaNetParams p = push.p;
  const uint thread = gl_LocalInvocationIndex, head = gl_WorkGroupID.y;
  const uint first = push.first + gl_WorkGroupID.x * kChunk;
  if (first >= step.n_rows) return;
  const uint last = step.n_rows - 1;
  const uint key_head = p.tiled == 1 ? head % p.key_heads : head / (p.value_heads / p.key_heads);
  const uint keys = push.base[0] + p.k_column + key_head * kWidth;
  const uint queries = push.base[0] + p.q_column + key_head * kWidth;

  const uint tile_row = thread / kColThreads * kTileRows, tile_col = thread % kColThreads;
  uint row_at[kTileRows], col_at[kTileCols];
  [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
    const uint row = tile_row + i;
    row_at[i] = (row < kChunk ? keys : queries) + min(first + row % kChunk, last) * p.qkv_stride;
  }
  [[unroll]] for (uint j = 0; j < kTileCols; ++j)
    col_at[j] = keys + min(first + tile_col + j * kColThreads, last) * p.qkv_stride;
  float products[kTileRows * kTileCols];
  [[unroll]] for (uint i = 0; i < kTileRows * kTileCols; ++i) products[i] = 0;
  for (uint d = 0; d < kWidth; d += 4) {
    vec4 cols[kTileCols];
    [[unroll]] for (uint j = 0; j < kTileCols; ++j) cols[j] = read_quad(col_at[j] + d);
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
      const vec4 row = read_quad(row_at[i] + d);
      [[unroll]] for (uint j = 0; j < kTileCols; ++j) products[i * kTileCols + j] += dot(row, cols[j]);
    }
  }
  [[unroll]] for (uint i = 0; i < kTileRows; ++i)
    [[unroll]] for (uint j = 0; j < kTileCols; ++j)
      pairs[(tile_row + i) * kPitch + tile_col + j * kColThreads] = products[i * kTileCols + j];

  // Parts of the queries' squares. Those of the keys are among the products.
  const uint kQueryThreads = kThreads / kChunk;
  const uint query_at = queries + min(first + thread / kQueryThreads, last) * p.qkv_stride;
  float of_query = 0;
  for (uint d = 4 * (thread % kQueryThreads); d < kWidth; d += 4 * kQueryThreads) {
    const vec4 x = read_quad(query_at + d);
    of_query += dot(x, x);
  }
  squares[thread] = of_query;
  // Rows beyond the step neither decay the state nor add to it.
  if (thread < kChunk) {
    const bool is_row = first + thread <= last;
    const uint at = push.base[1] + min(first + thread, last) * p.gates_stride + head;
    const float gamma = a[push.base[2] + head] * softplus(gates[at + p.alpha_column] + dt[push.base[3] + head]);
    gammas[thread] = is_row ? gamma : 0;
    betas[thread] = is_row ? sigmoid(gates[at + p.beta_column]) : 0;
  }
  barrier();

  if (thread < 2 * kChunk) {
    const uint row = thread % kChunk;
    float square = 0;
    if (thread < kChunk)
      square = pairs[row * kPitch + row];
    else
      [[unroll]] for (uint i = 0; i < kQueryThreads; ++i) square += squares[row * kQueryThreads + i];
    float scale = inversesqrt(square + p.eps);
    if (thread >= kChunk) scale *= inversesqrt(float(kWidth));
    lengths[thread] = first + row <= last ? scale : 0;
  }
  if (thread < kChunk) {
    precise float sum = 0, rest = 0;
    for (uint i = 0; i <= thread; ++i) {
      precise const float next = sum + gammas[i], added = next - sum;
      rest += (sum - (next - added)) + (gammas[i] - added);
      sum = next;
    }
    sums[thread] = vec2(sum, rest);
  }
  barrier();

  for (uint i = thread; i < 2 * kChunk * kChunk; i += kThreads) {
    const uint row = i / kChunk, col = i % kChunk, of = row % kChunk;
    if (col > of) continue;
    const float decay = decay_between(sums[of], sums[col]) * lengths[row] * lengths[col];
    pairs[row * kPitch + col] *= row < kChunk ? betas[of] * decay : decay;
  }
  barrier();

  if (thread < kChunk)
    for (uint row = thread; row < kChunk; ++row) {
      float sum = row == thread ? betas[row] : 0;
      for (uint i = thread; i < row; ++i) sum -= pairs[row * kPitch + i] * inverse[i * kPitch + thread];
      inverse[row * kPitch + thread] = sum;
    }
  barrier();

  const uint to = push.base[4] + (gl_WorkGroupID.x * p.value_heads + head) * kPrepared;
  for (uint i = thread; i < kChunk * kChunk; i += kThreads) {
    const uint row = i / kChunk, col = i % kChunk;
    float sum = 0;
    for (uint j = col; j <= row; ++j) sum += pairs[(kChunk + row) * kPitch + j] * inverse[j * kPitch + col];
    prepared[to + kPairs + i] = col <= row ? inverse[row * kPitch + col] : 0;
    prepared[to + kPairs + kChunk * kChunk + i] = sum;
  }
  if (thread < 2 * kChunk) {
    const uint row = thread % kChunk;
    prepared[to + kScales + thread] = lengths[thread] * decay_between(sums[row], vec2(0));
  }
  if (thread < kChunk)
    prepared[to + kNewScales + thread] = lengths[thread] * decay_between(sums[kChunk - 1], sums[thread]);
  if (thread == 0) prepared[to + kDecay] = decay_between(sums[kChunk - 1], vec2(0));
}
