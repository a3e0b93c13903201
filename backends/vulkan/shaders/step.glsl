// Included by every shader: the op parameters, and the values of the current step.
#include "../../op_params.h"
#include "../../regions.h"

layout(set = 0, binding = 0, std430) readonly buffer Step {
  StepParams step;
  HeadState head_states[];
};

// The number of rows of an op: `rows` is kStepRows or kLogitRows.
uint row_count(uint rows) { return rows == kLogitRows ? step.n_logit_rows : step.n_rows; }

// The heads of a dispatch, given by where their runs begin (heads.h).
struct RunWindow {
  uint first, entries;
};
bool is_in(HeadState head, RunWindow window) { return head.first - window.first < window.entries; }
// Where a head's run begins in the arrays of the dispatch.
uint run_start(HeadState head, RunWindow window) { return head.first - window.first; }
