// How the last part of a head to finish combines all `busy` parts. attend_pool.comp has written the results
// of each to `stats` and `outs`, from own_stats and own_outs on, `parts` per query head.

// Computes the weights[] of the parts of the subgroup's heads. The sinks of the query heads from first_query
// on are also added here.
void weigh_parts(uint own_stats, uint first_query, uint heads, uint parts, uint busy) {
  [[unroll]] for (uint j = 0; j < kHeadsEach; ++j) {
    const uint h = gl_SubgroupID + kSubgroups * j;
    if (h >= heads) continue;
    vec2 of_parts[kPartsEach];  // {maximum, sum}
#ifdef SINKS
    const float sink = sinks[push.base[9] + first_query + h] * kLog2E;
#else
    const float sink = kNoPeak;
#endif
    float top = sink, sum = 0;
    [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
      const uint part = gl_SubgroupInvocationID + kLanes * i;
      of_parts[i] = stats[own_stats + h * parts + min(part, busy - 1)];
      if (part >= busy) of_parts[i].y = 0;
      top = max(top, of_parts[i].x);
    }
    top = max_of_lanes(top);
#ifdef SINKS
    if (gl_SubgroupInvocationID == 0) sum = exp2(sink - top);
#endif
    [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
      of_parts[i].x = exp2(of_parts[i].x - top);
      sum += of_parts[i].x * of_parts[i].y;
    }
    const float factor = 1 / sum_of_lanes(sum);
    [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
      const uint part = gl_SubgroupInvocationID + kLanes * i;
      if (part < busy) weights[part * kHeadQuads + h / 4][h % 4] = of_parts[i].x * factor;
    }
  }
}

// Writes the rows of y of the query heads from first_query on.
void join_parts(uint own_stats, uint own_outs, uint first_query, uint heads, uint parts, uint busy) {
  const uint thread = gl_LocalInvocationIndex, part_slice = thread / kColumns;
  for (uint from = 0; from < kHeads * kQuads; from += kColumns) {
    const uint i = min(from + thread % kColumns, heads * kQuads - 1), h = i / kQuads;
    const uint column = own_outs + h * parts * kQuads + i % kQuads;
    vec4 of_parts[kLoads];  // loaded while their weights are computed
    [[unroll]] for (uint n = 0; n < kLoads; ++n)
      of_parts[n] = outs[column + min(part_slice + n * kPartSlices, busy - 1) * kQuads];
    if (from == 0) {
      weigh_parts(own_stats, first_query, heads, parts, busy);
      barrier();
    }
    vec4 sum = vec4(0);
    // No branches here: missing parts get weight zero, and are read from a valid address.
    [[dont_unroll]] for (uint first_part = part_slice; first_part < busy; first_part += kLoads * kPartSlices)
      [[unroll]] for (uint n = 0; n < kLoads; ++n) {
        const uint own = first_part + n * kPartSlices, next = own + kLoads * kPartSlices;
        const float weight = weights[min(own, busy - 1) * kHeadQuads + h / 4][h % 4];
        sum += (own < busy ? weight : 0) * of_parts[n];
        of_parts[n] = outs[column + min(next, busy - 1) * kQuads];
      }
    if (kPartSlices > 1) {  // in this case the loop has a single iteration
      room[thread] = sum;
      barrier();
      for (uint slice = 1; slice < kPartSlices; ++slice) sum += room[thread % kColumns + slice * kColumns];
    }
    if (thread >= kColumns || from + thread >= heads * kQuads) continue;
    const uint to = push.base[8] + (first_query + h) * kValueDim + i % kQuads * 4;
    [[unroll]] for (uint c = 0; c < 4; ++c)
      if (i % kQuads * 4 + c < kValueDim) y[to + c] = sum[c];
  }
}
