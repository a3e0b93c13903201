// What every shader includes: the op parameters, and the values of this step.
#include "../../op_params.h"
#include "../../regions.h"

layout(set = 0, binding = 0, std430) readonly buffer Step {
  StepParams step;
  HeadState head_states[];
};

// Rows that an op works on: `rows` is kStepRows or kLogitRows.
uint row_count(uint rows) { return rows == kLogitRows ? step.n_logit_rows : step.n_rows; }

// The heads that a dispatch works for, by where their runs begin (heads.h).
struct RunWindow {
  uint first, entries;
};
bool is_in(HeadState head, RunWindow window) { return head.first - window.first < window.entries; }
// Where a head's run begins in the arrays that the dispatch is given.
uint run_start(HeadState head, RunWindow window) { return head.first - window.first; }
