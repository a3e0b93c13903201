// embed: copies a row of the embedding table for each token.
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 64;
constexpr uint32_t kEach = 8;  // elements per thread

struct Table {
  const std::byte* rows;
  uint64_t row_bytes;
  uint32_t cols;
};

template <DType type>
__global__ void embed_kernel(const StepParams* step, EmbedParams p, const int32_t* tokens, Table table,
                             float* x) {
  begin_kernel();
  const uint32_t row = blockIdx.x, cols = p.cols;
  if (row >= step->n_rows) return;
  const std::byte* from = table.rows + static_cast<uint64_t>(tokens ? tokens[row] : row) * table.row_bytes;
  for (uint32_t c = kEach * (blockIdx.y * kThreads + threadIdx.x); c < cols;
       c += kEach * gridDim.y * kThreads) {
    const auto values = eight_of_row<type>(from, p.column + c, table.cols);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
      if (c + i < cols) x[uint64_t(row) * cols + c + i] = p.scale * values.at(i);
  }
}

}  // namespace

void embed(const Launch& l, const Embed& op) {
  // A single row is spread over the card, because its bytes come from memory with high latency.
  const uint32_t parts = l.max_rows == 1 ? static_cast<uint32_t>(ceil_div(op.p.cols, kEach * kThreads)) : 1;
  const Table table{data<std::byte>(op.table), dtype_bytes(op.table.type, op.table.cols), op.table.cols};
  launch(l, of_type(op.table.type, [](auto type) { return embed_kernel<type()>; }), dim3(l.max_rows, parts),
         kThreads, 0, l.step, op.p, data<int32_t>(op.tokens), table, data<float>(op.x));
}

}  // namespace thimble::cuda
