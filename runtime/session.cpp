// Creating, rewinding, cloning and resetting a session, and its statistics.
#include "runtime/session.h"

#include <algorithm>

#include "runtime/draft/lookup.h"
#include "runtime/draft_block.h"
#include "runtime/draft_model.h"

namespace thimble {

// ---- making ----

namespace {

// The state of an empty sequence. Its lists have reserved all memory that they will ever need.
SequenceState new_state(const Engine& engine) {
  const SessionOptions& o = engine.options();
  const Dimensions& d = engine.dimensions();
  SequenceState state(d.runs.size(),
                      Sampler(engine.model().output.rows, d.reach, engine.model().tokenizer.suppressed()));
  state.waiting.reserve(d.most_waiting);
  if (d.state_slots) {
    state.recent.reserve(d.most_recent);
    state.snapshots.reserve(d.state_slots);
  }
  state.unscored_tokens.reserve(again_rows(o));
  return state;
}

}  // namespace

Session::Session(std::unique_ptr<Engine> engine, std::unique_ptr<Drafter> drafter)
    : engine_(std::move(engine)),
      state_(new_state(*engine_)),
      drafter_(std::move(drafter)),
      cost_(engine_->model(), options(), engine_->policies()) {
  engine_->count_allocated(state_.host_bytes() + (drafter_ ? drafter_->bytes() : 0));
}

Session::Session(std::unique_ptr<Engine> engine, std::unique_ptr<Drafter> drafter, const SequenceState& state)
    : Session(std::move(engine), std::move(drafter)) {
  state_ = state;  // the lists keep their memory
}

Session::~Session() = default;

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const Model> model,
                                                 std::shared_ptr<Device> device,
                                                 const SessionOptions& options) {
  THIMBLE_LET(plan, make_plan(*model, *device, options));
  THIMBLE_TRY(check_free(plan, device->info()));
  auto ledger = std::make_shared<Ledger>();
  ledger->limit = options.budget;
  Policies policies(plan.options);
  THIMBLE_LET(engine, Engine::create(model, std::move(device), std::move(plan), std::move(policies),
                                     std::move(ledger), true));
  std::unique_ptr<Drafter> drafter;
  if (options.draft == Draft::kLookup) drafter = std::make_unique<Lookup>();
  if (options.draft == Draft::kModel) {
    THIMBLE_LET(by_model,
                DraftModel::create(engine->options(), engine->model().shape.vocab, engine->shared_device()));
    drafter = std::move(by_model);
  }
  if (options.draft == Draft::kMtp) {
    THIMBLE_LET(by_block, DraftBlock::create(model, engine->options(), engine->shared_device()));
    drafter = std::move(by_block);
  }
  return std::unique_ptr<Session>(new Session(std::move(engine), std::move(drafter)));
}

// ---- rewinding and cloning ----

Status Session::rewind(uint64_t position) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  if (position > state_.position())
    return error(Code::kInvalidArgument, "cannot rewind to position %llu of a stream of %llu tokens",
                 static_cast<unsigned long long>(position),
                 static_cast<unsigned long long>(state_.position()));
  if (position >= state_.read) {
    state_.waiting.resize(position - state_.read);
    return {};
  }
  if (position < state_.earliest()) {
    const bool evicted = state_.earliest() == state_.last_eviction;
    return error(Code::kCannotRewind,
                 "cannot rewind to position %llu: %s position %llu, the earliest that can be reached",
                 static_cast<unsigned long long>(position),
                 evicted ? "entries were evicted at" : "the states of recurrent layers are kept from",
                 static_cast<unsigned long long>(state_.earliest()));
  }
  state_.rewind(position);
  return {};
}

Result<std::unique_ptr<Session>> Session::clone() {
  THIMBLE_TRY(begin(Call::kNone, {}));
  auto twin = engine_->clone(state_);
  THIMBLE_TRY(engine_->check_store(twin.status(), state_));
  std::unique_ptr<Drafter> drafter;
  if (drafter_) {
    THIMBLE_LET(its_drafter, drafter_->clone());
    drafter = std::move(its_drafter);
  }
  std::unique_ptr<Session> session(new Session(std::move(*twin), std::move(drafter), state_));
  session->pace_ = pace_;
  // If the pool was made smaller, the clone gets only the held entries, and no queries.
  if (plan().released) session->state_.attended = Attended::kUnknown;
  return session;
}

Status Session::reset() {
  run_ = {};
  unfinished_ = {};
  ahead_ = {};
  state_.reset();
  if (drafter_) THIMBLE_TRY(drafter_->reset());
  return engine_->forget();
}

// ---- reports ----

Result<size_t> Session::run_of(uint32_t layer, uint32_t kv_head) const {
  const ModelShape& s = model().shape;
  const AttentionMixer* attention = layer < s.layers ? model().layers[layer].attention() : nullptr;
  if (attention && attention->has_keys() && kv_head < attention->kv_heads)
    return size_t(attention->first_run) + kv_head;
  return error(Code::kInvalidArgument, "layer %u, KV head %u: the model has %u layers with %u KV heads",
               layer, kv_head, s.layers, s.kv_heads);
}

Result<uint32_t> Session::kept_count(uint32_t layer, uint32_t kv_head) const {
  THIMBLE_LET(run, run_of(layer, kv_head));
  return state_.entries[run];
}

Status Session::kept(uint32_t layer, uint32_t kv_head, std::span<int32_t> positions) const {
  THIMBLE_LET(run, run_of(layer, kv_head));
  return engine_->positions(state_, run,
                            positions.first(std::min<size_t>(positions.size(), state_.entries[run])));
}

Result<SessionStats> Session::stats() const {
  SessionStats stats{.entries = state_.most_entries(),
                     .waiting = state_.waiting.size(),
                     .evicted = state_.evicted / state_.entries.size(),
                     .evictions = state_.evictions,
                     .generated = state_.generated,
                     .prefill_tokens = state_.prefill_tokens,
                     .prefill_seconds = state_.prefill_seconds,
                     .decode_seconds = state_.decode_seconds,
                     .prefill = state_.prefill,
                     .decode = state_.decode};
  if (const RecallStore* store = engine_->store()) {
    stats.stored = store->entries() / state_.entries.size();
    stats.recalled = *std::max_element(state_.recalled.begin(), state_.recalled.end());
  }
  // The tokens of an interrupted run also count as part of the stream.
  if (run_.work == Work::kDecode || run_.work == Work::kDraft) ++stats.waiting;
  if (run_.work == Work::kChunk && !run_.waiting) stats.waiting += run_.step.n_rows;
  stats.position = state_.read + stats.waiting;
  THIMBLE_LET(saturated, engine_->saturated());
  stats.saturated = saturated;
  SelectionStats selected;
  THIMBLE_TRY(selection().read_stats(engine_->device(), selected));
  stats.cache_hits = selected.hits;
  stats.cache_misses = selected.misses;
  stats.selected = stats.generated && selected.lists ? selected.selected / selected.lists : stats.entries;
  // A selection that was reused costs nothing.
  const double asked = static_cast<double>(selected.hits + selected.misses);
  stats.decode += state_.selecting * (asked > 0 ? static_cast<double>(selected.misses) / asked : 1);
  return stats;
}

// The mean number of entries over the heads that attend to every entry.
double Session::mean_entries() const {
  uint64_t sum = 0, heads = 0;
  for (size_t i = 0; i < state_.entries.size(); ++i) {
    if (engine_->is_windowed(i)) continue;
    sum += state_.entries[i];
    ++heads;
  }
  return heads ? static_cast<double>(sum) / static_cast<double>(heads) : 0;
}

}  // namespace thimble
