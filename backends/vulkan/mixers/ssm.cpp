// ssm: Mamba-2, row by row, or in chunks that are prepared for themselves.
#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kMostSteps = 8;  // programs with more rows take the chunk form

// As in delta_net, one slice of rows goes from chunk to chunk while the next is prepared in the other half of
// scratch.
constexpr uint32_t kChunk = 32, kMostSlice = 256;
constexpr uint32_t kPrepared = kChunk * kChunk + 2 * kChunk;  // floats, of ssm_chunk.glsl

uint64_t prepared_bytes(uint32_t rows, uint32_t heads) {
  return ceil_div(std::min(rows, kMostSlice), kChunk) * heads * kPrepared * sizeof(float);
}

void by_steps(Recording& r, const Ssm& op) {
  constexpr uint32_t kCols = 16;  // of a workgroup
  struct {
    SsmParams p;
    uint32_t slot_stride;
  } push{op.p, static_cast<uint32_t>(op.s.slot_stride / sizeof(float))};
  r.dispatch(Shader::kSsmStep, {op.p.state},
             {reads(op.xbc), reads(op.dt), reads(op.dt_bias), reads(op.a), reads(op.d), writes(op.s.all()),
              writes(op.y)},
             push, op.p.width / kCols, op.p.heads);
}

void by_chunks(Recording& r, const Ssm& op) {
  constexpr uint32_t kQuad = 4, kPrepareThreads = 128, kPrepareHeads = 8;
  const SsmParams& p = op.p;
  const bool in_quads = (op.xbc.offset / sizeof(float) | p.b_column | p.c_column | p.xbc_stride) % kQuad == 0;
  // A workgroup of ssm_chunks has a fourth as many columns as threads.
  const uint64_t column_bytes = (p.state + kChunk) * sizeof(float);
  const bool wide = p.width % 32 == 0 && 32 * column_bytes <= r.limits().max_shared_bytes;
  const uint32_t threads = wide ? 128 : 64;

  struct {
    SsmParams p;
    uint32_t first;
  } prepare{p, 0};
  struct {
    SsmParams p;
    uint32_t slot_stride, first, rows;
  } push{p, static_cast<uint32_t>(op.s.slot_stride / sizeof(float)), 0, 0};
  const double row_operations = 2.0 * p.heads * p.width * (2.0 * p.state + kChunk);
  const uint64_t bytes = prepared_bytes(r.max_rows(), p.heads);
  for (uint32_t first = 0; first < r.max_rows(); first += kMostSlice) {
    const uint32_t rows = std::min(r.max_rows() - first, kMostSlice);
    const View prepared = r.scratch().slice(r.turn() % 2 * bytes, bytes);
    prepare.first = push.first = first;
    push.rows = rows;
    r.dispatch(Shader::kSsmPrepare, {kPrepareThreads, p.state, in_quads},
               {reads(op.xbc), reads(op.dt), reads(op.dt_bias), reads(op.a), writes(prepared)}, prepare,
               static_cast<uint32_t>(ceil_div(rows, kChunk)), p.groups,
               static_cast<uint32_t>(ceil_div(p.heads / p.groups, kPrepareHeads)));
    r.expect(rows * row_operations);
    r.dispatch(Shader::kSsmChunks, {threads, p.state, in_quads},
               {reads(op.xbc), reads(prepared), reads(op.d), writes(op.s.all()), writes(op.y)}, push,
               p.width / (threads / 4), p.heads);
  }
}

}  // namespace

void ssm(Recording& r, const Ssm& op) { r.max_rows() > kMostSteps ? by_chunks(r, op) : by_steps(r, op); }

uint64_t ssm_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  return s.chunk > kMostSteps ? 2 * prepared_bytes(s.chunk, m.ssm_heads) : 0;
}

}  // namespace thimble::vulkan
