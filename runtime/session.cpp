#include "runtime/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/policy/retention.h"
#include "runtime/policy/selection.h"

namespace thimble {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// FNV-1a over token ids: recognises the tokens of a call that is repeated after an interrupt.
constexpr uint64_t kHashSeed = 0xcbf29ce484222325u;
uint64_t hash_tokens(uint64_t hash, std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001b3u;
  return hash;
}

// The host address of a view in the io arena.
template <typename T>
T* host(const View& view) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(view.buffer->mapped) + view.offset);
}

}  // namespace

// ---- making ----

Status Session::Ledger::take(uint64_t bytes) {
  const uint64_t before = used.fetch_add(bytes);
  if (!limit || before + bytes <= limit) return {};
  used -= bytes;
  const uint64_t missing = before + bytes - limit;
  return error(Code::kBudget,
               "the budget of %llu bytes lacks %llu: %llu are in use by this session and its clones and %llu "
               "more are "
               "needed",
               static_cast<unsigned long long>(limit), static_cast<unsigned long long>(missing),
               static_cast<unsigned long long>(before), static_cast<unsigned long long>(bytes))
      .set_bytes_missing(missing);
}

Session::Session(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, MemoryPlan plan,
                 std::shared_ptr<Ledger> ledger)
    : model_(std::move(model)),
      device_(std::move(device)),
      plan_(std::move(plan)),
      ledger_(std::move(ledger)),
      sampler_(model_->shape.vocab) {}

Session::~Session() = default;

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const Model> model,
                                                 std::shared_ptr<Device> device,
                                                 const SessionOptions& options) {
  THIMBLE_LET(plan, make_plan(*model, *device, options));
  THIMBLE_TRY(check_free(plan, device->info()));
  auto ledger = std::make_shared<Ledger>();
  ledger->limit = options.budget;
  return make(std::move(model), std::move(device), std::move(plan), std::move(ledger), true);
}

// `first`: the weights and the device's fixed part are counted once for a session and its clones.
Result<std::unique_ptr<Session>> Session::make(std::shared_ptr<const Model> model,
                                               std::shared_ptr<Device> device, MemoryPlan plan,
                                               std::shared_ptr<Ledger> ledger, bool first) {
  std::unique_ptr<Session> session(
      new Session(std::move(model), std::move(device), std::move(plan), std::move(ledger)));
  THIMBLE_TRY(session->allocate(first));
  return session;
}

Status Session::allocate(bool first) {
  const SessionOptions& o = plan_.options;
  const uint64_t bytes =
      plan_.total - (first ? 0 : plan_.fixed - plan_.programs + plan_.weights - plan_.shared);
  THIMBLE_TRY(ledger_->take(bytes));
  reservation_.ledger = ledger_;
  reservation_.bytes = bytes;

  THIMBLE_LET(weights, model_->placements.place(model_->file(), model_->tensors(), device_));
  weights_.model = std::move(weights);
  if (o.heads) {
    THIMBLE_LET(heads, o.heads->placements.place(o.heads->file, o.heads->tensors(), device_));
    weights_.heads = std::move(heads);
  }
  THIMBLE_LET(pool, device_->alloc(MemKind::kPool, plan_.pool));
  pool_ = std::move(pool);
  THIMBLE_LET(workspace, device_->alloc(MemKind::kWorkspace, plan_.workspace + plan_.view));
  workspace_ = std::move(workspace);
  THIMBLE_LET(io, device_->alloc(MemKind::kIo, plan_.io - host_bytes(*model_, o)));
  io_ = std::move(io);

  const DeviceInfo device = device_->info();
  Arena pool_arena(device.alignment, pool_.get()), workspace_arena(device.alignment, workspace_.get()),
      io_arena(device.alignment, io_.get());
  layout_ = lay_out(*model_, o, plan_.dimensions, device, plan_.backend_scratch, pool_arena, workspace_arena,
                    io_arena);

  std::vector<float> table(layout_.rope.bytes / sizeof(float));
  fill_rope_table(model_->rope, plan_.dimensions.rope_positions, o.context ? o.context : UINT32_MAX,
                  table.data());
  THIMBLE_TRY(device_->write(layout_.rope, table.data()));

  THIMBLE_LET(stream, device_->open_stream(layout_.scratch));
  stream_ = std::move(stream);
  const Decoder decoder(*model_, plan_, weights_, layout_);
  THIMBLE_LET(programs, decoder.record(*stream_));
  programs_ = std::move(programs);
  tail_ = decoder.tail();
  waiting_.reserve(uint64_t(o.chunk) + o.local + 1);
  cost_ = CostModel(*model_, o);
  return {};
}

