// The entries that a step works on. C++, CUDA and GLSL share this header, so every backend lists the same
// entries.
#ifndef THIMBLE_REGIONS_H
#define THIMBLE_REGIONS_H

#if defined(__CUDACC__)
#define THIMBLE_FUNCTION __host__ __device__ inline
#elif defined(__cplusplus)
#define THIMBLE_FUNCTION inline
#else
#define THIMBLE_FUNCTION
#endif

#ifdef __cplusplus
#include "backends/op_params.h"
namespace thimble {
#endif

// The entries of a head, including the step's rows.
THIMBLE_FUNCTION uint step_entries(StepParams step, HeadState head) { return head.n_entries + step.n_rows; }

// The number of units that a selection picks from. A unit is an entry or a page; the last page may be short.
THIMBLE_FUNCTION uint units(uint entries, uint page) { return (entries + page - 1) / page; }

// Whether a head with so many units is selected from. With fewer units, everything is attended (backend.h).
// No sum here can overflow.
THIMBLE_FUNCTION bool selects(StepParams step, uint units) {
  if (units <= step.n_init) return false;
  const uint rest = units - step.n_init;
  return rest > step.n_local && rest - step.n_local > step.select_k;
}

// A selection picks from the units [n_init, middle_end).
THIMBLE_FUNCTION uint middle_end(StepParams step, uint units) { return units - step.n_local; }

// [begin, end) are the units that need a score to be listed, and `wanted` of them are listed. The units
// before and after are always listed.
struct Regions {
  uint begin, end, wanted;
};
THIMBLE_FUNCTION Regions selected_regions(StepParams step, uint units) {
  Regions r;
  r.begin = step.n_init;
  r.end = middle_end(step, units);
  r.wanted = step.select_k;
  return r;
}
// If an eviction keeps fewer entries than are protected, the last entries have priority over the first.
THIMBLE_FUNCTION Regions kept_regions(HeadState head, uint entries) {
  const uint last = head.protect_last < head.keep ? head.protect_last : head.keep;
  const uint room = head.keep - last;
  Regions r;
  r.begin = head.protect_first < room ? head.protect_first : room;
  r.end = entries - last;
  r.wanted = room - r.begin;
  return r;
}

// The first of `entries` that is inside the window.
THIMBLE_FUNCTION uint window_begin(uint window, uint entries) {
  return window != 0 && entries > window ? entries - window : 0;
}

// The entries that the queries of query_score see, numbered from 0: first the sinks, then the entries of the
// run and the step's rows from `first` on. With a list, an entry here is an index in the list.
struct QuerySpan {
  uint rows;    // number of queries
  uint sinks;   // number of entries at the start
  uint first;   // the entry after the sinks
  uint end;     // one more than the last entry
  uint count;   // all entries; a row sees as many fewer as rows follow it
  uint scored;  // number of entries after the sinks that get a score
};
// `entries` is the number of entries of the head, including the step's rows, or the length of its list.
THIMBLE_FUNCTION QuerySpan query_span(StepParams step, HeadState head, QueryScoreParams p, uint entries) {
  const bool by_rows = p.kind == kQueryRows;
  QuerySpan s;
  s.rows = by_rows ? step.n_rows : 1;
  s.end = entries;
  s.first = window_begin(p.window, entries);
  if (by_rows) s.first = head.n_entries > step.n_rows ? head.n_entries - step.n_rows : 0;
  s.sinks = !by_rows ? 0 : p.sinks < s.first ? p.sinks : s.first;
  s.count = s.sinks + s.end - s.first;
  s.scored = by_rows ? head.n_entries - s.first : s.count;
  return s;
}
THIMBLE_FUNCTION uint entry_of(QuerySpan s, uint i) { return i < s.sinks ? i : s.first + i - s.sinks; }
// The number of tiles of the span, and the number of tiles per sum.
THIMBLE_FUNCTION uint query_tiles(QuerySpan s) { return units(s.count, kQueryScoreTile); }
THIMBLE_FUNCTION uint tiles_of_sum(QuerySpan s) { return units(query_tiles(s), kQueryScoreSums); }
// For a row of queries: how many entries of the span it sees, and its rotary position.
THIMBLE_FUNCTION uint entries_seen(QuerySpan s, uint row) { return s.count - (s.rows - 1 - row); }
THIMBLE_FUNCTION uint query_position(StepParams step, QuerySpan s, uint row, uint rope_mode) {
  const uint end = rope_mode == kRopeList ? s.end : uint(step.position) + step.n_rows;
  return end + row < s.rows ? 0 : end + row - s.rows;
}

#undef THIMBLE_FUNCTION

#ifdef __cplusplus
}  // namespace thimble
#endif

#endif
