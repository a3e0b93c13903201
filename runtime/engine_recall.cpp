// The engine: taking evicted entries to the store, and bringing them back.
#include <algorithm>

#include "runtime/engine.h"
#include "runtime/plan/lay_out.h"

namespace thimble {
namespace {

std::byte* row_at(const KvArray& rows, const AttentionMixer& m, uint64_t row) {
  return on_host<std::byte>(rows.values) + row * kv_bytes(rows.type, m.head_dim);
}

}  // namespace

Status Engine::make_store() {
  if (!plan_.options.recall) return {};
  RecallStore::Shape shape = recall_shape(*model_, plan_.options);
  std::byte* memory = nullptr;
  const bool device_reads = plan_.options.recalls_all() || !plan_.host_votes;
  if (device_reads && !device_->info().unified) {
    THIMBLE_SET(stored_, device_->alloc(MemKind::kIo, RecallStore::memory_bytes(shape)));
    memory = static_cast<std::byte*>(stored_->mapped);
  }
  THIMBLE_LET(store, RecallStore::create(std::move(shape), memory));
  store_.emplace(std::move(store));
  if (plan_.options.most_recalled()) choice_.emplace(*model_, recall_limits(plan_));
  return {};
}

// Shows the store to the ops that read its entries where they are.
Status Engine::show_store() {
  if (!layout_.recall.pages) return {};
  layout_.recall.stored.resize(model_->layers.size());
  const std::span<const std::byte> memory = store_->memory();
  if (!stored_) THIMBLE_SET(stored_, device_->import_host(memory.data(), memory.size()));
  const auto from = [&](uint64_t first) { return View{stored_.get(), first, memory.size() - first}; };
  for (size_t layer = 0; layer < model_->layers.size(); ++layer) {
    if (!model_->layers[layer].retains()) continue;
    const RecallStore::Places at = store_->places(model_->layers[layer].attention()->first_run);
    const View rows = layout_.recall.window ? layout_.recall.window : from(at.rows);
    layout_.recall.stored[layer] = {
        .pages = from(at.pages),
        .order = from(at.order),
        .k = {rows, layout_.recall.k[layer].type},
        .v = {rows.slice(at.key_bytes, rows.bytes - at.key_bytes), layout_.recall.v[layer].type},
        .page_capacity = store_->page_capacity(),
        .stride = static_cast<uint32_t>(at.stride / 64),
        .rows_stride = static_cast<uint32_t>(
            (layout_.recall.window ? at.page_bytes * store_->page_capacity() : at.stride) / 64)};
  }
  return {};
}

// Reads the rows that a layer's attention needs from the store's file. If that fails, the step begins anew
// without the store: its rows overwrite what they wrote.
Status Engine::load_stored(size_t layer) {
  if (!layout_.recall.window || !command_.step.reads_store || !holds_stored()) return {};
  if (layer >= model_->layers.size()) return {};
  const AttentionMixer* const m = model_->layers[layer].attention();
  if (!m || !model_->layers[m->owner].retains()) return {};
  const uint64_t stride = uint64_t(layout_.recall.stored[m->owner].rows_stride) * 64;
  for (uint32_t head = 0; head < m->kv_heads; ++head) {
    const Status loaded =
        store_->load(m->first_run + head, on_host<std::byte>(layout_.recall.window) + head * stride);
    if (loaded.ok()) continue;
    command_.next = command_.step.first;
    std::fill_n(on_host<uint32_t>(layout_.recall.pages), command_.heads.size(), 0u);
    THIMBLE_TRY(set_saturated(command_.saturated_before));
    return without_store(loaded);
  }
  return {};
}

// Takes the entries to the store that a segment has evicted from one layer.
Status Engine::store_spilled() {
  uint32_t* const spilled = on_host<uint32_t>(layout_.recall.spilled);
  if (!spilled[0]) return {};
  const size_t first_run = spilled[0] - 1, layer = model_->layer_of_run[first_run];
  const AttentionMixer& m = *model_->layers[layer].attention();
  const RecallViews& r = layout_.recall;
  const uint64_t capacity = plan_.dimensions.reach;
  spilled[0] = 0;
  for (uint32_t head = 0; head < m.kv_heads; ++head) {
    const uint64_t at = head * capacity;
    THIMBLE_TRY(store_->add(first_run + head,
                            {.positions = {on_host<int32_t>(r.pos) + at, spilled[1 + head]},
                             .scores = on_host<float>(r.cis) + at,
                             .keys = on_host<float>(r.keys) + at * m.head_dim,
                             .k = row_at(r.k[layer], m, at),
                             .v = row_at(r.v[layer], m, at)},
                            *device_->host));
  }
  return {};
}

// Closes the store after an error.
Status Engine::without_store(const Status& why) {
  store_->close();
  return error(why.code(), "%s; the session goes on without its store of evicted entries",
               why.message().c_str());
}

Status Engine::check_store(const Status& done, SequenceState& state) {
  if (done.ok() || !store_ || !store_->failed()) return done;
  THIMBLE_TRY(put_back(state));
  return without_store(done);
}

Status Engine::recall(SequenceState& state) {
  const uint32_t asking = std::min(kAskingTokens, state.ahead ? state.ahead : state.asking);
  if (!choice_ || !holds_stored() || !asking) return {};
  uint32_t retaining = 0;
  for (uint32_t layer = 0; layer < model_->layers.size(); ++layer) {
    if (!model_->layers[layer].retains()) continue;
    THIMBLE_TRY(check_interrupt());
    THIMBLE_TRY(list_own(*model_->layers[layer].attention(), state));
    THIMBLE_TRY(choose(layer, retaining, asking, state));
    THIMBLE_TRY(check_store(exchange(layer, retaining++, state), state));
  }
  return {};
}

// Chooses the pages that come back into a layer's runs, with the queries of so many latest tokens.
Status Engine::choose(uint32_t layer, uint32_t retaining, uint32_t asking, const SequenceState& state) {
  const AttentionMixer& m = *model_->layers[layer].attention();
  const RecallViews& r = layout_.recall;
  const bool alike = !plan_.options.recalls_per_head();
  const uint64_t read = state.read + state.ahead;
  if (!r.votes) {
    THIMBLE_TRY(device_->read(choice_->queries().data(), r.queries[layer]));
    choice_->choose(*store_, m,
                    {.tokens = asking,
                     .read = read,
                     .ahead = state.ahead,
                     .scale = model_->attention_scale,
                     .rope = rope_params(setting_, m, layout_, layer),
                     .alike = alike},
                    *device_->host);
    return {};
  }
  uint32_t* const asked = on_host<uint32_t>(r.asked);
  asked[0] = asking;
  asked[1] = static_cast<uint32_t>(read - 1);
  asked[2] = state.ahead;
  const uint32_t segment = 2 * retaining;
  THIMBLE_TRY(
      submit({.program = programs_.recall.get(), .first = segment, .last = segment + 1, .reads_store = true},
             state));
  THIMBLE_TRY(wait());
  choice_->choose(*store_, m, alike, on_host<float>(r.votes), *device_->host);
  return {};
}

Status Engine::put_back(SequenceState& state) {
  uint32_t retaining = 0;
  for (uint32_t layer = 0; layer < model_->layers.size() && choice_; ++layer) {
    if (!model_->layers[layer].retains()) continue;
    const AttentionMixer& m = *model_->layers[layer].attention();
    THIMBLE_TRY(list_own(m, state));
    choice_->choose_none();
    THIMBLE_TRY(exchange(layer, retaining++, state));
  }
  return {};
}

// Lists the entries of the layer's runs that did not come from the store.
Status Engine::list_own(const AttentionMixer& m, const SequenceState& state) {
  const uint64_t list_capacity = 1 + uint64_t(plan_.dimensions.reach);
  uint32_t* const lists = on_host<uint32_t>(layout_.recall.list);
  for (uint32_t head = 0; head < m.kv_heads; ++head)
    THIMBLE_TRY(positions(state, m.first_run + head,
                          choice_->positions(head).first(state.entries[m.first_run + head])));
  device_->host->run(m.kv_heads, [&](uint32_t head, uint32_t) {
    const uint32_t run = m.first_run + head;
    choice_->list_own(*store_, run, head, state.entries[run], lists + head * list_capacity);
  });
  for (uint32_t head = 0; head < m.kv_heads; ++head)
    if (lists[head * list_capacity] != state.own(m.first_run + head))
      return error(Code::kInternal, "the pool does not hold the entries that came from the store");
  return {};
}

// Copies the chosen pages of a head to the rows that come back.
Status Engine::fetch(uint32_t layer, uint32_t head) {
  const AttentionMixer& m = *model_->layers[layer].attention();
  const RecallViews& r = layout_.recall;
  uint32_t& rows = on_host<uint32_t>(r.rows)[head];
  rows = 0;
  for (const uint32_t page : choice_->chosen(head)) {
    const uint64_t at = head * uint64_t(plan_.dimensions.reach) + rows;
    THIMBLE_LET(fetched, store_->fetch(m.first_run + head, page, on_host<int32_t>(r.pos) + at,
                                       row_at(r.k[layer], m, at), row_at(r.v[layer], m, at)));
    rows += fetched;
  }
  return {};
}

// Replaces the entries that came from the store by those of the chosen pages, in all runs of a layer.
// `retaining`: the number of layers before it that have a store.
Status Engine::exchange(uint32_t layer, uint32_t retaining, SequenceState& state) {
  const AttentionMixer& m = *model_->layers[layer].attention();
  const RecallViews& r = layout_.recall;
  bool changes = false;
  for (uint32_t head = 0; head < m.kv_heads; ++head)
    changes |= !choice_->is_in_pool(*store_, m.first_run + head, head);
  if (!changes) return {};
  if (store_->in_memory())  // which cannot fail
    device_->host->run(m.kv_heads, [&](uint32_t head, uint32_t) { (void)fetch(layer, head); });
  else
    for (uint32_t head = 0; head < m.kv_heads; ++head) THIMBLE_TRY(fetch(layer, head));
  for (uint32_t head = 0; head < m.kv_heads; ++head) {
    const uint32_t run = m.first_run + head, rows = on_host<uint32_t>(r.rows)[head];
    store_->set_recalled(run, choice_->chosen(head));
    state.entries[run] = state.own(run) + rows;
    state.recalled[run] = rows;
  }
  ++state.generation;
  state.attended = Attended::kUnknown;  // the entries are at other places now
  const uint32_t segment = r.votes ? 2 * retaining + 1 : retaining;
  THIMBLE_TRY(submit({.program = programs_.recall.get(), .first = segment, .last = segment + 1}, state));
  return wait();
}

}  // namespace thimble
