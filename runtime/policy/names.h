// The table of policies. A row defines a policy's enum value and its name. The enum value is the policy's
// number in the C header. policies.cpp calls the function in runtime/policy/<name>.cpp that makes the policy.
// A retention's row also says what the planner and the engine must know of it (RetentionTraits).
#pragma once

#include <cstddef>
#include <cstdint>

namespace thimble {

// X(value, name, when entries are evicted, when they are scored, where they are scored, heads that it takes)
#define THIMBLE_RETENTIONS(X)                                         \
  X(None, none, kNever, kAtOnce, kOnDevice, kNoHeads)                 \
  X(Window, window, kWhenFull, kAtOnce, kOnDevice, kNoHeads)          \
  X(Random, random, kWhenFull, kAtOnce, kOnDevice, kNoHeads)          \
  X(Locret, locret, kWhenFull, kInBatches, kOnDevice, kRetainer)      \
  X(KeyDiff, keydiff, kWhenFull, kAtOnce, kOnDevice, kShares)         \
  X(Tova, tova, kWhenFull, kAtOnce, kOnDevice, kNoHeads)              \
  X(Reread, reread, kWhenFull, kOnSecondReading, kOnDevice, kNoHeads) \
  X(Adore, adore, kAfterEachToken, kAtOnce, kOnHost, kController)     \
  X(Mix, mix, kWhenFull, kInBatches, kOnDevice, kRetainer)

#define THIMBLE_SELECTIONS(X) \
  X(Dense, dense)             \
  X(TokenSelect, tokenselect) \
  X(Quest, quest)

#define X(value, ...) k##value,
enum class Retention : int32_t { THIMBLE_RETENTIONS(X) };
enum class Selection : int32_t { THIMBLE_SELECTIONS(X) };
#undef X

// When entries are evicted.
enum class Eviction {
  kNever,     // the policy computes no scores, and a full pool is an error
  kWhenFull,  // after a chunk or generated tokens that do not fit
  // Once the pool is full, also after each generated token, which evicts one entry: itself or an older one.
  kAfterEachToken
};
// When entries get their scores.
enum class Scoring {
  kAtOnce,     // in the step that reads them, or right before an eviction
  kInBatches,  // generated tokens wait, and upkeep scores a batch of them
  // All tokens wait, and upkeep reads them a second time. The second reading is a step whose rows come after
  // all tokens that were read. Its rows attend to every entry, and their keys and values are dropped.
  kOnSecondReading
};
// Where scores are computed. On the host: by the policy's HostControl (policy.h).
enum class Scored { kOnDevice, kOnHost };
// Which trained heads the retention takes. Shares are optional; a retainer or a controller is needed.
enum class Takes { kNoHeads, kShares, kRetainer, kController };

// What the planner and the engine must know of a retention.
struct RetentionTraits {
  Eviction eviction;
  Scoring scoring;
  Scored scored;
  Takes takes;
  constexpr bool evicts() const { return eviction != Eviction::kNever; }
};

#define X(value, name, eviction, scoring, scored, takes) \
  {Eviction::eviction, Scoring::scoring, Scored::scored, Takes::takes},
inline constexpr RetentionTraits kRetentionTraits[] = {THIMBLE_RETENTIONS(X)};
#undef X
constexpr RetentionTraits traits(Retention r) { return kRetentionTraits[static_cast<size_t>(r)]; }

// The name that users write, for example "locret". Null: no policy has this number.
const char* policy_name(Retention);
const char* policy_name(Selection);

}  // namespace thimble
