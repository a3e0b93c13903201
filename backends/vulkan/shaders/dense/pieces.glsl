// How matvec multiplies the block formats: pieces of 32 columns of a row of W with the same columns of x.
//
// Four bytes become floats by one operation each, `number & mask | bits of 2^23`; another one subtracts the
// 2^23, and an offset with it. Bytes 1 and 3 stay in place in the word, which makes them 256 times as large;
// the corresponding x are divided by that factor once for all rows of W.

// Blocks of 16-byte words are read from memory. Others pass through shared memory, of which each subgroup has
// its own part, so that no thread waits for other subgroups.
const bool kSuper = kType == kQ4_K || kType == kQ5_K;
const bool kFp4 = kType == kMXFP4;
const bool kStaged = kType == kQ8_0 || kType == kQ4_0 || kType == kQ4_1 || kType == kQ5_0 || kType == kQ5_1 || kType == kQ6_K;
const bool kInPieces = kSuper || kFp4 || kStaged;  // other types are multiplied four weights at a time
const bool kHasMinimum = kSuper || kType == kQ4_1 || kType == kQ5_1;

// ---- x ----

#ifdef DIGITS
#include "digits.glsl"
#endif

// The eight quads of x that belong to a piece, divided by the bytes' factors, and the sum that its minimum is
// multiplied with.
struct Columns {
  vec4 quads[8];
  float sum;
#ifdef DIGITS
  Digits digits;  // instead of the quads
#endif
};

// The first column of quad i of a piece.
uint quad_column(uint piece, uint i) {
  const uint part = piece % 8;
  // 16 bytes of q4_K and q5_K hold 16 columns of each of two groups of 32; 8 bytes of q6_K hold 8 columns of
  // each of two groups that are two apart.
  if (kSuper) return piece / 8 * 256 + part / 2 * 64 + i / 4 * 32 + part % 2 * 16 + i % 4 * 4;
  if (kType == kQ6_K) return piece / 8 * 256 + part / 4 * 128 + i / 2 * 32 + part % 4 * 8 + i % 2 * 4;
  return piece * 32 + i * 4;
}
float sum_of(vec4 v) { return v.x + v.y + (v.z + v.w); }

Columns columns_of(uint row, uint piece) {
  Columns c;
  [[unroll]] for (uint i = 0; i < 8; ++i) c.quads[i] = x_at(row, quad_column(piece, i));
  const float first = sum_of(c.quads[0] + c.quads[1] + (c.quads[2] + c.quads[3]));
  const float last = sum_of(c.quads[4] + c.quads[5] + (c.quads[6] + c.quads[7]));
  // Two pieces share two groups: the first has the minimum of one group, the second that of the other
  if (kSuper) {
    const bool second = piece % 2 != 0;
    c.sum = (second ? last : first) + subgroupShuffleXor(second ? first : last, 1);
  } else {
    c.sum = first + last;
  }
#ifdef DIGITS
  c.digits = digits_of(c.quads, first + last);
#endif
  if (!kFp4) [[unroll]] for (uint i = 0; i < 8; ++i) c.quads[i] *= vec4(1, 1.0 / 256, 1, 1.0 / 256);
  return c;
}

// ---- numbers ----

// sum + the products of x and `factor` (n - offset), where n are the bytes of a word under a mask; all of
// these are exact in f32.
float add_numbers(float sum, uint word, uint mask, float offset, vec4 of_x) {
  const uvec4 bytes = uvec4(word, word, word >> 16, word >> 16) & (mask & uvec4(0xff, 0xff00, 0xff, 0xff00));
  const vec4 n = uintBitsToFloat(bytes | 0x4b000000) - (8388608.0 + offset * vec4(1, 256, 1, 256));
  return add_products(sum, n, of_x);
}
const uint kLow = 0x0f0f0f0f, kHigh = 0xf0f0f0f0, kAll = 0xffffffff;

// ---- staging ----