Status Session::clear_gates() {
  const GateState clear{};
  for (const LayerPool& layer : layout_.layers)
    if (layer.gate) THIMBLE_TRY(device_->write(layer.gate, &clear));
  return {};
}

// ---- runs ----

// Runs what is left of the current run: the one just started, or one that an interrupt left.
Status Session::go_on() {
  if (run_.work == Work::kNone) return {};
  const double start = now();
  double& seconds = run_.work == Work::kDecode ? stats_.decode_seconds : stats_.prefill_seconds;
  while (run_.next < run_.last) {
    if (interrupted_.exchange(false, std::memory_order_relaxed)) {
      seconds += now() - start;
      return error(Code::kInterrupted, "interrupted; repeat the call to go on");
    }
    THIMBLE_TRY(stream_->submit(*run_.program, run_.next, run_.next + 1, run_.step));
    THIMBLE_TRY(stream_->wait());
    ++run_.next;
  }
  seconds += now() - start;
  const Run done = run_;
  run_ = {};
  commit(done);
  if (done.waiting) report_progress();
  return {};
}

Status Session::start(Run run) {
  run_ = run;
  return go_on();
}

// What a finished run changed.
void Session::commit(const Run& run) {
  const StepParams& step = run.step;
  const uint32_t entries = step.n_entries + step.n_rows;
  switch (run.work) {
    case Work::kChunk:
      read_ += step.n_rows;
      stats_.prefill_tokens += step.n_rows;
      stats_.prefill += cost_.run(step, run.last > tail_);
      if (plan_.options.select_prefill) stats_.prefill += cost_.select(step);
      if (run.waiting) waiting_.erase(waiting_.begin(), waiting_.begin() + step.n_rows);
      has_logits_ = run.logits;
      [[fallthrough]];
    case Work::kEvict:
      if (step.keep < entries) {
        stats_.evicted += entries - step.keep;
        ++stats_.evictions;
        last_eviction_ = read_;
      }
      entries_ = std::min(step.keep, entries);
      ++generation_;
      break;
    case Work::kDecode:
      ++read_;
      ++entries_;
      ++stats_.generated;
      stats_.decode += cost_.run(step, true);
      selecting_ += cost_.select(step);
      if (plan_.options.retention == Retention::kLocret) ++ring_;
      has_logits_ = true;
      break;
    case Work::kScoreRing:
      ring_ = 0;
      break;
    case Work::kNone:
    case Work::kLogits:
    case Work::kLogProb:
      break;
  }
}

StepParams Session::step_params(uint32_t rows) const {
  const SessionOptions& o = plan_.options;
  StepParams step{};
  step.n_rows = rows;
  step.n_entries = entries_;
  step.position = static_cast<int>(read_);
  step.seed = o.seed;
  step.ring_row = ring_;
  step.n_logit_rows = 1;
  step.first_logit_row = rows ? rows - 1 : 0;
  keep_all(step);
  select_entries(o, stats_.evictions > 0, generation_, step);
  return step;
}

Program& Session::chunk_program(uint32_t rows) const {
  for (const ChunkProgram& chunk : programs_.chunks)
    if (rows <= chunk.max_rows) return *chunk.program;
  return *programs_.chunks.back().program;
}

// Scores the tokens in the ring; their entries are the pool's last.
Status Session::score_ring() {
  if (!ring_) return {};
  StepParams step = step_params(ring_);
  step.position = static_cast<int>(read_ - ring_);
  return start({.work = Work::kScoreRing,
                .program = programs_.score_ring.get(),
                .next = 0,
                .last = model_->shape.layers,
                .step = step});
}

