// The table of policies. A row defines a policy's enum value and its name. The enum value is the policy's
// number in the C header. policies.cpp calls the function in runtime/policy/<name>.cpp that makes the policy.
#pragma once

#include <cstdint>

namespace thimble {

#define THIMBLE_RETENTIONS(X) \
  X(None, none)               \
  X(Window, window)           \
  X(Random, random)           \
  X(Locret, locret)           \
  X(KeyDiff, keydiff)         \
  X(Tova, tova)               \
  X(Reread, reread)           \
  X(Adore, adore)             \
  X(Mix, mix)

#define THIMBLE_SELECTIONS(X) \
  X(Dense, dense)             \
  X(TokenSelect, tokenselect) \
  X(Quest, quest)

#define X(value, name) k##value,
enum class Retention : int32_t { THIMBLE_RETENTIONS(X) };
enum class Selection : int32_t { THIMBLE_SELECTIONS(X) };
#undef X

// The name that users write, for example "locret". Null: no policy has this number.
const char* policy_name(Retention);
const char* policy_name(Selection);

}  // namespace thimble
