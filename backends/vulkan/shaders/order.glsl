// How scores and logits compare: as unsigned integers, the same on every backend.

// Bits that order as numbers do, from those of a float: NaN lowest, with -inf; -0 as 0.
uint order_bits(uint bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) bits = 0xff800000;  // NaN
  if (bits == 0x80000000) bits = 0;                         // -0
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

// The shift that divides `width` + 1 keys into so many bins, a power of two, or fewer.
uint bin_shift(uint width, uint bins) { return uint(max(findMSB(width) + 1 - findMSB(bins), 0)); }
