#include "text/grammar/token_grammar.h"

#include <algorithm>

namespace thimble::grammar {
namespace {

constexpr size_t kMasks = 64;               // that are remembered
constexpr uint64_t kMostBytes = 32u << 20;  // of the matcher, before it forgets its states

}  // namespace

TokenGrammar::TokenGrammar(std::shared_ptr<const TokenTrie> trie, Automaton automaton)
    : trie_(std::move(trie)), matcher_(std::move(automaton)), masks_(kMasks) {}

// The state of a place. Forgets the states if they take too much memory.
Matcher::State TokenGrammar::enter(const Place& place) const {
  if (matcher_.host_bytes() > kMostBytes) {
    matcher_.clear();
    ++epoch_;
    for (Masked& m : masks_) m.state = Matcher::kDead;
  }
  if (place.epoch_ != epoch_) {
    place.state_ = matcher_.load(place.saved_);
    place.epoch_ = epoch_;
  }
  return place.state_;
}

TokenGrammar::Place TokenGrammar::start() const {
  const std::scoped_lock lock(mutex_);
  Place place;
  place.saved_ = matcher_.save(matcher_.start());
  return place;
}

Matcher::State TokenGrammar::after(Matcher::State state, int32_t token) const {
  const std::string_view text = trie_->text(token);
  if (text.empty()) return Matcher::kDead;
  for (const char byte : text) {
    state = matcher_.step(state, static_cast<uint8_t>(byte));
    if (state == Matcher::kDead) break;
  }
  return state;
}

bool TokenGrammar::take(Place& place, int32_t token) const {
  if (token < 0 || static_cast<uint32_t>(token) >= trie_->tokens()) return false;
  const std::scoped_lock lock(mutex_);
  const Matcher::State state = enter(place);
  if (trie_->end_mask()[token]) {
    if (!matcher_.complete(state)) return false;
    place.ended_ = true;
    return true;
  }
  const Matcher::State next = place.ended_ ? Matcher::kDead : after(state, token);
  if (next == Matcher::kDead) return false;
  place.state_ = next;
  place.saved_ = matcher_.save(next);
  return true;
}

bool TokenGrammar::allows(const Place& place, int32_t token) const {
  if (token < 0 || static_cast<uint32_t>(token) >= trie_->tokens()) return false;
  const std::scoped_lock lock(mutex_);
  const Matcher::State state = enter(place);
  if (trie_->end_mask()[token]) return matcher_.complete(state);
  return !place.ended_ && after(state, token) != Matcher::kDead;
}

bool TokenGrammar::complete(const Place& place) const {
  const std::scoped_lock lock(mutex_);
  return matcher_.complete(enter(place));
}

void TokenGrammar::allowed(const Place& place, TokenMask& mask) const {
  const std::scoped_lock lock(mutex_);
  const Matcher::State state = enter(place);
  if (place.ended_) {
    mask = trie_->end_mask();
    return;
  }
  Masked& known = masks_[state % kMasks];
  if (known.state != state) {
    known.state = state;
    known.mask = matcher_.complete(state) ? trie_->end_mask() : TokenMask(trie_->tokens());
    add_tokens(trie_->other(), state, known.mask);
    add_plain(state, known.mask);
  }
  mask = known.mask;
}

// Steps along the texts of the trie. A text that is not allowed is left with everything below it.
void TokenGrammar::add_tokens(const Trie& trie, Matcher::State state, TokenMask& mask) const {
  walk_.assign(1, state);
  const auto end = static_cast<uint32_t>(trie.nodes.size());
  for (uint32_t i = 0; i < end;) {
    const Trie::Node& node = trie.nodes[i];
    const Matcher::State next = matcher_.step(walk_[node.depth - 1u], node.byte);
    if (next == Matcher::kDead) {
      i = node.after;
      continue;
    }
    for (uint32_t t = node.ids; t < node.ids + node.count; ++t) mask.set(trie.ids[t]);
    if (walk_.size() <= node.depth) walk_.resize(node.depth + 1u);
    walk_[node.depth] = next;
    ++i;
  }
}

// As long as the same ordinary characters are allowed and all lead on in the same way, all tokens of so many
// of these characters are allowed.
void TokenGrammar::add_plain(Matcher::State state, TokenMask& mask) const {
  const Matcher::Plain first = matcher_.plain(state);
  if (first.uniform && first.allowed.empty()) return;
  uint32_t length = 0;
  Matcher::Plain last = first;
  while (length < TokenTrie::kLongestPlain && last.uniform && last.allowed == first.allowed) {
    ++length;
    const Matcher::Plain next = matcher_.plain(last.next);
    if (last.next == state) length = TokenTrie::kLongestPlain;  // and so on
    last = next;
  }
  if (length > 0) trie_->add_plain(first.allowed, length, mask);
  const bool refuses = last.uniform && last.allowed.empty();
  if (length < TokenTrie::kLongestPlain && !refuses) add_tokens(trie_->plain(), state, mask);
}

uint64_t TokenGrammar::host_bytes() const {
  const std::scoped_lock lock(mutex_);
  return matcher_.host_bytes() + kMasks * trie_->end_mask().words().size_bytes();
}

}  // namespace thimble::grammar
