// The queries of a part, and sums over threads. The includer has defined kTile, the units that a workgroup
// scores at a time, and vec4 room[], shared memory for at least the queries: [heads][quads of channels].
shared float of_threads[128];
// At the end, kSharers threads share a head.
const uint kSharers = kHeads > 4 ? 16 : 32, kPartsEach = kMostScoreParts / kSharers;

uint tiles_of(uint local_head) {
  const uint n = units_of(head_states[push.p.head_state + push.p.first_head + local_head]);
  return selects(step, n) ? (middle_end(step, n) - step.n_init + kTile - 1) / kTile : 0;
}
const uint kMostShare = kMostScoreParts;
#include "../shares.glsl"

uint thread;  // index in subgroup order, so that lanes of a subgroup are neighbours

// The pairs of a query, those that the threads process at once, and in how many queries.
const uint kPairs = kUnits * 4, kPairsAtOnce = kPairs > 128 ? 128 : kPairs, kAtOnce = 128 / kPairsAtOnce;

// Stores a pair of channels of the queries from first_query on in room: the mean over the rows, times scale. A
// thread has the pair of several heads, so that one angle rotates them all, and issues all its loads at once.
// Results for heads that do not exist are never read.
void rotate_pairs(uint first_query, uint heads, uint pair) {
  const uint kQueriesEach = (kHeads + kAtOnce - 1) / kAtOnce, first_head = thread / kPairsAtOnce;
  const uvec2 channels = channels_of(pair);
  vec2 angle = vec2(push.p.scale, 0);
  if (kSummed)
    angle.x /= float(step.n_rows);
  else if (pair < rope_pairs() && rotates_query())
    angle = rope_angle(score_position(), pair) * push.p.scale;
  const vec2 weights = kSummed || pair >= kHeadDim / 2 ? vec2(1) : query_weights(channels);  // summed ones have them
  vec2 x[kQueriesEach];
  [[unroll]] for (uint j = 0; j < kQueriesEach; ++j) {
    const uint query = first_query + min(first_head + kAtOnce * j, heads - 1);
    x[j] = vec2(0);
    if (pair >= kHeadDim / 2) continue;
    if (kSummed) {
      const uint at = push.base[1] + query * kHeadDim, stride = push.p.heads * push.p.group * kHeadDim;
      for (uint slice = 0; slice < push.slices; ++slice)
        x[j] += vec2(sums[at + slice * stride + channels.x], sums[at + slice * stride + channels.y]);
    } else {
      const uint at = push.base[0] + (push.p.first_head * push.p.group + query) * kHeadDim;
      x[j] = vec2(q[at + channels.x], q[at + channels.y]);
    }
  }
  [[unroll]] for (uint j = 0; j < kQueriesEach; ++j) {
    const uint h = first_head + kAtOnce * j;
    if (h >= kHeads) continue;
    const vec2 turned = rotated_pair(x[j], angle) * weights;
    room[h * kUnits * 2 + channels.x / 4][channels.x % 4] = turned.x;
    room[h * kUnits * 2 + channels.y / 4][channels.y % 4] = turned.y;
  }
}
void rotate_queries(uint first_query, uint heads) {
  for (uint pair = thread % kPairsAtOnce; pair < kPairs; pair += kPairsAtOnce) rotate_pairs(first_query, heads, pair);
}

// x of the thread whose index differs by `apart`, a power of two.
float from_thread(float x, uint apart) {
  if (apart < kLanes) return subgroupShuffleXor(x, apart);
  barrier();
  of_threads[thread] = x;
  barrier();
  return of_threads[thread ^ apart];
}
// The maximum and the sum over `sharers` neighbouring threads, a power of two.
float max_of_threads(float x, uint sharers) {
  [[unroll]] for (uint apart = 1; apart < sharers; apart *= 2) x = max(x, from_thread(x, apart));
  return x;
}
float sum_of_threads(float x, uint sharers) {
  [[unroll]] for (uint apart = 1; apart < sharers; apart *= 2) x += from_thread(x, apart);
  return x;
}