// Eight pieces are one block of q6_K or eight blocks of the other types.
const uint kTeam = kLanes < 8 ? kShare : kLanes;  // threads that share a strip of a line, one piece each
const uint kStripBytes = kTeam * kBlockBytes / (kType == kQ6_K ? 8 : 1);
const uint kStripQuads = kStaged ? kStripBytes / 16 + 2 : 1;  // 16-byte units that hold a strip
const uint kSteps = (kStripQuads + kTeam - 1) / kTeam;
shared uint staged[kStaged ? kThreads / kTeam * kStripQuads * 4 : 1];

// The strip of the thread's team.
uint own_strip() { return place / kTeam * (kStripQuads * 4); }
void await_team() {
  if (kTeam == kLanes)
    subgroupBarrier();
  else
    barrier();
}
// Where the strip of the thread's team begins in a row; strips begin at a piece.
uint strip_start(uint first_piece) {
  return (first_piece + thread / kTeam * kTeam) / (kType == kQ6_K ? 8 : 1) * kBlockBytes;
}

// For lines that are read from memory: the block's first 16 bytes, the thread's piece, and q5_K's fifth bits.
struct Words {
  uvec4 head, quants, fifths;
};
Words words;  // of the current line
// Data in flight: the words of the next lines, or the thread's part of their strips.
Words fetched[kTogether];
uvec4 fetched_quads[kTogether * kSteps];

Words fetch_words(uint line, uint piece) {
  if (kFp4) {  // 17 bytes from any byte on are in five words
    const uint first = (line_start(line) + piece * kBlockBytes) / 4, m = line % kMatrices;
    return Words(uvec4(word_at(m, first + 4), 0, 0, 0),
                 uvec4(word_at(m, first), word_at(m, first + 1), word_at(m, first + 2), word_at(m, first + 3)), uvec4(0));
  }
  const uint block_quads = kType == kQ5_K ? 11 : 9, part = piece % 8, m = line % kMatrices;
  const uint block = line_start(line) / 16 + piece / 8 * block_quads;
  return Words(words_at(m, block), words_at(m, block + block_quads - 8 + part),
               kType == kQ5_K ? words_at(m, block + 1 + part % 2) : uvec4(0));
}
// The words of a matrix from 4 i on. Beyond the last unit the last one is read again, because the matrix may
// end within 16 bytes.
uvec4 fetch_quad(uint matrix, uint i, uint last) {
  if (4 * i + 3 <= last) return words_at(matrix, i);
  return uvec4(word_at(matrix, 4 * i), word_at(matrix, min(4 * i + 1, last)), word_at(matrix, min(4 * i + 2, last)), 0);
}

// Starts loading the data of a line in the strip that begins with a piece.
void fetch(uint slot, uint first_piece, uint line) {
  if (!kStaged) {
    fetched[slot] = fetch_words(line, min(first_piece + thread, push.p.in_cols / 32 - 1));
    return;
  }
  const uint strip = min(strip_start(first_piece), push.p.row_bytes), bytes = min(kStripBytes, push.p.row_bytes - strip);
  const uint last = (matrix_rows() * push.p.row_bytes + 3) / 4 - 1;
  const uint start = line_start(line) + strip, end = (start + bytes + 15) / 16;
  [[unroll]] for (uint s = 0; s < kSteps; ++s) {
    const uint i = min(start / 16 + s * kTeam + thread % kTeam, end - 1);
    fetched_quads[slot * kSteps + s] = fetch_quad(line % kMatrices, i, last);
  }
}

// Moves the loaded data to where it is multiplied from.
void take_fetched(uint slot) {
  if (!kStaged) {
    words = fetched[slot];
    return;
  }
  await_team();  // the previous data is no longer read
  [[unroll]] for (uint s = 0; s < kSteps; ++s) {
    const uint i = s * kTeam + thread % kTeam, to = own_strip() + 4 * i;
    if (i < kStripQuads)
      [[unroll]] for (uint k = 0; k < 4; ++k) staged[to + k] = fetched_quads[slot * kSteps + s][k];
  }
  await_team();
}

