// Which expert a workgroup works for; whole subgroups call these. kLanes: lanes of a subgroup.
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_KHR_shader_subgroup_shuffle : require

// Whose slot it is: as many experts come before as have slots that end before it. Four loads go out together.
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

// Experts' slots in tiles of `each`, one expert's after the other's: finds the slots of a tile. False where there is none.
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
// The same, of what the dispatch sees.
bool find_seen_tile(uint tile, uint each, out uint first, out uint end) {
  if (!find_tile(tile, each, first, end) || !sees_expert()) return false;
  first = max(first, push.p.first_slot);
  end = min(end, push.p.first_slot + push.p.seen_slots);
  return first < end;
}
