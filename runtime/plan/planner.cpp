#include "runtime/plan/planner.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include "base/size_text.h"
#include "runtime/draft/lookup.h"
#include "runtime/memory/host_weights.h"
#include "runtime/plan/dimensions.h"
#include "runtime/plan/lay_out.h"
#include "runtime/policy/kv_types.h"
#include "runtime/sampler/sampler.h"

namespace thimble {
namespace {

constexpr uint32_t kDefaultPool = 4096, kDefaultChunk = 1024, kDefaultMaxNew = 256;
constexpr uint32_t kLargestCount = kCount.most;
constexpr uint32_t kMostLayerEntries = INT32_MAX;

// The largest pool that is useful with these options.
uint32_t useful_pool(const Model& model, const SessionOptions& o, const Policies& policies) {
  const uint32_t trained = std::max(model.info.context_length, 1u);
  if (!traits(o.retention).evicts()) {
    // If a policy also selects in prefill, no row attends to more than its list, so a text may be longer than
    // the trained context.
    const bool unbounded = o.budget && policies.selection->selects_chunks(o);
    const uint32_t bound = o.context ? o.context : unbounded ? kLargestCount : trained;
    return bound > o.max_new ? bound - o.max_new : 1;
  }
  // With list positions, a larger pool would use positions for which the model was not trained.
  return trained_entries(model, o);
}

SessionShape session_shape(const Setting& s, const DeviceInfo& device, const Policies& policies) {
  const Dimensions& d = s.dimensions;
  return {.chunk = s.options.chunk,
          .run_capacity = d.capacity,
          .layer_entries = d.most_layer_entries,
          .reach = d.reach,
          .view_capacity = d.view_capacity,
          .positions = policies.selection->selects(s.options)
                           ? std::max(policies.selection->vote_positions(s), 1u)
                           : 0,
          .heads = static_cast<uint32_t>(d.runs.size()),
          .stored_pages = s.dimensions.stored / kRecallPage,
          .recalls = s.options.most_recalled() != 0,
          .voted_pages = votes_on_device(s.options, device) ? recall_shape(s.model, s.options).pages : 0,
          .voters = kAskingTokens};
}

// Whether the keys of all layers among which runs may move have the same width.
bool have_equal_widths(const Model& model) {
  return std::all_of(model.layers.begin(), model.layers.end(), [&](const Layer& layer) {
    return !layer.retains() || layer.attention()->head_dim == model.retained_head_dim();
  });
}

// Whether these layers store keys and values alike.
bool have_equal_formats(const Model& model, const SessionOptions& o) {
  std::optional<KvTypes> first;
  return std::all_of(model.layers.begin(), model.layers.end(), [&](const Layer& layer) {
    if (!layer.retains()) return true;
    const KvTypes types = kv_types(model, *layer.attention(), o);
    if (!first) first = types;
    return types == *first;
  });
}

// Whether selecting and attending to the selection reads fewer bytes than attending to a full pool (methods
// 6.2).
bool pays(const Model& model, const SessionOptions& o, const Dimensions& d,
          const SelectionPolicy& selection) {
  if (!selection.selects(o) || d.capacity <= selection.most_attended(o)) return false;
  const double entry = full_entry_cost(model, o).both.bytes;
  return selection.cost(model, o, d.capacity).bytes + entry * selection.most_attended(o) < entry * d.capacity;
}

// What a device needs for the layer with the largest needs.
Result<Needs> most_needs(const Model& model, const Device& device, const SessionOptions& o,
                         const SessionShape& session) {
  Needs most;
  std::vector<ModelShape> seen;
  for (const Layer& layer : model.layers) {
    ModelShape shape = model.shape_of(layer);
    if (o.retainer) shape.retainer = o.retainer->matrices();
    if (std::find(seen.begin(), seen.end(), shape) != seen.end()) continue;
    seen.push_back(shape);
    THIMBLE_LET(needs, device.needs(shape, session));
    most.fixed = std::max(most.fixed, needs.fixed);
    most.programs = std::max(most.programs, needs.programs);
    most.workspace = std::max(most.workspace, needs.workspace);
  }
  return most;
}

Status too_small_store(RecallStore::Shape shape, const SessionOptions& o) {
  shape.pages = 1;
  return error(Code::kBudget, "a store of %s has no room for a page of each head; it needs at least %s",
               size_text(shape.in_file ? o.recall_disk : o.recall_mem).c_str(),
               size_text(shape.in_file ? RecallStore::file_bytes(shape) : RecallStore::bytes(shape)).c_str());
}

}  // namespace

const Model* drafter_of(const Model& model, const SessionOptions& o) {
  return o.draft == Draft::kModel ? o.draft_model.get()
         : o.draft == Draft::kMtp ? model.draft_block.get()
                                  : nullptr;
}

// A draft block reads small chunks, which always fit next to what an eviction leaves.
SessionOptions draft_options(const Model& drafter, const SessionOptions& target) {
  constexpr uint32_t kMostPool = 4096, kLeastPool = 64, kMaxNew = 256;
  SessionOptions o{.retention = Retention::kWindow, .chunk = target.chunk, .local = 0, .max_new = kMaxNew};
  if (drafter.joined) o.chunk = std::min(o.chunk, kMaxNew);
  const uint32_t most = std::min(kMostPool, trained_entries(drafter, o));
  o.pool = std::clamp(target.pool, std::min(kLeastPool, most), most);
  return o;
}

Result<MemoryPlan> count_plan(const Model& model, const Device& on, const SessionOptions& o,
                              Policies& policies, bool labels, uint32_t host_groups) {
  const DeviceInfo device = on.info();
  MemoryPlan plan;
  plan.options = o;
  plan.host_groups = host_groups;
  plan.dimensions = dimensions(model, o, policies);
  const Dimensions& d = plan.dimensions;
  if (d.moves && !have_equal_widths(model))
    return error(Code::kUnsupported,
                 "heads of different widths cannot share one pool unequally; leave the shares out");
  if (d.moves && !have_equal_formats(model, o))
    return error(
        Code::kUnsupported,
        "some layers of this model store keys or values more finely than the session asks for, and "
        "heads in different formats cannot share one pool unequally; store both as f16, or leave the "
        "shares out");
  if (d.most_layer_entries > kMostLayerEntries)
    return error(
        Code::kUnsupported,
        "the heads of a layer cannot hold more than %u entries together; choose a smaller pool, or a "
        "model whose windows are shorter",
        kMostLayerEntries);
  const Setting setting{model, plan.options, d};
  SessionShape session = session_shape(setting, device, policies);
  session.labels = labels;
  THIMBLE_LET(needs, most_needs(model, on, o, session));

  plan.capacity = d.capacity;
  plan.finer_layers = finer_layers(model, o);
  plan.backend_scratch = needs.workspace;
  Arena pool(device.alignment), workspace(device.alignment), io(device.alignment);
  WeightWindow window(model, device, host_groups);
  const Layout layout = lay_out(setting, policies, device, needs.workspace, window, pool, workspace, io);
  plan.window_copies = window.copies();
  if (o.recall) {
    const RecallStore::Shape shape = recall_shape(model, o);
    if (!shape.pages) return too_small_store(shape, o);
    plan.store_pages = shape.pages;
    plan.host_threads = on.host->threads();
    plan.host_votes = !votes_on_device(o, device);
    if (o.recalls_all()) plan.recall_bytes = uint64_t(stored_entry_cost(model, o).bytes) * d.stored;
    (shape.in_file ? plan.store_file : plan.store) =
        shape.in_file ? RecallStore::file_bytes(shape) : RecallStore::bytes(shape);
  }
  const auto weigh = [&](const auto& owner, const PlacedTensors::InHost& in_host) {
    const uint64_t bytes = Placements::bytes(owner.tensors(), device, in_host);
    plan.weights += bytes;
    if (owner.placements.has(on)) plan.shared += bytes;
  };
  weigh(model, host_weights(model, host_groups));
  if (o.retainer) weigh(*o.retainer, {});
  plan.pool = round_up(pool.size(), device.granularity);
  for (const StateArray& layer : layout.states) plan.states += layer.slots * layer.slot_stride;
  plan.view = layout.view_k.values.bytes + layout.view_v.values.bytes + layout.lifted_k.values.bytes +
              layout.lifted_v.values.bytes;
  plan.workspace = round_up(workspace.size(), device.granularity) - plan.view;
  plan.io = io.size() + host_bytes(model, plan);
  plan.programs = needs.programs;
  plan.fixed = needs.fixed + needs.programs;
  if (const Model* drafter = drafter_of(model, o)) {
    THIMBLE_LET(draft, make_plan(*drafter, on, draft_options(*drafter, o)));
    const uint64_t waiting = drafter->joined ? uint64_t(o.chunk) + draft.options.chunk + draft.capacity
                                             : uint64_t(draft.options.pool) + kMostDrafted;
    plan.draft = draft.total - (draft.fixed - draft.programs) + waiting * sizeof(int32_t);
    plan.draft_weights = draft.weights - draft.shared;
  }
  plan.total =
      plan.weights - plan.shared + plan.pool + plan.view + plan.workspace + plan.io + plan.fixed + plan.draft;
  plan.selection_pays = pays(model, o, d, *policies.selection);
  plan.largest_position = o.positions == Positions::kOriginal ? UINT32_MAX : d.largest_list - 1;
  return plan;
}

namespace {

// The smallest pool that these options allow.
uint32_t smallest_pool(const SessionOptions& o) {
  if (!traits(o.retention).evicts()) return 1;
  return o.protect_init + (o.stabilizers == kDefault ? 0 : o.stabilizers) + std::max(o.rebuild, 1u);
}

// The largest pool within the budget. 0: even the smallest pool does not fit.
Result<uint32_t> search(const Model& model, const Device& device, SessionOptions o,
                        uint32_t host_groups = 0) {
  const Policies policies(o);
  uint32_t fits = 0, low = smallest_pool(o), high = std::max(useful_pool(model, o, policies), low);
  while (low <= high) {
    SessionOptions tried = o;
    tried.pool = low + (high - low) / 2;
    THIMBLE_TRY(policies.retention->resolve(model, tried));
    Policies counted(tried);
    if (const auto plan = count_plan(model, device, tried, counted, false, host_groups);
        plan.ok() && plan->total <= o.budget) {
      fits = tried.pool;
      low = tried.pool + 1;
    } else {
      high = tried.pool - 1;
    }
  }
  return fits;
}

// Refuses a plan that exceeds the budget, and says how many bytes are missing and which pool would fit, if
// `fits` is not 0.
Status over_budget(const MemoryPlan& plan, uint32_t fits) {
  const SessionOptions& o = plan.options;
  const uint64_t missing = plan.total - o.budget;
  const std::string advice =
      fits ? "a pool of " + std::to_string(fits) + " would fit"
           : "no pool fits; a smaller chunk than " + std::to_string(o.chunk) + " needs less workspace";
  const std::string drafts =
      plan.draft ? ", drafts " + size_text(plan.draft) + ", of which weights " + size_text(plan.draft_weights)
                 : "";
  return error(Code::kBudget,
               "the budget of %s lacks %s: a pool of %u needs %s (weights %s, pool %s, view %s, workspace "
               "%s, io %s, device %s%s); %s",
               size_text(o.budget).c_str(), size_text(missing).c_str(), o.pool, size_text(plan.total).c_str(),
               size_text(plan.weights - plan.shared).c_str(), size_text(plan.pool).c_str(),
               size_text(plan.view).c_str(), size_text(plan.workspace).c_str(), size_text(plan.io).c_str(),
               size_text(plan.fixed).c_str(), drafts.c_str(), advice.c_str())
      .set_bytes_missing(missing);
}

}  // namespace

Status check_free(const MemoryPlan& plan, const DeviceInfo& device) {
  const uint64_t needed = plan.total - (plan.fixed - plan.programs);  // the device's part is already taken
  if (device.unified || needed <= device.free_bytes) return {};
  return error(Code::kOutOfMemory,
               "%s has %s free, but this session needs %s (pool %s); close other programs that use the card, "
               "or set the budget to what is free",
               device.name.c_str(), size_text(device.free_bytes).c_str(), size_text(needed).c_str(),
               size_text(plan.pool).c_str());
}

RecallChoice::Limits recall_limits(const MemoryPlan& plan) {
  const SessionOptions& o = plan.options;
  return {.rope_positions = plan.dimensions.rope_positions,
          .context = o.context ? o.context : UINT32_MAX,
          .capacity = plan.dimensions.capacity,
          .recall = o.most_recalled(),
          .pages = plan.store_pages,
          .threads = plan.host_threads,
          .votes = plan.host_votes};
}

// What a store takes of the session's memory: what chooses the entries that come back, and the index of a
// file.
static uint64_t store_bytes(const Model& model, const MemoryPlan& plan) {
  const SessionOptions& o = plan.options;
  uint64_t bytes = o.recall_disk ? RecallStore::bytes(recall_shape(model, o)) : 0;
  if (o.most_recalled()) bytes += RecallChoice::bytes(model, recall_limits(plan));
  return bytes;
}

uint64_t host_bytes(const Model& model, const MemoryPlan& plan) {
  constexpr uint64_t kStepPrograms = 7;  // that run layers, at most: Programs in decoder.h
  const SessionOptions& o = plan.options;
  const Dimensions& d = plan.dimensions;
  // Ops of a layer in all recorded programs, measured on the CPU: 72 to 101, 6 more for every further pass
  // over the view, up to 9 more for every pass over a lifted one, and up to 11 more if the session watches.
  const uint64_t ops_of_layer = 98 + d.view_passes * 11 + d.lifted_passes() * 9 + (o.watch ? 11 : 0) +
                                (o.draft == Draft::kNone ? 0 : 27);
  return Sampler::bytes(model.output.rows, plan.dimensions.reach) +
         (d.most_waiting + d.most_recent + again_rows(o)) * sizeof(int32_t) +
         d.state_slots * sizeof(Snapshot) + (o.draft == Draft::kLookup ? Lookup::planned_bytes() : 0) +
         (traits(o.retention).scored == Scored::kOnHost
              ? plan.capacity * sizeof(int32_t) + uint64_t(kNotedAtOnce) * model.shape.d_model * sizeof(float)
              : 0) +
         store_bytes(model, plan) +
         plan.dimensions.runs.size() * (sizeof(HeadState) + sizeof(HeadRun) + 2 * sizeof(uint32_t)) +
         plan.dimensions.divisions.size() * plan.dimensions.runs.size() * sizeof(HeadRun) +
         ((uint64_t(model.shape.layers) + 1) * ops_of_layer + kStepPrograms * plan.window_copies) *
             sizeof(Op);
}

namespace {

// Decides the options of the store of evicted entries.
Status resolve_recall(SessionOptions& o) {
  constexpr uint32_t kDefaultRecall = 512, kDefaultRecallEvery = 128;
  if (o.recall_mem && o.recall_disk)
    return error(
        Code::kInvalidArgument,
        "the store of evicted entries is in memory or in a file; leave out recall_mem or recall_disk");
  if (!o.recall_mem && !o.recall_disk) {
    if (!o.recall && !o.recall_prefill) return {};
    return error(
        Code::kInvalidArgument,
        "entries are recalled from a store of evicted entries; give the store a size with recall_mem "
        "or recall_disk");
  }
  if (traits(o.retention).eviction != Eviction::kWhenFull)
    return error(
        Code::kInvalidArgument,
        "%s gives a store nothing to recall: %s; choose another retention, or leave the store out",
        policy_name(o.retention),
        traits(o.retention).evicts() ? "it reads evicted tokens again by itself" : "it evicts nothing");
  if (!o.recall) o.recall = kDefaultRecall;
  if (!o.recalls_all()) {
    if (o.recall_prefill)
      return error(Code::kInvalidArgument,
                   "only with recall all does a text attend to the store while it is read; leave "
                   "recall_prefill out, or recall all");
    if (!o.recall_every) o.recall_every = kDefaultRecallEvery;
    return {};
  }
  if (o.recall_every)
    return error(Code::kInvalidArgument,
                 "with recall all, every generated token attends to the store; leave recall_every out");
  if (o.selection != Selection::kDense)
    return error(Code::kInvalidArgument,
                 "%s attends to a part of the pool, and recall all to everything; leave out one of them",
                 policy_name(o.selection));
  return {};
}

// Refuses numbers that are too large. An option that stays undecided, because no policy reads it, may be
// kDefault.
template <typename T>
Status check_most(const char* name, T value, T at_first, const OptionValues& values) {
  if (value == at_first || static_cast<double>(value) <= values.most) return {};
  if (values.all && static_cast<double>(value) == UINT32_MAX) return {};
  return error(Code::kInvalidArgument, "%s is %u; the largest is %u", name, static_cast<uint32_t>(value),
               values.most);
}

// Checks that a model may draft for another one.
Status check_draft_model(const Model* drafter, const Model& model) {
  if (!drafter || !drafter->has_weights())
    return error(Code::kInvalidArgument, "drafts by a model need that model, with its weights");
  if (std::any_of(drafter->layers.begin(), drafter->layers.end(),
                  [](const Layer& layer) { return layer.state_bytes() != 0; }))
    return error(Code::kUnsupported,
                 "%s has recurrent layers, which cannot go back after a wrong guess; take another model for "
                 "drafts",
                 drafter->gguf().name().c_str());
  // One vocabulary may have more tokens after those of the other.
  const Tokenizer &a = drafter->tokenizer, &b = model.tokenizer;
  const bool have_text = a.ok() && b.ok();
  const uint32_t common = have_text ? std::min(a.size(), b.size()) : 0;
  bool same = have_text || drafter->shape.vocab == model.shape.vocab;
  for (uint32_t id = 0; same && id < common; ++id)
    same = a.text(static_cast<int32_t>(id)) == b.text(static_cast<int32_t>(id));
  if (same) return {};
  return error(Code::kMismatch, "%s has another vocabulary than %s; a draft model must have the same tokens",
               drafter->gguf().name().c_str(), model.gguf().name().c_str());
}

Status check_draft_block(const Model& model) {
  if (model.draft_block) return {};
  const std::string& why = model.description_of_draft_block_error;
  return error(Code::kUnsupported,
               "%s has no layer for drafts (multi-token prediction)%s%s; choose other drafts",
               model.gguf().name().c_str(), why.empty() ? "" : " that can be used: ", why.c_str());
}

Status check_counts(const SessionOptions& o) {
#define X(type, name, at_first, values, saved) THIMBLE_TRY(check_most<type>(#name, o.name, at_first, values));
  THIMBLE_SESSION_OPTIONS(X)
#undef X
  return {};
}

}  // namespace

Result<SessionOptions> resolve(const Model& model, const SessionOptions& options) {
  SessionOptions o = options;
  if (!model.has_weights())
    return error(Code::kUnsupported, "%s holds a vocabulary but no weights; open the model itself to run it",
                 model.gguf().name().c_str());
  const Policies policies(o);
  const bool evicts = traits(o.retention).evicts();
  if (!o.max_new) o.max_new = kDefaultMaxNew;
  const auto pairs = static_cast<uint32_t>(model.layer_of_run.size());
  if (!o.keeps.empty()) {
    if (o.keeps.size() != pairs || !evicts)
      return error(Code::kInvalidArgument,
                   "%zu heads are given a number of entries to keep; a retention that evicts takes one for "
                   "each of the %u "
                   "KV heads of all layers",
                   o.keeps.size(), pairs);
    const uint64_t sum = std::accumulate(o.keeps.begin(), o.keeps.end(), uint64_t{0});
    o.pool = static_cast<uint32_t>(std::min<uint64_t>(sum / pairs, kLargestCount + 1));
  }
  THIMBLE_TRY(resolve_recall(o));
  THIMBLE_TRY(check_heads(o));
  THIMBLE_TRY(policies.retention->resolve(model, o));
  const auto is_latent = [](const Layer& layer) { return layer.retains() && layer.attention()->is_latent(); };
  if (o.recall && std::any_of(model.layers.begin(), model.layers.end(), is_latent))
    return error(Code::kUnsupported,
                 "%s has latent attention, whose entries a store cannot hold yet; leave the store out",
                 model.info.architecture.c_str());
  if (o.recall && !o.local)
    return error(Code::kInvalidArgument,
                 "the last tokens of a prompt call back evicted entries, so local cannot be 0 with a store");
  if (!o.chunk) o.chunk = kDefaultChunk;
  THIMBLE_TRY(policies.selection->resolve(model, evicts, o));
  THIMBLE_TRY(policies.check(o));
  if (o.draft == Draft::kModel) THIMBLE_TRY(check_draft_model(o.draft_model.get(), model));
  if (o.draft == Draft::kMtp) THIMBLE_TRY(check_draft_block(model));
  if (o.positions == Positions::kOriginal && !o.context) o.context = std::max(model.info.context_length, 1u);
  if (!o.pool && !o.budget) o.pool = evicts ? kDefaultPool : useful_pool(model, o, policies);
  if (o.pool) THIMBLE_TRY(policies.retention->resolve(model, o));
  THIMBLE_TRY(check_counts(o));
  return o;
}

namespace {

// Refuses formats of keys and values that the model or the device does not have.
Status check_formats(const Model& model, const Device& device, const SessionOptions& o) {
  const bool asks = o.key_format != KvFormat::kF16 || o.value_format != KvFormat::kF16;
  for (const Layer& layer : model.layers) {
    const AttentionMixer* m = layer.attention();
    if (!m || !m->has_keys()) continue;
    const KvTypes types = kv_types(model, *m, o);
    const KvMerge op{
        .k = {{}, types.k}, .v = {{}, types.v}, .pos = {}, .cis = {}, .p = {.head_dim = m->head_dim}};
    if (asks && m->is_latent())
      return error(
          Code::kUnsupported,
          "%s reads values from its keys' rows, which are stored as f16 only; leave their formats out",
          model.gguf().name().c_str());
    if (types == KvTypes{} || device.supports(op)) continue;
    return error(Code::kUnsupported,
                 "%s cannot store keys as %s and values as %s; leave these formats out, or use --device cpu",
                 device.info().name.c_str(), dtype_info(types.k).name, dtype_info(types.v).name);
  }
  return {};
}

// A plan within the budget for a session of which no pool fits next to all weights: as few of them as
// possible stay in the host's memory, so that the pool that was asked for fits, or else one of the default
// size. Fails with `refused` if that does not help.
Result<MemoryPlan> plan_host_weights(const Model& model, const Device& device, SessionOptions o,
                                     Status refused) {
  if (device.info().unified || model.placements.has(device)) return refused;
  const auto all = static_cast<uint32_t>(host_groups(model).size());
  Policies policies(o);
  if (!o.pool) {
    THIMBLE_LET(fits, search(model, device, o, all));
    o.pool = std::min(fits, kDefaultPool);
    if (!o.pool) return refused;
    THIMBLE_TRY(policies.retention->resolve(model, o));
  }
  uint32_t low = 1, high = all;
  while (low < high) {
    const uint32_t groups = low + (high - low) / 2;
    THIMBLE_LET(plan, count_plan(model, device, o, policies, false, groups));
    if (plan.total <= o.budget)
      high = groups;
    else
      low = groups + 1;
  }
  THIMBLE_LET(plan, count_plan(model, device, o, policies, false, high));
  if (plan.total > o.budget) return refused;
  return std::move(plan);
}

}  // namespace

Result<MemoryPlan> make_plan(const Model& model, const Device& device, const SessionOptions& options) {
  THIMBLE_LET(o, resolve(model, options));
  THIMBLE_TRY(check_formats(model, device, o));
  Policies policies(o);
  const SessionOptions without_pool = o;
  const bool asked = o.pool != 0;
  uint32_t fits = 0;
  if (!asked) {
    THIMBLE_SET(fits, search(model, device, o));
    o.pool = fits ? fits : smallest_pool(o);
    THIMBLE_TRY(policies.retention->resolve(model, o));
  }
  THIMBLE_LET(plan, count_plan(model, device, o, policies));
  if (o.budget && plan.total > o.budget) {
    if (asked) THIMBLE_SET(fits, search(model, device, o));
    const Status refused = over_budget(plan, fits);
    if (fits) return refused;
    THIMBLE_SET(plan, plan_host_weights(model, device, asked ? o : without_pool, refused));
  }
  plan.asked = options;
  if (const DeviceInfo info = device.info(); info.pages_files) {
    const uint64_t taken = plan.total + info.free_bytes / 16;  // the rest is for other programs
    plan.paged_layers = paged_layers(model, info.free_bytes - std::min(info.free_bytes, taken));
  }
  return plan;
}

Result<uint32_t> largest_pool(const Model& model, const Device& device, const SessionOptions& options) {
  if (!options.budget)
    return error(Code::kInvalidArgument, "the largest pool is chosen for a budget; set budget_bytes");
  SessionOptions asked = options;
  asked.pool = 0;
  THIMBLE_LET(plan, make_plan(model, device, asked));
  if (!plan.host_groups) return plan.options.pool;
  THIMBLE_LET(o, resolve(model, asked));
  return search(model, device, o, static_cast<uint32_t>(host_groups(model).size()));
}

}  // namespace thimble
