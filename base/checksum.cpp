#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace thimble {

struct Checksum::State {
  XXH3_state_t xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }

Checksum::~Checksum() = default;

void Checksum::add(const void* data, size_t bytes) { XXH3_64bits_update(&state_->xxh, data, bytes); }

uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh); }

uint64_t checksum(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

}  // namespace thimble
