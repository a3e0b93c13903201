// ssm, from chunk to chunk: a workgroup has kColumns columns of a head's state in shared memory.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../step.glsl"
#include "ssm_chunk.glsl"

layout(set = 0, binding = 2, std430) readonly buffer Prepared { float prepared[]; };
layout(set = 0, binding = 2, std430) readonly buffer PreparedQuads { vec4 prepared_quads[]; };
layout(set = 0, binding = 3, std430) readonly buffer D { float d[]; };
layout(set = 0, binding = 4, std430) buffer Slots { float slots[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push {
  SsmParams p;
  uint slot_stride;
  uint first, rows;  // of this dispatch; one that begins later in a step goes on from its own state
  uint base[5];
} push;

// A thread computes 4 rows and 2 columns of y.
const uint kTileRows = 4, kTileCols = 2;
const uint kColumns = kThreads * kTileRows * kTileCols / kChunk;
const uint kColThreads = kColumns / kTileCols;

shared float s[kState * kColumns];
shared float xs[kChunk * kColumns];

void main() {
  const SsmParams p = push.p;
  const uint thread = gl_LocalInvocationIndex, head = gl_WorkGroupID.y, first_col = gl_WorkGroupID.x * kColumns;
  if (push.first > 0 && push.first >= step.n_rows) return;
  const uint group = head / (p.heads / p.groups);
  const uint of_b = push.base[0] + p.b_column + group * kState, of_c = push.base[0] + p.c_column + group * kState;
  const uint of_x = push.base[0] + p.x_column + head * p.width + first_col;
  const uint of_y = push.base[4] + head * p.width + first_col;
  const float of_d = d[push.base[2] + head];

  const uint in_slot = push.base[3] + head * kState * p.width + first_col;
  const uint from = push.first > 0 ? step.state_to : step.state_from;
  for (uint i = thread; i < kState * kColumns; i += kThreads) {
    const uint at = in_slot + i / kColumns * p.width + i % kColumns;
    s[i] = from == kNoState ? 0 : slots[at + from * push.slot_stride];
  }
  const uint tile_row = thread / kColThreads * kTileRows, col = thread % kColThreads;
  const uint end = min(step.n_rows, push.first + push.rows);
  for (uint first = push.first; first < end; first += kChunk) {
    const uint of = push.base[1] + ((first - push.first) / kChunk * p.heads + head) * kPrepared;
    vec2 x[kTileRows], sums[kTileRows];
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
      const uint row = first + tile_row + i, at = of_x + row * p.xbc_stride + col;
      x[i] = row < end ? vec2(xbc[at], xbc[at + kColThreads]) : vec2(0);
      sums[i] = vec2(0);
      xs[(tile_row + i) * kColumns + col] = x[i].x;
      xs[(tile_row + i) * kColumns + col + kColThreads] = x[i].y;
    }
    barrier();
    for (uint n = 0; n < kState; n += 4) {
      vec2 of_s[4];
      [[unroll]] for (uint k = 0; k < 4; ++k) of_s[k] = vec2(s[(n + k) * kColumns + col], s[(n + k) * kColumns + col + kColThreads]);
      [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
        const vec4 c = read_quad(of_c + min(first + tile_row + i, end - 1) * p.xbc_stride + n);
        [[unroll]] for (uint k = 0; k < 4; ++k) sums[i] += c[k] * of_s[k];
      }
    }
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) sums[i] *= prepared[of + kScales + tile_row + i];
    // Only terms of the triangle: a value that is not a number must not reach earlier rows.
    for (uint j = 0; j <= tile_row; j += 4) {
      vec2 value[4];
      [[unroll]] for (uint k = 0; k < 4; ++k) value[k] = vec2(xs[(j + k) * kColumns + col], xs[(j + k) * kColumns + col + kColThreads]);
      [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
        const vec4 pairs = prepared_quads[(of + kPairs + (tile_row + i) * kChunk + j) / 4];
        [[unroll]] for (uint k = 0; k < 4; ++k)
          if (j + k <= tile_row + i) sums[i] += pairs[k] * value[k];
      }
    }
    [[unroll]] for (uint i = 0; i < kTileRows; ++i) {
      const uint row = first + tile_row + i;
      if (row >= end) continue;
      const vec2 made = sums[i] + of_d * x[i];
      y[of_y + row * p.y_stride + col] = made.x;
      y[of_y + row * p.y_stride + col + kColThreads] = made.y;
    }
    barrier();

    // Here a thread has a column, and every (kThreads / kColumns)th quad of its numbers.
    const uint s_col = thread % kColumns;
    float news[kChunk];
    [[unroll]] for (uint i = 0; i < kChunk; ++i) news[i] = xs[i * kColumns + s_col] * prepared[of + kNewScales + i];
    const float decay = prepared[of + kScales + kChunk - 1];
    for (uint n = thread / kColumns * 4; n < kState; n += kThreads / kColumns * 4) {
      vec4 sum = vec4(0);
      [[unroll]] for (uint i = 0; i < kChunk; ++i)
        sum += news[i] * read_quad(of_b + min(first + i, end - 1) * p.xbc_stride + n);
      [[unroll]] for (uint k = 0; k < 4; ++k) s[(n + k) * kColumns + s_col] = decay * s[(n + k) * kColumns + s_col] + sum[k];
    }
    barrier();
  }
  for (uint i = thread; i < kState * kColumns; i += kThreads)
    slots[in_slot + i / kColumns * p.width + i % kColumns + step.state_to * push.slot_stride] = s[i];
}
