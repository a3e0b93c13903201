// What every backend checks of what it is handed: defects of the caller, found before a kernel reads past its
// operands.
#pragma once

#include <algorithm>
#include <cinttypes>

#include "backends/backend.h"

namespace thimble {

// Whether a matrix is [rows][cols], can have so many columns, and has all its bytes.
inline Status check_matrix(const char* op, const Weight& w, uint32_t rows, uint32_t cols) {
  const DTypeInfo& type = dtype_info(w.type);
  if (w.rows != rows || w.cols != cols)
    return error(Code::kInternal, "%s of [%u][%u] was recorded with a matrix of [%u][%u]", op, rows, cols,
                 w.rows, w.cols);
  if (cols % type.block != 0)
    return error(Code::kUnsupported,
                 "a matrix with %u columns cannot be %s, whose blocks have %u; use another file", cols,
                 type.name, type.block);
  if (w.bytes < dtype_bytes(w.type, uint64_t(rows) * cols))
    return error(Code::kInternal, "%s was recorded with %" PRIu64 " of the %" PRIu64 " bytes of its matrix",
                 op, w.bytes, dtype_bytes(w.type, uint64_t(rows) * cols));
  return {};
}

// Whether a program has these segments and room for the step's rows.
inline Status check_submit(const Program& program, uint32_t max_rows, uint32_t first, uint32_t last,
                           const StepParams& step) {
  if (first > last || last > program.segments)
    return error(Code::kInternal, "segments [%u, %u) of a program that has %u", first, last,
                 program.segments);
  if (step.n_rows > max_rows || step.n_logit_rows > std::min(max_rows, kMostLogitRows))
    return error(Code::kInternal, "a step of %u rows and %u rows of logits, in a program for %u", step.n_rows,
                 step.n_logit_rows, max_rows);
  return {};
}

// Whether a view lies within its buffer.
inline Status check_view(const View& v) {
  if (v.buffer && v.offset <= v.buffer->size && v.bytes <= v.buffer->size - v.offset) return {};
  return error(Code::kInternal, "%" PRIu64 " bytes at %" PRIu64 " of a buffer of %" PRIu64, v.bytes, v.offset,
               v.buffer ? v.buffer->size : 0);
}

}  // namespace thimble
