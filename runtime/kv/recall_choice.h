// Chooses the pages of the store that come back into the runs of a layer: those with the most votes, as long
// as their entries fit.
#pragma once

#include <optional>

#include "runtime/kv/page_votes.h"

namespace thimble {

class RecallChoice {
 public:
  struct Limits {
    uint32_t rope_positions = 0, context = 0;  // as for PageVotes
    uint32_t capacity = 0;                     // entries of the longest run
    uint32_t recall = 0;                       // entries that come back into a run at most
    uint32_t pages = 0;                        // of a run in the store
    uint32_t threads = 1;                      // of the host
    bool votes = true;                         // whether the host votes
  };
  RecallChoice(const Model&, const Limits&);
  // The bytes of such an object's arrays.
  static uint64_t bytes(const Model&, const Limits&);

  // The engine reads the layer's kept queries to the first, and the positions of a head's entries to the
  // second.
  std::span<float> queries() { return ring_; }
  std::span<int32_t> positions(uint32_t head) {
    return std::span(positions_).subspan(size_t(head) * limits_.capacity, limits_.capacity);
  }
  // Reduces a head's positions to those of its own entries, without those that came back from the store, and
  // lists these entries: their number, and their indices in the run.
  void list_own(const RecallStore&, size_t run, uint32_t head, uint32_t entries, uint32_t* list);

  struct Asking {
    uint32_t tokens = 0;  // the latest tokens whose queries vote
    uint64_t read = 0;    // one more than the position of the latest of them
    uint32_t ahead = 0;   // those of them that have no entries
    float scale = 1;      // of the products of queries and keys
    RopeParams rope = {};
    bool alike = false;  // whether all heads of the layer get the same positions
  };
  // Chooses pages for all heads of a layer, after list_own(), if the host votes.
  void choose(const RecallStore&, const AttentionMixer&, const Asking&, Host&);
  // The same with the votes of a device, [kv head][pages].
  void choose(const RecallStore&, const AttentionMixer&, bool alike, const float* votes, Host&);
  // The pages that a head gets, by ascending index.
  std::span<const uint32_t> chosen(uint32_t head) const { return {chosen_of(head), counts_[head]}; }
  void choose_none() { std::fill(counts_.begin(), counts_.end(), 0); }
  // Whether a head has exactly these pages already.
  bool is_in_pool(const RecallStore&, size_t run, uint32_t head) const;

 private:
  const uint32_t* chosen_of(uint32_t head) const { return &chosen_[size_t(head) * limits_.recall]; }
  // Chooses with the votes that vote(head, votes) adds for the pages of a head.
  template <typename Vote>
  void choose_with(const RecallStore&, const AttentionMixer&, bool alike, Host&, const Vote&);
  void take_best(const RecallStore&, size_t run, uint32_t head, const float* votes, uint32_t* pages);

  Limits limits_;
  std::optional<PageVotes> votes_;
  std::vector<float> ring_;         // [kAskingTokens][H dh], if the host votes
  std::vector<int32_t> positions_;  // [kv head][capacity]
  std::vector<uint32_t> own_;       // [kv head]: the number of own entries
  std::vector<float> sums_;         // [kv head][pages]: votes
  std::vector<uint32_t> heaps_;     // [kv head][pages]: pages by votes
  std::vector<uint32_t> chosen_;    // [kv head][recall]
  std::vector<uint32_t> counts_;    // [kv head]
};

}  // namespace thimble
