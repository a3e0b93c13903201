// Bins of a layer's votes (top_k.h), in ascending order of votes.

// An upper bound for the k-th largest vote of this many query heads.
float most_of_kth(uint queries, uint k) { return log(float(queries) / float(max(k, 1))); }

// The bits of a vote's distance below that bound. -inf is farther away than any number.
int bits_below(float most, uint vote_bits) {
  if (vote_bits == 0xff800000) return 0x7f800000;
  precise const float below = most - uintBitsToFloat(vote_bits);  // two shaders must find the same bin
  return floatBitsToInt(below);
}
// The bin for these bits; the first and the last bin also get everything beyond them.
int step_of(int bits) { return bits >> kLayerShift; }
uint layer_bin(int bits) { return kLayerBins - 1 - uint(clamp(step_of(bits) - kLayerNearest, 0, int(kLayerBins - 1))); }
int step_of_bin(uint bin) { return kLayerNearest + int(kLayerBins - 1 - bin); }
// The finer bin within a bin that has bounds.
uint finer_bin(int bits) { return kListBins - 1 - ((bits >> (kLayerShift - findMSB(kListBins))) & (kListBins - 1)); }

// Where a bin's count is stored. Neighbouring bins, which have the most votes, are stored far apart: next to
// each other, counting took 5 us longer (32,768 votes, one H200).
uint count_at(uint bin) { return bin % 16 * (kLayerBins / 16) + bin / 16; }
