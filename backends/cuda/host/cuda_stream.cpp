// Recording is stream capture: an op launches its kernels, and the capture becomes a graph of the segment, or
// two where steps vote in either scope.
#include "backends/cuda/host/cuda_stream.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "backends/checks.h"
#include "backends/cuda/ops.h"
#include "backends/cuda/host/store_step.h"
#include "backends/joins.h"

namespace thimble::cuda {
namespace {

using Call = std::function<void(const Launch&)>;

struct CudaProgram : Program {
  explicit CudaProgram(std::shared_ptr<const CardState> s) : state(std::move(s)) {}
  ~CudaProgram() override {
    if (cudaSetDevice(state->card.index) != cudaSuccess) return;
    for (const auto& of_scope : graphs)
      for (cudaGraphExec_t graph : of_scope) cudaGraphExecDestroy(graph);
  }
  std::shared_ptr<const CardState> state;
  // One a segment; for either vote_scope, or for all steps.
  std::vector<std::vector<cudaGraphExec_t>> graphs;
  uint32_t max_rows = 0;
};

class CudaRecorder : public Recorder {
 public:
  explicit CudaRecorder(uint32_t rows) : max_rows(rows) {}

  void segment() override {
    add_pending();
    segments.emplace_back();
  }
  void embed(const Embed& op) override {
    check("embed", op.table, op.table.rows, op.p.cols);
    add(cuda::embed, op);
  }
  // A token's norm is made by the products that read it: its own launch would take 2.5 us of an H200.
  void rms_norm(const RmsNorm& op) override {
    add_pending();
    if (max_rows == 1)
      norm_ = op;
    else
      add(cuda::rms_norm, op);
  }
  // Matrices that multiply the same rows one after the other may share a launch.
  void linear(const Linear& op) override {
    check("linear", op.w, op.p.out_cols, op.p.in_cols);
    const bool joins =
        siblings_.size() < kMostSiblings &&
        std::all_of(siblings_.begin(), siblings_.end(), [&](const Linear& s) { return share_rows(s, op); }) &&
        (!norm_ || makes_rows(*norm_, op.x, op.p.x_stride, op.p.in_cols, op.p.rows, op.y));
    if (holds_others() || !joins) add_pending();
    siblings_.push_back(op);
  }
  void glu(const Glu& op) override {
    check("glu", op.gate, op.p.out_cols, op.p.in_cols);
    check("glu", op.up, op.p.out_cols, op.p.in_cols);
    if (holds_others() || !siblings_.empty() ||
        (norm_ && !makes_rows(*norm_, op.x, op.p.in_cols, op.p.in_cols, kStepRows, op.h)))
      add_pending();
    call([op, norm = std::exchange(norm_, {})](const Launch& l) {
      cuda::glu(l, op, norm ? &*norm : nullptr);
    });
  }
  void activation(const Activation& op) override { add(cuda::activation, op); }
  // A token's row may be copied and compared by the launch that appends it.
  void kv_append(const KvAppend& op) override {
    add_pending();
    if (max_rows == 1)
      append_ = op;
    else
      add(cuda::kv_append, op);
  }
  void cis_store(const CisStore& op) override { add(cuda::cis_store, op); }
  void kv_view(const KvView& op) override { add(cuda::kv_view, op); }
  void attention(const Attention& op) override { add(cuda::attention, op); }
  void kv_compact(const KvCompact& op) override {
    rewritten_.push_back(op.k);
    add(cuda::kv_compact, op);
  }
  void query_gate(const QueryGate& op) override {
    if (append_ && !gate_ && apart({op.cached, op.gate}, {op.q}))
      gate_ = op;
    else
      add(cuda::query_gate, op);
  }
  // The votes of KV heads, and the log-sum-exps in them, are made by the launch that picks by them.
  void token_score(const TokenScore& op) override {
    add_pending();
    scored_ = op;
    keys_stay_ =
        std::none_of(rewritten_.begin(), rewritten_.end(), [&](const View& v) { return overlap(v, op.k); });
  }
  void vote(const Vote& op) override {
    if (vote_ || !scored_ || !makes_scores(*scored_, op)) add_pending();
    vote_ = op;
    votes = true;
  }
  void top_k(const TopK& op) override {
    if (!vote_ || !makes_votes(*vote_, op)) add_pending();
    call([op, scored = std::exchange(scored_, {}), vote = std::exchange(vote_, {}),
          keys_stay = keys_stay_](const Launch& l) {
      const bool joined = vote && can_vote(l, vote->p);
      if (scored) cuda::token_score(l, *scored, keys_stay, !joined);
      if (vote && !joined) cuda::vote(l, *vote);
      cuda::top_k(l, op, joined ? &*vote : nullptr, joined && scored ? &*scored : nullptr);
    });
  }
  void arg_max(const ArgMax& op) override { add(cuda::arg_max, op); }
  void log_prob(const LogProb& op) override { add(cuda::log_prob, op); }
  void copy(const Copy& op) override {
    rewritten_.push_back(op.dst);
    if (append_ && !copy_ && !gate_ && apart({op.dst}, {op.src}))
      copy_ = op;
    else
      add(cuda::copy, op);
  }

