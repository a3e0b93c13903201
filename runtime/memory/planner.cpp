#include "runtime/memory/planner.h"

#include <cstdio>

#include "runtime/sampler.h"

namespace thimble {
namespace {

constexpr uint32_t kDefaultPool = 4096, kDefaultChunk = 1024, kDefaultLocal = 100, kDefaultMaxNew = 256;
constexpr uint32_t kDefaultSinks = 4;  // StreamingLLM's; fewer hurt a window
constexpr uint32_t kDefaultSelectK = 2048, kDefaultSelectInit = 128,
                   kDefaultSelectLocal = 512;  // methods 3.3
// Bound on positions where only a layer vote over an evicted pool needs one: 4 MiB of votes.
constexpr uint32_t kDefaultContext = 1u << 20;
constexpr uint32_t kLargestCount = 1u << 28;  // keeps every index and byte count far from overflow

uint32_t or_default(uint32_t value, uint32_t fallback) { return value == kDefault ? fallback : value; }

// The largest pool that these options can put to use.
uint32_t useful_pool(const Model& model, const SessionOptions& o) {
  const uint32_t trained = std::max(model.info.context_length, 1u);
  if (o.retention == Retention::kNone) {
    const uint32_t bound = o.context ? o.context : trained;
    return bound > o.max_new ? bound - o.max_new : 1;
  }
  // Under list positions a longer pool would use positions that the model was not trained for.
  const uint32_t beside = std::max(o.chunk, o.local + o.max_new);
  return trained > beside ? trained - beside : 1;
}

// Decides the stabilizers once the pool is known, and checks what they leave to choose.
Status settle_retention(SessionOptions& o) {
  if (o.retention == Retention::kNone) return {};
  if (o.stabilizers == kDefault) {
    // The share of the pool that the heads were trained with; a quarter where they do not say.
    const RetainingHeads* heads = o.heads.get();
    if (!heads)
      o.stabilizers = 0;
    else if (heads->stabilizers && heads->budget)
      o.stabilizers = static_cast<uint32_t>(uint64_t(heads->stabilizers) * o.pool / heads->budget);
    else
      o.stabilizers = o.pool / 4;
  }
  if (uint64_t(o.stabilizers) + o.protect_init >= o.pool)
    return error(Code::kInvalidArgument,
                 "%u stabilizers and %u protected first entries leave nothing to choose in a pool of %u; "
                 "make the pool "
                 "larger than their sum",
                 o.stabilizers, o.protect_init, o.pool);
  return {};
}

Status check_selection(const SessionOptions& o) {
  if (o.selection == Selection::kDense) return {};
  if (!(o.select_theta >= -1.0f && o.select_theta <= 1e9f))
    return error(Code::kInvalidArgument, "select_theta is %g; it is a cosine: -1 always reuses, 1 never",
                 o.select_theta);
  if (o.select_prefill && o.chunk > o.select_local)
    return error(
        Code::kInvalidArgument,
        "selecting while reading needs chunks that lie within the local window: a chunk of %u is more than "
        "select_local %u; lower the chunk or raise select_local",
        o.chunk, o.select_local);
  return {};
}

MemoryPlan count(const Model& model, const Device& on, const SessionOptions& o, const Needs& needs) {
  const DeviceInfo device = on.info();
  MemoryPlan plan;
  plan.options = o;
  plan.dimensions = dimensions(model, o);
  plan.capacity = plan.dimensions.capacity;
  plan.backend_scratch = needs.workspace;
  Arena pool(device.alignment), workspace(device.alignment), io(device.alignment);
  const Layout layout = lay_out(model, o, plan.dimensions, device, needs.workspace, pool, workspace, io);
  const auto weigh = [&](const auto& owner) {
    const uint64_t bytes = Placements::bytes(owner.tensors(), device);
    plan.weights += bytes;
    if (owner.placements.has(on)) plan.shared += bytes;
  };
  weigh(model);
  if (o.heads) weigh(*o.heads);
  plan.pool = round_up(pool.size(), device.granularity);
  plan.view = layout.view_k.bytes + layout.view_v.bytes;
  plan.workspace = round_up(workspace.size(), device.granularity) - plan.view;
  plan.io = io.size() + host_bytes(model, o);
  plan.programs = needs.programs;
  plan.fixed = needs.fixed + needs.programs;
  plan.total = plan.weights - plan.shared + plan.pool + plan.view + plan.workspace + plan.io + plan.fixed;
  const uint32_t selected = o.select_init + o.select_k + o.select_local;
  plan.selection_pays = o.selection != Selection::kDense &&
                        uint64_t(plan.capacity) + o.select_init + o.select_local > 2 * uint64_t(selected);
  plan.largest_position = o.positions == Positions::kOriginal ? UINT32_MAX : plan.dimensions.reach - 1;
  return plan;
}

Result<MemoryPlan> count(const Model& model, const Device& device, const SessionOptions& o) {
  const Dimensions d = dimensions(model, o);
  ModelShape shape = model.shape;
  shape.d_retain = o.retention == Retention::kLocret ? o.heads->d_r : 0;
  const bool selects = o.selection != Selection::kDense;
  THIMBLE_LET(needs, device.needs(shape, {.chunk = o.chunk,
                                          .pool_capacity = d.capacity,
                                          .view_capacity = d.view_capacity,
                                          .positions = selects ? std::max(d.vote_capacity, 1u) : 0}));
  return count(model, device, o, needs);
}

// The least pool that these options allow.
uint32_t smallest_pool(const SessionOptions& o) {
  if (o.retention == Retention::kNone) return 1;
  return o.protect_init + (o.stabilizers == kDefault ? 0 : o.stabilizers) + 1;
}

// The largest pool within the budget; 0 where not even the smallest fits.
Result<uint32_t> search(const Model& model, const Device& device, SessionOptions o) {
  uint32_t fits = 0, low = smallest_pool(o), high = std::max(useful_pool(model, o), low);
  while (low <= high) {
    o.pool = low + (high - low) / 2;
    THIMBLE_LET(plan, count(model, device, o));
    if (plan.total <= o.budget) {
      fits = o.pool;
      low = o.pool + 1;
    } else {
      high = o.pool - 1;
    }
  }
  return fits;
}

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Refuses a plan that is over the budget, saying what is missing and what would fit.
Status over_budget(const Model& model, const Device& device, const MemoryPlan& plan) {
  const SessionOptions& o = plan.options;
  const uint64_t missing = plan.total - o.budget;
  THIMBLE_LET(fits, search(model, device, o));
  char advice[160];
  if (fits)
    std::snprintf(advice, sizeof advice, "a pool of %u would fit", fits);
  else
    std::snprintf(advice, sizeof advice, "no pool fits; a smaller chunk than %u needs less workspace",
                  o.chunk);
  return error(Code::kBudget,
               "the budget of %.1f MiB is %llu bytes too small: a pool of %u needs %.1f MiB (weights %.1f, "
               "pool %.1f, view "
               "%.1f, "
               "workspace %.1f, io %.1f, device %.1f); %s",
               mib(o.budget), static_cast<unsigned long long>(missing), o.pool, mib(plan.total),
               mib(plan.weights - plan.shared), mib(plan.pool), mib(plan.view), mib(plan.workspace),
               mib(plan.io), mib(plan.fixed), advice)
      .set_bytes_missing(missing);
}

}  // namespace

Status check_free(const MemoryPlan& plan, const DeviceInfo& device) {
  const uint64_t needed = plan.total - (plan.fixed - plan.programs);  // the device itself is there
  if (device.unified || needed <= device.free_bytes) return {};
  return error(Code::kOutOfMemory,
               "%s has %.1f MiB free, but this session needs %.1f MiB (pool %.1f); close what else uses the "
               "card, or give the session a budget of what is free",
               device.name.c_str(), mib(device.free_bytes), mib(needed), mib(plan.pool));
}

uint64_t host_bytes(const Model& model, const SessionOptions& o) {
  // Recorded programs: about 60 ops a layer, none of 512 bytes.
  constexpr uint64_t kProgramBytesPerLayer = 32 << 10;
  return Sampler::bytes(model.shape.vocab) + (uint64_t(o.chunk) + o.local + 1) * sizeof(int32_t) +
         model.shape.layers * kProgramBytesPerLayer;
}

Result<SessionOptions> resolve(const Model& model, const SessionOptions& options) {
  SessionOptions o = options;
  if (!model.has_weights())
    return error(Code::kUnsupported, "%s holds a vocabulary but no weights; open the model itself to run it",
                 model.gguf().name().c_str());
  const RetainingHeads* heads = o.heads.get();
  if (o.retention == Retention::kLocret && !heads)
    return error(Code::kInvalidArgument,
                 "locret retention needs the retaining heads of this model; give their file (--heads), or "
                 "choose another "
                 "retention");
  if (o.retention != Retention::kLocret) o.heads = nullptr;
  const bool retains = o.retention != Retention::kNone;

  if (!o.chunk) o.chunk = o.heads && heads->chunk ? heads->chunk : kDefaultChunk;
  if (!o.max_new) o.max_new = kDefaultMaxNew;
  if (!o.select_k) o.select_k = kDefaultSelectK;
  if (!o.select_local) o.select_local = kDefaultSelectLocal;
  o.select_init = or_default(o.select_init, kDefaultSelectInit);
  if (!retains) {
    o.local = o.stabilizers = o.protect_init = 0;
  } else {
    o.local = or_default(o.local, o.heads && heads->local ? heads->local : kDefaultLocal);
    o.protect_init = or_default(o.protect_init, o.retention == Retention::kWindow ? kDefaultSinks : 0);
  }
  if (o.positions == Positions::kOriginal && !o.context) o.context = std::max(model.info.context_length, 1u);
  if (o.vote == VoteScope::kLayer && retains && !o.context) o.context = kDefaultContext;

  if (!o.pool && !o.budget)
    o.pool = !retains ? useful_pool(model, o) : o.heads && heads->budget ? heads->budget : kDefaultPool;
  struct {
    const char* name;
    uint32_t value;
  } const counts[] = {{"pool", o.pool},
                      {"chunk", o.chunk},
                      {"local", o.local},
                      {"max_new", o.max_new},
                      {"select_k", o.select_k},
                      {"select_init", o.select_init},
                      {"select_local", o.select_local},
                      {"context", o.context},
                      {"vote_window", o.vote_window}};
  for (const auto& c : counts)
    if (c.value > kLargestCount)
      return error(Code::kInvalidArgument, "%s is %u; the largest is %u", c.name, c.value, kLargestCount);
  if (o.pool) THIMBLE_TRY(settle_retention(o));
  THIMBLE_TRY(check_selection(o));
  return o;
}

Result<MemoryPlan> make_plan(const Model& model, const Device& device, const SessionOptions& options) {
  THIMBLE_LET(o, resolve(model, options));
  if (!o.pool) {
    THIMBLE_LET(fits, search(model, device, o));
    o.pool = fits ? fits : smallest_pool(o);
    THIMBLE_TRY(settle_retention(o));
  }
  THIMBLE_LET(plan, count(model, device, o));
  if (o.budget && plan.total > o.budget) return over_budget(model, device, plan);
  return plan;
}

Result<uint32_t> largest_pool(const Model& model, const Device& device, const SessionOptions& options) {
  if (!options.budget)
    return error(Code::kInvalidArgument, "the largest pool is a question about a budget; set budget_bytes");
  SessionOptions asked = options;
  asked.pool = 0;
  THIMBLE_LET(plan, make_plan(model, device, asked));
  return plan.options.pool;
}

}  // namespace thimble
