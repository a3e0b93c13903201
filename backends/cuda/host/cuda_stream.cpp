// The recorder collects the ops of a segment. Then the stream captures their kernel launches, and the capture
// becomes the segment's graph.
#include "backends/cuda/host/cuda_stream.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/checks.h"
#include "backends/cuda/host/store_step.h"
#include "backends/cuda/ops.h"
#include "backends/fusion.h"

namespace thimble::cuda {
namespace {

struct CudaProgram : Program {
  explicit CudaProgram(std::shared_ptr<const CardState> s) : state(std::move(s)) {}
  ~CudaProgram() override {
    if (cudaSetDevice(state->card.index) != cudaSuccess) return;
    const std::lock_guard lock(state->memory);
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  }
  std::shared_ptr<const CardState> state;
  std::vector<cudaGraphExec_t> graphs;  // one per segment
  ProgramBounds bounds;
};

// Collects the ops. finish() launches them.
struct CudaRecorder : Recorder {
  CudaRecorder(const DeviceInfo& device, uint32_t max_rows) : info(device) { bounds.max_rows = max_rows; }

  void segment() override { segments.emplace_back(); }
  void record(const Op& op) override {
    if (status.ok()) status = check_op(op, info, bounds);
    if (status.ok() && !has_op(op, kOnCuda))
      status = error(Code::kUnsupported, "%s has no %s; use --device cpu", info.name.c_str(), op_name(op));
    if (segments.empty()) segments.emplace_back();
    segments.back().push_back(op);
  }

  const DeviceInfo& info;
  std::vector<std::vector<Op>> segments;
  ProgramBounds bounds;
  Status status;
};

// The groups of ops that are launched together. On an H200, a separate launch takes 2.5 us in every layer. In
// a program with many rows this matters little, so only products share a launch there.
Joins joins_of(const Launch& l) {
  const bool token = l.max_rows == 1;
  return {.norm = token ? Joins::Norm::kOfProducts : Joins::Norm::kAlone,
          .sibling =
              [token](const RmsNorm*, std::span<const Linear> siblings, const Linear& next) {
                return siblings.size() < kMostSiblings && (token || siblings[0].exact == next.exact) &&
                       std::all_of(siblings.begin(), siblings.end(),
                                   [&](const Linear& s) { return share_rows(s, next); });
              },
          .routed_glu = token,
          .routed_linear = token,
          .shared_expert = token,
          .append = token,
          .normed_append = token,
          .convolved_delta = token,
          .normed_delta = token && l.card.major >= 9,  // takes a cluster of blocks
          .vote = [&l](const Vote& vote,
                       const TopK&) { return vote.p.scope == kVoteLayer || can_vote(l, vote.p); }};
}

// Launches the ops of a program. There is one overload for each op and each group of ops.
class Launcher {
 public:
  explicit Launcher(const Launch& l) : l_(l) {}

  void operator()(const Op* op) { std::visit(*this, *op); }
  void operator()(const Products& g) { linear(l_, g.siblings, g.norm); }
  void operator()(const GluOfNorm& g) { glu(l_, *g.glu, g.norm); }
  void operator()(const RoutedExperts& g) { routed_experts(l_, *g.route, *g.glu, g.linear, g.shared); }
  void operator()(const AppendToken& g) {
    if (g.q_norm)
      append_token(l_, *g.q_norm, *g.k_norm, *g.append);
    else
      append_token(l_, *g.append, g.copy, g.gate);
  }
  void operator()(const ConvolvedDelta& g) { delta_net(l_, *g.net, *g.conv, g.norm); }
  void operator()(const Select& g) {
    if (g.score) token_score_before_vote(l_, *g.score);
    if (g.vote->p.scope == kVoteGroup) return top_k(l_, *g.top_k, g.vote, g.score);
    vote(l_, *g.vote, g.score);
    top_k(l_, *g.top_k);
  }

#define THIMBLE_LAUNCH_OP(Type, name, backends)              \
  void operator()(const Type& op) {                          \
    if constexpr ((kOnCuda & (backends)) != 0) name(l_, op); \
  }
  THIMBLE_OPS(THIMBLE_LAUNCH_OP)
#undef THIMBLE_LAUNCH_OP

 private:
  const Launch& l_;
};

class CudaStream : public Stream {
 public:
  CudaStream(std::shared_ptr<const CardState> state, const DeviceInfo& info, View scratch, uint32_t heads)
      : state_(std::move(state)),
        info_(info),
        scratch_(scratch),
        values_(round_up(kHeadsAt + heads * sizeof(HeadState), 16)),
        heads_(heads) {}

  ~CudaStream() override {
    if (cudaSetDevice(state_->card.index) != cudaSuccess) return;
    const std::lock_guard lock(state_->memory);
    if (crossing_) cudaEventDestroy(crossing_);
    if (copies_) cudaStreamDestroy(copies_);
    if (stream_) cudaStreamDestroy(stream_);
    if (step_) cudaFree(step_);
  }

