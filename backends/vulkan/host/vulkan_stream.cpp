#include "backends/vulkan/host/vulkan_stream.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "backends/checks.h"
#include "backends/joins.h"
#include "backends/vulkan/ops.h"
#include "backends/vulkan/host/program.h"

namespace thimble::vulkan {
namespace {

class VulkanRecorder : public Recorder {
 public:
  VulkanRecorder(std::shared_ptr<StreamState> stream, uint32_t max_rows)
      : recording_(std::move(stream), max_rows) {}

  void segment() override { recording().segment(); }
  void embed(const Embed& op) override {
    if (check("embed", op.table, op.table.rows, op.p.cols)) vulkan::embed(recording(), op);
  }
  // A token's norm is made by the product before it and those that read it: a dispatch of its own would take
  // 4.4 us of an H200.
  void rms_norm(const RmsNorm& op) override {
    if (!norm_ && siblings_.size() == 1 && recording_.max_rows() == 1 && makes_vector(siblings_[0], op)) {
      before_ = std::exchange(siblings_, {})[0];
      norm_ = op;
    } else {
      vulkan::rms_norm(recording(), op);
    }
  }
  void linear(const Linear& op) override {
    if (!check("linear", op.w, op.p.out_cols, op.p.in_cols)) return;
    const bool joins = norm_ ? makes_rows(*norm_, op.x, op.p.x_stride, op.p.in_cols, op.p.rows, op.y)
                             : siblings_.empty() || side_by_side(siblings_.back(), op);
    if (scored_ || vote_ || !joins) record_pending();
    prepare_norm();
    siblings_.push_back(op);
  }
  void glu(const Glu& op) override {
    if (!check("glu", op.gate, op.p.out_cols, op.p.in_cols) ||
        !check("glu", op.up, op.p.out_cols, op.p.in_cols))
      return;
    const bool joins =
        norm_ && siblings_.empty() && makes_rows(*norm_, op.x, op.p.in_cols, op.p.in_cols, kStepRows, op.h);
    if (!joins) record_pending();
    prepare_norm();
    const std::optional<RmsNorm> norm = std::exchange(norm_, {});
    vulkan::glu(recording_, op, norm ? &*norm : nullptr);
  }
  void activation(const Activation& op) override { vulkan::activation(recording(), op); }
  void kv_append(const KvAppend& op) override { vulkan::kv_append(recording(), op); }
  void cis_store(const CisStore& op) override { vulkan::cis_store(recording(), op); }
  void kv_view(const KvView& op) override { vulkan::kv_view(recording(), op); }
  void attention(const Attention& op) override { vulkan::attention(recording(), op); }
  void kv_compact(const KvCompact& op) override { vulkan::kv_compact(recording(), op); }
  void query_gate(const QueryGate& op) override { vulkan::query_gate(recording(), op); }
  void token_score(const TokenScore& op) override {
    record_pending();
    scored_ = op;
  }
  void vote(const Vote& op) override {
    if (!scored_ || vote_ || !makes_scores(*scored_, op)) record_pending();
    vote_ = op;
  }
  void top_k(const TopK& op) override {
    if (!vote_ || !lists_votes(recording_.limits(), *vote_, op)) return vulkan::top_k(recording(), op);
    const std::optional<TokenScore> scored = std::exchange(scored_, {});
    vulkan::vote_top_k(recording_, scored ? &*scored : nullptr, *std::exchange(vote_, {}), op);
  }
  void arg_max(const ArgMax& op) override { vulkan::arg_max(recording(), op); }
  void log_prob(const LogProb& op) override { vulkan::log_prob(recording(), op); }
  void copy(const Copy& op) override { vulkan::copy(recording(), op); }

  Result<std::unique_ptr<Program>> finish() { return recording().finish(); }

