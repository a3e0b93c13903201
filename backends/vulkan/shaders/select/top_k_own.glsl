// How a workgroup that knows the smallest picked vote writes its part of a list. Votes are for entries; if
// they are for positions, entries must be positions.
layout(constant_id = 4) const uint kPartVotes = 2048;  // the most per workgroup
const uint kEach = (kPartVotes + kThreads - 1) / kThreads;

// Writes the part with entries `own` to the lists of this many heads, which are equal.
void write_own(Range own, Lowest lowest, uint before, uint heads) {
  const uint each = (own.end - own.begin + gl_NumSubgroups - 1) / gl_NumSubgroups;
  const uint begin = own.begin + gl_SubgroupID * each, end = min(begin + each, own.end);
  uvec4 picked[kEach];
  uint count = 0;
  [[unroll]] for (uint j = 0; j < kEach; ++j) {
    const uint i = begin + j * gl_SubgroupSize + gl_SubgroupInvocationID;
    picked[j] = subgroupBallot(i < end && reaches(key_at(min(i, own.end - 1)), i, lowest));
    count += subgroupBallotBitCount(picked[j]);
  }
  const uint first = own_list + 1 + middle.begin + before + scan_subgroups(count).x;
  [[dont_unroll]] for (uint h = 0; h < heads; ++h) {
    uint to = first + h * push.p.list_capacity;
    [[unroll]] for (uint j = 0; j < kEach; ++j) {
      if (subgroupInverseBallot(picked[j]))
        list[to + subgroupBallotExclusiveBitCount(picked[j])] = begin + j * gl_SubgroupSize + gl_SubgroupInvocationID;
      to += subgroupBallotBitCount(picked[j]);
    }
  }
}
