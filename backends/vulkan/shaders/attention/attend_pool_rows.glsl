// How attend_pool.comp reads queries, keys and values. The includer has declared the operands and its
// constants.

// Whether the channels of pair i are adjacent.
bool adjacent(uint i) { return kPairing == kRopeAdjacent || i >= rope_pairs(); }

// The positions of a unit's two quads of channels in an aligned row; split_quads() makes first and second
// channels of them.
uvec2 unit_quads(uint unit) {
  return adjacent(unit * 4) ? uvec2(2 * unit, 2 * unit + 1) : uvec2(unit, unit + rope_pairs() / 4);
}
void sort_pairs(inout vec4 x, inout vec4 y, uint unit) {
  if (!kAligned || !adjacent(unit * 4)) return;
  const vec4 low = x, high = y;
  x = vec4(low.xz, high.xz);
  y = vec4(low.yw, high.yw);
}

#ifdef BLOCKS

KV_READER(key, k, kKvFormat)

// Two units of a key, of which the first has an even number; `row` is the key's first word. Aligned, they are
// the first and the second channels of eight pairs, or eight pairs of neighbours.
void load_units(uint row, uint unit, out vec4 x[2], out vec4 y[2]) {
  if (kAligned && adjacent(unit * 4)) {
    [[unroll]] for (uint i = 0; i < 2; ++i) {
      vec4 low, high;
      key_eight(row, (unit + i) * 8, low, high);
      x[i] = vec4(low.xz, high.xz);
      y[i] = vec4(low.yw, high.yw);
    }
  } else if (kAligned) {
    key_eight(row, unit * 4, x[0], x[1]);
    key_eight(row, unit * 4 + rope_pairs(), y[0], y[1]);
  } else {
    [[dont_unroll]] for (uint i = 0; i < 8; ++i) {
      const uvec2 c = channels_of(unit * 4 + i);
      x[i / 4][i % 4] = key_channel(row, c.x);
      y[i / 4][i % 4] = key_channel(row, c.y);
    }
  }
}

// A quad of channels of a value as it is stored: codes of 8 or 4 bits and a word that has their scale, or f16.
uvec2 load_quad(uint row, uint quad) {
  if (kValueFormat == kHalfRows) return uvec2(v[row + 2 * quad], v[row + 2 * quad + 1]);
  const uint scales = v[row + KV_CODE_WORDS(kValueFormat, kHeadDim) + quad / 16];
  if (kValueFormat == kByteRows) return uvec2(v[row + quad], scales);
  return uvec2(v[row + quad / 2] >> quad % 2 * 16, scales);
}
// Its numbers; those of blocks are the transform of the channels, times 4.
vec4 quad_of(uvec2 stored, uint quad) {
  if (kValueFormat == kHalfRows) return vec4(unpackHalf2x16(stored.x), unpackHalf2x16(stored.y));
  const float scale = half_in(stored.y, quad / 8);
  if (kValueFormat == kByteRows) return vec4(ivec4(stored.x << 24, stored.x << 16, stored.x << 8, stored.x) >> 24) * scale;
  return (vec4(stored.x & 15, stored.x >> 4 & 15, stored.x >> 8 & 15, stored.x >> 12 & 15) - 8) * scale;
}
// The channels of a quad of a block whose transformed quads, times 4, are room[first] and on.
vec4 transformed_back(uint first, uint quad) {
  vec4 sum = vec4(0);
  [[unroll]] for (uint i = 0; i < 8; ++i) sum += (bitCount(i & quad) & 1) != 0 ? -room[first + i] : room[first + i];
  sum = vec4(sum.xy + sum.zw, sum.xy - sum.zw);
  return vec4(sum.x + sum.y, sum.x - sum.y, sum.z + sum.w, sum.z - sum.w) * 0.25;
}

#else

uint k_bits(uint row, uint c) { return c < kHeadDim ? kv_bits(k[row + c / 2], c) : 0; }

// The words of a unit of a key; `row` is the key's first word.
uvec4 load_unit(uint row, uint unit) {
  if (kAligned) {
    const uvec2 quads = row / 2 + unit_quads(unit);
    return uvec4(k2[quads.x], k2[quads.y]);
  }
  uvec4 words;
  [[unroll]] for (uint i = 0; i < 2; ++i) {
    const uint pair = unit * 4 + i * 2;
    words[i] = kv_word(k_bits(row, channels_of(pair).x), k_bits(row, channels_of(pair + 1).x));
    words[i + 2] = kv_word(k_bits(row, channels_of(pair).y), k_bits(row, channels_of(pair + 1).y));
  }
  return words;
}
#endif

// The angles of a unit in a row of the table; pairs that do not rotate are unchanged.
void load_angles(uint row, uint unit, out vec4 cosines, out vec4 sines) {
  cosines = vec4(1);
  sines = vec4(0);
  if (kAligned) {
    if (unit * 4 >= rope_pairs()) return;
    const uint at = (ROPE_BASE + 2 * (row * rope_pairs() + unit * 4)) / 4;
    const vec4 low = rope_table4[at], high = rope_table4[at + 1];
    cosines = vec4(low.xz, high.xz);
    sines = vec4(low.yw, high.yw);
    return;
  }
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    if (unit * 4 + i >= rope_pairs()) continue;
    const vec2 angle = rope_row(row, unit * 4 + i);
    cosines[i] = angle.x;
    sines[i] = angle.y;
  }
}

#ifndef BLOCKS
// A quad of channels of a value.
uvec2 load_quad(uint row, uint quad) {
  if (kAligned) return v2[row / 2 + quad];
  return uvec2(v[row + 2 * quad], 2 * quad + 1 < kValueDim / 2 ? v[row + 2 * quad + 1] : 0);
}
#define quad_of(stored, quad) kv_four(stored)
#endif

// Rotates the queries, the first of which begins at `row`, for the tile that begins with list entry `first_key`
// of `count`. Queries with weights rotate to their position first, and then back by that of the tile. There is
// no branch that would delay later loads.
void rotate_queries(uint row, uint heads, uint count, uint first_key) {
  const bool weighted = ROPE.query_weight != 0;
  const uint position = kByList ? count - 1 - (weighted ? 0 : first_key) : uint(step.position);
  const uint kPairs = kUnits * 4;
  // The model's attention factor applies to query and key, but the low half of the table, which rotates keys,
  // lacks it.
  const float factor = kByList && !weighted && rope_pairs() > 0 ? rope_factor() : 1;
  [[unroll]] for (uint first = 0; first < kHeads * kPairs; first += kThreads) {
    const uint i = min(first + gl_LocalInvocationIndex, kHeads * kPairs - 1), h = i / kPairs, pair = i % kPairs;
    const uint from = row + min(h, heads - 1) * kHeadDim;
    const bool there = pair < kHeadDim / 2;
    const float x = there ? q[from + channels_of(pair).x] * (push.p.scale * kLog2E) : 0;
    const float y = there ? q[from + channels_of(pair).y] * (push.p.scale * kLog2E) : 0;
    const vec2 angle = pair < rope_pairs() ? rope_angle(position, pair) * factor : vec2(1, 0);
    if (first + gl_LocalInvocationIndex >= kHeads * kPairs) continue;
    const uint to = h * 2 * kUnits + pair / 4;
    vec2 turned = rotated_pair(vec2(x, y), angle);
    if (weighted && there) {
      turned *= query_weights(channels_of(pair));
      if (kByList && pair < rope_pairs()) turned = rotated_back(turned, rope_angle(first_key, pair));
    }
    room[to][pair % 4] = turned.x;
    room[to + kUnits][pair % 4] = turned.y;
  }
}