  Status open() {
    THIMBLE_TRY(state_->use());
    const std::lock_guard lock(state_->memory);
    THIMBLE_LET(before, state_->free_bytes());
    for (cudaStream_t* stream : {&stream_, &copies_})
      THIMBLE_TRY(state_->check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream"));
    THIMBLE_TRY(
        state_->check(cudaEventCreateWithFlags(&crossing_, cudaEventDisableTiming), "making a stream"));
    THIMBLE_TRY(state_->check(cudaMalloc(&step_, values_.size()), "allocating a step"));
    THIMBLE_LET(taken, taken_since(before));
    bytes = values_.size() + taken;
    return {};
  }

  std::unique_ptr<Recorder> record(uint32_t max_rows) override {
    return std::make_unique<CudaRecorder>(info_, max_rows);
  }

  Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
    const CudaRecorder& r = static_cast<CudaRecorder&>(*recorder);
    THIMBLE_TRY(r.status);
    THIMBLE_TRY(state_->use());
    auto program = std::make_unique<CudaProgram>(state_);
    program->bounds = r.bounds;
    program->segments = static_cast<uint32_t>(r.segments.size());
    cudaError_t failed = cudaSuccess;
    std::vector<View> rewritten;
    const Launch launch{.stream = stream_,
                        .copies = copies_,
                        .crossing = crossing_,
                        .step = reinterpret_cast<const StepParams*>(step_),
                        .heads = reinterpret_cast<const HeadState*>(step_ + kHeadsAt),
                        .max_rows = r.bounds.max_rows,
                        .scratch = data<std::byte>(scratch_),
                        .scratch_bytes = scratch_.bytes,
                        .card = state_->card,
                        .error = &failed,
                        .rewritten = &rewritten};
    Launcher launcher(launch);
    const std::lock_guard lock(state_->memory);
    THIMBLE_LET(before, state_->free_bytes());
    for (const std::vector<Op>& ops : r.segments) {
      THIMBLE_LET(graph, capture(launch, launcher, ops));
      program->graphs.push_back(graph);
    }
    THIMBLE_TRY(wait());
    THIMBLE_LET(taken, taken_since(before));
    program->bytes = taken + sizeof *program + program->graphs.capacity() * sizeof program->graphs[0] +
                     program->bounds.heads.capacity() * sizeof program->bounds.heads[0];
    return std::unique_ptr<Program>(std::move(program));
  }

  Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step,
                std::span<const HeadState> heads) override {
    const CudaProgram& p = static_cast<CudaProgram&>(program);
    if (heads.size() != heads_)
      return error(Code::kInternal, "a step of %zu heads on a stream of %u", heads.size(), heads_);
    THIMBLE_TRY(check_submit(program, p.bounds, first, last, step, heads));
    THIMBLE_TRY(state_->use());
    std::memcpy(values_.data(), &step, sizeof step);
    if (!heads.empty()) std::memcpy(values_.data() + kHeadsAt, heads.data(), heads.size_bytes());
    THIMBLE_TRY(state_->check(store_step(stream_, values_, step_), "starting a step"));
    for (uint32_t s = first; s < last; ++s)
      THIMBLE_TRY(state_->check(cudaGraphLaunch(p.graphs[s], stream_), "starting a step"));
    return {};
  }

  Status wait() override {
    THIMBLE_TRY(state_->use());
    return state_->check(cudaStreamSynchronize(stream_), "running a step");
  }

 private:
  // The offset of the table of heads, which follows the step.
  static constexpr size_t kHeadsAt = round_up(sizeof(StepParams), 16);

  // Card memory taken since `before`, a value of state_->free_bytes().
  Result<uint64_t> taken_since(uint64_t before) const {
    THIMBLE_LET(now, state_->free_bytes());
    return before - std::min(now, before);
  }

  Result<cudaGraphExec_t> capture(const Launch& launch, Launcher& launcher, std::span<const Op> ops) {
    cudaError_t& failed = *launch.error;
    // Relaxed mode, because a kernel is loaded when it is launched for the first time, which the other modes
    // forbid.
    THIMBLE_TRY(state_->check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "recording"));
    for (const Group& group : group_ops(ops, joins_of(launch))) std::visit(launcher, group);
    const bool copies =
        std::any_of(ops.begin(), ops.end(), [](const Op& op) { return std::holds_alternative<Stage>(op); });
    if (copies && failed == cudaSuccess) failed = cudaEventRecord(crossing_, copies_);
    if (copies && failed == cudaSuccess) failed = cudaStreamWaitEvent(stream_, crossing_, 0);
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    cudaGraphExec_t executable = nullptr;
    if (failed == cudaSuccess) failed = ended;
    if (failed == cudaSuccess) failed = cudaGraphInstantiate(&executable, graph, 0);
    if (failed == cudaSuccess) failed = cudaGraphUpload(executable, stream_);
    if (graph) cudaGraphDestroy(graph);
    if (failed == cudaSuccess) return executable;
    if (executable) cudaGraphExecDestroy(executable);
    return state_->check(failed, "recording a program");
  }

  std::shared_ptr<const CardState> state_;
  const DeviceInfo info_;
  View scratch_;
  std::vector<std::byte> values_;  // the step, followed by the table of heads
  uint32_t heads_;
  cudaStream_t stream_ = nullptr, copies_ = nullptr;  // of kernels, and of copies next to them
  cudaEvent_t crossing_ = nullptr;
  std::byte* step_ = nullptr;  // where the kernels read the values
};

}  // namespace

uint64_t program_bytes(const ModelShape& model) {
  // Graphs, and kernels that are loaded when they are first recorded. On an H200, a session takes 14 MiB for
  // 8 layers and 22 MiB for 40 layers.
  return (12 << 20) + uint64_t(model.layers) * (448 << 10);
}

Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<const CardState> state, const DeviceInfo& info,
                                            View scratch, uint32_t heads) {
  auto stream = std::make_unique<CudaStream>(std::move(state), info, scratch, heads);
  THIMBLE_TRY(stream->open());
  return std::unique_ptr<Stream>(std::move(stream));
}

}  // namespace thimble::cuda