// Evicts down to the pool's size where that many more entries would not fit.
Status Session::make_room(uint32_t rows) {
  if (entries_ + rows <= plan_.capacity) return {};
  if (plan_.options.retention == Retention::kNone) return check_room(rows);
  THIMBLE_TRY(score_ring());
  StepParams step = step_params(0);
  keep_pool(plan_.options, false, step);
  return start({.work = Work::kEvict,
                .program = programs_.evict.get(),
                .next = 0,
                .last = model_->shape.layers,
                .step = step});
}

// Reads the first rows of the waiting tokens. `evicts`: the pool is compacted to its size afterwards, `last`
// without stabilizers; else the rows stay, whatever they are worth.
Status Session::read_waiting(uint32_t rows, bool evicts, bool last) {
  THIMBLE_TRY(score_ring());
  // Behind a pool of its own size a chunk has the chunk buffer; behind a fuller one it must fit, or positions
  // would pass plan().largest_position.
  if (!evicts || entries_ > plan_.options.pool) THIMBLE_TRY(make_room(rows));
  set_tokens(std::span(waiting_).first(rows));
  const bool logits = rows == waiting_.size() && (!evicts || last);
  StepParams step = step_params(rows);
  if (evicts) keep_pool(plan_.options, last, step);
  return start({.work = Work::kChunk,
                .program = &chunk_program(rows),
                .next = Decoder::kHead,
                .last = tail_ + logits,
                .step = step,
                .waiting = true,
                .logits = logits});
}

void Session::report_progress() {
  if (!progress_) return;
  const double seconds = now() - call_start_;
  progress_({.done = read_,
             .total = read_ + waiting_.size() +
                      (unfinished_.call == Call::kFeed ? unfinished_.count - unfinished_.taken : 0),
             .entries = entries_,
             .capacity = plan_.capacity,
             .tokens_per_second = seconds > 0 ? static_cast<double>(read_ - call_start_read_) / seconds : 0});
}

// ---- the stream ----

// Begins a public call: goes on with the interrupted one if it is the same again, else finishes the run that
// was interrupted and leaves it at that.
Status Session::begin(Call call, std::span<const int32_t> tokens) {
  const Unfinished& u = unfinished_;
  const bool same = call != Call::kNone && u.call == call && u.count == tokens.size() &&
                    u.hash == hash_tokens(kHashSeed, tokens.first(u.taken));
  if (!same) unfinished_ = {};
  call_start_ = now();
  call_start_read_ = read_;
  THIMBLE_TRY(go_on());
  if (same) return {};
  THIMBLE_TRY(check_tokens(tokens));
  THIMBLE_TRY(check_room(tokens.size()));
  unfinished_.call = call;
  unfinished_.count = tokens.size();
  unfinished_.hash = kHashSeed;
  return {};
}

// Counts the next tokens of the running call as taken.
void Session::take(std::span<const int32_t> tokens) {
  unfinished_.taken += tokens.size();
  unfinished_.hash = hash_tokens(unfinished_.hash, tokens);
}

// Gives a step its tokens; where the embedding stays on the host, its rows of them, which the step then
// counts.
void Session::set_tokens(std::span<const int32_t> tokens) {
  int32_t* ids = host<int32_t>(layout_.tokens);
  std::copy(tokens.begin(), tokens.end(), ids);
  if (!layout_.embedding_rows) return;
  const Tensor& table = model_->token_embedding;
  const uint64_t row_bytes = dtype_bytes(table.type, table.cols);
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(host<std::byte>(layout_.embedding_rows) + i * row_bytes,
                table.data + static_cast<uint64_t>(tokens[i]) * row_bytes, row_bytes);
    ids[i] = static_cast<int32_t>(i);
  }
}

