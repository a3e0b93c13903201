// The table of session options. thimble.h describes each of them. A new option is a field there and a row
// here; from the row follow its field in SessionOptions, its conversion from and to the C interface, the
// values that are refused, and its name and value in session files.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/model/model.h"
#include "runtime/policy/names.h"

namespace thimble {

inline constexpr uint32_t kDefault = UINT32_MAX;
inline constexpr uint32_t kRecallAll = UINT32_MAX;  // of `recall`

enum class RetainScope : uint32_t { kPerHead, kLayer };
enum class VoteScope : uint32_t { kAuto, kLayer, kGroup };
enum class VoteScale : uint32_t { kNone, kSqrt };
enum class Positions : uint32_t { kList, kOriginal };
enum class Draft : int32_t { kNone, kLookup, kModel, kMtp };

// The formats of keys and values: X(name, which is also that of the type of rows, name in files).
// THIMBLE_KV_* in thimble.h has their numbers.
#define THIMBLE_KV_FORMATS(X) \
  X(F16, f16)                 \
  X(Q8_0, q8_0)               \
  X(Q4_0, q4_0)
#define X(name, in_files) k##name,
enum class KvFormat : uint32_t { THIMBLE_KV_FORMATS(X) };
#undef X

// A value that has a name: its number in the C interface and here, its name in errors and in session files.
struct OptionChoice {
  int32_t number;
  const char* name;
  const char* in_files;
};

// The values that an option may have.
struct OptionValues {
  std::span<const OptionChoice> choices = {};  // the only values; empty: any number
  uint32_t most = UINT32_MAX;                  // checked after resolve() has decided the defaults
  const char* all = nullptr;                   // what UINT32_MAX means, if it is a value and not a default
};

#define X(value, name, ...) {static_cast<int32_t>(Retention::k##value), #name, #name},
inline constexpr OptionChoice kRetentionChoices[] = {THIMBLE_RETENTIONS(X)};
#undef X
#define X(value, name) {static_cast<int32_t>(Selection::k##value), #name, #name},
inline constexpr OptionChoice kSelectionChoices[] = {THIMBLE_SELECTIONS(X)};
#undef X
inline constexpr OptionChoice kRetainScopeChoices[] = {{0, "PER_HEAD", "head"}, {1, "LAYER", "layer"}};
inline constexpr OptionChoice kVoteScopeChoices[] = {
    {0, "AUTO", "auto"}, {1, "LAYER", "layer"}, {2, "GROUP", "group"}};
inline constexpr OptionChoice kVoteScaleChoices[] = {{0, "NONE", "none"}, {1, "SQRT", "sqrt"}};
inline constexpr OptionChoice kPositionChoices[] = {{0, "LIST", "list"}, {1, "ORIGINAL", "original"}};
inline constexpr OptionChoice kDraftChoices[] = {
    {0, "NONE", "none"}, {1, "LOOKUP", "lookup"}, {2, "MODEL", "model"}, {3, "MTP", "mtp"}};
#define X(name, in_files) {static_cast<int32_t>(KvFormat::k##name), #name, #in_files},
inline constexpr OptionChoice kKvFormatChoices[] = {THIMBLE_KV_FORMATS(X)};
#undef X
inline constexpr OptionChoice kYesOrNo[] = {{0, "no", "0"}, {1, "yes", "1"}};
inline constexpr OptionChoice kYesNoOrDefault[] = {
    {0, "no", "0"}, {1, "yes", "1"}, {-1, "DEFAULT", "default"}};

inline constexpr OptionValues kAnyNumber = {};
inline constexpr OptionValues kCount = {.most = 1u << 28};  // so low that no index or byte count overflows
inline constexpr OptionValues kCountOrAll = {.most = kCount.most, .all = "all"};
inline constexpr uint32_t kMostDrafted = kMostLogitRows - 1;  // a step also reads the token before a draft
inline constexpr OptionValues kCosine = {};                   // a float, at least -1

// Whether a session is restored only if it has the saved session's value. kOnHost: only if its retention
// scores on the host, kWithStore: only if it has a store of evicted entries; other files lack the option,
// because they are older than it. kIfSet: yes, but files lack the option where it has its value at first,
// because they may be older than it.
enum class Saved { kNo, kYes, kOnHost, kWithStore, kIfSet };

// X(type, name, value at first, values, whether it is saved), in the order of session files. Zero and
// kDefault mean that resolve() in plan/planner.h decides. Each name is also that of the field in
// thimble_session_options.
// clang-format off
#define THIMBLE_SESSION_OPTIONS(X)                                                              \
  X(RetainScope, retain_scope,   RetainScope::kPerHead, {kRetainScopeChoices},  Saved::kYes)    \
  X(uint32_t,    pool,           0,                     kCount,                 Saved::kYes)    \
  X(uint32_t,    chunk,          0,                     kCount,                 Saved::kYes)    \
  X(uint32_t,    stabilizers,    kDefault,              kAnyNumber,             Saved::kYes)    \
  X(uint32_t,    local,          kDefault,              kCount,                 Saved::kYes)    \
  X(uint32_t,    protect_init,   kDefault,              kAnyNumber,             Saved::kYes)    \
  X(uint32_t,    max_new,        0,                     kCount,                 Saved::kYes)    \
  X(Selection,   selection,      Selection::kDense,     {kSelectionChoices},    Saved::kYes)    \
  X(uint32_t,    select_k,       0,                     kCount,                 Saved::kYes)    \
  X(uint32_t,    select_init,    kDefault,              kCount,                 Saved::kYes)    \
  X(uint32_t,    select_local,   0,                     kCount,                 Saved::kYes)    \
  X(float,       select_theta,   1.0f,                  kCosine,                Saved::kYes)    \
  X(VoteScope,   vote,           VoteScope::kAuto,      {kVoteScopeChoices},    Saved::kYes)    \
  X(VoteScale,   vote_scale,     VoteScale::kNone,      {kVoteScaleChoices},    Saved::kYes)    \
  X(uint32_t,    vote_window,    0,                     kCount,                 Saved::kYes)    \
  X(uint32_t,    select_prefill, kDefault,              {kYesNoOrDefault},      Saved::kYes)    \
  X(uint32_t,    select_page,    0,                     kCount,                 Saved::kYes)    \
  X(uint32_t,    dense_layers,   kDefault,              kAnyNumber,             Saved::kYes)    \
  X(Positions,   positions,      Positions::kList,      {kPositionChoices},     Saved::kYes)    \
  X(uint32_t,    context,        0,                     kCount,                 Saved::kYes)    \
  X(uint32_t,    seed,           0,                     kAnyNumber,             Saved::kYes)    \
  X(uint32_t,    rebuild,        0,                     kAnyNumber,             Saved::kOnHost) \
  X(uint32_t,    rebuild_every,  0,                     kAnyNumber,             Saved::kOnHost) \
  X(bool,        watch,          false,                 {kYesOrNo},             Saved::kNo)     \
  X(Draft,       draft,          Draft::kNone,          {kDraftChoices},        Saved::kNo)     \
  X(uint32_t,    draft_tokens,   0,                     {.most = kMostDrafted}, Saved::kNo)     \
  X(uint32_t,    recall,         0,                     kCountOrAll,            Saved::kWithStore) \
  X(uint32_t,    recall_every,   0,                     kCount,                 Saved::kWithStore) \
  X(KvFormat,    recall_format,  KvFormat::kF16,        {kKvFormatChoices},     Saved::kWithStore) \
  X(KvFormat,    key_format,     KvFormat::kF16,        {kKvFormatChoices},     Saved::kIfSet)  \
  X(KvFormat,    value_format,   KvFormat::kF16,        {kKvFormatChoices},     Saved::kIfSet)  \
  X(bool,        recall_prefill, false,                 {kYesOrNo},             Saved::kWithStore)
// clang-format on

struct SessionOptions {
  std::shared_ptr<const Retainer> retainer;
  std::shared_ptr<const Model> draft_model;  // for Draft::kModel
  uint64_t budget = 0;                       // bytes; 0: no limit
  uint64_t recall_mem = 0;                   // bytes of host memory for evicted entries; 0: no store there
  uint64_t recall_disk = 0;                  // bytes of a file for them, instead; 0: no store there
  Retention retention = Retention::kNone;    // in the C interface, its default depends on the heads
  // The share of the pool of each head, in the order of runs, 1 on average. Null: all heads get the same. The
  // policy takes the shares from the retainer's file.
  std::shared_ptr<const std::vector<float>> shares;
  // The number of entries that each head keeps, in the order of runs. Empty: each head keeps `pool`. Values
  // of windowed layers are not used.
  std::vector<uint32_t> keeps;

#define X(type, name, at_first, values, saved) type name = at_first;
  THIMBLE_SESSION_OPTIONS(X)
#undef X

  // Whether questions and generated tokens attend to everything in the store, where it is.
  bool recalls_all() const { return recall == kRecallAll; }
  // The most entries that come back into a head's run.
  uint32_t most_recalled() const { return recalls_all() ? 0 : recall; }
  // Whether entries come back that differ from head to head.
  bool recalls_per_head() const { return most_recalled() && retain_scope == RetainScope::kPerHead; }
};

}  // namespace thimble
