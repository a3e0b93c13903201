#include "training/partial.h"

#include <utility>

namespace thimble {

constexpr char kMagic[8] = {'T', 'H', 'I', 'M', 'T', 'R', 'N', '1'};

uint64_t hash_of(const void* data, size_t bytes, uint64_t hash) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (; bytes >= sizeof(uint64_t); at += sizeof(uint64_t), bytes -= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    hash = (hash ^ word) * kFnv1aPrime;
    hash ^= hash >> 29;
  }
  for (; bytes; ++at, --bytes) hash = (hash ^ *at) * kFnv1aPrime;
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

Status SavedTwice::save(StateFile& file, const std::vector<std::span<std::byte>>& state) {
  Header header{kHashSeed, ++saves_};
  const uint64_t first = place(saves_ % 2);
  uint64_t at = first + sizeof header;
  for (const std::span<std::byte> part : state) {
    header.hash = hash_of(part.data(), part.size(), header.hash);
    THIMBLE_TRY(file.write(at, part.data(), part.size()));
    at += part.size();
  }
  THIMBLE_TRY(file.write(first, &header, sizeof header));
  return file.flush();
}

Result<bool> SavedTwice::load(StateFile& file, const std::vector<std::span<std::byte>>& state) {
  std::vector<std::pair<Header, uint64_t>> places;  // the later one first
  for (uint64_t slot = 0; slot < 2; ++slot) {
    Header header;
    if (file.size() < place(slot) + sizeof header + bytes_) continue;
    THIMBLE_TRY(file.read(place(slot), &header, sizeof header));
    places.emplace_back(header, place(slot) + sizeof header);
  }
  if (places.size() == 2 && places[0].first.saves < places[1].first.saves) std::swap(places[0], places[1]);
  for (auto [header, at] : places) {
    uint64_t hash = kHashSeed;
    for (const std::span<std::byte> part : state) {
      THIMBLE_TRY(file.read(at, part.data(), part.size()));
      hash = hash_of(part.data(), part.size(), hash);
      at += part.size();
    }
    if (header.hash != hash || header.saves == 0) continue;
    saves_ = header.saves;
    return true;
  }
  return false;
}

}  // namespace thimble
