// A grammar over the tokens of a vocabulary: which tokens may come next, and where they lead.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "text/grammar/matcher.h"
#include "text/grammar/token_trie.h"

namespace thimble::grammar {

// Any number of threads may use one. It remembers what it computed, within a limit.
class TokenGrammar {
 public:
  TokenGrammar(std::shared_ptr<const TokenTrie> trie, Automaton automaton);

  // Where a text stands. A plain value that belongs to its grammar.
  class Place {
   public:
    bool operator==(const Place& other) const { return saved_ == other.saved_ && ended_ == other.ended_; }

   private:
    friend class TokenGrammar;

    std::vector<uint32_t> saved_;
    bool ended_ = false;  // a token that ends the generation was taken
    // The state with this number since the grammar last forgot its states, which `epoch_` counts.
    mutable Matcher::State state_ = 0;
    mutable uint64_t epoch_ = 0;
  };

  Place start() const;
  // Takes the token if it is allowed. Otherwise returns false and leaves the place as it is.
  bool take(Place& place, int32_t token) const;
  bool allows(const Place& place, int32_t token) const;
  // Sets `mask` to the tokens that may come next. It is empty only if the vocabulary lacks a byte or an end.
  void allowed(const Place& place, TokenMask& mask) const;
  // Whether the text may end here.
  bool complete(const Place& place) const;

  const TokenTrie& trie() const { return *trie_; }
  uint64_t host_bytes() const;

 private:
  struct Masked {
    Matcher::State state = Matcher::kDead;
    TokenMask mask;
  };

  Matcher::State enter(const Place& place) const;
  Matcher::State after(Matcher::State state, int32_t token) const;
  void add_tokens(const Trie& trie, Matcher::State state, TokenMask& mask) const;
  void add_plain(Matcher::State state, TokenMask& mask) const;

  const std::shared_ptr<const TokenTrie> trie_;
  mutable std::mutex mutex_;  // of everything below
  mutable Matcher matcher_;
  mutable uint64_t epoch_ = 1;
  mutable std::vector<Masked> masks_;         // recent ones, by state
  mutable std::vector<Matcher::State> walk_;  // scratch memory: the state after each byte of a token
};

}  // namespace thimble::grammar