  // Adds what was recorded last and waits for the next op.
  void add_pending() {
    const std::vector<Linear> siblings = std::exchange(siblings_, {});
    const std::optional<RmsNorm> norm = std::exchange(norm_, {});
    const std::optional<KvAppend> append = std::exchange(append_, {});
    const std::optional<Copy> copy = std::exchange(copy_, {});
    const std::optional<QueryGate> gate = std::exchange(gate_, {});
    const std::optional<TokenScore> scored = std::exchange(scored_, {});
    const std::optional<Vote> vote = std::exchange(vote_, {});
    if (!siblings.empty())
      call([=](const Launch& l) { cuda::linear(l, siblings, norm ? &*norm : nullptr); });
    else if (norm)
      call([=](const Launch& l) { cuda::rms_norm(l, *norm); });
    else if (append)
      call([=](const Launch& l) {
        cuda::append_token(l, *append, copy ? &*copy : nullptr, gate ? &*gate : nullptr);
      });
    if (scored)
      call([=, keys_stay = keys_stay_](const Launch& l) { cuda::token_score(l, *scored, keys_stay, true); });
    if (vote) call([=](const Launch& l) { cuda::vote(l, *vote); });
  }

  const uint32_t max_rows;
  std::vector<std::vector<Call>> segments;
  bool votes = false;  // some op does
  Status status;

 private:
  // Whether one launch may make both: the same x, and neither writes what the other reads or writes.
  static bool share_rows(const Linear& a, const Linear& b) {
    return a.x.buffer == b.x.buffer && a.x.offset == b.x.offset && a.p.x_stride == b.p.x_stride &&
           a.p.in_cols == b.p.in_cols && a.p.rows == b.p.rows && !overlap(a.x, a.y) && !overlap(b.x, b.y) &&
           (a.y.buffer != b.y.buffer || a.y.offset != b.y.offset);
  }

  template <typename Op>
  void add(void (*function)(const Launch&, const Op&), const Op& op) {
    add_pending();
    call([function, op](const Launch& l) { function(l, op); });
  }
  void call(Call c) {
    if (segments.empty()) segments.emplace_back();
    segments.back().push_back(std::move(c));
  }
  void check(const char* op, const Weight& w, uint32_t rows, uint32_t cols) {
    if (status.ok()) status = check_matrix(op, w, rows, cols);
  }

  // Whether an op that writes and reads these can run beside the pending append and copy.
  bool apart(std::initializer_list<View> writes, std::initializer_list<View> reads) const {
    std::vector<View> written{append_->k, append_->v, append_->pos}, read{append_->qkv};
    if (copy_) written.push_back(copy_->dst), read.push_back(copy_->src);
    const auto meet = [](const auto& some, const auto& others) {
      for (const View& a : some)
        for (const View& b : others)
          if (overlap(a, b)) return true;
      return false;
    };
    return !meet(writes, written) && !meet(writes, read) && !meet(reads, written);
  }

  // Whether more than products and their norm is not yet added.
  bool holds_others() const { return append_ || scored_ || vote_; }

