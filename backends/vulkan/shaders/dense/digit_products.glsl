// Products of q4_K, q5_K, q6_K and q8_0 with digits of x (digits.glsl).

// The sums of a digit stay below 2^26: 2 * 16 columns of at most 2^7 * 15, 16 times as large, with scales of
// 6 bits.
float super_product(uint piece, Columns x) {
  const uint pair = piece % 8 / 2;  // pair of groups, whose scales and minima are two neighbouring bytes
  uint low[4], high[4];
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    const uint q = words.quants[i];
    if (kType == kQ5_K) {
      const uint fifths = words.fifths[i] >> 2 * pair;
      low[i] = q & kLow | fifths << 4 & 0x10101010;
      high[i] = q >> 4 & kLow | fifths << 3 & 0x10101010;
    } else {
      low[i] = q & kLow;
      high[i] = q & kHigh;  // 16 times as large
    }
  }
  const uint scales = two_scales(pair);
  const int low_scale = int(scales & 0xff) * (kType == kQ4_K ? 16 : 1), high_scale = int(scales >> 8);
  float sum = 0;
  [[unroll]] for (uint k = 0; k < kDigits; ++k) {
    int low_sum = 0, high_sum = 0;
    [[unroll]] for (uint i = 0; i < 4; ++i) {
      low_sum += dot_unsigned(x.digits.words[8 * k + i], low[i], kFourBytes);
      high_sum += dot_unsigned(x.digits.words[8 * k + 4 + i], high[i], kFourBytes);
    }
    sum += float(1u << 8 * k) * float(low_scale * low_sum + high_scale * high_sum);
  }
  const vec2 d = unpackHalf2x16(words.head.x);
  return d.x * (kType == kQ4_K ? 1.0 / 16 : 1.0) * (x.digits.unit * sum) -
         d.y * (float(minimum_of(piece)) * x.sum);
}

// A piece has 8 bytes of low nibbles for groups 0 and 2 of a half, 8 for groups 1 and 3, and 8 with pairs of
// high bits for all four. Four times a weight is a signed byte: its six bits at the top, the highest
// inverted. The sums are at most 2^26 and fit 32 bits.
float q6_K_product(uint block, uint part, Columns x) {
  const uint half_block = part / 4, i = part % 4;
  const uvec2 even = two_words(block + 64 * half_block + 8 * i), odd = two_words(block + 64 * half_block + 32 + 8 * i),
              pairs = two_words(block + 128 + 32 * half_block + 8 * i) ^ 0xaaaaaaaa;
  const uint four = 0x3c3c3c3c, two = 0xc0c0c0c0;
  ivec2 numbers[4];  // of a group
  numbers[0] = ivec2(even << 2 & four | pairs << 6 & two);
  numbers[1] = ivec2(odd << 2 & four | pairs << 4 & two);
  numbers[2] = ivec2(even >> 2 & four | pairs << 2 & two);
  numbers[3] = ivec2(odd >> 2 & four | pairs & two);
  // Two signed scales of 16 columns per group.
  const ivec2 words = ivec2(two_words(block + 192 + 8 * half_block) >> 8 * (i / 2));
  const ivec4 scales = ivec4(bitfieldExtract(words, 0, 8), bitfieldExtract(words, 16, 8)).xzyw;
  float sum = 0;
  [[unroll]] for (uint k = 0; k < kDigits; ++k) {
    int of_digit = 0;
    [[unroll]] for (uint g = 0; g < 4; ++g)
      of_digit += scales[g] * (dot_signed(x.digits.words[8 * k + 2 * g], numbers[g].x, kFourBytes) +
                               dot_signed(x.digits.words[8 * k + 2 * g + 1], numbers[g].y, kFourBytes));
    sum += float(1u << 8 * k) * float(of_digit);
  }
  return one_half(block + 208) / 4 * (x.digits.unit * sum);
}

// A scale and 32 signed bytes. The sums are at most 2^19 and fit 32 bits.
float q8_0_product(uint block, Columns x) {
  int numbers[8];
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    const ivec2 two = ivec2(two_words(block + 2 + 8 * i));
    numbers[2 * i] = two.x;
    numbers[2 * i + 1] = two.y;
  }
  float sum = 0;
  [[unroll]] for (uint k = 0; k < kDigits; ++k) {
    int of_digit = 0;
    [[unroll]] for (uint i = 0; i < 8; ++i) of_digit += dot_signed(x.digits.words[8 * k + i], numbers[i], kFourBytes);
    sum += float(1u << 8 * k) * float(of_digit);
  }
  return one_half(block) * (x.digits.unit * sum);
}
