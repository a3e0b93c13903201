// The engine: allocation, and running a step.
#include "runtime/engine.h"

#include <algorithm>

#include "base/size_text.h"
#include "runtime/memory/host_weights.h"
#include "runtime/plan/lay_out.h"

namespace thimble {

// ---- making ----

Status Ledger::take(uint64_t bytes) {
  const uint64_t before = reserved.fetch_add(bytes);
  if (!limit || before + bytes <= limit) return {};
  reserved -= bytes;
  const uint64_t missing = before + bytes - limit;
  return error(
             Code::kBudget,
             "the budget of %s lacks %s: %s are in use by this session and its clones and %s more are needed",
             size_text(limit).c_str(), size_text(missing).c_str(), size_text(before).c_str(),
             size_text(bytes).c_str())
      .set_bytes_missing(missing);
}

Engine::Reservation::~Reservation() {
  if (!ledger) return;
  ledger->reserved -= reserved;
  ledger->allocated -= allocated;
}

Engine::Engine(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, MemoryPlan plan,
               Policies policies)
    : model_(std::move(model)),
      device_(std::move(device)),
      plan_(std::move(plan)),
      policies_(std::move(policies)),
      setting_{*model_, plan_.options, plan_.dimensions} {}

Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::create(std::shared_ptr<const Model> model,
                                               std::shared_ptr<Device> device, MemoryPlan plan,
                                               Policies policies, std::shared_ptr<Ledger> ledger,
                                               bool first) {
  std::unique_ptr<Engine> engine(
      new Engine(std::move(model), std::move(device), std::move(plan), std::move(policies)));
  THIMBLE_TRY(engine->check_files());
  THIMBLE_TRY(engine->allocate(std::move(ledger), first));
  return engine;
}

Result<std::unique_ptr<Engine>> Engine::clone(const SequenceState& state) const {
  THIMBLE_LET(twin, create(model_, device_, plan_, Policies(plan_.options), reservation_.ledger, false));
  THIMBLE_TRY(copy_to(*twin, state));
  return std::move(twin);
}

Status Engine::allocate(std::shared_ptr<Ledger> ledger, bool first) {
  const uint64_t device_fixed = plan_.fixed - plan_.programs;  // measured when the device was opened
  const uint64_t common = device_fixed + plan_.weights - plan_.shared + plan_.draft_weights,
                 own = plan_.total - common;
  THIMBLE_TRY(ledger->take(first ? common + own : own));
  reservation_.ledger = std::move(ledger);
  reservation_.reserved = own;

  uint64_t weights = 0, allocated = 0;
  THIMBLE_TRY(place_weights(weights));
  weights_.pager = LayerPager(*model_, plan_.paged_layers);
  THIMBLE_TRY(allocate_arenas(allocated));
  THIMBLE_TRY(make_store());
  THIMBLE_TRY(record_programs());
  const uint64_t heads = plan_.dimensions.runs.size();
  command_.heads.resize(heads);
  if (policies_.host()) {
    held_.reserve(plan_.capacity);
    embeddings_.resize(uint64_t(kNotedAtOnce) * model_->shape.d_model);
  }
  if (choice_) allocated += RecallChoice::bytes(*model_, recall_limits(plan_));
  if (plan_.options.recall_disk) allocated += store_->bytes();
  allocated += stream_->bytes + programs_.bytes() + held_.capacity() * sizeof(int32_t) +
               embeddings_.size() * sizeof(float) + heads * (sizeof(HeadState) + sizeof(HeadRun)) +
               plan_.dimensions.divisions.size() * heads * sizeof(HeadRun);
  count_allocated(allocated);
  reservation_.ledger->allocated += weights + (first ? device_fixed : 0);
  return {};
}

void Engine::count_allocated(uint64_t bytes) {
  reservation_.allocated += bytes;
  reservation_.ledger->allocated += bytes;
}

// Counts the weights that no other engine on the device had placed. What a draft block shares with its model
// is where the model's engine placed it.
Status Engine::place_weights(uint64_t& allocated) {
  const auto place = [&](const auto& owner, const std::vector<std::span<const std::byte>>& files,
                         const PlacedTensors::InHost& in_host) -> Status {
    const bool shared = owner.placements.has(*device_);
    THIMBLE_LET(placed, owner.placements.place(files, owner.tensors(), device_, in_host));
    if (!shared) allocated += placed->bytes();
    weights_.placed.push_back(std::move(placed));
    return {};
  };
  THIMBLE_TRY(place(*model_, model_->memory(), host_weights(*model_, plan_.host_groups)));
  if (const Model* target = model_->target) THIMBLE_TRY(place(*target, target->memory(), {}));
  const auto& retainer = plan_.options.retainer;
  return retainer ? place(*retainer, {retainer->file.bytes()}, {}) : Status();
}

Status Engine::allocate_arenas(uint64_t& allocated) {
  const auto allocate = [&](MemKind kind, uint64_t size, std::unique_ptr<Buffer>& into) -> Status {
    THIMBLE_LET(buffer, device_->alloc(kind, size));
    allocated += buffer->size;
    into = std::move(buffer);
    return {};
  };
  THIMBLE_TRY(allocate(MemKind::kPool, plan_.pool + plan_.released, pool_));
  THIMBLE_TRY(allocate(MemKind::kWorkspace, plan_.workspace + plan_.view, workspace_));
  THIMBLE_TRY(allocate(MemKind::kIo, plan_.io - host_bytes(*model_, plan_), io_));
  allocated -= plan_.released;  // pages of a clone that are never touched
  return {};
}

Status Engine::record_programs() {
  const DeviceInfo device = device_->info();
  Arena pool(device.alignment, pool_.get()), workspace(device.alignment, workspace_.get()),
      io(device.alignment, io_.get());
  weights_.window = WeightWindow(*model_, device, plan_.host_groups);
  layout_ = lay_out(setting_, policies_, device, plan_.backend_scratch, weights_.window, pool, workspace, io);
  const uint32_t context = plan_.options.context;
  THIMBLE_TRY(write_rope_tables(*device_, setting_, layout_, context ? context : UINT32_MAX));
  THIMBLE_LET(stream,
              device_->open_stream(layout_.scratch, static_cast<uint32_t>(plan_.dimensions.runs.size())));
  stream_ = std::move(stream);
  THIMBLE_TRY(show_store());
  const Decoder decoder(setting_, policies_, weights_, layout_);
  THIMBLE_LET(programs, decoder.record(*device_, *stream_));
  programs_ = std::move(programs);
  tail_ = decoder.tail();
  return {};
}

// ---- steps ----

Program& Engine::chunk_program(uint32_t rows) const {
  for (const ChunkProgram& chunk : programs_.chunks)
    if (rows <= chunk.max_rows) return *chunk.program;
  return *programs_.chunks.back().program;
}

Status Engine::check_files() const {
  THIMBLE_TRY(model_->check_files());
  const auto& retainer = plan_.options.retainer;
  return retainer ? retainer->file.check_whole("the file of heads") : Status();
}

void Engine::set_tokens(std::span<const int32_t> tokens) const {
  thimble::set_tokens(*model_, layout_, tokens);
}

Status Engine::note_tokens(std::span<const int32_t> tokens, const SequenceState& state) {
  HostControl* host = policies_.host();
  if (!host) return {};
  THIMBLE_TRY(submit({.program = programs_.embed.get(),
                      .first = 0,
                      .last = 1,
                      .n_rows = static_cast<uint32_t>(tokens.size()),
                      .position = state.read},
                     state));
  THIMBLE_TRY(wait());
  const uint64_t cols = model_->shape.d_model;
  for (size_t first = 0; first < tokens.size(); first += kNotedAtOnce) {
    const auto some = tokens.subspan(first, std::min<size_t>(kNotedAtOnce, tokens.size() - first));
    const std::span<float> rows = std::span(embeddings_).first(some.size() * cols);
    THIMBLE_TRY(device_->read(rows.data(), layout_.x.slice(first * cols * sizeof(float), rows.size_bytes())));
    host->note(state.read + first, some, rows);
  }
  return {};
}

// Computes the scores for this step's compaction on the host, and changes the step if it reads evicted tokens
// again.
Status Engine::score_on_host(HostControl& host, Step& step, const SequenceState& state) {
  held_.resize(state.entries[0]);
  THIMBLE_TRY(positions(state, 0, held_));
  const bool generates = step.program == programs_.decode.get();
  const std::span<const int32_t> again = host.prepare({held_, state.read, step.n_rows, generates});
  if (again.empty()) return {};
  set_tokens(again);
  step.program = programs_.rebuild.get();
  step.n_rows = static_cast<uint32_t>(again.size());
  step.first_logit_row = step.n_rows - 1;
  // The last entries are not the latest tokens, so protect_last would protect the wrong ones. The scores
  // protect the latest tokens instead.
  step.evicts = step.ends_prompt = true;
  return {};
}

Status Engine::start(Step step, const SequenceState& state) {
  const bool compacts = step.rows == Step::Rows::kNew && (step.n_rows || step.evicts);
  if (HostControl* host = policies_.host(); host && compacts) THIMBLE_TRY(score_on_host(*host, step, state));
  fill(step, state);
  if (layout_.recall.window && step.reads_store) THIMBLE_SET(command_.saturated_before, saturated());
  command_.step = step;
  command_.next = step.first;
  command_.part = 0;
  return {};
}

Status Engine::check_interrupt() {
  return interrupted_.exchange(false, std::memory_order_relaxed)
             ? error(Code::kInterrupted, "interrupted; repeat the call to continue")
             : Status();
}

Status Engine::run(std::function<void()> meanwhile) {
  Command& c = command_;
  while (c.next < c.step.last) {
    THIMBLE_TRY(check_interrupt());
    THIMBLE_TRY(check_files());
    // Programs that run layers have a segment for each, after the first one. For the first one the number
    // wraps around to one after all layers, so that the pager reads the first layers ahead.
    const bool runs_layers = c.step.program->segments > model_->layers.size();
    if (runs_layers && c.part == 0) {
      weights_.pager.before(c.next - Decoder::kHead - 1);
      THIMBLE_TRY(load_stored(c.next - Decoder::kHead - 1));
    }
    THIMBLE_TRY(stream_->submit_part(*c.step.program, c.next, c.part, c.params, c.heads));
    if (meanwhile) std::exchange(meanwhile, {})();
    THIMBLE_TRY(stream_->wait());
    if (++c.part < c.step.program->parts(c.next)) continue;
    if (runs_layers) weights_.pager.after(c.next - Decoder::kHead - 1);
    c.part = 0;
    ++c.next;
    if (store_)
      if (const Status stored = store_spilled(); !stored.ok()) return without_store(stored);
  }
  return {};
}

Status Engine::submit(const Step& step, const SequenceState& state) {
  fill(step, state);
  return stream_->submit(*step.program, step.first, step.last, command_.params, command_.heads);
}

void Engine::fill(const Step& step, const SequenceState& state) {
  StepParams params{};
  params.n_rows = step.n_rows;
  params.position = static_cast<int>(step.position);
  const uint32_t replaced = step.rows == Step::Rows::kAgain ? step.n_rows : 0;
  params.ring_row = state.unscored - std::min(state.unscored, replaced);
  params.n_logit_rows = step.n_logit_rows;
  params.first_logit_row = step.first_logit_row;
  params.state_from = state.state_slot;
  params.state_to = state.free_slot();
  policies_.retention->fill(plan_.options, params);
  policies_.selection->fill(plan_.options, state.generation, params);
  command_.params = params;
  fill_heads(step, state);
  for (size_t i = 0; i < command_.heads.size() && layout_.recall.pages; ++i)
    on_host<uint32_t>(layout_.recall.pages)[i] = step.reads_store ? store_->count(i) : 0;
}

void Engine::fill_heads(const Step& step, const SequenceState& state) {
  const std::vector<HeadRun>& placed = plan_.dimensions.runs_in(state.placed);
  const std::vector<HeadRun>& runs = this->runs(state);
  const uint32_t added = step.rows == Step::Rows::kNew ? step.n_rows : 0;
  const uint32_t replaced = step.rows == Step::Rows::kAgain ? step.n_rows : 0;
  const bool rows_stay = added && again_rows(plan_.options);
  for (size_t i = 0; i < runs.size(); ++i) {
    const HeadRun& run = runs[i];
    const bool drops = step.evicts && run.evicts && (is_windowed(i) || !rows_stay);
    HeadState& head = command_.heads[i];
    head.first = placed[i].first;
    head.capacity = placed[i].capacity;
    head.n_entries = step.rows == Step::Rows::kDone ? 0 : state.entries[i] - replaced;
    head.keep = state.entries[i] + added;
    if (drops) head.keep = std::min(run.keep, head.keep);
    head.protect_first = drops ? run.protect_first : 0;
    head.protect_last = drops && !step.ends_prompt ? run.protect_last : 0;
  }
}

void Engine::count_entries(SequenceState& state) const {
  uint64_t dropped = 0;
  if (plan_.dimensions.state_slots && command_.params.n_rows) state.state_slot = command_.params.state_to;
  for (size_t i = 0; i < state.entries.size(); ++i) {
    const uint32_t entries = command_.heads[i].n_entries + command_.params.n_rows;
    state.entries[i] = std::min(command_.heads[i].keep, entries);
    dropped += entries - state.entries[i];
    // A windowed head still holds its whole window.
    if (state.entries[i] < entries && !is_windowed(i)) state.attended = Attended::kUnknown;
  }
  if (!dropped) return;
  state.evicted += dropped;
  ++state.evictions;
  state.last_eviction = state.read;
  if (plan_.dimensions.state_slots) state.drop_snapshots();
}

std::span<const int32_t> Engine::arg_max(uint32_t rows) const {
  return {on_host<int32_t>(layout_.arg_max), rows};
}

View Engine::logits_of(uint32_t row) const {
  const uint64_t bytes = uint64_t(model_->output.rows) * sizeof(float);
  return layout_.logits.slice(row * bytes, bytes);
}

Result<std::span<const float>> Engine::logits(uint32_t row) const {
  const View& readable = layout_.host_logits ? layout_.host_logits : logits_of(row);
  float* logits = on_host<float>(readable);
  if (layout_.host_logits) THIMBLE_TRY(device_->read(logits, logits_of(row)));
  return std::span<const float>(logits, model_->output.rows);
}

Status Engine::move_logits(uint32_t row) const {
  return row ? device_->copy(logits_of(0), logits_of(row)) : Status();
}

}  // namespace thimble
