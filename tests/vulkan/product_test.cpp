// How products are divided if a matrix, or rows of x and y, are larger than what a device can bind.
#include "backends/vulkan/dense/product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "backends/vulkan/ops.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::vulkan {
namespace {

// Records the dispatches.
class Notes : public Recording {
 public:
  struct Note {
    Shader shader;
    std::vector<View> views;
    std::vector<uint32_t> push;
    double operations;
    uint32_t x, y, z;

    const ProductParams& params() const {
      EXPECT_EQ(push.size() * sizeof(uint32_t), sizeof(ProductParams));
      return reinterpret_cast<const ProductParams&>(*push.data());
    }
  };

  Notes(const Limits& limits, uint32_t max_rows, const View& scratch)
      : Recording(limits, max_rows, scratch, {}, {}) {}
  std::vector<Note> notes;
  const Status& status() const { return status_; }

 private:
  void dispatch(Shader shader, std::initializer_list<uint32_t>, std::initializer_list<Operand> operands,
                const void* push, size_t push_bytes, uint32_t x, uint32_t y, uint32_t z) override {
    Note note{shader, {}, std::vector<uint32_t>(push_bytes / 4), std::exchange(operations_, 0), x, y, z};
    std::memcpy(note.push.data(), push, push_bytes);
    for (const Operand& o : operands) note.views.push_back(o.view);
    notes.push_back(note);
  }
};

constexpr Limits kLimits{.subgroup_size = 32,
                         .max_group_threads = 128,
                         .max_shared_bytes = 16 << 10,
                         .max_groups = 65535,
                         .offset_alignment = 64,
                         .max_range = 1 << 20,
                         .operations_per_second = 1e12};

// Weights with blocks of 34 bytes, so that rows begin in the middle of words.
Weight q8_0_matrix(Buffer& buffer, uint32_t rows, uint32_t cols) {
  Weight w;
  static_cast<View&>(w) = {&buffer, 0, dtype_bytes(DType::kQ8_0, uint64_t(rows) * cols)};
  w.type = DType::kQ8_0;
  w.rows = rows;
  w.cols = cols;
  return w;
}

// Records y = W x.
Notes record(const Limits& limits, uint32_t max_rows, uint32_t in_cols, uint32_t out_cols,
             uint32_t x_stride) {
  static Buffer buffers[5];
  const ModelShape model{.d_model = in_cols, .d_ff = out_cols};
  const View scratch{&buffers[4], 0, product_scratch(model, {.chunk = max_rows}, limits)};
  Notes notes(limits, max_rows, scratch);
  const Linear op{
      View{&buffers[0], 0, uint64_t(max_rows) * x_stride * 4},
      q8_0_matrix(buffers[1], out_cols, in_cols),
      View{&buffers[2], 0, uint64_t(out_cols) * 4},
      View{&buffers[3], 0, uint64_t(max_rows) * out_cols * 4},
      {.in_cols = in_cols, .out_cols = out_cols, .x_stride = x_stride, .y_stride = out_cols, .add = 1}};
  linear(notes, op);
  return notes;
}

bool same(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.bytes == b.bytes;
}

// Checks that every element of y is computed once, from W or from slices of it in scratch, and that these are
// made once.
void check(const Notes& notes, const Limits& limits, uint32_t max_rows, uint32_t in_cols, uint32_t out_cols,
           uint32_t x_stride) {
  ASSERT_TRUE(notes.status().ok()) << notes.status().message();
  const uint64_t row_bytes = dtype_bytes(DType::kQ8_0, in_cols);
  std::vector<int> made(size_t(max_rows) * out_cols), sliced(out_cols);
  const Notes::Note* slice = nullptr;
  for (const Notes::Note& n : notes.notes) {
    for (const View& v : n.views) {
      EXPECT_EQ(v.offset % 4, 0u);
      EXPECT_LE(v.offset % limits.offset_alignment + v.bytes, limits.max_range);
    }
    if (n.shader == Shader::kDequantize) {
      const View& to = n.views[1];
      EXPECT_LE(to.offset + to.bytes, notes.scratch().bytes);
      EXPECT_EQ(to.bytes, n.y * in_cols * sizeof(uint16_t));
      for (uint64_t r = 0; r < n.y; ++r) ++sliced[n.views[0].offset / row_bytes + r];
      slice = &n;
      continue;
    }
    if (slice) {
      EXPECT_TRUE(same(n.views[1], slice->views[1]));
      EXPECT_EQ(n.params().row_bytes, in_cols * sizeof(uint16_t));
    }
    const View &x = n.views[0], &w = slice ? slice->views[0] : n.views[1], &bias = n.views[2],
               &y = n.views[3];
    const uint32_t col = static_cast<uint32_t>(w.offset / row_bytes), cols = n.params().out_cols,
                   row = n.params().first_row;
    EXPECT_EQ(w.offset % row_bytes, 0u);
    EXPECT_EQ(w.bytes, cols * row_bytes);
    EXPECT_EQ(bias.offset, col * 4u);
    EXPECT_EQ(x.offset, uint64_t(row) * x_stride * 4);
    EXPECT_EQ(y.offset, (uint64_t(row) * out_cols + col) * 4);
    const uint64_t rows = (x.bytes / 4 - in_cols) / x_stride + 1;
    EXPECT_EQ(y.bytes, ((rows - 1) * out_cols + cols) * 4);
    for (uint64_t r = row; r < row + rows; ++r)
      for (uint32_t c = col; c < col + cols; ++c) ++made[r * out_cols + c];
  }
  EXPECT_EQ(made, std::vector<int>(made.size(), 1));
  EXPECT_EQ(sliced, std::vector<int>(out_cols, slice ? 1 : 0));
}

TEST(VulkanProduct, IsOneDispatchIfItFits) {
  for (uint32_t max_rows : {1u, 64u}) {
    const Notes notes = record(kLimits, max_rows, 96, 1000, 96);
    EXPECT_EQ(notes.notes.size(), 1u);
    check(notes, kLimits, max_rows, 96, 1000, 96);
  }
}

TEST(VulkanProduct, SplitsMatricesAtTheLargestRange) {
  for (uint32_t max_rows : {1u, 3u}) {
    const Notes notes = record(kLimits, max_rows, 96, 32769, 96);  // 3.2 times the largest range
    EXPECT_EQ(notes.notes.size(), 4u);
    check(notes, kLimits, max_rows, 96, 32769, 96);
  }
  const Notes notes = record(kLimits, 65, 96, 32769, 96);  // in slices
  EXPECT_GT(notes.notes.size(), 2u);
  check(notes, kLimits, 65, 96, 32769, 96);
}

TEST(VulkanProduct, SplitsRowsAtTheLargestRange) {
  const Notes few = record(kLimits, 60, 96, 40, 10000), many = record(kLimits, 100, 96, 40, 10000);
  EXPECT_EQ(few.notes.size(), 3u);        // of at most 26 rows
  EXPECT_EQ(many.notes.size(), 1u + 4u);  // first W in f16
  check(few, kLimits, 60, 96, 40, 10000);
  check(many, kLimits, 100, 96, 40, 10000);
}

TEST(VulkanProduct, LimitsTheNumberOfWorkgroups) {
  Limits limits = kLimits;
  limits.max_groups = 300;
  const Notes notes = record(limits, 1, 32, 1000, 32);
  for (const Notes::Note& n : notes.notes) EXPECT_LE(n.x, 300u);
  check(notes, limits, 1, 32, 1000, 32);
}

TEST(VulkanProduct, RefusesRowsWiderThanTheLargestRange) {
  const Notes notes = record(kLimits, 1, 32768, 64, 32768);  // 64 rows of 34 KiB
  EXPECT_EQ(notes.status().code(), Code::kUnsupported);
}

// 50 ms of this device are slightly more than 256 rows.
TEST(VulkanProduct, BoundsTheWorkOfADispatch) {
  Limits limits = kLimits;
  limits.max_range = 16 << 20;  // a single dispatch
  limits.operations_per_second = 300 * 2.0 * 96 * 1000 / 0.05;
  const Notes notes = record(limits, 1000, 96, 1000, 96);
  EXPECT_EQ(notes.notes.size(), 1u + 4u);
  check(notes, limits, 1000, 96, 1000, 96);
  double operations = 0;
  for (const Notes::Note& n : notes.notes) {
    EXPECT_LE(n.operations, notes.most_operations());
    operations += n.operations;
  }
  EXPECT_EQ(operations, 2.0 * 1000 * 96 * 1000);
}

// On matrix units: first x; then slices of W, alternating between two slots of scratch, each made right
// before it is multiplied. For few rows, parts of y are added once the next slice is ready.
void check_scratch(uint32_t all_rows, uint32_t parts_each) {
  Limits limits = kLimits;
  limits.max_shared_bytes = 48 << 10;
  limits.max_range = 1 << 30;
  limits.cooperative_matrix = true;
  constexpr uint32_t kIn = 14336, kOut = 5000, kTile = 128;
  const Notes notes = record(limits, all_rows, kIn, kOut, kIn);
  ASSERT_TRUE(notes.status().ok()) << notes.status().message();

  const uint64_t row_bytes = dtype_bytes(DType::kQ8_0, kIn), f16_bytes = kIn * sizeof(uint16_t);
  std::vector<uint8_t> made(size_t(all_rows) * kOut);
  const Notes::Note *x = nullptr, *w = nullptr;
  View last_slot;
  for (auto note = notes.notes.begin(); note != notes.notes.end(); ++note) {
    const Notes::Note& n = *note;
    if (n.shader == Shader::kScaleRows) x = &n;
    if (n.shader == Shader::kDequantize) w = &n;
    if (n.shader != Shader::kProductCooperative) continue;
    ASSERT_TRUE(x && w);
    EXPECT_EQ(n.z, parts_each);
    EXPECT_EQ(n.z, ceil_div(n.params().in_cols, n.params().depth_each));
    const bool in_parts = parts_each > 1;
    const auto added = std::find_if(note, notes.notes.end(), [&](const Notes::Note& later) {
      return !in_parts || later.shader == Shader::kAddParts;
    });
    ASSERT_NE(added, notes.notes.end());
    const View &of_x = n.views[0], &slot = n.views[1], &y = added->views[3], &scales = n.views[4],
               &parts = n.views[5];
    if (in_parts) {
      EXPECT_TRUE(same(added->views[4], scales) && same(added->views[5], parts));
      EXPECT_EQ(added->params().out_cols, n.params().out_cols);
      EXPECT_EQ(added->params().depth_each, n.params().depth_each);
      EXPECT_FALSE(n.views[3]);
      EXPECT_EQ(added->y, x->x);
      EXPECT_EQ(parts.bytes, uint64_t(n.z) * n.y * kTile * slot.bytes / f16_bytes * sizeof(float));
      const bool last = w->views[0].offset / row_bytes + n.params().out_cols == kOut;
      EXPECT_EQ(added - note, last ? 1 : 2) << "with the next slice between them";
    }
    EXPECT_TRUE(same(of_x, x->views[1]) && same(scales, x->views[2]));
    EXPECT_TRUE(same(slot.slice(0, n.params().out_cols * f16_bytes), w->views[1]));
    EXPECT_FALSE(same(slot, last_slot));
    last_slot = slot;
    const View places[] = {of_x, scales, slot, parts};
    for (const View& a : places) {
      EXPECT_LE(a.offset + a.bytes, notes.scratch().bytes);
      EXPECT_EQ(a.offset % 256, 0u);
      for (const View& b : places)
        EXPECT_TRUE(&a == &b || a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset);
    }
    const uint32_t row = n.params().first_row, cols = n.params().out_cols,
                   col = static_cast<uint32_t>(w->views[0].offset / row_bytes);
    EXPECT_EQ(w->views[0].bytes, cols * row_bytes);
    EXPECT_EQ(w->y, cols);
    EXPECT_EQ(x->views[0].offset, uint64_t(row) * kIn * 4);
    EXPECT_EQ(y.offset, (uint64_t(row) * kOut + col) * 4);
    const uint32_t rows = x->x;
    EXPECT_EQ(y.bytes, ((rows - 1) * uint64_t(kOut) + cols) * 4);
    EXPECT_EQ(n.x, ceil_div(cols, kTile));
    EXPECT_EQ(n.y, ceil_div(rows, kTile));
    EXPECT_LE(round_up(rows, kTile) * f16_bytes, of_x.bytes);
    EXPECT_LE(round_up(cols, kTile) * f16_bytes, slot.bytes);
    for (uint32_t r = row; r < row + rows; ++r)
      for (uint32_t c = col; c < col + cols; ++c) ++made[size_t(r) * kOut + c];
  }
  EXPECT_EQ(made, std::vector<uint8_t>(made.size(), 1));
}
TEST(VulkanProduct, MatricesInScratchDoNotOverlap) { check_scratch(4200, 1); }
TEST(VulkanProduct, PartsOfFewRowsInScratchDoNotOverlap) { check_scratch(128, 19); }

// q, k and v, or some of them if the others have a bias, fit the size that product_scratch() returns.
TEST(VulkanProduct, ScratchFitsASubsetOfQkv) {
  static Buffer buffers[5];
  const ModelShape model{.d_model = 1024, .heads = 28, .kv_heads = 4, .head_dim = 128, .d_ff = 64};
  const uint32_t cols[] = {model.heads * model.head_dim, model.kv_heads * model.head_dim,
                           model.kv_heads * model.head_dim};
  for (const bool units : {false, true})
    for (uint32_t some = 1; some < 8; ++some) {
      SCOPED_TRACE(::testing::Message() << "units " << units << ", siblings " << some);
      Limits limits = kLimits;
      limits.max_shared_bytes = 48 << 10;
      limits.max_range = 4 << 20;
      limits.cooperative_matrix = units;
      Notes notes(limits, 256, {&buffers[4], 0, product_scratch(model, {.chunk = 256}, limits)});
      std::vector<Linear> siblings;
      uint32_t first = 0;
      for (uint32_t i = 0; i < 3; first += cols[i++]) {
        if (!(some >> i & 1)) continue;
        siblings.push_back(
            {View{&buffers[0], 0, 256ull * model.d_model * 4},
             q8_0_matrix(buffers[1], cols[i], model.d_model),
             {},
             View{&buffers[3], first * 4ull, 256ull * 8192 * 4},
             {.in_cols = model.d_model, .out_cols = cols[i], .x_stride = model.d_model, .y_stride = 8192}});
      }
      linear(notes, siblings, nullptr);
      EXPECT_TRUE(notes.status().ok()) << notes.status().message();
      EXPECT_GT(notes.notes.size(), siblings.size());
    }
}

}  // namespace
}  // namespace thimble::vulkan
