// How the workgroups that share a head's top_k exchange their counts of digits. Digits have 11, 11 and 10
// bits from the top; each value of a digit is a bin.
//
// scratch: [2][heads][parts][kBins] counts of an even and an odd digit, then [2][heads]{bits, wanted} after a
// digit.

layout(set = 0, binding = 6, std430) buffer Scratch { uint scratch[]; };

// The largest difference between keys that share the digits before `digit`.
uint digit_width(uint digit) { return digit == 0 ? 0xffffffff : digit == 1 ? 0x1fffff : 0x3ff; }

uint histogram_at(uint digit, uint head, uint part) {
  return push.base[5] + ((digit % 2 * push.p.heads + head) * push.parts + part) * kBins;
}
uint found_at(uint digit, uint head) {
  return histogram_at(0, 0, 0) + 2 * push.p.heads * push.parts * kBins + (digit % 2 * push.p.heads + head) * 2;
}

// The digits up to `digit`, which the previous dispatch counted.
struct Found {
  uint bits;
  Bin last;
};
Found find_digits(uint head, uint digit) {
  barrier();
  for (uint bin = thread_in_order(); bin < kBins; bin += kThreads) {
    uint sum = 0;
    for (uint part = 0; part < push.parts; ++part) sum += scratch[histogram_at(digit, head, part) + bin];
    histogram[bin] = sum;
  }
  barrier();
  const uint before = found_at(digit + 1, head);  // after digit - 1
  const Bin found = find_bin(digit == 0 ? wanted : scratch[before + 1]);
  return Found((digit == 0 ? 0 : scratch[before]) + (found.bin << bin_shift(digit_width(digit), kBins)), found);
}
