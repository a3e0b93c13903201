#include "backends/vulkan/dense/product.h"

#include <algorithm>
#include <bit>

#include "base/bits.h"

namespace thimble::vulkan {
namespace {

uint32_t groups(uint32_t n, uint32_t each) { return static_cast<uint32_t>(ceil_div(n, each)); }

// Whether a thread has at least 128 registers. On narrow subgroups, of processors and of cards, it does not.
bool has_registers(const Limits& l) { return l.subgroup_size >= 16; }

// Whether matvec.comp multiplies a type with digits (digits.glsl).
bool in_digits(const Limits& l, DType type) {
  return l.byte_products &&
         (type == DType::kQ4_K || type == DType::kQ5_K || type == DType::kQ6_K || type == DType::kQ8_0);
}
// Whether it does so in pieces of 32 columns (pieces.glsl), or else four weights at a time.
bool in_pieces(const Limits& l, DType type) {
  switch (type) {
    case DType::kQ8_0:
    case DType::kQ4_0:
    case DType::kQ4_1:
    case DType::kQ5_0:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
    case DType::kQ6_K:
      return true;
    case DType::kMXFP4:
      return l.half_subnormals;
    default:
      return false;
  }
}

// The number of threads that process pieces of 32 columns of W, chosen so that all have one piece, or equally
// many. For matrices of many columns more than 128 threads would be faster in isolation, but with 128 all
// matrices of a layer share a shader, and a layer's code must stay in the instruction caches (Llama 3.1 8B on
// an H200: 199.9 tokens/s instead of 193.6).
uint32_t matvec_threads(const Limits& l, uint32_t cols) {
  const uint32_t pieces = groups(cols, 32), least = std::max(l.subgroup_size, 8u);
  const uint32_t most = l.threads(128);
  return std::min(most, groups(groups(pieces, groups(pieces, most)), least) * least);
}

// The dispatch covers `rows` rows of x and y, and the p.w.rows rows of the matrix.
void dispatch_matvec(Recording& r, const Product& p, uint32_t rows) {
  const uint32_t matrices = p.up ? 2 : 1, rows_each = std::min(rows, 4u);
  const Matvec m(r.limits(), p.w, matrices);
  r.dispatch(m.digits  ? Shader::kMatvecDigits
             : m.books ? Shader::kMatvecBooks
                       : Shader::kMatvec,
             {static_cast<uint32_t>(p.w.type), p.activates, in_quads(p.x, p.x_stride, p.in_cols), m.lines,
              rows_each, matrices, m.threads, r.limits().subgroup_size, m.together},
             {reads(p.x), reads(p.w), reads(p.bias), writes(p.y), reads(p.up), reads(p.prepared.squares),
              writes(p.prepares.row ? p.prepares.row : p.norm), reads(p.norm_weight),
              writes(p.prepares.squares), reads(r.code_books())},
             p.params(), groups(p.w.rows, m.lines / matrices), groups(rows, rows_each));
}
void dispatch_product(Recording& r, const Product& p, uint32_t rows) {
  const ProductTile tile(r.limits(), rows);
  r.dispatch(
      Shader::kProduct,
      {static_cast<uint32_t>(p.w.type), p.activates, in_quads(p.x, p.x_stride, p.in_cols), tile.thread_rows,
       tile.thread_cols, ProductTile::kThreads, p.in_cols % kDepth == 0, in_eights(p.w)},
      {reads(p.x), reads(p.w), reads(p.bias), writes(p.y), reads(r.code_books())}, p.params(),
      groups(p.w.rows, tile.cols()), groups(rows, tile.rows()));
}

bool by_vectors(const Recording& r, const Product& p) { return p.exact || by_vectors(r, p.rows); }

// Whether W is first converted to f16 in scratch: for matrix units, and if there is more than one tile of
// rows, because each tile would convert W again. W can be used as stored if it is f16 in whole eights.
bool by_slices(const Recording& r, const Product& p) {
  if (by_vectors(r, p)) return false;
  return by_matrices(r, p.rows) || (r.max_rows() > most_tile_rows(r.limits()) && !in_eights(p.w));
}

}  // namespace

Matvec::Matvec(const Limits& l, const Weight& w, uint32_t matrices) : threads(matvec_threads(l, w.cols)) {
  const bool pieces = in_pieces(l, w.type);
  digits = in_digits(l, w.type);
  books = !pieces && dtype_info(w.type).block > 1;
  // More lines per workgroup if there are enough rows to occupy a card.
  lines = !pieces || !has_registers(l) ? 4 : matrices * w.rows < 8192 ? 8 : 16;
  // The lines of a gate and its up are multiplied together. Larger values, also for other products, would be
  // faster in isolation, but a layer's code must stay in the instruction caches.
  together = matrices == 2 && pieces && has_registers(l) ? 2 : 1;
  // Products of few rows without pieces, such as a router's, finish as soon as their data arrives, so each
  // thread loads little.
  if (!pieces && w.rows <= 1024)
    threads = std::clamp(std::bit_floor(w.cols / 4), std::max(l.subgroup_size, 8u), l.threads(512));
}

// 128 x 128 if the device's limits and the number of rows allow it, otherwise tiles of 64 columns.
ProductTile::ProductTile(const Limits& l, uint32_t rows) {
  const bool large = rows > 64 && most_tile_rows(l) == kTile;
  thread_rows = large ? 16 : rows <= 32 ? 4 : 8;
  thread_cols = large ? 8 : 4;
}

uint32_t most_tile_rows(const Limits& l) {
  constexpr uint32_t kLargeBytes = kTile * kDepth * (sizeof(float) + sizeof(uint16_t));
  return has_registers(l) && l.max_shared_bytes >= kLargeBytes ? kTile : 64;
}

void multiply_parts(Recording& r, const Product& p) {
  const uint64_t part = largest_part(r.limits());
  const uint32_t all_rows = r.most_rows(p.rows), all_cols = p.w.rows;
  uint64_t most_rows =
      std::clamp<uint64_t>(part / sizeof(float) / std::max(p.x_stride, p.y_stride), 1, all_rows);
  // A workgroup computes at least one column of y. Parts consist of whole tiles, which begin at multiples of
  // 16 bytes.
  uint64_t most_cols = std::min<uint64_t>(part / dtype_bytes(p.w.type, p.w.cols), r.limits().max_groups);
  most_cols = most_cols < all_cols ? most_cols / kTile * kTile : all_cols;
  if (!most_cols)
    return r.fail(error(Code::kUnsupported,
                        "a matrix of %u columns is too wide for the device; use --device cpu", p.w.cols));

  const double row_operations =
      2.0 * static_cast<double>(std::min<uint64_t>(most_cols, all_cols)) * p.in_cols;
  if (!by_vectors(r, p))
    most_rows = std::min(
        most_rows, std::max<uint64_t>(uint64_t(r.most_operations() / row_operations) / kTile * kTile, kTile));
  for (uint32_t row = 0; row < all_rows; row += static_cast<uint32_t>(most_rows))
    for (uint32_t col = 0; col < all_cols; col += static_cast<uint32_t>(most_cols)) {
      const uint32_t rows = static_cast<uint32_t>(std::min<uint64_t>(most_rows, all_rows - row));
      const uint32_t cols = static_cast<uint32_t>(std::min<uint64_t>(most_cols, all_cols - col));
      Product piece = p.part(row, rows, col, cols);
      if (col > 0) piece.norm = {};  // the first part has written the norm
      if (by_vectors(r, p)) {
        dispatch_matvec(r, piece, rows);
      } else {
        r.expect(row_operations * rows);
        dispatch_product(r, piece, rows);
      }
    }
}

Weight rows_of(const Weight& w, uint32_t first, uint32_t count) {
  if (!w) return w;
  Weight part = w;
  static_cast<View&>(part) =
      w.slice(dtype_bytes(w.type, uint64_t(first) * w.cols), dtype_bytes(w.type, uint64_t(count) * w.cols));
  part.rows = count;
  return part;
}

Product Product::part(uint32_t row, uint32_t count, uint32_t col, uint32_t cols) const {
  const auto floats = [&](const View& v, uint64_t stride, uint64_t first, uint64_t width) {
    return v.slice((row * stride + first) * sizeof(float), ((count - 1) * stride + width) * sizeof(float));
  };
  Product p = *this;
  p.x = floats(x, x_stride, 0, in_cols);
  p.y = floats(y, y_stride, col, cols);
  p.w = rows_of(w, col, cols);
  p.up = rows_of(up, col, cols);
  if (bias) p.bias = bias.slice(col * sizeof(float), cols * sizeof(float));
  if (prepares.row) {
    p.norm_weight = norm_weight.slice(col * sizeof(float), cols * sizeof(float));
    p.prepares.row = prepares.row.slice(col * sizeof(float), cols * sizeof(float));
    p.prepares.squares = prepares.squares.slice(col / kSquaresEach * sizeof(float),
                                                ceil_div(cols, kSquaresEach) * sizeof(float));
  }
  p.first_row = first_row + row;
  return p;
}

ProductParams Product::params() const {
  return {.in_cols = in_cols,
          .out_cols = w.rows,
          .x_stride = x_stride,
          .y_stride = y_stride,
          .row_bytes = static_cast<uint32_t>(dtype_bytes(w.type, w.cols)),
          .first_row = first_row,
          .rows = rows,
          .act = act,
          .has_bias = bias ? 1u : 0u,
          .adds = adds ? 1u : 0u,
          .prepares = prepares.row ? 1u : 0u,
          .scales = prepared.row ? 1u : 0u,
          .eps = eps,
          .writes_norm = norm ? 1u : 0u,
          .w_scale = w.scale,
          .up_scale = up.scale};
}

PreparedNorm PreparedNorm::in(const View& scratch, uint32_t cols) {
  const uint64_t row = round_up(cols * sizeof(float), 256);
  return {scratch.slice(0, cols * sizeof(float)), scratch.slice(row, bytes(cols) - row)};
}
uint64_t PreparedNorm::bytes(uint32_t cols) {
  constexpr uint32_t kQuad = 4;  // sums of squares are read four at a time
  return round_up(cols * sizeof(float), 256) + round_up(ceil_div(cols, kSquaresEach), kQuad) * sizeof(float);
}

void finish_norm(const Recording& r, std::span<Product> products, const RmsNorm& norm) {
  for (Product& p : products) {
    p.prepared = PreparedNorm::in(r.scratch(), norm.p.cols);
    p.x = p.prepared.row;
    p.eps = norm.p.eps;
  }
  products.front().norm = norm.y;
}

void multiply(Recording& r, std::span<const Product> siblings) {
  const auto sliced = [&](const Product& p) { return by_slices(r, p); };
  if (std::any_of(siblings.begin(), siblings.end(), sliced)) return multiply_slices(r, siblings);
  for (const Product& p : siblings) multiply_parts(r, p);
}

}  // namespace thimble::vulkan
