#include "backends/vulkan/host/vulkan_stream.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>
#include <vector>

#include "backends/checks.h"
#include "backends/fusion.h"
#include "backends/vulkan/host/program.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

// Collects a program's ops. finish() puts the ops of a group into the same dispatches.
class VulkanRecorder : public Recorder {
 public:
  VulkanRecorder(std::shared_ptr<StreamState> stream, uint32_t max_rows)
      : info_(stream->context->gpu.info), recording_(std::move(stream), max_rows) {
    bounds_.max_rows = max_rows;
  }

  void segment() override { segments_.emplace_back(); }

  void record(const Op& op) override {
    if (const Status status = check_op(op, info_, bounds_); !status.ok()) {
      recording_.fail(status);
    } else if (!supports(op, recording_.limits())) {
      recording_.fail(error(Code::kUnsupported, "%s has no %s of this kind; use --device cpu",
                            info_.name.c_str(), op_name(op)));
    } else {
      if (segments_.empty()) segment();
      segments_.back().push_back(op);
    }
  }

  Result<std::unique_ptr<Program>> finish() {
    const Joins joins = what_joins();
    for (const std::vector<Op>& ops : segments_) {
      recording_.segment();
      for (const Group& group : group_ops(ops, joins))
        std::visit([this](const auto& g) { launch(g); }, group);
    }
    return recording_.finish(std::move(bounds_));
  }

 private:
  Joins what_joins() const {
    Joins joins;
    // In a program of one row, a norm is computed by the product before it and the products that read it. A
    // separate dispatch would take 4.4 us on an H200.
    joins.norm = recording_.max_rows() == 1 ? Joins::Norm::kBetweenProducts : Joins::Norm::kAlone;
    joins.routed_glu = recording_.max_rows() == 1;
    joins.normed_append = recording_.max_rows() == 1;
    joins.sibling = [](const RmsNorm* norm, std::span<const Linear> siblings, const Linear& next) {
      return norm || (side_by_side(siblings.back(), next) && siblings.back().exact == next.exact);
    };
    joins.vote = [this](const Vote& vote, const TopK& list) {
      return lists_votes(recording_.limits(), vote, list);
    };
    return joins;
  }

  void launch(const Op* op) {
    std::visit([this](const auto& o) { launch(o); }, *op);
  }
#define THIMBLE_LAUNCH_OP(Type, name, backends)                        \
  void launch(const Type& op) {                                        \
    if constexpr ((kOnVulkan & (backends)) != 0) name(recording_, op); \
  }
  THIMBLE_OPS(THIMBLE_LAUNCH_OP)
#undef THIMBLE_LAUNCH_OP

  void launch(const Products& p) {
    if (p.before) linear_before(recording_, *p.before, *p.norm);
    if (p.experts && !expert_linear_before(recording_, *p.experts, *p.norm)) {
      launch(*p.experts);
      launch(*p.norm);
      return linear(recording_, p.siblings, nullptr);
    }
    linear(recording_, p.siblings, p.norm);
  }
  void launch(const GluOfNorm& g) {
    if (g.before) linear_before(recording_, *g.before, *g.norm);
    glu(recording_, *g.glu, g.norm);
  }
  void launch(const RoutedExperts& g) {
    if (routed_expert_glu(recording_, *g.route, *g.glu)) return;
    launch(*g.route);
    launch(*g.glu);
  }
  void launch(const ConvolvedDelta&) {}  // joins.convolved_delta is false
  void launch(const Select& s) { vote_top_k(recording_, s.score, *s.vote, *s.top_k); }
  void launch(const AppendToken& a) {
    if (norm_append(recording_, *a.q_norm, *a.k_norm, *a.append)) return;
    launch(*a.q_norm);
    launch(*a.k_norm);
    launch(*a.append);
  }

  const DeviceInfo& info_;
  ProgramRecording recording_;
  ProgramBounds bounds_;
  std::vector<std::vector<Op>> segments_;
};

