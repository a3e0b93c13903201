#include "backends/vulkan/host/program.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "backends/vulkan/host/pipelines.h"
#include "base/bits.h"

namespace thimble::vulkan {

template <typename T>
static uint64_t bytes_of(const std::vector<T>& list) {
  return list.capacity() * sizeof(T);
}

// A view of no bytes may be at the end of its buffer, where nothing can be bound.
static bool is_empty(const View& view) { return !view || !view.bytes; }

VulkanProgram::~VulkanProgram() {
  const Context& c = *stream->context;
  uint64_t last = 0;
  for (const Piece& piece : pieces) last = std::max(last, piece.submitted);
  static_cast<void>(stream->timeline.wait(last));  // if the device is lost, there is nothing to wait for
  c.vk.DestroyCommandPool(c.device, commands, nullptr);
  for (const VkDescriptorPool pool : descriptors) c.vk.DestroyDescriptorPool(c.device, pool, nullptr);
}

ProgramRecording::ProgramRecording(std::shared_ptr<StreamState> stream, uint32_t max_rows)
    : Recording(stream->context->gpu.limits, max_rows, stream->scratch,
                {stream->shared.get(), StreamState::kCounters, kCounterBytes},
                {stream->shared.get(), StreamState::kCodeBooks, sizeof StreamState::kBooks}),
      stream_(std::move(stream)),
      context_(*stream_->context),
      program_(std::make_unique<VulkanProgram>(stream_)) {
  const VkCommandPoolCreateInfo pool{.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                     .queueFamilyIndex = context_.gpu.queue_family};
  fail(context_.check(context_.vk.CreateCommandPool(context_.device, &pool, nullptr, &program_->commands),
                      "making a command pool"));
}

void ProgramRecording::segment() {
  if (status_.ok()) fail(end());
  program_->first_piece.push_back(program_->pieces.size());
  if (status_.ok()) fail(begin());
}

Status ProgramRecording::begin() {
  const VkCommandBufferAllocateInfo info{.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                         .commandPool = program_->commands,
                                         .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                         .commandBufferCount = 1};
  VkCommandBuffer commands = VK_NULL_HANDLE;
  THIMBLE_TRY(context_.check(context_.vk.AllocateCommandBuffers(context_.device, &info, &commands),
                             "recording a program"));
  program_->pieces.push_back({commands});
  const VkCommandBufferBeginInfo begin{.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  THIMBLE_TRY(context_.check(context_.vk.BeginCommandBuffer(commands, &begin), "recording a program"));
  full_barrier(context_.vk, commands);
  hazards_ = {};
  recording_ = true;
  return {};
}

Status ProgramRecording::end() {
  if (!recording_) return {};
  recording_ = false;
  const VkCommandBuffer commands = program_->pieces.back().commands;
  full_barrier(context_.vk, commands);
  return context_.check(context_.vk.EndCommandBuffer(commands), "recording a program");
}

Result<std::unique_ptr<Program>> ProgramRecording::finish(ProgramBounds bounds) {
  if (status_.ok()) fail(end());
  THIMBLE_TRY(status_);
  context_.pipelines->keep();
  program_->bounds = std::move(bounds);
  program_->segments = static_cast<uint32_t>(program_->first_piece.size());
  program_->first_piece.push_back(program_->pieces.size());
  program_->bytes = sizeof *program_ + bytes_of(program_->pieces) + bytes_of(program_->first_piece) +
                    bytes_of(program_->descriptors) + bytes_of(program_->bounds.heads);
  return std::unique_ptr<Program>(std::move(program_));
}

void ProgramRecording::dispatch(Shader shader, std::initializer_list<uint32_t> constants,
                                std::initializer_list<Operand> operands, const void* push, size_t push_bytes,
                                uint32_t x, uint32_t y, uint32_t z) {
  if (!recording_) segment();
  if (status_.ok() && x && y && z) fail(try_dispatch(shader, constants, operands, push, push_bytes, x, y, z));
}

Status ProgramRecording::try_dispatch(Shader shader, std::span<const uint32_t> constants,
                                      std::span<const Operand> operands, const void* push, size_t push_bytes,
                                      uint32_t x, uint32_t y, uint32_t z) {
  const Api& vk = context_.vk;
  const char* name = shader_name(shader);
  if (operands.size() > kMostOperands || push_bytes + operands.size() * sizeof(uint32_t) > kPushBytes)
    return error(Code::kInternal, "%s has %zu operands and %zu bytes of parameters", name, operands.size(),
                 push_bytes);
  if (std::max({x, y, z}) > limits_.max_groups)
    return error(Code::kUnsupported, "%s needs %u x %u x %u workgroups, and %s has %u in a dimension", name,
                 x, y, z, context_.gpu.info.name.c_str(), limits_.max_groups);

  std::byte pushed[kPushBytes];
  std::memcpy(pushed, push, push_bytes);
  VkDescriptorBufferInfo bound[1 + kMostOperands] = {
      {stream_->shared->handle, StreamState::kStep, stream_->step_bytes()}};
  // Instead of an empty operand that the shader may write, one that it does write is bound again, because
  // dispatches that share the same few bytes would have to wait for each other.
  const View nothing{stream_->shared.get(), StreamState::kNothing, StreamState::kNothingBytes};
  const auto written = std::find_if(operands.begin(), operands.end(),
                                    [](const Operand& o) { return o.writes && !is_empty(o.view); });
  Access accesses[kMostOperands];
  double bytes = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    View view = operands[i].view;
    if (is_empty(view)) view = operands[i].writes && written != operands.end() ? written->view : nothing;
    THIMBLE_TRY(check_view(view));
    if (view.offset % sizeof(uint32_t))
      return error(Code::kInternal, "operand %zu of %s starts at byte %" PRIu64, i, name, view.offset);
    const uint64_t first = view.offset / limits_.offset_alignment * limits_.offset_alignment;
    const uint64_t end = round_up(view.offset + view.bytes, sizeof(uint32_t));
    if (end - first > limits_.max_range)
      return error(Code::kUnsupported,
                   "%s has an operand of %" PRIu64 " MiB, and %s shows a shader at most %" PRIu64
                   " MiB; use a smaller pool, or --device cpu",
                   name, (end - first) >> 20, context_.gpu.info.name.c_str(), limits_.max_range >> 20);
    const uint32_t base = static_cast<uint32_t>((view.offset - first) / sizeof(uint32_t));
    std::memcpy(pushed + push_bytes + i * sizeof base, &base, sizeof base);
    bound[1 + i] = {static_cast<VulkanBuffer*>(view.buffer)->handle, first, end - first};
    // The whole bound range counts, because validation layers assume that all of it is read and written.
    accesses[i] = {view.buffer, first, end, operands[i].writes};
    bytes += static_cast<double>(end - first);
  }

  THIMBLE_LET(pipeline, context_.pipelines->find(shader, constants, operands.size()));
  THIMBLE_LET(set, descriptor_set(operands.size()));
  VkWriteDescriptorSet write{.sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
                             .dstSet = set,
                             .descriptorCount = static_cast<uint32_t>(1 + operands.size()),
                             .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                             .pBufferInfo = bound};
  vk.UpdateDescriptorSets(context_.device, 1, &write, 0, nullptr);

  const double seconds = std::max(bytes / limits_.bytes_per_second,
                                  std::exchange(operations_, 0) / limits_.operations_per_second);
  if (const double before = program_->pieces.back().seconds; before && before + seconds > kSubmitSeconds) {
    THIMBLE_TRY(end());
    THIMBLE_TRY(begin());
  }
  program_->pieces.back().seconds += seconds;
  const VkCommandBuffer commands = program_->pieces.back().commands;
  if (hazards_.add({accesses, operands.size()})) {
    const VkMemoryBarrier barrier{.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                  .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT,
                                  .dstAccessMask = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT};
    vk.CmdPipelineBarrier(commands, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                          VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, 0, 1, &barrier, 0, nullptr, 0, nullptr);
  }
  const VkPipelineLayout layout = context_.pipelines->layout(operands.size());
  vk.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
  vk.CmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, nullptr);
  vk.CmdPushConstants(commands, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                      static_cast<uint32_t>(push_bytes + operands.size() * sizeof(uint32_t)), pushed);
  vk.CmdDispatch(commands, x, y, z);
  return {};
}

