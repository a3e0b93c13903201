// Finds the expert of a workgroup; whole subgroups call these functions. kLanes: lanes per subgroup.
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_KHR_shader_subgroup_shuffle : require

// Finds the expert of a slot: the number of experts whose slots end before it. Four loads are issued
// together.
void find_expert(uint slot) {
  expert = 0;
  for (uint from = 0; from < push.p.experts; from += 4 * kLanes) {
    bool before[4];
    [[unroll]] for (uint i = 0; i < 4; ++i) {
      const uint e = from + i * kLanes + gl_SubgroupInvocationID;
      before[i] = first_slot(min(e + 1, push.p.experts)) <= slot;
    }
    [[unroll]] for (uint i = 0; i < 4; ++i) expert += subgroupBallotBitCount(subgroupBallot(before[i]));
  }
}

// Divides each expert's slots into tiles of `each` and finds the slots of a tile. Returns false if there is
// no such tile.
bool find_tile(uint tile, uint each, out uint first, out uint end) {
  uint before = 0;
  for (uint from = 0; from < push.p.experts; from += kLanes) {
    const uint e = from + gl_SubgroupInvocationID;
    const uint own_first = e < push.p.experts ? first_slot(e) : 0, own_end = e < push.p.experts ? first_slot(e + 1) : 0;
    const uint tiles = (own_end - own_first + each - 1) / each, behind = before + subgroupInclusiveAdd(tiles);
    const uvec4 mine = subgroupBallot(behind > tile);
    if (subgroupBallotBitCount(mine) > 0) {
      const uint holder = subgroupBallotFindLSB(mine);
      expert = from + holder;
      first = subgroupShuffle(own_first + (tile - (behind - tiles)) * each, holder);
      end = min(first + each, subgroupShuffle(own_end, holder));
      return true;
    }
    before = subgroupMax(behind);
  }
  return false;
}
// The same for the visible slots of the dispatch.
bool find_seen_tile(uint tile, uint each, out uint first, out uint end) {
  if (!find_tile(tile, each, first, end) || !sees_expert()) return false;
  first = max(first, push.p.first_slot);
  end = min(end, push.p.first_slot + push.p.seen_slots);
  return first < end;
}