Status Session::feed(std::span<const int32_t> tokens) {
  const SessionOptions& o = plan_.options;
  THIMBLE_TRY(begin(Call::kFeed, tokens));
  const uint64_t enough = uint64_t(o.chunk) + o.local + 1;
  for (;;) {
    if (waiting_.size() == enough) THIMBLE_TRY(read_waiting(o.chunk, o.retention != Retention::kNone, false));
    const auto left = tokens.subspan(unfinished_.taken);
    if (left.empty()) break;
    const auto next = left.first(std::min<uint64_t>(left.size(), enough - waiting_.size()));
    waiting_.insert(waiting_.end(), next.begin(), next.end());
    take(next);
    has_logits_ = false;
  }
  unfinished_ = {};
  return {};
}

Status Session::flush() {
  THIMBLE_TRY(begin(Call::kNone, {}));
  return flush_waiting();
}

Status Session::flush_waiting() {
  const SessionOptions& o = plan_.options;
  while (!waiting_.empty()) {
    const uint32_t waiting = static_cast<uint32_t>(waiting_.size());
    if (o.retention != Retention::kNone && waiting > o.local) {
      const uint32_t rows = std::min(o.chunk, waiting - o.local);
      THIMBLE_TRY(read_waiting(rows, true, rows == waiting - o.local));
    } else {
      THIMBLE_TRY(read_waiting(std::min(o.chunk, waiting), false, false));
    }
  }
  return {};
}

Result<int32_t> Session::step() {
  THIMBLE_TRY(begin(Call::kStep, {}));
  Unfinished& u = unfinished_;
  if (!u.sampled) {
    THIMBLE_TRY(flush_waiting());
    THIMBLE_TRY(check_logits());
    THIMBLE_TRY(check_room(1));
    if (sampler_.greedy()) {
      u.token = *host<int32_t>(layout_.arg_max);
    } else {
      THIMBLE_LET(logits, this->logits());
      u.token = sampler_.sample(logits.data());
    }
    u.sampled = true;
  }
  THIMBLE_TRY(append_token(u.token));
  const int32_t token = u.token;
  u = {};
  return token;
}

Status Session::accept(int32_t token) {
  const std::span<const int32_t> tokens(&token, 1);
  THIMBLE_TRY(begin(Call::kAccept, tokens));
  if (!unfinished_.taken) take(tokens);
  THIMBLE_TRY(flush_waiting());
  THIMBLE_TRY(append_token(token));
  unfinished_ = {};
  return {};
}

// Runs one token through the model. Repeated after an interrupt it runs it once all the same.
Status Session::append_token(int32_t token) {
  if (unfinished_.started) return {};  // and begin() finished it
  if (ring_ == kRingRows) THIMBLE_TRY(score_ring());
  THIMBLE_TRY(make_room(1));
  set_tokens({&token, 1});
  unfinished_.started = true;
  sampler_.accept(token);
  return start({.work = Work::kDecode,
                .program = programs_.decode.get(),
                .next = 0,
                .last = 1,
                .step = step_params(1)});
}

Status Session::score(std::span<const int32_t> tokens, std::span<float> log_probs) {
  THIMBLE_TRY(begin(Call::kScore, tokens));
  Unfinished& u = unfinished_;
  if (u.taken == 0 && !tokens.empty()) {
    THIMBLE_TRY(flush_waiting());
    THIMBLE_TRY(check_logits());
    THIMBLE_TRY(target_log_probs(tokens.first(1), log_probs.data()));
  }
  while (u.taken < tokens.size() || u.row < u.slice) {
    if (u.row == u.slice) THIMBLE_TRY(append_slice(tokens.subspan(u.taken)));
    // Row i of the slice gives the probability of the token after its own.
    const uint32_t rows = std::min(u.slice - u.row, kLogitRowsAtOnce);
    const uint64_t next = u.taken - u.slice + u.row + 1;
    const auto targets = tokens.subspan(next, std::min<uint64_t>(rows, tokens.size() - next));
    THIMBLE_TRY(slice_logits(u.row, rows));
    THIMBLE_TRY(target_log_probs(targets, log_probs.data() + next));
    u.row += rows;
    u.has_logits = u.has_log_probs = false;
  }
  if (u.slice) {  // the next token's logits belong in the first row
    THIMBLE_TRY(slice_logits(u.slice - 1, 1));
    has_logits_ = true;
  }
  u = {};
  return {};
}

