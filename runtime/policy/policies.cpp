// The table of policy names, and code that policies share.
#include <algorithm>

#include "base/bits.h"
#include "runtime/policy/policy.h"

namespace thimble {

#define X(value, name, ...) std::unique_ptr<RetentionPolicy> make_##name##_retention();
THIMBLE_RETENTIONS(X)
#undef X
#define X(value, name) std::unique_ptr<SelectionPolicy> make_##name##_selection();
THIMBLE_SELECTIONS(X)
#undef X

namespace {

struct RetentionRow {
  const char* name;
  std::unique_ptr<RetentionPolicy> (*make)();
};
constexpr RetentionRow kRetentions[] = {
#define X(value, name, ...) {#name, make_##name##_retention},
    THIMBLE_RETENTIONS(X)
#undef X
};

struct SelectionRow {
  const char* name;
  std::unique_ptr<SelectionPolicy> (*make)();
};
constexpr SelectionRow kSelections[] = {
#define X(value, name) {#name, make_##name##_selection},
    THIMBLE_SELECTIONS(X)
#undef X
};

}  // namespace

const char* policy_name(Retention r) {
  const auto i = static_cast<size_t>(r);  // a negative number becomes a large one
  return i < std::size(kRetentions) ? kRetentions[i].name : nullptr;
}
const char* policy_name(Selection s) {
  const auto i = static_cast<size_t>(s);
  return i < std::size(kSelections) ? kSelections[i].name : nullptr;
}

Policies::Policies(const SessionOptions& o)
    : retention(kRetentions[static_cast<size_t>(o.retention)].make()),
      windowed(make_window_retention()),
      selection(kSelections[static_cast<size_t>(o.selection)].make()) {}

Status Policies::check(const SessionOptions& o) const {
  if (host() && selection->selects(o))
    return error(
        Code::kInvalidArgument,
        "%s chooses by itself what each step attends to, so %s has nothing to select from; leave out one "
        "of them",
        policy_name(o.retention), policy_name(o.selection));
  if (o.rebuild && !host())
    return error(
        Code::kInvalidArgument,
        "%s knows nothing of the tokens that it dropped, so none can be rebuilt; choose the retention "
        "adore, or leave out rebuild",
        policy_name(o.retention));
  if (o.draft == Draft::kNone) return {};
  const char* refuses = nullptr;
  if (!retention->takes_drafts()) refuses = policy_name(o.retention);
  if (selection->selects(o)) refuses = policy_name(o.selection);
  if (o.watch) refuses = "watch";
  if (o.recall) refuses = "a store of evicted entries";
  if (!refuses) return {};
  return error(Code::kInvalidArgument,
               "drafted tokens are read in one step, and %s needs a step of its own for every generated "
               "token; leave out one of them",
               refuses);
}

uint32_t unscored_rows(const SessionOptions& o) {
  switch (traits(o.retention).scoring) {
    case Scoring::kAtOnce:
      return 0;
    case Scoring::kInBatches:
      return kBatchRows;
    case Scoring::kOnSecondReading:
      return o.chunk;
  }
  return 0;
}

uint32_t again_rows(const SessionOptions& o) {
  return traits(o.retention).scoring == Scoring::kOnSecondReading ? o.chunk : 0;
}

Status check_heads(const SessionOptions& o) {
  const Takes takes = traits(o.retention).takes;
  if (takes != Takes::kRetainer && takes != Takes::kController) return {};
  const bool controller = takes == Takes::kController;
  if (o.retainer && (o.retainer->kind == Retainer::Kind::kAdore) == controller) return {};
  return error(
      Code::kInvalidArgument,
      "%s retention needs the %s of this model; give its file (--heads), or choose another retention",
      policy_name(o.retention), controller ? "controller" : "retainer");
}

Status resolve_eviction(SessionOptions& o) {
  constexpr uint32_t kDefaultLocal = 100;
  // The number of generated tokens between two evictions. An eviction reads and moves the whole pool, so it
  // must be rare (methods 2.7).
  constexpr uint32_t kLeastBetweenEvictions = 64;
  if (o.local == kDefault) o.local = kDefaultLocal;
  if (o.protect_init == kDefault) o.protect_init = kSinks;
  if (o.local < kLeastBetweenEvictions) o.max_new = std::max(o.max_new, kLeastBetweenEvictions - o.local);
  if (!o.pool) return {};
  if (o.stabilizers == kDefault) o.stabilizers = 0;
  if (uint64_t(o.stabilizers) + o.protect_init >= o.pool)
    return error(Code::kInvalidArgument,
                 "%u stabilizers and %u protected first entries leave nothing to choose in a pool of %u; "
                 "make the pool larger than their sum",
                 o.stabilizers, o.protect_init, o.pool);
  return {};
}

void take_shares(SessionOptions& o) {
  if (o.retainer && !o.retainer->shares.empty()) o.shares = {o.retainer, &o.retainer->shares};
}

uint32_t trained_entries(const Model& model, const SessionOptions& o) {
  const uint32_t trained = std::max(model.info.context_length, 1u);
  const uint32_t others = std::max(o.chunk, o.local + o.max_new + o.most_recalled()) + again_rows(o);
  return trained > others ? trained - others : 1;
}

Status SelectionPolicy::add_list_counts(Device& device, const List& list, SelectionStats& stats) {
  const uint64_t list_bytes = uint64_t(list.capacity) * sizeof(uint32_t);
  for (uint64_t at = 0; at < list.entries.bytes; at += list_bytes) {
    uint32_t count;
    THIMBLE_TRY(device.read(&count, list.entries.slice(at, sizeof count)));
    stats.selected += count;
    ++stats.lists;
  }
  return {};
}

void store_plain_score(const LayerStep& l, uint32_t kind) {
  const SessionOptions& o = l.setting.options;
  l.recorder.record(CisStore{.score = {},
                             .cis = l.chunk ? l.chunk_rows().cis : l.pool().cis,
                             .p = {.first_head = 0,
                                   .heads = l.attention().kv_heads,
                                   .kind = kind,
                                   .share_heads = o.retain_scope == RetainScope::kLayer,
                                   .layer = l.layer,
                                   .chunk_capacity = o.chunk,
                                   .head_state = l.head_state(),
                                   .into = l.chunk ? kIntoChunk : kIntoPool}});
}

void record_query_score(const LayerStep& l, const View& query, const View& sums) {
  const AttentionMixer& m = l.attention();
  const bool last = bool(query);
  l.recorder.record(QueryScore{.q = last ? query : l.at.qkv,
                               .k = l.pool().k,
                               .chunk_k = l.chunk_rows().k,
                               .list = {},
                               .rope = l.rope_table(),
                               .sinks = l.weights.of(m.sinks),
                               .sums = sums,
                               .cis = l.pool().cis,
                               .chunk_cis = l.chunk_rows().cis,
                               .p = {.first_head = 0,
                                     .heads = m.kv_heads,
                                     .group = m.group(),
                                     .head_dim = m.head_dim,
                                     .row_stride = l.setting.dimensions.qkv_cols,
                                     .chunk_capacity = l.setting.options.chunk,
                                     .head_state = l.head_state(),
                                     .kind = last ? kQueryLast : kQueryRows,
                                     .rows = last ? 1 : l.setting.options.chunk,
                                     .sinks = l.setting.options.protect_init,
                                     .scale = l.setting.model.attention_scale,
                                     .cap = l.setting.model.attention_cap,
                                     .rope = l.rope()}});
}

Status check_scope_of_keys(const SessionOptions& o) {
  if (o.retain_scope != RetainScope::kLayer) return {};
  return error(Code::kInvalidArgument,
               "%s compares the keys of one head with each other, so a layer's heads cannot keep the same "
               "entries; leave retain_scope at head, or choose another retention",
               policy_name(o.retention));
}

KeySums place_key_sums(const Setting& s, Arena& workspace) {
  const auto blocks = static_cast<uint32_t>(ceil_div(s.dimensions.reach, kKeyDiffBlock));
  return {blocks, workspace.place(blocks * uint64_t(s.dimensions.kv_cols) * sizeof(float))};
}

void record_key_diff(const LayerStep& l, const KeySums& sums, const RetentionPolicy::Scores& into) {
  l.recorder.record(KeyDiff{.k = l.pool().k,
                            .chunk_k = l.chunk_rows().k,
                            .sums = sums.sums,
                            .cis = into.pool,
                            .chunk_cis = into.chunk,
                            .p = {.first_head = 0,
                                  .heads = l.attention().kv_heads,
                                  .head_dim = l.attention().head_dim,
                                  .chunk_capacity = l.setting.options.chunk,
                                  .head_state = l.head_state(),
                                  .blocks = sums.blocks}});
}

}  // namespace thimble
