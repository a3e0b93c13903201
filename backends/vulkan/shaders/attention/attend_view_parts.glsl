// How workgroups divide the keys of a head that has more of them than others. attend_view.glsl includes this.
//
// A column of the grid processes one part of a head's keys, with a workgroup for each kRows of its queries.
// There are more columns than heads. If heads are equal, each has one column, and the other columns have no
// work. The first part of a head continues from earlier passes and leaves its results in y and ml, as any
// pass except the last does; the other parts leave theirs in outs and stats. The last workgroup to finish
// combines them.
#include "../last_group.glsl"

uint tiles_of(uint of_head) { return tiles_in(work_of(of_head, 0, step.n_rows * push.p.group - 1)); }
const uint kMostShare = 0xffffffff;  // as many as there are columns
#include "../shares.glsl"

Share share;  // of the workgroup

// Returns false if the workgroup has no work.
bool find_head() {
  const uint column = gl_WorkGroupID.x;
  share = find_share(Share(column, 0, 1, column), gl_NumWorkGroups.x, push.p.heads);
  local_head = share.local_head;
  return local_head < push.p.heads;
}

// The workgroup's part of the keys that its queries see. All parts have the same number of tiles, except the
// last ones, which may have fewer or none.
struct KeyPart {
  uint begin, end;
  uint busy;  // parts that have tiles; at least 1, because the first part always leaves a result
};
KeyPart own_keys(Work w) {
  const uint tiles = tiles_in(w), each = max((tiles + share.parts - 1) / share.parts, 1);
  KeyPart keys;
  keys.begin = w.begin + share.part * each * kKeys;
  keys.end = min(w.end, keys.begin + each * kKeys);
  keys.busy = kEqualHeads ? 1 : max((tiles + each - 1) / each, 1);
  return keys;
}

// Workgroups per column, and parts before this head's that are not the first of their head.
uint query_groups() { return (step.n_rows * push.p.group + kRows - 1) / kRows; }
uint parts_before() { return share.before - share.local_head; }

const uint kHeadQuads = (kValueDim + 3) / 4;  // of channels
uint part_row(uint part, uint vector) { return (parts_before() + part - 1) * query_groups() * kRows + vector; }
uint outs_start(uint part, uint vector) { return push.base[7] / 4 + part_row(part, vector) * kHeadQuads; }
uint stats_start(uint part, uint vector) { return push.base[8] / 2 + part_row(part, vector); }

// Four channels of y from c on; channels after the head's are zeros, and are not written.
vec4 y_quad(uint vector, uint c) {
  vec4 quad = vec4(0);
  [[unroll]] for (uint e = 0; e < 4; ++e)
    if (c + e < kValueDim) quad[e] = y[y_start(vector) + c + e];
  return quad;
}
void put_y_quad(uint vector, uint c, vec4 quad) {
  [[unroll]] for (uint e = 0; e < 4; ++e)
    if (c + e < kValueDim) y[y_start(vector) + c + e] = quad[e];
}
void put_ml(uint vector, vec2 stat) {
  ml[ml_start(vector)] = stat.x;
  ml[ml_start(vector) + 1] = stat.y;
}

// Stores a result of the workgroup's part.
void leave_quad(uint vector, uint c, vec4 quad) {
  if (share.part == 0)
    put_y_quad(vector, c, quad);
  else if (c < kValueDim)
    outs[outs_start(share.part, vector) + c / 4] = quad;
}
void leave_stat(uint vector, vec2 stat) {
  if (share.part == 0)
    put_ml(vector, stat);
  else
    stats[stats_start(share.part, vector)] = stat;
}

// Combines the parts of the queries from `first` on, in order. Several threads share a query, and load
// several quads of a part at once.
void join_parts(uint first, uint busy, bool last_pass) {
  const uint sharers = kThreads / kRows, kAtOnce = 8;
  const uint vector = first + gl_LocalInvocationIndex / sharers, sharer = gl_LocalInvocationIndex % sharers;
  const bool there = vector < step.n_rows * push.p.group;
  vec2 all = vec2(0);
  for (uint from = sharer; there && from < kHeadQuads; from += kAtOnce * sharers) {
    vec4 sums[kAtOnce];
    [[unroll]] for (uint i = 0; i < kAtOnce; ++i) sums[i] = y_quad(vector, (from + i * sharers) * 4);
    all = vec2(ml[ml_start(vector)], ml[ml_start(vector) + 1]);
    for (uint part = 1; part < busy; ++part) {
      const uint row = outs_start(part, vector);
      vec4 quads[kAtOnce];
      [[unroll]] for (uint i = 0; i < kAtOnce; ++i) quads[i] = outs[row + min(from + i * sharers, kHeadQuads - 1)];
      const vec2 stat = stats[stats_start(part, vector)];
      const float top = max(all.x, stat.x), shrink = exp2(all.x - top), weight = exp2(stat.x - top);
      all = vec2(top, all.y * shrink + stat.y * weight);
      [[unroll]] for (uint i = 0; i < kAtOnce; ++i) sums[i] = sums[i] * shrink + quads[i] * weight;
    }
    const float scale = last_pass ? 1 / all.y : 1;
    [[unroll]] for (uint i = 0; i < kAtOnce; ++i) put_y_quad(vector, (from + i * sharers) * 4, sums[i] * scale);
  }
  barrier();  // the first part's sums are no longer read
  if (there && sharer == 0 && !last_pass) put_ml(vector, all);
}

// All threads call this after the workgroup has stored its results for the queries from `first` on.
void finish(uint first, KeyPart taken, bool last_pass) {
  if (kEqualHeads || taken.busy == 1) return;
  const uint counter = push.base[9] + parts_before() * query_groups() + first / kRows;
  if (finishes_last(counter, taken.busy)) join_parts(first, taken.busy, last_pass);
}