class VulkanStream : public Stream {
 public:
  explicit VulkanStream(std::shared_ptr<StreamState> state)
      : state_(std::move(state)), heads_(state_->heads) {
    bytes = sizeof *this + sizeof *state_ + state_->shared->size + heads_.capacity() * sizeof heads_[0];
  }

  std::unique_ptr<Recorder> record(uint32_t max_rows) override {
    return std::make_unique<VulkanRecorder>(state_, max_rows);
  }

  Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
    return static_cast<VulkanRecorder&>(*recorder).finish();
  }

  Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step,
                std::span<const HeadState> heads) override {
    VulkanProgram& p = static_cast<VulkanProgram&>(program);
    if (heads.size() != heads_.size())
      return error(Code::kInternal, "a step with %zu heads, on a stream that was opened for %zu",
                   heads.size(), heads_.size());
    THIMBLE_TRY(check_submit(program, p.bounds, first, last, step, heads));
    if (first == last) return {};
    THIMBLE_TRY(store(step, heads));
    // Submits as many pieces at once as possible.
    Timeline& timeline = state_->timeline;
    const std::span<VulkanProgram::Piece> pieces(&p.pieces[p.first_piece[first]],
                                                 p.first_piece[last] - p.first_piece[first]);
    for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
      double seconds = 0;
      commands_.clear();
      do {
        THIMBLE_TRY(timeline.wait(pieces[end].submitted));  // a piece must not be submitted while it runs
        commands_.push_back(pieces[end].commands);
        seconds += pieces[end].seconds;
      } while (++end < pieces.size() && seconds + pieces[end].seconds <= kSubmitSeconds);
      THIMBLE_TRY(timeline.submit(commands_));
      for (size_t i = begin; i < end; ++i) pieces[i].submitted = timeline.last();
    }
    return {};
  }

  Status wait() override { return state_->timeline.wait(state_->timeline.last()); }

 private:
  // Writes the values that differ from the last step to memory that shaders read.
  Status store(const StepParams& step, std::span<const HeadState> heads) {
    const bool new_step = std::memcmp(&step, &step_, sizeof step) != 0;
    const bool new_heads =
        !heads.empty() && std::memcmp(heads.data(), heads_.data(), heads.size_bytes()) != 0;
    if (!new_step && !new_heads) return {};
    THIMBLE_TRY(state_->timeline.wait(state_->timeline.last()));  // running work reads the old values
    std::byte* mapped = static_cast<std::byte*>(state_->shared->mapped) + StreamState::kStep;
    if (new_step) {
      step_ = step;
      std::memcpy(mapped, &step, sizeof step);
    }
    if (new_heads) {
      std::copy(heads.begin(), heads.end(), heads_.begin());
      std::memcpy(mapped + sizeof step, heads.data(), heads.size_bytes());
    }
    return {};
  }

  std::shared_ptr<StreamState> state_;
  // A copy of the values in state_->shared.
  StepParams step_{};
  std::vector<HeadState> heads_;
  std::vector<VkCommandBuffer> commands_;
};

}  // namespace

uint64_t program_bytes(const ModelShape& model) {
  // On lavapipe, 160 KiB per layer were measured, 1.6 KB per dispatch. With experts, each of three programs
  // for chunks has up to 60 more dispatches per layer.
  return (1 << 20) + uint64_t(model.layers) * ((256 << 10) + (model.experts ? 300 << 10 : 0));
}

Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<Context> context, View scratch, uint32_t heads) {
  auto state = std::make_shared<StreamState>(std::move(context));
  state->scratch = scratch;
  state->heads = heads;
  THIMBLE_TRY(state->timeline.open());
  const uint64_t bytes = StreamState::kStep + state->step_bytes();
  THIMBLE_LET(shared, allocate(state->context, Place::kMappedDevice, bytes));
  std::memset(shared->mapped, 0, bytes);
  std::memcpy(static_cast<std::byte*>(shared->mapped) + StreamState::kCodeBooks, StreamState::kBooks,
              sizeof StreamState::kBooks);
  state->shared = std::move(shared);
  return std::unique_ptr<Stream>(std::make_unique<VulkanStream>(std::move(state)));
}

}  // namespace thimble::vulkan
