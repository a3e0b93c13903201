// The table of policies: a row makes the enum value, which is the policy's number in the C header, and its
// name; policies.cpp makes the object that runtime/policy/<name>.cpp defines.
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

// "locret": as users name it; null for a number that no policy has.
const char* policy_name(Retention);
const char* policy_name(Selection);

}  // namespace thimble