 private:
  // What an op records to: what has waited for it comes before. Products wait for siblings and for a norm, a
  // norm for its products, a token_score for its vote, and a vote for a top_k.
  ProgramRecording& recording() {
    record_pending();
    return recording_;
  }
  void record_pending() {
    const std::optional<RmsNorm> norm = std::exchange(norm_, {});
    if (before_) {
      vulkan::linear(recording_, {&*before_, 1});
      vulkan::rms_norm(recording_, *norm);
    } else if (!siblings_.empty()) {
      vulkan::linear(recording_, siblings_, norm ? &*norm : nullptr);
    }
    before_.reset();
    siblings_.clear();
    if (scored_) vulkan::token_score(recording_, *scored_);
    scored_.reset();
    if (vote_) vulkan::vote(recording_, *vote_);
    vote_.reset();
  }
  // The first of a norm's products is there.
  void prepare_norm() {
    if (before_) vulkan::linear_before(recording_, *before_, *norm_);
    before_.reset();
  }
  // Whether a linear makes the vector of a norm, and nothing else.
  static bool makes_vector(const Linear& a, const RmsNorm& n) {
    return a.y.buffer == n.x.buffer && a.y.offset == n.x.offset && a.p.out_cols == n.p.cols &&
           a.p.rows == kStepRows && n.p.rows == kStepRows && n.p.groups == 1;
  }
  bool check(const char* op, const Weight& w, uint32_t rows, uint32_t cols) {
    const Status status = check_matrix(op, w, rows, cols);
    recording_.fail(status);
    return status.ok();
  }

  ProgramRecording recording_;
  // Not recorded yet: products that stand side by side; a linear and the norm of what it makes, `before_` and
  // `norm_`; products of a norm that is prepared, without `before_`; or a token_score and its vote, or one of
  // them.
  std::optional<Linear> before_;
  std::optional<RmsNorm> norm_;
  std::vector<Linear> siblings_;
  std::optional<TokenScore> scored_;
  std::optional<Vote> vote_;
};

class VulkanStream : public Stream {
 public:
  explicit VulkanStream(std::shared_ptr<StreamState> state) : state_(std::move(state)) {}

  std::unique_ptr<Recorder> record(uint32_t max_rows) override {
    return std::make_unique<VulkanRecorder>(state_, max_rows);
  }

  Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
    return static_cast<VulkanRecorder&>(*recorder).finish();
  }

  Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step) override {
    VulkanProgram& p = static_cast<VulkanProgram&>(program);
    THIMBLE_TRY(check_submit(program, p.max_rows, first, last, step));
    if (first == last) return {};
    Timeline& timeline = state_->timeline;
    if (std::memcmp(&step, &step_, sizeof step) != 0) {
      THIMBLE_TRY(timeline.wait(timeline.last()));  // what runs now reads the old values
      std::memcpy(state_->step->mapped, &step, sizeof step);
      step_ = step;
    }
    // As many pieces at once as may be.
    const std::span<VulkanProgram::Piece> pieces(&p.pieces[p.first_piece[first]],
                                                 p.first_piece[last] - p.first_piece[first]);
    for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
      double seconds = 0;
      commands_.clear();
      do {
        THIMBLE_TRY(timeline.wait(pieces[end].submitted));  // it may not be submitted while it runs
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
  std::shared_ptr<StreamState> state_;
  StepParams step_{};  // what lies in state_->step
  std::vector<VkCommandBuffer> commands_;
};

}  // namespace

uint64_t program_bytes(const ModelShape& model) {
  // 160 KiB a layer were measured on lavapipe, 1.6 KB a dispatch.
  return (1 << 20) + uint64_t(model.layers) * (256 << 10);
}

Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<Context> context, View scratch) {
  auto state = std::make_shared<StreamState>(std::move(context));
  state->scratch = scratch;
  THIMBLE_TRY(state->timeline.open());
  THIMBLE_LET(step, allocate(state->context, Place::kMappedDevice,
                             StreamState::kCounters + Recording::kCounterBytes));
  std::memset(step->mapped, 0, step->size);
  state->step = std::move(step);
  return std::unique_ptr<Stream>(std::make_unique<VulkanStream>(std::move(state)));
}

}  // namespace thimble::vulkan
