// Bins of a layer's votes (top_k.h), ascending with them.

// The largest that the k-th largest vote of so many query heads can be.
float most_of_kth(uint queries, uint k) { return log(float(queries) / float(max(k, 1))); }

// The bits of how far a vote lies below that. -inf is farther away than any number.
int bits_below(float most, uint vote_bits) {
  if (vote_bits == 0xff800000) return 0x7f800000;
  precise const float below = most - uintBitsToFloat(vote_bits);  // two shaders must find the same bin
  return floatBitsToInt(below);
}
// Bins by these bits: the first and the last one have all that lies beyond them.
int step_of(int bits) { return bits >> kLayerShift; }
uint layer_bin(int bits) { return kLayerBins - 1 - uint(clamp(step_of(bits) - kLayerNearest, 0, int(kLayerBins - 1))); }
int step_of_bin(uint bin) { return kLayerNearest + int(kLayerBins - 1 - bin); }
// And within a bin that has bounds.
uint finer_bin(int bits) { return kListBins - 1 - ((bits >> (kLayerShift - findMSB(kListBins))) & (kListBins - 1)); }

// Where a bin is counted. Neighbours, which have most votes, are far apart: next to each other they were counted 5 us more slowly
// (32,768 votes, one H200).
uint count_at(uint bin) { return bin % 16 * (kLayerBins / 16) + bin / 16; }
