// A program: command buffers that are recorded once and submitted repeatedly. A segment has one command
// buffer, or several if a slow device would take too long for it.
#pragma once

#include <iterator>
#include <memory>
#include <vector>

#include "backends/checks.h"
#include "backends/codebooks.h"
#include "backends/vulkan/host/hazards.h"
#include "backends/vulkan/host/memory.h"
#include "backends/vulkan/recording.h"

namespace thimble::vulkan {

// The state that all programs of a stream share.
struct StreamState {
  explicit StreamState(std::shared_ptr<Context> c) : context(std::move(c)), timeline(context) {}
  static constexpr uint16_t kBooks[] = {THIMBLE_CODE_BOOKS};
  // Offsets in `shared`: Recording::counters(), the data of empty operands, the code books, and StepParams
  // followed by the table of HeadState. They are multiples of every alignment that a device may require for a
  // descriptor.
  static constexpr uint64_t kCounters = 0, kNothing = Recording::kCounterBytes, kNothingBytes = 16,
                            kCodeBooks = kNothing + 256, kStep = kCodeBooks + sizeof kBooks;
  static_assert(kStep % 256 == 0 && std::size(kBooks) == THIMBLE_IQ1_FIRST + 2048);

  // The bytes of binding 0 in shaders (shaders/step.glsl). In both C++ and GLSL there is no padding between
  // the two.
  uint64_t step_bytes() const { return sizeof(StepParams) + heads * sizeof(HeadState); }
  static_assert(sizeof(StepParams) == 13 * sizeof(uint32_t) && sizeof(HeadState) == 6 * sizeof(uint32_t));

  std::shared_ptr<Context> context;
  Timeline timeline;
  std::unique_ptr<VulkanBuffer> shared;
  uint32_t heads = 0;  // rows of the table of HeadState
  View scratch;
};

struct VulkanProgram : Program {
  explicit VulkanProgram(std::shared_ptr<StreamState> s) : stream(std::move(s)) {}
  ~VulkanProgram() override;
  std::shared_ptr<StreamState> stream;
  ProgramBounds bounds;
  VkCommandPool commands = VK_NULL_HANDLE;
  std::vector<VkDescriptorPool> descriptors;

  struct Piece {
    VkCommandBuffer commands;
    double seconds = 0;      // estimated time on a slow device
    uint64_t submitted = 0;  // number of its last submit in the stream's timeline
  };
  std::vector<Piece> pieces;
  std::vector<size_t> first_piece;  // for each segment; then the number of pieces
};

class ProgramRecording : public Recording {
 public:
  ProgramRecording(std::shared_ptr<StreamState>, uint32_t max_rows);

  // Ends the current segment, if any, and begins another.
  void segment();
  Result<std::unique_ptr<Program>> finish(ProgramBounds);

 private:
  void dispatch(Shader, std::initializer_list<uint32_t> constants, std::initializer_list<Operand>,
                const void* push, size_t push_bytes, uint32_t x, uint32_t y, uint32_t z) override;
  Status try_dispatch(Shader, std::span<const uint32_t> constants, std::span<const Operand>, const void* push,
                      size_t push_bytes, uint32_t x, uint32_t y, uint32_t z);
  Status begin();
  Status end();
  Result<VkDescriptorSet> descriptor_set(size_t operands);

  std::shared_ptr<StreamState> stream_;
  const Context& context_;
  std::unique_ptr<VulkanProgram> program_;
  Hazards hazards_;  // of the current piece
  bool recording_ = false;
};

}  // namespace thimble::vulkan