// Appends as many of these tokens as one chunk and the pool have room for; they stay.
Status Session::append_slice(std::span<const int32_t> tokens) {
  THIMBLE_TRY(score_ring());
  THIMBLE_TRY(make_room(1));
  const uint32_t rows = static_cast<uint32_t>(
      std::min<uint64_t>({tokens.size(), plan_.options.chunk, plan_.capacity - entries_}));
  set_tokens(tokens.first(rows));
  take(tokens.first(rows));
  unfinished_.slice = rows;
  unfinished_.row = 0;
  unfinished_.has_log_probs = false;  // the first token's are read
  return start({.work = Work::kChunk,
                .program = &chunk_program(rows),
                .next = Decoder::kHead,
                .last = tail_,
                .step = step_params(rows)});
}

// Logits of these rows of the step that ran last.
Status Session::slice_logits(uint32_t first, uint32_t rows) {
  if (unfinished_.has_logits) return {};  // and begin() finished it
  unfinished_.has_logits = true;
  StepParams step = step_params(unfinished_.slice);
  step.first_logit_row = first;
  step.n_logit_rows = rows;
  return start({.work = Work::kLogits,
                .program = &chunk_program(unfinished_.slice),
                .next = tail_,
                .last = tail_ + 1,
                .step = step});
}

// Log-probabilities of these tokens, one for each row of logits.
Status Session::target_log_probs(std::span<const int32_t> targets, float* log_probs) {
  if (targets.empty()) return {};
  if (!unfinished_.has_log_probs) {
    unfinished_.has_log_probs = true;
    std::copy(targets.begin(), targets.end(), host<int32_t>(layout_.targets));
    StepParams step = step_params(0);
    step.n_logit_rows = static_cast<uint32_t>(targets.size());
    THIMBLE_TRY(start(
        {.work = Work::kLogProb, .program = programs_.log_prob.get(), .next = 0, .last = 1, .step = step}));
  }
  std::copy_n(host<float>(layout_.log_prob), targets.size(), log_probs);
  return {};
}

Result<std::span<const float>> Session::logits() const {
  THIMBLE_TRY(check_logits());
  const View& on_host = layout_.host_logits ? layout_.host_logits : layout_.logits;
  float* logits = host<float>(on_host);
  if (layout_.host_logits) THIMBLE_TRY(device_->read(logits, layout_.logits.slice(0, on_host.bytes)));
  return std::span<const float>(logits, model_->shape.vocab);
}

Status Session::check_logits() const {
  if (has_logits_) return {};
  return error(Code::kInvalidArgument,
               "there are no logits to go on from: feed at least one token and flush first");
}

Status Session::check_tokens(std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens)
    if (token < 0 || static_cast<uint32_t>(token) >= model_->shape.vocab)
      return error(Code::kInvalidArgument, "token id %d is not in the vocabulary; ids go from 0 to %u", token,
                   model_->shape.vocab - 1);
  return {};
}

// Whether that many more tokens fit where nothing may be evicted, or positions are bounded.
Status Session::check_room(uint64_t tokens) const {
  const SessionOptions& o = plan_.options;
  const uint64_t position = read_ + waiting_.size();
  const uint64_t entries = entries_ + waiting_.size();
  if (o.retention == Retention::kNone && entries + tokens > plan_.capacity)
    return error(Code::kContextFull,
                 "context_length_exceeded: %llu tokens are held and %llu more do not fit in a pool of %u; "
                 "make the pool "
                 "larger, or choose a retention policy that evicts",
                 static_cast<unsigned long long>(entries), static_cast<unsigned long long>(tokens),
                 plan_.capacity);
  const uint64_t bound = o.context ? o.context : INT32_MAX;
  if (position + tokens > bound)
    return error(Code::kContextFull,
                 "context_length_exceeded: %llu tokens after position %llu pass the bound of %llu positions; "
                 "raise the "
                 "context",
                 static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(position),
                 static_cast<unsigned long long>(bound));
  return {};
}

// ---- going back, and going on twice ----

