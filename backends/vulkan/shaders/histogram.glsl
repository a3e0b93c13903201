// A workgroup's histogram of keys, and the bin where a rank falls. The shader that includes this defines kThreads, as scan.glsl
// has it, and kBins, a power of two and a multiple of kThreads. All threads must call these.
#include "scan.glsl"

shared uint histogram[kBins];

// The shift that divides `width` + 1 keys into as many bins as there are, or fewer.
uint bin_shift(uint width) { return uint(max(findMSB(width) + 1 - findMSB(kBins), 0)); }

void clear_histogram() {
  barrier();
  for (uint bin = thread_in_order(); bin < kBins; bin += kThreads) histogram[bin] = 0;
  barrier();
}

struct Bin {
  uint bin;
  uint wanted;  // of its keys, how many are picked
  uint count;   // and how many there are
};
shared Bin found_bin;

// The bin of the wanted-th largest key, from a histogram that is complete. There are at least as many keys.
Bin find_bin(uint wanted) {
  const uint kEach = kBins / kThreads, top = kBins - 1 - thread_in_order() * kEach;  // bins descend with threads
  uint own = 0;
  for (uint i = 0; i < kEach; ++i) own += histogram[top - i];
  uint above = scan_threads(own).x;  // keys in larger bins
  if (above < wanted && wanted <= above + own)
    for (uint i = 0; i < kEach; ++i) {
      const uint count = histogram[top - i];
      if (wanted <= above + count) {
        found_bin = Bin(top - i, wanted - above, count);
        break;
      }
      above += count;
    }
  barrier();
  return found_bin;
}

// The smallest and the largest of the threads' keys.
shared uint smallest, largest;
uvec2 smallest_and_largest(uint low, uint high) {
  if (thread_in_order() == 0) {
    smallest = 0xffffffff;
    largest = 0;
  }
  barrier();
  low = subgroupMin(low);
  high = subgroupMax(high);
  if (subgroupElect()) {
    atomicMin(smallest, low);
    atomicMax(largest, high);
  }
  barrier();
  return uvec2(smallest, largest);
}
