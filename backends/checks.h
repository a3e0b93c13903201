// Checks that every backend makes on its input. They find errors of the caller before a kernel reads beyond
// its operands.
#pragma once

#include <cinttypes>
#include <span>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// An upper bound for a number of the step, and the op that sets it.
struct Bound {
  uint64_t most = UINT64_MAX;
  const char* op = "";
  void narrow(uint64_t to, const char* by) {
    if (to < most) *this = {to, by};
  }
};

// The bounds that a program's ops set for the KV heads of one layer.
struct HeadBounds {
  uint32_t head_state, heads;  // rows [head_state, head_state + heads) of the table of HeadState
  uint32_t first_head;         // number of the first of these heads in its layer

  Bound array;    // entries of the layer's arrays, which contain all runs
  Bound entries;  // entries of a head, including the step's rows
  Bound held;     // entries of a head before the step
  Bound kept;     // entries that an eviction keeps
  // Ops that restrict where the step's rows are. `grows`: an op that finds them after the run's entries.
  // `compacts`: an op that moves the kept rows there. `batch`: an op that finds them among the run's entries.
  const char *grows = nullptr, *compacts = nullptr, *batch = nullptr;

  // Bounds for heads that are selected from, in units of `page` entries (0: no op selects).
  uint32_t page = 0;
  Bound units;                   // including the step's rows
  Bound middle;                  // end of the scored units
  Bound positions;               // positions in the text, including the step's rows
  Bound local;                   // n_local plus the step's rows, if queries rotate that far
  Bound selected;                // entries of a selection, or all entries without a selection
  const char* scores = nullptr;  // an op that reads the middle of the run directly
  const char* equal = nullptr;   // an op that needs all heads to hold equally many entries
  Bound pages;                   // of the layer's page bounds
};

// The limits of a program's ops. They are collected while it is recorded, and compared with every step.
struct ProgramBounds {
  uint32_t max_rows = 0;  // set before the first op
  Bound rows;             // rows of a step, if an op accepts fewer
  Bound positions;        // positions in the text, including the step's rows
  Bound source_rows[2];   // first_logit_row plus the rows of a copy, by CopyParams::rows
  Bound ring_rows[2];     // ring_row plus the rows of a copy
  Bound slots;            // slots of the states
  std::vector<HeadBounds> heads;
};

// Checks that an op's operands exist and are as large as its parameters say. Tightens the bounds of its
// program.
Status check_op(const Op&, const DeviceInfo&, ProgramBounds&);

// Checks that a program has these segments, and that the step is within its bounds.
Status check_submit(const Program&, const ProgramBounds&, uint32_t first, uint32_t last, const StepParams&,
                    std::span<const HeadState> heads);

// Checks that a view is within its buffer.
inline Status check_view(const View& v) {
  if (v.buffer && v.offset <= v.buffer->size && v.bytes <= v.buffer->size - v.offset) return {};
  return error(Code::kInternal, "%" PRIu64 " bytes at %" PRIu64 " of a buffer of %" PRIu64, v.bytes, v.offset,
               v.buffer ? v.buffer->size : 0);
}

}  // namespace thimble