// Words 0 and 1, or word 0, from an even byte of the staged data on. One word more may be read; it exists.
uvec2 two_words(uint byte) {
  const uint a = staged[byte / 4], b = staged[byte / 4 + 1], c = staged[byte / 4 + 2];
  return byte % 4 == 0 ? uvec2(a, b) : uvec2(a >> 16 | b << 16, b >> 16 | c << 16);
}
uint one_word(uint byte) {
  const uint a = staged[byte / 4], b = staged[byte / 4 + 1];
  return byte % 4 == 0 ? a : a >> 16 | b << 16;
}
float one_half(uint byte) { return unpackHalf2x16(staged[byte / 4] >> 8 * (byte % 4)).x; }

// ---- products ----

// The scales and minima of q4_K and q5_K have six bits; those of the last four groups are stored in two
// places.
struct Places {
  uint low, high;            // shifts of the words
  uint low_mask, high_mask;  // masks of a byte
};
Places places_of(uint pair, uint more) {
  const uint low = 16 * (pair % 2) + more;
  return pair < 2 ? Places(low, low, 0x3f, 0) : Places(low + 2, low, 0x30, 0x0f);
}
// Those of groups 2 pair and 2 pair + 1, one byte each.
uint two_scales(uint pair) {
  const Places at = places_of(pair, 0);
  return words.head.y >> at.low & 0x101 * at.low_mask | words.head.w >> at.high & 0x101 * at.high_mask;
}
// That of the group whose minimum belongs to the piece.
uint minimum_of(uint piece) {
  const Places at = places_of(piece % 8 / 2, piece % 2 * 8);
  return words.head.z >> at.low & at.low_mask | words.head.w >> at.high + 4 & at.high_mask;
}

#ifdef DIGITS
#include "digit_products.glsl"
#else
float super_product(uint piece, Columns x) {
  const uint pair = piece % 8 / 2;  // pair of groups, whose scales and minima are two neighbouring bytes
  float low = 0, high = 0;
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    const uint q = words.quants[i];
    if (kType == kQ5_K) {
      const uint fifths = words.fifths[i] >> 2 * pair;
      low = add_numbers(low, q & kLow | fifths << 4 & 0x10101010, kAll, 0, x.quads[i]);
      high = add_numbers(high, q >> 4 & kLow | fifths << 3 & 0x10101010, kAll, 0, x.quads[4 + i]);
    } else {
      low = add_numbers(low, q, kLow, 0, x.quads[i]);
      high = add_numbers(high, q, kHigh, 0, x.quads[4 + i]);
    }
  }
  if (kType == kQ4_K) high *= 1.0 / 16;
  const uint scales = two_scales(pair);
  const vec2 d = unpackHalf2x16(words.head.x);
  return d.x * (float(scales & 0xff) * low + float(scales >> 8) * high) -
         d.y * (float(minimum_of(piece)) * x.sum);
}

// A piece has 8 bytes of low nibbles for groups 0 and 2 of a half, 8 for groups 1 and 3, and 8 with pairs of
// high bits for all four.
float q6_K_product(uint block, uint part, Columns x) {
  const uint half_block = part / 4, i = part % 4;
  const uvec2 even = two_words(block + 64 * half_block + 8 * i), odd = two_words(block + 64 * half_block + 32 + 8 * i),
              pairs = two_words(block + 128 + 32 * half_block + 8 * i);
  vec4 groups = vec4(0);
  [[unroll]] for (uint k = 0; k < 2; ++k) {
    const uint bits = 0x30303030;
    groups[0] = add_numbers(groups[0], even[k] & kLow | pairs[k] << 4 & bits, kAll, 32, x.quads[k]);
    groups[1] = add_numbers(groups[1], odd[k] & kLow | pairs[k] << 2 & bits, kAll, 32, x.quads[2 + k]);
    groups[2] = add_numbers(groups[2], even[k] >> 4 & kLow | pairs[k] & bits, kAll, 32, x.quads[4 + k]);
    groups[3] = add_numbers(groups[3], odd[k] >> 4 & kLow | pairs[k] >> 2 & bits, kAll, 32, x.quads[6 + k]);
  }
  // Two signed scales of 16 columns per group.
  const ivec2 scales = ivec2(two_words(block + 192 + 8 * half_block) >> 8 * (i / 2));
  return one_half(block + 208) *
         dot(groups, vec4(bitfieldExtract(scales, 0, 8), bitfieldExtract(scales, 16, 8)).xzyw);
}
#endif

