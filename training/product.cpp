#include "training/product.h"

namespace thimble {

static View whole(const Buffer* b) { return {const_cast<Buffer*>(b), 0, b->size}; }

View Product::Matrix::view() const { return whole(on_device ? on_device.get() : host.get()); }

Result<Product::Matrix> Product::allocate(uint64_t bytes) const {
  Matrix matrix;
  THIMBLE_LET(host, device_->alloc(MemKind::kIo, bytes));
  matrix.host = std::move(host);
  if (device_->info().unified) return matrix;
  THIMBLE_LET(on_device, device_->alloc(MemKind::kWorkspace, bytes));
  matrix.on_device = std::move(on_device);
  return matrix;
}

Result<std::unique_ptr<Product>> Product::make(const std::shared_ptr<Device>& device, uint32_t rows,
                                               uint32_t inner, uint32_t cols, DType type_of_w) {
  std::unique_ptr<Product> product(new Product(device));
  THIMBLE_LET(matrix, product->allocate(dtype_bytes(type_of_w, uint64_t(cols) * inner)));
  product->w_ = std::move(matrix);
  Weight w;
  static_cast<View&>(w) = product->w_.view();
  w.type = type_of_w;
  w.rows = cols;
  w.cols = inner;
  THIMBLE_TRY(product->record(rows, w));
  return product;
}

Result<std::unique_ptr<Product>> Product::by(const std::shared_ptr<Device>& device, uint32_t rows,
                                             const Weight& w) {
  std::unique_ptr<Product> product(new Product(device));
  THIMBLE_TRY(product->record(rows, w));
  return product;
}

SessionShape session_of_rows(uint32_t rows) {
  return {.chunk = rows,
          .run_capacity = 1,
          .layer_entries = 1,
          .reach = 1,
          .view_capacity = 1,
          .positions = 0,
          .heads = 0};
}

// A session with a model of this shape has this product as its largest.
static Result<uint64_t> scratch_bytes(const Device& device, uint32_t rows, uint32_t inner, uint32_t cols) {
  const ModelShape model{
      .layers = 1, .d_model = inner, .heads = 1, .kv_heads = 1, .head_dim = 64, .d_ff = cols, .vocab = 1};
  THIMBLE_LET(needs, device.needs(model, session_of_rows(rows)));
  return needs.workspace;
}

Result<uint64_t> Product::bytes(const Device& device, uint32_t rows, uint32_t inner, uint32_t cols,
                                DType type_of_w) {
  THIMBLE_LET(scratch, scratch_bytes(device, rows, inner, cols));
  const uint64_t matrices = uint64_t(rows) * (inner + uint64_t(cols)) * sizeof(float) +
                            dtype_bytes(type_of_w, uint64_t(cols) * inner);
  return scratch + matrices * (device.info().unified ? 1 : 2);
}

Status Product::record(uint32_t rows, const Weight& w) {
  THIMBLE_LET(x, allocate(uint64_t(rows) * w.cols * sizeof(float)));
  x_ = std::move(x);
  THIMBLE_LET(y, allocate(uint64_t(rows) * w.rows * sizeof(float)));
  y_ = std::move(y);
  THIMBLE_LET(scratch, scratch_bytes(*device_, rows, w.cols, w.rows));
  THIMBLE_LET(buffer, device_->alloc(MemKind::kWorkspace, scratch));
  scratch_ = std::move(buffer);
  THIMBLE_LET(stream, device_->open_stream(whole(scratch_.get()), 0));
  stream_ = std::move(stream);

  std::unique_ptr<Recorder> recorder = stream_->record(rows);
  recorder->segment();
  recorder->record(Linear{.x = x_.view(),
                          .w = w,
                          .bias = {},
                          .y = y_.view(),
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
  for (const Matrix* matrix : {&x_, &w_})
    if (matrix->on_device) THIMBLE_TRY(device_->copy(matrix->view(), whole(matrix->host.get())));
  THIMBLE_TRY(stream_->submit(*program_, 0, 1, step_, {}));
  THIMBLE_TRY(stream_->wait());
  return y_.on_device ? device_->copy(whole(y_.host.get()), y_.view()) : Status();
}

}  // namespace thimble
