// A session: how it is made, looked at, taken back, cloned.
#include "runtime/session.h"

#include <algorithm>

#include "base/size_text.h"
#include "runtime/plan/lay_out.h"

namespace thimble {

// ---- making ----

Status Session::Ledger::take(uint64_t bytes) {
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

Session::Session(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, MemoryPlan plan,
                 std::shared_ptr<Ledger> ledger)
    : model_(std::move(model)),
      device_(std::move(device)),
      plan_(std::move(plan)),
      ledger_(std::move(ledger)),
      policies_(plan_.options),
      sampler_(model_->output.rows, plan_.dimensions.reach),
      entries_(plan_.dimensions.runs.size()),
      heads_(plan_.dimensions.runs.size()) {}

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

// `first`: the weights and the device's fixed part are counted once, in the ledger that a session and its
// clones have in common, until the last of them goes.
Result<std::unique_ptr<Session>> Session::make(std::shared_ptr<const Model> model,
                                               std::shared_ptr<Device> device, MemoryPlan plan,
                                               std::shared_ptr<Ledger> ledger, bool first) {
  std::unique_ptr<Session> session(
      new Session(std::move(model), std::move(device), std::move(plan), std::move(ledger)));
  THIMBLE_TRY(session->allocate(first));
  return session;
}

Status Session::allocate(bool first) {
  THIMBLE_TRY(check_files());
  const SessionOptions& o = plan_.options;
  const uint64_t device_fixed = plan_.fixed - plan_.programs;  // measured when the device was opened
  const uint64_t common = device_fixed + plan_.weights - plan_.shared, own = plan_.total - common;
  THIMBLE_TRY(ledger_->take(first ? common + own : own));
  reservation_.ledger = ledger_;
  reservation_.reserved = own;

  uint64_t common_allocated = first ? device_fixed : 0, allocated = 0;
  const auto place = [&](const auto& owner, const std::vector<std::span<const std::byte>>& files,
                         std::shared_ptr<const PlacedTensors>& into) -> Status {
    const bool shared = owner.placements.has(*device_);
    THIMBLE_LET(placed, owner.placements.place(files, owner.tensors(), device_));
    if (!shared) common_allocated += placed->bytes();
    into = std::move(placed);
    return {};
  };
  THIMBLE_TRY(place(*model_, model_->memory(), weights_.model));
  if (o.retainer) THIMBLE_TRY(place(*o.retainer, {o.retainer->file.bytes()}, weights_.retainer));
  const auto allocate = [&](MemKind kind, uint64_t size, std::unique_ptr<Buffer>& into) -> Status {
    THIMBLE_LET(buffer, device_->alloc(kind, size));
    allocated += buffer->size;
    into = std::move(buffer);
    return {};
  };
  THIMBLE_TRY(allocate(MemKind::kPool, plan_.pool + plan_.released, pool_));
  THIMBLE_TRY(allocate(MemKind::kWorkspace, plan_.workspace + plan_.view, workspace_));
  THIMBLE_TRY(allocate(MemKind::kIo, plan_.io - thimble::host_bytes(*model_, plan_), io_));

  const DeviceInfo device = device_->info();
  Arena pool_arena(device.alignment, pool_.get()), workspace_arena(device.alignment, workspace_.get()),
      io_arena(device.alignment, io_.get());
  const Setting setting{*model_, o, plan_.dimensions};
  layout_ = lay_out(setting, policies_, device, plan_.backend_scratch, pool_arena, workspace_arena, io_arena);

  THIMBLE_TRY(write_rope_tables(*device_, setting, layout_, o.context ? o.context : UINT32_MAX));

  THIMBLE_LET(stream, device_->open_stream(layout_.scratch, static_cast<uint32_t>(heads_.size())));
  stream_ = std::move(stream);
  const Decoder decoder(setting, policies_, weights_, layout_);
  THIMBLE_LET(programs, decoder.record(*device_, *stream_));
  programs_ = std::move(programs);
  tail_ = decoder.tail();
  waiting_.reserve(uint64_t(o.chunk) + o.local + 1);
  if (policies_.retention->reads_again()) unscored_tokens_.reserve(o.chunk);
  if (policies_.retention->scores_on_host()) {
    held_.reserve(plan_.capacity);
    embeddings_.resize(uint64_t(kNotedAtOnce) * model_->shape.d_model);
  }
  cost_ = CostModel(*model_, o, policies_);
  place_heads();

  allocated -= plan_.released;  // pages of a clone that nothing touches
  allocated +=
      stream_->bytes + programs_.bytes() + sampler_.bytes() +
      (waiting_.capacity() + unscored_tokens_.capacity() + held_.capacity() + embeddings_.size()) * 4 +
      heads_.size() * (sizeof(HeadState) + sizeof(HeadRun) + sizeof(uint32_t)) +
      plan_.dimensions.divisions.size() * heads_.size() * sizeof(HeadRun);
  reservation_.allocated = allocated;
  ledger_->allocated += common_allocated + allocated;
  return {};
}

// What a new session starts with, and a reset one.
Status Session::clear() {
  const uint32_t none = 0;
  THIMBLE_TRY(device_->write(layout_.saturated, &none));
  return policies_.selection->clear(*device_);
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
  for (uint32_t& entries : entries_) entries -= dropped;
  unscored_ -= std::min(unscored_, dropped);
  if (policies_.retention->reads_again()) unscored_tokens_.resize(unscored_);
  ++generation_;
  attended_ = Attended::kUnknown;
  has_logits_ = false;
  sampler_.rewind(position);
  return {};
}

Result<std::unique_ptr<Session>> Session::clone() {
  THIMBLE_TRY(begin(Call::kNone, {}));
  THIMBLE_LET(twin, make(model_, device_, plan_, ledger_, false));
  THIMBLE_TRY(copy_pool(*twin));
  THIMBLE_TRY(device_->copy({twin->io_.get(), 0, io_->size}, {io_.get(), 0, io_->size}));
  if (layout_.host_logits)  // elsewhere they lie in io
    THIMBLE_TRY(device_->copy(twin->layout_.logits, layout_.logits));
  twin->sampler_ = sampler_;
  twin->waiting_.assign(waiting_.begin(), waiting_.end());
  twin->read_ = read_;
  twin->entries_ = entries_;
  twin->unscored_ = unscored_;
  twin->unscored_tokens_.assign(unscored_tokens_.begin(), unscored_tokens_.end());
  twin->last_eviction_ = last_eviction_;
  twin->generation_ = generation_;
  // Of a pool that was made smaller a clone gets what is held and no queries (copy_pool).
  twin->attended_ = plan_.released ? Attended::kUnknown : attended_;
  twin->has_logits_ = has_logits_;
  twin->finite_logits_ = finite_logits_;
  twin->evicted_ = evicted_;
  twin->stats_ = stats_;
  twin->selecting_ = selecting_;
  return std::move(twin);
}

Status Session::reset() {
  run_ = {};
  unfinished_ = {};
  waiting_.clear();
  read_ = last_eviction_ = evicted_ = 0;
  std::fill(entries_.begin(), entries_.end(), 0);
  plan_.dimensions.use(0);
  place_heads();
  unscored_ = generation_ = 0;
  unscored_tokens_.clear();
  attended_ = Attended::kUnknown;
  has_logits_ = false;
  stats_ = {};
  selecting_ = {};
  sampler_.reset();
  return clear();
}

// ---- looking ----

Result<uint32_t> Session::kept_count(uint32_t layer, uint32_t kv_head) const {
  const ModelShape& s = model_->shape;
  if (layer >= s.layers || kv_head >= s.kv_heads)
    return error(Code::kInvalidArgument, "layer %u, KV head %u: the model has %u layers with %u KV heads",
                 layer, kv_head, s.layers, s.kv_heads);
  return entries_[uint64_t(layer) * s.kv_heads + kv_head];
}

Status Session::kept(uint32_t layer, uint32_t kv_head, std::span<int32_t> positions) const {
  THIMBLE_LET(count, kept_count(layer, kv_head));
  const HeadState& head = heads_[uint64_t(layer) * model_->shape.kv_heads + kv_head];
  return device_->read(positions.data(), layout_.layers[layer].pos.slice(
                                             uint64_t(head.first) * sizeof(int32_t),
                                             std::min<uint64_t>(positions.size(), count) * sizeof(int32_t)));
}

Result<SessionStats> Session::stats() const {
  SessionStats stats = stats_;
  stats.entries = most_entries();
  stats.waiting = waiting_.size();
  // Tokens of an interrupted run are in the stream, too.
  if (run_.work == Work::kDecode) ++stats.waiting;
  if (run_.work == Work::kChunk && !run_.waiting) stats.waiting += run_.step.n_rows;
  stats.position = read_ + stats.waiting;
  stats.evicted = evicted_ / entries_.size();
  uint32_t saturated;
  THIMBLE_TRY(device_->read(&saturated, layout_.saturated));
  stats.saturated = saturated;
  SelectionStats selection;
  THIMBLE_TRY(policies_.selection->read_stats(*device_, selection));
  stats.cache_hits = selection.hits;
  stats.cache_misses = selection.misses;
  stats.selected = stats.generated && selection.lists ? selection.selected / selection.lists : stats.entries;
  // A choice that was used again cost nothing.
  const double asked = static_cast<double>(selection.hits + selection.misses);
  stats.decode += selecting_ * (asked > 0 ? static_cast<double>(selection.misses) / asked : 1);
  return stats;
}

}  // namespace thimble
