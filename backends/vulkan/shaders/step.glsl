// What every shader includes: the op parameters, StepParams, and what follows from a step alone.
#include "../../op_params.h"

layout(set = 0, binding = 0, std430) readonly buffer Step { StepParams step; };

// Rows that an op works on: `rows` is kStepRows or kLogitRows.
uint row_count(uint rows) { return rows == kLogitRows ? step.n_logit_rows : step.n_rows; }

uint step_entries() { return step.n_entries + step.n_rows; }

// Whether this step selects: below that everything is attended (backend.h). No sum here can overflow.
bool selects() {
  const uint rest = step_entries() - min(step_entries(), step.n_init);
  return rest - min(rest, step.n_local) > step.select_k;
}
// The entries that a selection picks from: [n_init, middle_end()).
uint middle_end() { return step_entries() - step.n_local; }
