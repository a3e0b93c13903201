#include "training/partial.h"

namespace thimble {

constexpr char kMagic[8] = {'T', 'H', 'I', 'M', 'T', 'R', 'N', '1'};

uint64_t hash_of(const void* data, size_t bytes, uint64_t hash) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (; bytes >= sizeof(uint64_t); at += sizeof(uint64_t), bytes -= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  for (; bytes; ++at, --bytes) hash = (hash ^ *at) * 0x100000001b3u;
  return hash;
}

Result<StateFile> open_partial(const std::string& path, uint64_t signature) {
  THIMBLE_LET(state, StateFile::open(path));
  if (state.size() == 0) {
    THIMBLE_TRY(state.write(0, kMagic, sizeof kMagic));
    THIMBLE_TRY(state.write(sizeof kMagic, &signature, sizeof signature));
    return std::move(state);
  }
  char magic[sizeof kMagic] = {};
  uint64_t found = 0;
  if (state.size() >= kPartialBegin) {
    THIMBLE_TRY(state.read(0, magic, sizeof magic));
    THIMBLE_TRY(state.read(sizeof magic, &found, sizeof found));
  }
  if (std::memcmp(magic, kMagic, sizeof magic) != 0 || found != signature)
    return error(Code::kMismatch,
                 "%s was left by another training; remove it, or train with the same model, texts and flags",
                 path.c_str());
  return std::move(state);
}

Status SavedTwice::save(StateFile& file, const std::vector<std::byte>& state) {
  const Header header{hash_of(state.data(), state.size()), ++saves_};
  const uint64_t at = place(saves_ % 2);
  THIMBLE_TRY(file.write(at, &header, sizeof header));
  THIMBLE_TRY(file.write(at + sizeof header, state.data(), state.size()));
  return file.flush();
}

Result<std::vector<std::byte>> SavedTwice::load(StateFile& file) {
  std::vector<std::byte> state(bytes_), latest;
  for (uint64_t slot = 0; slot < 2; ++slot) {
    Header header;
    if (file.size() < place(slot) + sizeof header + state.size()) continue;
    THIMBLE_TRY(file.read(place(slot), &header, sizeof header));
    THIMBLE_TRY(file.read(place(slot) + sizeof header, state.data(), state.size()));
    if (header.hash != hash_of(state.data(), state.size()) || header.saves <= saves_) continue;
    saves_ = header.saves;
    latest = state;
  }
  return latest;
}

}  // namespace thimble
