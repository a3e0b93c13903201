// Keeps the generated tokens of a sequence inside a grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "text/grammar/token_grammar.h"

namespace thimble {

// A plain value: a copy continues independently. Unlike the rest of a session, it allocates memory while it
// is used.
class Constraint {
 public:
  using Grammar = std::shared_ptr<const grammar::TokenGrammar>;

  // The next generated token begins a text of the grammar. Null: any token may come next.
  void set(Grammar grammar);
  bool active() const { return grammar_ != nullptr; }
  // Whether the token may come next.
  bool allows(int32_t token) const { return !grammar_ || grammar_->allows(place_, token); }
  // The tokens that may come next. Only if active().
  const grammar::TokenMask& allowed();
  // Takes a token that is allowed. `position` is its position in the stream.
  void accept(int32_t token, uint64_t position);
  // Returns to where the text stood at this position of the stream.
  void rewind(uint64_t position);
  // Returns to the start of the grammar.
  void reset();

  bool operator==(const Constraint& other) const {
    return grammar_ == other.grammar_ && place_ == other.place_ && taken_ == other.taken_;
  }

 private:
  struct Taken {
    uint64_t position;
    int32_t token;

    bool operator==(const Taken&) const = default;
  };

  Grammar grammar_;
  grammar::TokenGrammar::Place place_;
  std::vector<Taken> taken_;
  grammar::TokenMask mask_;
  bool has_mask_ = false;
};

}  // namespace thimble
