// A program being recorded: what an op gets, and how it puts a shader into the program.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "backends/backend.h"
#include "backends/vulkan/shaders.h"

namespace thimble::vulkan {

// What the device of a recording can do.
struct Limits {
  uint32_t subgroup_size = 0;      // that every pipeline gets: a power of two, 4 to 128
  uint32_t max_group_threads = 0;  // threads in a workgroup, at least 128
  uint32_t max_shared_bytes = 0;   // shared memory of a workgroup, at least 16 KiB
  uint32_t max_groups = 0;         // workgroups in any dimension of a grid, at least 65535
  uint32_t offset_alignment = 0;   // of descriptors, a power of two; an operand may start at any word
  uint64_t max_range = 0;          // bytes that one operand can show, at least 128 MiB
  bool f16_storage = false;        // 16-bit types in buffers
  bool f16_arithmetic = false;
  bool half_subnormals = false;  // f16 below 2^-14 become f32 as they are
  bool byte_products = false;    // four products of bytes and their sum in one operation
  // Subgroups multiply matrices of 16 x 16 in f16 and add them in f32 (the XC rows of shaders.h), and both of
  // the above are there.
  bool cooperative_matrix = false;
  // What slow devices of its kind do in a second; nothing is measured.
  double operations_per_second = 0, bytes_per_second = 0;

  // A workgroup of so many threads or, where the device has no room for them, of fewer: a power of two.
  uint32_t threads(uint32_t most) const { return std::min(most, std::bit_floor(max_group_threads)); }
};

// A submit takes about so long and no longer, so that a desktop on the same card stays alive.
inline constexpr double kSubmitSeconds = 0.05;

// An operand of a shader, and whether the shader writes it (it may then read it too). An operand that some
// variants of the shader write is declared as written also where it is empty.
struct Operand {
  View view;
  bool writes;
};
inline Operand reads(const View& view) { return {view, false}; }
inline Operand writes(const View& view) { return {view, true}; }
inline constexpr size_t kMostOperands = 12;  // of a dispatch

// Operand i of a dispatch is binding 1 + i of set 0, an array of words; binding 0 is StepParams and the table
// of HeadState (shaders/step.glsl). A descriptor starts at a multiple of offset_alignment: the words between
// it and operand i's first element are push.base[i]. An empty operand is bound to a few bytes that no shader
// may touch: it learns otherwise that the operand is not there.
//
//   layout(push_constant) uniform Push { CopyParams p; uint base[2]; } push;
//
// Barriers come from the operands: a dispatch waits for those before it whose results it needs or overwrites,
// and for no others.
class Recording {
 public:
  virtual ~Recording() = default;

  const Limits& limits() const { return limits_; }
  uint32_t max_rows() const { return max_rows_; }
  // Rows that an op of this program may get: `rows` is kStepRows or kLogitRows. StepParams says how many
  // there are.
  uint32_t most_rows(uint32_t rows = kStepRows) const {
    return rows == kLogitRows && max_rows_ > kMostLogitRows ? kMostLogitRows : max_rows_;
  }
  // An op may use it from its first byte on; what it leaves there is gone with the next op. As large as
  // needs() said.
  const View& scratch() const { return scratch_; }
  // 0, 1, 2, ...: what ops put into different parts of scratch by turns does not wait for what came before.
  uint32_t turn() { return turn_++; }
  // Zeros in fast memory. A shader whose workgroups count there, so that the last one finishes what the
  // others began, leaves zeros.
  const View& counters() const { return counters_; }
  static constexpr uint64_t kCounterBytes = 4096;

  // The code books (backends/codebooks.h), two entries a word. Products and embed read them and the weights.
  const View& code_books() const { return code_books_; }

  // Floating-point operations that one dispatch may take; an op that needs more cuts its work into several.
  double most_operations() const { return limits_.operations_per_second * kSubmitSeconds; }
  // The next dispatch takes so many of them. Ops say it where to compute takes longer than to read operands.
  void expect(double operations) { operations_ = operations; }

  // Records x * y * z workgroups of a shader. `constants` are its specialisation constants 0, 1, ...
  template <typename Params>
  void dispatch(Shader shader, std::initializer_list<uint32_t> constants,
                std::initializer_list<Operand> operands, const Params& push, uint32_t x, uint32_t y = 1,
                uint32_t z = 1) {
    static_assert(sizeof(Params) % sizeof(uint32_t) == 0 && sizeof(Params) <= 128);
    dispatch(shader, constants, operands, &push, sizeof push, x, y, z);
  }

  // Makes finish() fail; the first error sticks.
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

 protected:
  Recording(const Limits& limits, uint32_t max_rows, const View& scratch, const View& counters,
            const View& code_books)
      : limits_(limits),
        max_rows_(max_rows),
        scratch_(scratch),
        counters_(counters),
        code_books_(code_books) {}

  virtual void dispatch(Shader, std::initializer_list<uint32_t> constants, std::initializer_list<Operand>,
                        const void* push, size_t push_bytes, uint32_t x, uint32_t y, uint32_t z) = 0;

  Limits limits_;
  double operations_ = 0;  // that the next dispatch is expected to take
  uint32_t max_rows_;
  uint32_t turn_ = 0;
  View scratch_, counters_, code_books_;
  Status status_;
};

}  // namespace thimble::vulkan
