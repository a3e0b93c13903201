// delta_net, from chunk to chunk: a workgroup has kColumns columns of a head's state in shared memory.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../step.glsl"
#include "delta_chunk.glsl"

layout(set = 0, binding = 2, std430) readonly buffer Prepared { float prepared[]; };
layout(set = 0, binding = 2, std430) readonly buffer PreparedQuads { vec4 prepared_quads[]; };
layout(set = 0, binding = 3, std430) buffer Slots { float slots[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  DeltaNetParams p;
  uint slot_stride;
  uint first, rows;  // of this dispatch; one that begins later in a step goes on from its own state
  uint base[4];
} push;

// A thread computes 4 rows and 2 columns of products with [2 kChunk][kColumns] results.
const uint kTileRows = 4, kTileCols = 2;
const uint kColumns = kThreads * kTileRows * kTileCols / (2 * kChunk);
const uint kColThreads = kColumns / kTileCols;

shared float m[kWidth * kColumns];
shared float values[kChunk * kColumns];  // V - diag(e^G) K M
shared float news[kChunk * kColumns];    // diag(e^(G_last - G)) N, divided by the keys' lengths

void main() {
  const DeltaNetParams p = push.p;
  const uint thread = gl_LocalInvocationIndex, head = gl_WorkGroupID.y, first_col = gl_WorkGroupID.x * kColumns;
  if (push.first > 0 && push.first >= step.n_rows) return;
  const uint key_head = p.tiled == 1 ? head % p.key_heads : head / (p.value_heads / p.key_heads);
  const uint keys = push.base[0] + p.k_column + key_head * kWidth;
  const uint queries = push.base[0] + p.q_column + key_head * kWidth;
  const uint of_values = push.base[0] + p.v_column + head * kWidth + first_col;
  const uint of_y = push.base[3] + head * kWidth + first_col;

  const uint in_slot = push.base[2] + head * kWidth * kWidth + first_col;
  const uint from = push.first > 0 ? step.state_to : step.state_from;
  for (uint i = thread; i < kWidth * kColumns; i += kThreads) {
    const uint at = in_slot + i / kColumns * kWidth + i % kColumns;
    m[i] = from == kNoState ? 0 : slots[at + from * push.slot_stride];
  }
  const uint tile_row = thread / kColThreads * kTileRows, col = thread % kColThreads;
  const bool of_keys = tile_row < kChunk;
  const uint chunk_row = tile_row % kChunk;
  const uint end = min(step.n_rows, push.first + push.rows);
  for (uint first = push.first; first < end; first += kChunk) {
    const uint of = push.base[1] + ((first - push.first) / kChunk * p.value_heads + head) * kPrepared;
    uint row_at[kTileRows];
    vec2 v[kTileRows], sums[kTileRows];
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
      const uint row = first + chunk_row + i;
      row_at[i] = (of_keys ? keys : queries) + min(row, end - 1) * p.qkv_stride;
      v[i] = sums[i] = vec2(0);
      if (of_keys && row < end) {
        const uint at = of_values + row * p.qkv_stride + col;
        v[i] = vec2(qkv[at], qkv[at + kColThreads]);
      }
    }
    barrier();
    for (uint d = 0; d < kWidth; d += 4) {
      vec2 of_m[4];
      [[unroll]] for (uint i = 0; i < 4; ++i) {
        const uint at = (d + i) * kColumns + col;
        of_m[i] = vec2(m[at], m[at + kColThreads]);
      }
      [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
        const vec4 x = read_quad(row_at[i] + d);
        [[unroll]] for (uint k = 0; k < 4; ++k) sums[i] += x[k] * of_m[k];
      }
    }
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
      sums[i] *= prepared[of + kScales + tile_row + i];
      if (!of_keys) continue;
      values[(tile_row + i) * kColumns + col] = v[i].x - sums[i].x;
      values[(tile_row + i) * kColumns + col + kColThreads] = v[i].y - sums[i].y;
      sums[i] = vec2(0);
    }
    barrier();

    // Only terms of the triangle: a value that is not a number must not reach earlier rows.
    for (uint j = 0; j <= chunk_row; j += 4) {
      vec2 value[4];
      [[unroll]] for (uint k = 0; k < 4; ++k) {
        const uint at = (j + k) * kColumns + col;
        value[k] = vec2(values[at], values[at + kColThreads]);
      }
      [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
        const vec4 x = prepared_quads[(of + kPairs + (tile_row + i) * kChunk + j) / 4];
        [[unroll]] for (uint k = 0; k < 4; ++k)
          if (j + k <= chunk_row + i) sums[i] += x[k] * value[k];
      }
    }
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
      const uint row = first + chunk_row + i;
      if (of_keys) {
        sums[i] *= prepared[of + kNewScales + tile_row + i];
        news[(tile_row + i) * kColumns + col] = sums[i].x;
        news[(tile_row + i) * kColumns + col + kColThreads] = sums[i].y;
      } else if (row < end) {
        y[of_y + row * p.y_stride + col] = sums[i].x;
        y[of_y + row * p.y_stride + col + kColThreads] = sums[i].y;
      }
    }
    barrier();

    // Here a thread has a column, and every (kThreads / kColumns)th quad of its elements.
    const uint m_col = thread % kColumns;
    float of_news[kChunk];
    [[unroll]] for (uint i = 0; i < kChunk; ++i) of_news[i] = news[i * kColumns + m_col];
    const float decay = prepared[of + kDecay];
    for (uint d = thread / kColumns * 4; d < kWidth; d += kThreads / kColumns * 4) {
      vec4 sum = vec4(0);
      [[unroll]] for (uint i = 0; i < kChunk; ++i)
        sum += of_news[i] * read_quad(keys + min(first + i, end - 1) * p.qkv_stride + d);
      [[unroll]] for (uint k = 0; k < 4; ++k) {
        const uint at = (d + k) * kColumns + m_col;
        m[at] = decay * m[at] + sum[k];
      }
    }
  }
  barrier();
  for (uint i = thread; i < kWidth * kColumns; i += kThreads)
    slots[in_slot + i / kColumns * kWidth + i % kColumns + step.state_to * push.slot_stride] = m[i];
}
