// Converts options of the C API to those of the runtime, and checks each field by itself.
#include <string>

#include "capi/handles.h"

namespace thimble::capi {
namespace {

constexpr uint32_t kMostThreads = 1024;

// The bytes of `reserved`, which the next option may replace.
template <typename T>
constexpr size_t reserved_bytes() {
  if constexpr (requires(T options) { options.reserved; }) return sizeof(T::reserved);
  return 0;
}

// Every field of the C struct has a row in the table of options, or is one of those that are read here by
// name.
using Options = thimble_session_options;
#define X(type, name, at_first, values, saved) +sizeof(Options::name)
static_assert(sizeof(Options) ==
              sizeof(Options::struct_size) + sizeof(Options::threads) + sizeof(Options::device) +
                  sizeof(Options::heads) + sizeof(Options::budget_bytes) + sizeof(Options::recall_mem_bytes) +
                  sizeof(Options::recall_disk_bytes) + sizeof(Options::retention) +
                  sizeof(Options::progress) + sizeof(Options::progress_user) + sizeof(Options::draft_model) +
                  reserved_bytes<Options>() THIMBLE_SESSION_OPTIONS(X));
#undef X

static_assert(THIMBLE_DEFAULT == kDefault);
static_assert(Draft{THIMBLE_DRAFT_LOOKUP} == Draft::kLookup);
static_assert(Draft{THIMBLE_DRAFT_MODEL} == Draft::kModel);
static_assert(Draft{THIMBLE_DRAFT_MTP} == Draft::kMtp);
static_assert(Positions{THIMBLE_POSITIONS_ORIGINAL} == Positions::kOriginal);
static_assert(RetainScope{THIMBLE_RETAIN_LAYER} == RetainScope::kLayer);
static_assert(VoteScope{THIMBLE_VOTE_LAYER} == VoteScope::kLayer);
static_assert(VoteScope{THIMBLE_VOTE_GROUP} == VoteScope::kGroup);
#define X(name, in_files) static_assert(KvFormat{THIMBLE_KV_##name} == KvFormat::k##name);
THIMBLE_KV_FORMATS(X)
#undef X
static_assert(VoteScale{THIMBLE_SCALE_SQRT} == VoteScale::kSqrt);

// Checks an option by itself and converts it. The planner checks counts, after it has decided the defaults.
template <typename From, typename To>
Status read_option(const char* field, From from, const OptionValues& values, To& to) {
  to = static_cast<To>(from);
  const auto number = static_cast<int32_t>(from);
  std::string allowed;
  for (const OptionChoice& choice : values.choices) {
    if (choice.number == number) return {};
    allowed +=
        std::string(allowed.empty() ? "" : ", ") + choice.name + " (" + std::to_string(choice.number) + ")";
  }
  if (allowed.empty()) return {};  // any number
  return error(Code::kInvalidArgument, "options.%s is %d; it must be one of %s", field, number,
               allowed.c_str());
}

Status read_option(const char* field, float from, const OptionValues&, float& to) {
  to = from;
  if (from >= -1.0f) return {};  // false for a NaN
  return error(Code::kInvalidArgument, "options.%s is %g; it is a cosine: -1 always reuses, 1 or more never",
               field, static_cast<double>(from));
}

// Heads work with every handle of the model that they were trained for.
Status check_heads(const thimble_model& model, const thimble_heads& heads) {
  if (heads.model == model.model || heads.model->fingerprint() == model.model->fingerprint()) return {};
  return error(Code::kMismatch, "options.heads were opened for another model; open them for this one");
}

}  // namespace

Result<Request> read_request(const thimble_model& model, const thimble_session_options* lent) {
  thimble_session_options o;
  thimble_session_options_init(&o, sizeof o);
  THIMBLE_TRY(read_struct(lent, "options", o));

  Request request;
  SessionOptions& r = request.options;
  if (o.heads) {
    THIMBLE_TRY(check_heads(model, *o.heads));
    r.retainer = o.heads->retainer;
  }
  if (o.retention == THIMBLE_RETENTION_DEFAULT)
    o.retention = o.heads ? thimble_heads_retention(o.heads) : THIMBLE_RETENTION_NONE;
  THIMBLE_TRY(read_option("retention", o.retention, {kRetentionChoices}, r.retention));
#define X(type, name, at_first, values, saved) THIMBLE_TRY(read_option(#name, o.name, values, r.name));
  THIMBLE_SESSION_OPTIONS(X)
#undef X
  if (o.draft_model) r.draft_model = o.draft_model->model;
  if ((r.draft == Draft::kModel) != (o.draft_model != nullptr))
    return error(Code::kInvalidArgument,
                 "options.draft_model is %s; it is for options.draft = MODEL (%d), which needs it",
                 o.draft_model ? "set" : "not set", THIMBLE_DRAFT_MODEL);
  if (o.threads > kMostThreads)
    return error(Code::kInvalidArgument,
                 "options.threads is %u; it must be at most %u, and 0 takes one for each core", o.threads,
                 kMostThreads);
  r.budget = o.budget_bytes;
  r.recall_mem = o.recall_mem_bytes;
  r.recall_disk = o.recall_disk_bytes;
  THIMBLE_LET(device, model.device(o.device ? o.device : "auto", o.threads));
  request.device = device;
  request.outside = {device->info().name, o.threads, o.progress, o.progress_user};
  return request;
}

thimble_session_options write_options(const SessionOptions& r, const OutsideOptions& outside) {
  thimble_session_options o = {};
  o.device = outside.device.c_str();
  o.threads = outside.threads;
  o.progress = outside.progress;
  o.progress_user = outside.progress_user;
  o.budget_bytes = r.budget;
  o.recall_mem_bytes = r.recall_mem;
  o.recall_disk_bytes = r.recall_disk;
  o.retention = static_cast<int32_t>(r.retention);
#define X(type, name, at_first, values, saved) o.name = static_cast<decltype(o.name)>(r.name);
  THIMBLE_SESSION_OPTIONS(X)
#undef X
  return o;
}

}  // namespace thimble::capi

