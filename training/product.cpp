#include "training/product.h"

namespace thimble {

static View whole(const std::unique_ptr<Buffer>& b) { return {b.get(), 0, b->size}; }

Result<std::unique_ptr<Product>> Product::make(const std::shared_ptr<Device>& device, uint32_t rows,
                                               uint32_t inner, uint32_t cols, DType type_of_w) {
  auto product = std::make_unique<Product>();
  THIMBLE_LET(buffer, device->alloc(MemKind::kIo, dtype_bytes(type_of_w, uint64_t(cols) * inner)));
  product->w_ = std::move(buffer);
  Weight w;
  static_cast<View&>(w) = whole(product->w_);
  w.type = type_of_w;
  w.rows = cols;
  w.cols = inner;
  THIMBLE_TRY(product->record(*device, rows, w));
  return product;
}

Result<std::unique_ptr<Product>> Product::by(const std::shared_ptr<Device>& device, uint32_t rows,
                                             const Weight& w) {
  auto product = std::make_unique<Product>();
  THIMBLE_TRY(product->record(*device, rows, w));
  return product;
}

// The largest matrix product of a session with such a model is this one.
static Result<uint64_t> scratch_bytes(const Device& device, uint32_t rows, uint32_t inner, uint32_t cols) {
  const ModelShape model{
      .layers = 1, .d_model = inner, .heads = 1, .kv_heads = 1, .head_dim = 64, .d_ff = cols, .vocab = 1};
  THIMBLE_LET(needs, device.needs(model, {.chunk = rows,
                                          .run_capacity = 1,
                                          .layer_entries = 1,
                                          .reach = 1,
                                          .view_capacity = 1,
                                          .positions = 0,
                                          .heads = 0}));
  return needs.workspace;
}

Result<uint64_t> Product::bytes(const Device& device, uint32_t rows, uint32_t inner, uint32_t cols,
                                DType type_of_w) {
  THIMBLE_LET(scratch, scratch_bytes(device, rows, inner, cols));
  return scratch + uint64_t(rows) * (inner + uint64_t(cols)) * sizeof(float) +
         dtype_bytes(type_of_w, uint64_t(cols) * inner);
}

Status Product::record(Device& device, uint32_t rows, const Weight& w) {
  const auto allocate = [&](uint64_t bytes, std::unique_ptr<Buffer>& into) -> Status {
    THIMBLE_LET(buffer, device.alloc(MemKind::kIo, bytes));
    into = std::move(buffer);
    return {};
  };
  THIMBLE_TRY(allocate(uint64_t(rows) * w.cols * sizeof(float), x_));
  THIMBLE_TRY(allocate(uint64_t(rows) * w.rows * sizeof(float), y_));
  THIMBLE_LET(scratch, scratch_bytes(device, rows, w.cols, w.rows));
  THIMBLE_TRY(allocate(scratch, scratch_));
  THIMBLE_LET(stream, device.open_stream(whole(scratch_), 0));
  stream_ = std::move(stream);

  std::unique_ptr<Recorder> recorder = stream_->record(rows);
  recorder->segment();
  recorder->record(Linear{.x = whole(x_),
                          .w = w,
                          .bias = {},
                          .y = whole(y_),
                          .p = {.in_cols = w.cols,
                                .out_cols = w.rows,
                                .x_stride = w.cols,
                                .y_stride = w.rows,
                                .add = 0,
                                .rows = kStepRows}});
  THIMBLE_LET(program, stream_->finish(std::move(recorder)));
  program_ = std::move(program);
  step_.n_rows = rows;
  return {};
}

Status Product::run() {
  THIMBLE_TRY(stream_->submit(*program_, 0, 1, step_, {}));
  return stream_->wait();
}

}  // namespace thimble