  // Recorded last, and not yet added: siblings and the norm before them or it alone; what append_token()
  // takes; or what top_k() takes.
  std::vector<Linear> siblings_;
  std::optional<RmsNorm> norm_;
  std::optional<KvAppend> append_;
  std::optional<Copy> copy_;
  std::optional<QueryGate> gate_;
  std::optional<TokenScore> scored_;
  bool keys_stay_ = false;  // for scored_
  std::optional<Vote> vote_;

  std::vector<View> rewritten_;  // where keys may lie, by ops other than kv_append
};

class CudaStream : public Stream {
 public:
  CudaStream(std::shared_ptr<const CardState> state, View scratch)
      : state_(std::move(state)), scratch_(scratch) {}

  ~CudaStream() override {
    if (cudaSetDevice(state_->card.index) != cudaSuccess) return;
    if (stream_) cudaStreamDestroy(stream_);
    if (step_) cudaFree(step_);
  }

  Status open() {
    THIMBLE_TRY(state_->use());
    THIMBLE_TRY(state_->check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"));
    return state_->check(cudaMalloc(&step_, sizeof *step_), "allocating a step");
  }

  std::unique_ptr<Recorder> record(uint32_t max_rows) override {
    return std::make_unique<CudaRecorder>(max_rows);
  }

  Result<std::unique_ptr<Program>> finish(std::unique_ptr<Recorder> recorder) override {
    CudaRecorder& r = static_cast<CudaRecorder&>(*recorder);
    r.add_pending();
    THIMBLE_TRY(r.status);
    THIMBLE_TRY(state_->use());
    auto program = std::make_unique<CudaProgram>(state_);
    program->max_rows = r.max_rows;
    program->segments = static_cast<uint32_t>(r.segments.size());
    program->graphs.resize(r.votes ? 2 : 1);
    for (uint32_t scope = 0; scope < program->graphs.size(); ++scope)
      for (const std::vector<Call>& segment : r.segments) {
        THIMBLE_LET(graph, capture(segment, r.max_rows, scope));
        program->graphs[scope].push_back(graph);
      }
    THIMBLE_TRY(wait());
    return std::unique_ptr<Program>(std::move(program));
  }

  Status submit(Program& program, uint32_t first, uint32_t last, const StepParams& step) override {
    const CudaProgram& p = static_cast<CudaProgram&>(program);
    THIMBLE_TRY(check_submit(program, p.max_rows, first, last, step));
    THIMBLE_TRY(state_->use());
    THIMBLE_TRY(state_->check(store_step(stream_, step, step_), "starting a step"));
    const auto& graphs = p.graphs[p.graphs.size() > 1 ? step.vote_scope : 0];
    for (uint32_t s = first; s < last; ++s)
      THIMBLE_TRY(state_->check(cudaGraphLaunch(graphs[s], stream_), "starting a step"));
    return {};
  }

  Status wait() override {
    THIMBLE_TRY(state_->use());
    return state_->check(cudaStreamSynchronize(stream_), "running a step");
  }

 private:
  Result<cudaGraphExec_t> capture(const std::vector<Call>& segment, uint32_t max_rows, uint32_t vote_scope) {
    cudaError_t failed = cudaSuccess;
    const Launch launch{.stream = stream_,
                        .step = step_,
                        .max_rows = max_rows,
                        .vote_scope = vote_scope,
                        .scratch = data<std::byte>(scratch_),
                        .card = state_->card,
                        .error = &failed};
    // Relaxed: a kernel that is launched for the first time is loaded now, which the other modes forbid.
    THIMBLE_TRY(state_->check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "recording"));
    for (const Call& call : segment) call(launch);
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
  View scratch_;
  cudaStream_t stream_ = nullptr;
  StepParams* step_ = nullptr;
};

}  // namespace

uint64_t program_bytes(const ModelShape& model) {
  // Graphs, and kernels that are loaded when first recorded. Measured on an H200: 14 MiB a session for 8
  // layers, 22 MiB for 40.
  return (12 << 20) + uint64_t(model.layers) * (448 << 10);
}

Result<std::unique_ptr<Stream>> open_stream(std::shared_ptr<const CardState> state, View scratch) {
  auto stream = std::make_unique<CudaStream>(std::move(state), scratch);
  THIMBLE_TRY(stream->open());
  return std::unique_ptr<Stream>(std::move(stream));
}

}  // namespace thimble::cuda