// q8_0: a scale and 32 signed bytes. q4_0, q4_1, q5_0, q5_1: a scale, a minimum, 32 fifth bits, as far as the
// type has them, and 16 bytes; their low nibbles are columns 0 to 15, the high nibbles the others.
float block_product(uint block, Columns x) {
  const float d = one_half(block);
  if (kType == kQ8_0) {
    float sum = 0;
    [[unroll]] for (uint i = 0; i < 4; ++i) {
      const uvec2 q = two_words(block + 2 + 8 * i) ^ 0x80808080;
      sum = add_numbers(sum, q.x, kAll, 128, x.quads[2 * i]);
      sum = add_numbers(sum, q.y, kAll, 128, x.quads[2 * i + 1]);
    }
    return d * sum;
  }
  const bool has_fifths = kType == kQ5_0 || kType == kQ5_1;
  const uint quants = block + kBlockBytes - 16;
  const float offset = kHasMinimum ? 0.0 : has_fifths ? 16.0 : 8.0;
  const uint fifths = has_fifths ? one_word(quants - 4) : 0;
  float low = 0, high = 0;
  [[unroll]] for (uint i = 0; i < 4; i += 2) {
    const uvec2 q = two_words(quants + 4 * i);
    [[unroll]] for (uint k = 0; k < 2; ++k) {
      low = add_numbers(low, q[k] & kLow | fifth_bits(fifths >> 4 * (i + k)), kAll, offset, x.quads[i + k]);
      high = add_numbers(high, q[k] >> 4 & kLow | fifth_bits(fifths >> 16 + 4 * (i + k)), kAll, offset, x.quads[4 + i + k]);
    }
  }
  return d * (low + high) + (kHasMinimum ? one_half(block + 2) * x.sum : 0.0);
}

// mxfp4: an exponent, and 16 bytes; their low nibbles are columns 0 to 15, the high nibbles the others. The 4
// bits of a number are those of an f16: the sign, the last two bits of the exponent and the first of the
// mantissa. As an f16 it is 2^-14 times as large, and subnormal if the number itself is. This converts the
// upper bytes of four of them:
vec4 four_halves(uint bytes) {
  const vec2 even = unpackHalf2x16(bytes << 8 & 0xff00ff00), odd = unpackHalf2x16(bytes & 0xff00ff00);
  return vec4(even.x, odd.x, even.y, odd.y);
}
float fp4_product(uint byte, Columns x) {
  const uint shift = 8 * (byte % 4);
  const uint five[5] = {words.quants.x, words.quants.y, words.quants.z, words.quants.w, words.head.x};
  vec4 sums = vec4(0);
  // Shifts right by 8 to 32 bits, as the upper half of a product.
  const uint factor = 1u << 24 - shift;
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    uint upper, lower;
    umulExtended(five[i], factor, upper, lower);
    const uint q = five[i + 1] * factor + upper;
    sums = fma(four_halves(q << 1 & 0x0e0e0e0e | q << 4 & 0x80808080), x.quads[i], sums);
    sums = fma(four_halves(q >> 3 & 0x0e0e0e0e | q & 0x80808080), x.quads[4 + i], sums);
  }
  return fp4_scale(words.quants.x >> shift & 0xff) * (32768.0 * sum_of(sums));
}

// The product of the thread's piece with a line whose data was moved by take_fetched().
float piece_product(uint line, uint first_piece, Columns x) {
  const uint piece = min(first_piece + thread, push.p.in_cols / 32 - 1);
  if (kFp4) return fp4_product(line_start(line) + piece * kBlockBytes, x);
  if (!kStaged) return super_product(piece, x);
  const uint strip = 4 * own_strip() + (line_start(line) + strip_start(first_piece)) % 16, own = thread % kTeam;
#ifdef DIGITS
  if (kType == kQ8_0) return q8_0_product(strip + own * kBlockBytes, x);
#endif
  return kType == kQ6_K ? q6_K_product(strip + own / 8 * kBlockBytes, own % 8, x)
                        : block_product(strip + own * kBlockBytes, x);
}
