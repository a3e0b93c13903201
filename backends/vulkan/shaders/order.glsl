// How scores and logits compare: as unsigned integers, the same on every backend.

// Bits that order as numbers do, from those of a float: NaN lowest, with -inf; -0 as 0.
uint order_bits(uint bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) bits = 0xff800000;  // NaN
  if (bits == 0x80000000) bits = 0;                         // -0
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}
