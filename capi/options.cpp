// Converts options of the C API to those of the runtime, and checks each field by itself.
#include <cmath>
#include <initializer_list>
#include <string>

#include "capi/handles.h"

namespace thimble::capi {
namespace {

constexpr uint32_t kMostThreads = 1024;

// One enum value: its number in the C API, its name there, and its value in the runtime.
template <typename T>
struct Choice {
  int32_t number;
  const char* name;
  T value;
};

template <typename T>
Status read_choice(const char* field, int32_t number, std::initializer_list<Choice<T>> choices, T& out) {
  std::string allowed;
  for (const Choice<T>& choice : choices) {
    if (choice.number == number) {
      out = choice.value;
      return {};
    }
    allowed +=
        std::string(allowed.empty() ? "" : ", ") + choice.name + " (" + std::to_string(choice.number) + ")";
  }
  return error(Code::kInvalidArgument, "options.%s is %d; it must be one of %s", field, number,
               allowed.c_str());
}

// Finds a policy by its number in the C API, which is its row in the table of names.
template <typename Policy>
Status read_policy(const char* field, int32_t number, Policy& out) {
  if (policy_name(Policy{number})) {
    out = Policy{number};
    return {};
  }
  std::string allowed;
  for (int32_t i = 0; const char* name = policy_name(Policy{i}); ++i)
    allowed += std::string(allowed.empty() ? "" : ", ") + name + " (" + std::to_string(i) + ")";
  return error(Code::kInvalidArgument, "options.%s is %d; it must be one of %s", field, number,
               allowed.c_str());
}

Status check_theta(float theta) {
  if (theta >= -1.0f) return {};  // false for a NaN
  return error(Code::kInvalidArgument,
               "options.select_theta is %g; it is a cosine: -1 always reuses, 1 or more never",
               static_cast<double>(theta));
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
  request.progress = o.progress;
  request.progress_user = o.progress_user;
  SessionOptions& r = request.options;
  if (o.heads) {
    THIMBLE_TRY(check_heads(model, *o.heads));
    r.retainer = o.heads->retainer;
  }
  const int32_t by_default = o.heads ? thimble_heads_retention(o.heads) : THIMBLE_RETENTION_NONE;
  THIMBLE_TRY(read_policy("retention", o.retention == THIMBLE_RETENTION_DEFAULT ? by_default : o.retention,
                          r.retention));
  THIMBLE_TRY(read_choice<RetainScope>("retain_scope", o.retain_scope,
                                       {{THIMBLE_RETAIN_PER_HEAD, "PER_HEAD", RetainScope::kPerHead},
                                        {THIMBLE_RETAIN_LAYER, "LAYER", RetainScope::kLayer}},
                                       r.retain_scope));
  THIMBLE_TRY(read_policy("selection", o.selection, r.selection));
  THIMBLE_TRY(read_choice<VoteScope>("vote", o.vote,
                                     {{THIMBLE_VOTE_AUTO, "AUTO", VoteScope::kAuto},
                                      {THIMBLE_VOTE_LAYER, "LAYER", VoteScope::kLayer},
                                      {THIMBLE_VOTE_GROUP, "GROUP", VoteScope::kGroup}},
                                     r.vote));
  THIMBLE_TRY(read_choice<bool>("vote_scale", o.vote_scale,
                                {{THIMBLE_SCALE_NONE, "NONE", false}, {THIMBLE_SCALE_SQRT, "SQRT", true}},
                                r.vote_scaled));
  THIMBLE_TRY(read_choice<Positions>("positions", o.positions,
                                     {{THIMBLE_POSITIONS_LIST, "LIST", Positions::kList},
                                      {THIMBLE_POSITIONS_ORIGINAL, "ORIGINAL", Positions::kOriginal}},
                                     r.positions));
  THIMBLE_TRY(read_choice<uint32_t>("select_prefill", static_cast<int32_t>(o.select_prefill),
                                    {{0, "no", 0}, {1, "yes", 1}, {-1, "DEFAULT", kDefault}},
                                    r.select_prefill));
  THIMBLE_TRY(read_choice<bool>("watch", static_cast<int32_t>(o.watch), {{0, "no", false}, {1, "yes", true}},
                                r.watch));
  THIMBLE_TRY(check_theta(o.select_theta));
  if (o.threads > kMostThreads)
    return error(Code::kInvalidArgument,
                 "options.threads is %u; it must be at most %u, and 0 takes one a core", o.threads,
                 kMostThreads);
  r.budget = o.budget_bytes;
  r.pool = o.pool;
  r.chunk = o.chunk;
  r.stabilizers = o.stabilizers;
  r.local = o.local;
  r.protect_init = o.protect_init;
  r.max_new = o.max_new;
  r.select_k = o.select_k;
  r.select_init = o.select_init;
  r.select_local = o.select_local;
  r.select_theta = o.select_theta;
  r.vote_window = o.vote_window;
  r.select_page = o.select_page;
  r.dense_layers = o.dense_layers;
  r.rebuild = o.rebuild;
  r.rebuild_every = o.rebuild_every;
  r.context = o.context;
  r.seed = o.seed;
  THIMBLE_LET(device, model.device(o.device ? o.device : "auto", o.threads));
  request.device = device;
  return request;
}

}  // namespace thimble::capi

using namespace thimble;

void thimble_session_options_init(thimble_session_options* options, uint32_t struct_size) {
  thimble_session_options defaults = {};
  defaults.retention = THIMBLE_RETENTION_DEFAULT;
  defaults.stabilizers = defaults.local = defaults.protect_init = defaults.select_init =
      defaults.select_prefill = defaults.dense_layers = THIMBLE_DEFAULT;
  defaults.select_theta = 1.0f;
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
