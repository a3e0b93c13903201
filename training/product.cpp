#include "training/product.h"

namespace thimble {

Result<std::unique_ptr<Product>> Product::make(const std::shared_ptr<Device>& device, uint32_t rows,
                                               uint32_t inner, uint32_t cols, DType type_of_w) {
  auto product = std::make_unique<Product>();
  const auto allocate = [&](uint64_t bytes, std::unique_ptr<Buffer>& into) -> Status {
    THIMBLE_LET(buffer, device->alloc(MemKind::kIo, bytes));
    into = std::move(buffer);
    return {};
  };
  const auto view = [](const std::unique_ptr<Buffer>& b) { return View{b.get(), 0, b->size}; };
  const uint64_t f32 = sizeof(float);
  const uint64_t w_bytes = dtype_bytes(type_of_w, uint64_t(cols) * inner);
  THIMBLE_TRY(allocate(uint64_t(rows) * inner * f32, product->x_));
  THIMBLE_TRY(allocate(w_bytes, product->w_));
  THIMBLE_TRY(allocate(uint64_t(rows) * cols * f32, product->y_));
  const ModelShape model{
      .layers = 1, .d_model = inner, .heads = 1, .kv_heads = 1, .head_dim = 64, .d_ff = cols, .vocab = 1};
  THIMBLE_LET(needs, device->needs(model, {.chunk = rows,
                                           .run_capacity = 1,
                                           .layer_entries = 1,
                                           .reach = 1,
                                           .view_capacity = 1,
                                           .positions = 0,
                                           .heads = 0}));
  THIMBLE_TRY(allocate(needs.workspace, product->scratch_));
  THIMBLE_LET(stream, device->open_stream(view(product->scratch_), 0));
  product->stream_ = std::move(stream);

  Weight w;
  static_cast<View&>(w) = view(product->w_);
  w.type = type_of_w;
  w.rows = cols;
  w.cols = inner;
  std::unique_ptr<Recorder> recorder = product->stream_->record(rows);
  recorder->segment();
  recorder->record(Linear{.x = view(product->x_),
                          .w = w,
                          .bias = {},
                          .y = view(product->y_),
                          .p = {.in_cols = inner,
                                .out_cols = cols,
                                .x_stride = inner,
                                .y_stride = cols,
                                .add = 0,
                                .rows = kStepRows}});
  THIMBLE_LET(program, product->stream_->finish(std::move(recorder)));
  product->program_ = std::move(program);
  product->step_.n_rows = rows;
  return product;
}

}  // namespace thimble