// A descriptor set that lives as long as the program. A pool holds 128 sets, most of which have fewer than 8
// buffers.
Result<VkDescriptorSet> ProgramRecording::descriptor_set(size_t operands) {
  constexpr uint32_t kSets = 128;
  const Api& vk = context_.vk;
  const VkDescriptorSetLayout layout = context_.pipelines->set_layout(operands);
  VkDescriptorSetAllocateInfo allocate{.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
                                       .descriptorSetCount = 1,
                                       .pSetLayouts = &layout};
  VkDescriptorSet set = VK_NULL_HANDLE;
  if (!program_->descriptors.empty()) {
    allocate.descriptorPool = program_->descriptors.back();
    const VkResult r = vk.AllocateDescriptorSets(context_.device, &allocate, &set);
    if (r == VK_SUCCESS) return set;
    if (r != VK_ERROR_OUT_OF_POOL_MEMORY && r != VK_ERROR_FRAGMENTED_POOL)
      return context_.check(r, "recording a program");
  }
  const VkDescriptorPoolSize size{VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, kSets * 8};
  const VkDescriptorPoolCreateInfo create{.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO,
                                          .maxSets = kSets,
                                          .poolSizeCount = 1,
                                          .pPoolSizes = &size};
  VkDescriptorPool pool = VK_NULL_HANDLE;
  THIMBLE_TRY(context_.check(vk.CreateDescriptorPool(context_.device, &create, nullptr, &pool),
                             "recording a program"));
  program_->descriptors.push_back(pool);
  allocate.descriptorPool = pool;
  THIMBLE_TRY(
      context_.check(vk.AllocateDescriptorSets(context_.device, &allocate, &set), "recording a program"));
  return set;
}

}  // namespace thimble::vulkan
