#include "training/embeddings.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "training/product.h"

namespace thimble {

constexpr uint32_t kRows = 512;  // rows per run of the program

// The result is a copy in host memory, wherever the model's embedding is stored.
Result<std::vector<float>> embeddings_of(const Model& model, Device& device,
                                         std::span<const int32_t> tokens) {
  const Tensor& table = model.token_embedding;
  const uint32_t cols = table.cols;
  const uint64_t row_bytes = dtype_bytes(table.type, cols), x_bytes = uint64_t(kRows) * cols * sizeof(float);
  THIMBLE_LET(needs, device.needs(model.shape, session_of_rows(kRows)));
  THIMBLE_LET(ids, device.alloc(MemKind::kIo, kRows * sizeof(int32_t)));
  THIMBLE_LET(rows, device.alloc(MemKind::kIo, kRows * row_bytes));
  THIMBLE_LET(x, device.alloc(MemKind::kWorkspace, x_bytes));
  THIMBLE_LET(scratch, device.alloc(MemKind::kWorkspace, std::max<uint64_t>(needs.workspace, 1)));
  THIMBLE_LET(stream, device.open_stream({scratch.get(), 0, scratch->size}, 0));
  Weight weight;
  static_cast<View&>(weight) = {rows.get(), 0, rows->size};
  weight.type = table.type;
  weight.rows = kRows;
  weight.cols = cols;
  std::unique_ptr<Recorder> recorder = stream->record(kRows);
  recorder->segment();
  recorder->record(Embed{.tokens = View{ids.get(), 0, ids->size},
                         .table = weight,
                         .x = View{x.get(), 0, x->size},
                         .p = {.cols = cols}});
  THIMBLE_LET(program, stream->finish(std::move(recorder)));

  auto* const id = static_cast<int32_t*>(ids->mapped);
  std::iota(id, id + kRows, 0);
  std::vector<float> out(tokens.size() * cols);
  for (size_t first = 0; first < tokens.size(); first += kRows) {
    const auto count = static_cast<uint32_t>(std::min<size_t>(kRows, tokens.size() - first));
    for (uint32_t i = 0; i < count; ++i)
      std::memcpy(static_cast<std::byte*>(rows->mapped) + i * row_bytes,
                  table.data + static_cast<uint64_t>(tokens[first + i]) * row_bytes, row_bytes);
    StepParams step{};
    step.n_rows = count;
    THIMBLE_TRY(stream->submit(*program, 0, 1, step, {}));
    THIMBLE_TRY(stream->wait());
    THIMBLE_TRY(device.read(&out[first * cols], {x.get(), 0, uint64_t(count) * cols * sizeof(float)}));
  }
  return out;
}

}  // namespace thimble
