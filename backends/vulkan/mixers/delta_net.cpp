// delta_net: the gated delta rule, row by row, or in chunks that are prepared for themselves.
#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kMostSteps = 8;  // programs with more rows take the chunk form

// Rows are taken by slices: while one slice goes from chunk to chunk, the next one is prepared in the other
// half of scratch.
constexpr uint32_t kChunk = 32, kMostSlice = 256;
constexpr uint32_t kPrepared = 2 * kChunk * kChunk + 4 * kChunk;  // floats, of delta_chunk.glsl

uint64_t prepared_bytes(uint32_t rows, uint32_t value_heads) {
  return ceil_div(std::min(rows, kMostSlice), kChunk) * value_heads * kPrepared * sizeof(float);
}

void by_steps(Recording& r, const DeltaNet& op) {
  constexpr uint32_t kColumns = 32, kMostThreads = 256;  // of the shader
  struct {
    DeltaNetParams p;
    uint32_t slot_stride;
  } push{op.p, static_cast<uint32_t>(op.m.slot_stride / sizeof(float))};
  r.dispatch(Shader::kDeltaStep, {r.limits().threads(kMostThreads), op.p.width},
             {reads(op.qkv), reads(op.gates), reads(op.a), reads(op.dt), writes(op.m.all()), writes(op.y)},
             push, op.p.width / kColumns, op.p.value_heads);
}

void by_chunks(Recording& r, const DeltaNet& op) {
  constexpr uint32_t kQuad = 4, kPrepareThreads = 128;
  const DeltaNetParams& p = op.p;
  const bool in_quads = (op.qkv.offset / sizeof(float) | p.q_column | p.k_column | p.qkv_stride) % kQuad == 0;
  // A workgroup of delta_chunks has an eighth as many columns as threads.
  const auto shared_bytes = [&](uint32_t threads) {
    return (p.width + 2 * kChunk) * threads / 8 * sizeof(float);
  };
  const bool has_room = r.limits().threads(256) == 256 && shared_bytes(256) <= r.limits().max_shared_bytes;
  const uint32_t threads = has_room ? 256 : 128;

  struct {
    DeltaNetParams p;
    uint32_t first;
  } prepare{p, 0};
  struct {
    DeltaNetParams p;
    uint32_t slot_stride, first, rows;
  } push{p, static_cast<uint32_t>(op.m.slot_stride / sizeof(float)), 0, 0};
  const double row_operations = p.value_heads * p.width * (6.0 * p.width + 10.0 * kChunk);
  const uint64_t bytes = prepared_bytes(r.max_rows(), p.value_heads);
  for (uint32_t first = 0; first < r.max_rows(); first += kMostSlice) {
    const uint32_t rows = std::min(r.max_rows() - first, kMostSlice);
    const View prepared = r.scratch().slice(r.turn() % 2 * bytes, bytes);
    prepare.first = push.first = first;
    push.rows = rows;
    r.dispatch(Shader::kDeltaPrepare, {kPrepareThreads, p.width, in_quads},
               {reads(op.qkv), reads(op.gates), reads(op.a), reads(op.dt), writes(prepared)}, prepare,
               static_cast<uint32_t>(ceil_div(rows, kChunk)), p.value_heads);
    r.expect(rows * row_operations);
    r.dispatch(Shader::kDeltaChunks, {threads, p.width, in_quads},
               {reads(op.qkv), reads(prepared), writes(op.m.all()), writes(op.y)}, push,
               p.width / (threads / 8), p.value_heads);
  }
}

}  // namespace

void delta_net(Recording& r, const DeltaNet& op) {
  r.max_rows() > kMostSteps ? by_chunks(r, op) : by_steps(r, op);
}

uint64_t delta_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  return s.chunk > kMostSteps ? 2 * prepared_bytes(s.chunk, m.delta_values) : 0;
}

}  // namespace thimble::vulkan
