// How the workgroups of a dispatch are divided among KV heads, by each head's tiles of work. The grid is
// sized for equal heads and used directly for them. If heads differ, the same workgroups, in order, are
// divided anew. The includer defines kLanes (lanes per subgroup), kMostShare (the most parts per head),
// kEqualHeads (heads are always equal) and
//
//   uint tiles_of(uint local_head);  // for the heads of the dispatch
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_KHR_shader_subgroup_shuffle : require

struct Share {
  uint local_head;  // the workgroup's head; no work if the dispatch has no such head
  uint part, parts;
  uint before;  // parts of the heads before it
};

// How many of `groups` workgroups a head with `tiles` of `total` tiles gets: at least one, and the same
// number for equal heads.
uint parts_of(uint tiles, uint total, uint groups, uint heads) {
  return min(1 + (groups - heads) * tiles / max(total, 1), kMostShare);
}

// The share of one of `groups` workgroups, which is `equal` if the heads are equal. Whole subgroups call
// this.
Share find_share(Share equal, uint groups, uint heads) {
  if (kEqualHeads) return equal;
  // One head per lane, so that all are loaded at once.
  const uint lane = gl_SubgroupInvocationID;
  const uint first_tiles = tiles_of(min(lane, heads - 1));
  const uint any = subgroupBroadcastFirst(first_tiles);
  bool alike = first_tiles == any;
  for (uint from = kLanes; from < heads; from += kLanes) alike = alike && tiles_of(min(from + lane, heads - 1)) == any;
  if (subgroupBallotBitCount(subgroupBallot(alike)) == kLanes) return equal;

  uint total = 0;
  for (uint from = 0; from < heads; from += kLanes)
    total += subgroupAdd(from + lane < heads ? tiles_of(from + lane) : 0);
  const uint group = equal.before + equal.part;
  uint before = 0;
  for (uint from = 0; from < heads; from += kLanes) {
    const uint own = from + lane < heads ? parts_of(tiles_of(from + lane), total, groups, heads) : 0;
    const uint begin = before + subgroupExclusiveAdd(own);
    const uvec4 mine = subgroupBallot(begin <= group && group < begin + own);
    if (subgroupBallotBitCount(mine) > 0) {
      const uint holder = subgroupBallotFindLSB(mine), head_begin = subgroupShuffle(begin, holder);
      return Share(from + holder, group - head_begin, subgroupShuffle(own, holder), head_begin);
    }
    before += subgroupAdd(own);
  }
  return Share(heads, 0, 1, 0);
}
// The same for workgroup (part, head) of a grid of (parts, heads).
Share find_share(uint part, uint head, uint parts, uint heads) {
  return find_share(Share(head, part, parts, head * parts), parts * heads, heads);
}