using namespace thimble;

void thimble_session_options_init(thimble_session_options* options, uint32_t struct_size) {
  thimble_session_options defaults = capi::write_options({}, {});
  defaults.device = nullptr;
  defaults.retention = THIMBLE_RETENTION_DEFAULT;
  capi::init_struct(options, struct_size, defaults);
}

void thimble_sampler_options_init(thimble_sampler_options* options, uint32_t struct_size) {
  thimble_sampler_options defaults = {};
  defaults.top_k = 40;
  defaults.top_p = 0.95f;
  defaults.min_p = 0.05f;
  defaults.repeat_penalty = 1.0f;
  defaults.repeat_last = 64;
  capi::init_struct(options, struct_size, defaults);
}

const char* thimble_retention_name(int32_t retention) { return policy_name(Retention{retention}); }
const char* thimble_selection_name(int32_t selection) { return policy_name(Selection{selection}); }

uint32_t thimble_retention_traits(int32_t retention) {
  if (!thimble_retention_name(retention)) return 0;
  const RetentionTraits t = traits(Retention{retention});
  uint32_t bits = 0;
  if (t.evicts()) bits |= THIMBLE_TRAIT_EVICTS;
  if (t.eviction == Eviction::kAfterEachToken) bits |= THIMBLE_TRAIT_EVICTS_EACH;
  if (t.takes == Takes::kShares || t.takes == Takes::kRetainer) bits |= THIMBLE_TRAIT_SHARES;
  if (t.takes == Takes::kRetainer) bits |= THIMBLE_TRAIT_RETAINER;
  if (t.takes == Takes::kController) bits |= THIMBLE_TRAIT_CONTROLLER;
  if (t.scored == Scored::kOnHost) bits |= THIMBLE_TRAIT_REMEMBERS;
  return bits;
}