Status Session::rewind(uint64_t position) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  if (position > read_ + waiting_.size())
    return error(Code::kInvalidArgument, "cannot rewind to position %llu of a stream of %llu tokens",
                 static_cast<unsigned long long>(position),
                 static_cast<unsigned long long>(read_ + waiting_.size()));
  if (position >= read_) {
    waiting_.resize(position - read_);
    return {};
  }
  if (position < last_eviction_)
    return error(Code::kCannotRewind,
                 "cannot rewind to position %llu: entries were evicted at position %llu and are gone",
                 static_cast<unsigned long long>(position), static_cast<unsigned long long>(last_eviction_));
  const uint32_t dropped = static_cast<uint32_t>(read_ - position);
  waiting_.clear();
  read_ = position;
  entries_ -= dropped;
  ring_ -= std::min(ring_, dropped);
  ++generation_;
  has_logits_ = false;
  return {};
}

Result<std::unique_ptr<Session>> Session::clone() {
  THIMBLE_TRY(begin(Call::kNone, {}));
  THIMBLE_LET(twin, make(model_, device_, plan_, ledger_, false));
  THIMBLE_TRY(device_->copy({twin->pool_.get(), 0, pool_->size}, {pool_.get(), 0, pool_->size}));
  THIMBLE_TRY(device_->copy({twin->io_.get(), 0, io_->size}, {io_.get(), 0, io_->size}));
  if (layout_.host_logits)  // elsewhere they lie in io
    THIMBLE_TRY(device_->copy(twin->layout_.logits, layout_.logits));
  twin->sampler_ = sampler_;
  twin->waiting_.assign(waiting_.begin(), waiting_.end());
  twin->read_ = read_;
  twin->entries_ = entries_;
  twin->ring_ = ring_;
  twin->last_eviction_ = last_eviction_;
  twin->generation_ = generation_;
  twin->has_logits_ = has_logits_;
  twin->stats_ = stats_;
  twin->selecting_ = selecting_;
  return std::move(twin);
}

Status Session::reset() {
  run_ = {};
  unfinished_ = {};
  waiting_.clear();
  read_ = last_eviction_ = 0;
  entries_ = ring_ = generation_ = 0;
  has_logits_ = false;
  stats_ = {};
  selecting_ = {};
  sampler_.reset();
  return clear_gates();
}

// ---- looking ----

Status Session::kept(uint32_t layer, uint32_t kv_head, std::span<int32_t> positions) const {
  const ModelShape& s = model_->shape;
  if (layer >= s.layers || kv_head >= s.kv_heads)
    return error(Code::kInvalidArgument, "layer %u, KV head %u: the model has %u layers with %u KV heads",
                 layer, kv_head, s.layers, s.kv_heads);
  const View& pos = layout_.layers[layer].pos;
  return device_->read(positions.data(),
                       pos.slice(uint64_t(kv_head) * plan_.capacity * sizeof(int32_t),
                                 std::min<uint64_t>(positions.size(), entries_) * sizeof(int32_t)));
}

Result<SessionStats> Session::stats() const {
  SessionStats stats = stats_;
  stats.entries = entries_;
  stats.waiting = waiting_.size();
  stats.position = read_ + waiting_.size();
  stats.selected = entries_;
  if (plan_.options.selection == Selection::kDense) return stats;
  uint64_t selected = 0;
  for (const LayerPool& layer : layout_.layers) {
    GateState gate;
    THIMBLE_TRY(device_->read(&gate, layer.gate));
    stats.cache_hits += gate.hits;
    stats.cache_misses += gate.misses;
    for (uint32_t head = 0; head < model_->shape.kv_heads; ++head) {
      uint32_t count;
      const uint64_t list_bytes = uint64_t(plan_.dimensions.select_list) * sizeof count;
      THIMBLE_TRY(device_->read(&count, layer.list.slice(head * list_bytes, sizeof count)));
      selected += count;
    }
  }
  if (const double asked = static_cast<double>(stats.cache_hits + stats.cache_misses); asked > 0)
    stats.decode += selecting_ * (static_cast<double>(stats.cache_misses) / asked);
  if (stats.generated) stats.selected = selected / (uint64_t(model_->shape.layers) * model_->shape.kv_heads);
  return stats;
}

}  // namespace thimble
