// What every backend checks of what it is handed: defects of the caller, found before a kernel reads past its
// operands.
#pragma once

#include <cinttypes>
#include <span>
#include <vector>

#include "backends/backend.h"

namespace thimble {

// A number that a step must not exceed, and the op that sets it.
struct Bound {
  uint64_t most = UINT64_MAX;
  const char* op = "";
  void narrow(uint64_t to, const char* by) {
    if (to < most) *this = {to, by};
  }
};

// What the ops of a program ask of the KV heads of one layer.
struct HeadBounds {
  uint32_t head_state, heads;  // rows [head_state, head_state + heads) of the table
  uint32_t first_head;         // the first one's number in its layer

  Bound array;    // entries of the layer's arrays, in which every run lies
  Bound entries;  // of a head with the step's rows
  Bound held;     // of a head before the step
  Bound kept;     // of those that an eviction leaves
  // What the step's rows ask of a run: `grows` names an op that finds them behind its entries, `compacts` one
  // that puts those of them that are kept there, `batch` one that finds them among its entries.
  const char *grows = nullptr, *compacts = nullptr, *batch = nullptr;

  // Where a head is selected from, in units of `page` entries (0: no op selects).
  uint32_t page = 0;
  Bound units;                   // with the step's rows
  Bound middle;                  // where the scored ones end
  Bound positions;               // of the text with the step's rows
  Bound local;                   // n_local and the step's rows, where queries rotate as far
  Bound selected;                // entries of a selection, or of everything where there is none
  const char* scores = nullptr;  // an op that reads the middle of the run itself
  const char* equal = nullptr;   // an op that works only on heads with as many entries
  Bound pages;                   // of the layer's bounds
};

// What the ops of a program can serve, gathered while it is recorded and compared with every step.
struct ProgramBounds {
  uint32_t max_rows = 0;  // set before the first op
  Bound rows;             // of a step, where an op takes fewer
  Bound positions;        // of the text with the step's rows
  Bound source_rows[2];   // first_logit_row and a copy's rows behind it, by CopyParams::rows
  Bound ring_rows[2];     // ring_row and a copy's rows behind it
  std::vector<HeadBounds> heads;
};

// Whether an op's operands are there and as large as its parameters say; narrows the bounds of its program.
Status check_op(const Op&, const DeviceInfo&, ProgramBounds&);

// Whether a program has these segments, and room for the step.
Status check_submit(const Program&, const ProgramBounds&, uint32_t first, uint32_t last, const StepParams&,
                    std::span<const HeadState> heads);

// Whether a view lies within its buffer.
inline Status check_view(const View& v) {
  if (v.buffer && v.offset <= v.buffer->size && v.bytes <= v.buffer->size - v.offset) return {};
  return error(Code::kInternal, "%" PRIu64 " bytes at %" PRIu64 " of a buffer of %" PRIu64, v.bytes, v.offset,
               v.buffer ? v.buffer->size : 0);
}

}  // namespace thimble
