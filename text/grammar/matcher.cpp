#include "text/grammar/matcher.h"

#include <algorithm>

namespace thimble::grammar {
namespace {

// The most places of a state, and the most that are visited to find them. A very ambiguous grammar has more.
// The rest are then left out. This forbids some texts of the grammar, and allows no other text.
constexpr size_t kMostPlaces = 4096;
constexpr size_t kMostVisits = 4 * kMostPlaces;
// A state with more pieces gets a table of 256 steps.
constexpr size_t kMostPieces = 4;

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ b) * 0x9e3779b97f4a7c15u;
  x ^= x >> 32;
  x *= 0xbf58476d1ce4e5b9u;
  return x ^ x >> 29;
}
uint64_t both(uint32_t high, uint32_t low) { return uint64_t(high) << 32 | low; }

}  // namespace

void NumberTable::insert(uint64_t hash, uint32_t number) {
  if (2 * ++used_ > slots_.size()) {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    used_ = 1;
    for (const Slot& s : old)
      if (s.number != kNone) insert(s.hash, s.number);
  }
  size_t i = hash & (slots_.size() - 1);
  while (slots_[i].number != kNone) i = (i + 1) & (slots_.size() - 1);
  slots_[i] = {hash, number};
}

void NumberTable::clear() {
  slots_.assign(64, Slot());
  used_ = 0;
}

Matcher::Matcher(Automaton automaton) : automaton_(std::move(automaton)) { clear(); }

void Matcher::clear() {
  frames_.assign(1, {});
  frame_numbers_.clear();
  states_.assign(1, {});  // kDead
  state_numbers_.clear();
  places_.clear();
  rows_.assign(1, {});  // kDead has no pieces
  pieces_.clear();
  dense_.clear();
  states_[kDead].row = 0;
  plain_.clear();
  reach(automaton_.start(), kNoFrame);
  start_ = take_reached();
}

uint64_t Matcher::host_bytes() const {
  return automaton_.host_bytes() + frames_.capacity() * sizeof(Frame) + states_.capacity() * sizeof(Known) +
         places_.capacity() * sizeof(Place) + rows_.capacity() * sizeof(Row) +
         pieces_.capacity() * sizeof(Piece) + dense_.size() * sizeof dense_[0] +
         plain_.capacity() * sizeof(Plain);
}

uint32_t Matcher::push(uint32_t node, uint32_t count, uint32_t below) {
  const uint64_t hash = mixed(both(node, count), mixed(below, 1));
  const uint32_t known = frame_numbers_.find(hash, [&](uint32_t i) {
    return frames_[i].node == node && frames_[i].count == count && frames_[i].below == below;
  });
  if (known != NumberTable::kNone) return known;
  const auto number = static_cast<uint32_t>(frames_.size());
  frames_.push_back({node, count, below, frames_[below].depth + 1});
  frame_numbers_.insert(hash, number);
  return number;
}

bool Matcher::first_visit(uint32_t node, uint32_t frame) {
  if (2 * visited_slots_.size() >= visited_.size()) {
    std::vector<uint64_t> keys;
    for (const uint32_t slot : visited_slots_) keys.push_back(visited_[slot]);
    visited_.assign(2 * visited_.size(), UINT64_MAX);
    visited_slots_.clear();
    for (const uint64_t key : keys) first_visit(static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key));
  }
  const uint64_t key = both(node, frame);
  size_t i = mixed(key, 0) & (visited_.size() - 1);
  for (; visited_[i] != UINT64_MAX; i = (i + 1) & (visited_.size() - 1))
    if (visited_[i] == key) return false;
  visited_[i] = key;
  visited_slots_.push_back(static_cast<uint32_t>(i));
  return true;
}

// Places from which nothing can be completed within the depth are left out, so there is always a way to the
// end.
void Matcher::reach(uint32_t node, uint32_t frame) {
  using Kind = Automaton::Kind;
  todo_.push_back({node, frame});
  while (!todo_.empty()) {
    const Place at = todo_.back();
    todo_.pop_back();
    const Automaton::Node& n = automaton_[at.node];
    // Also excludes the UINT32_MAX of nodes from which nothing can be completed.
    if (uint64_t(frames_[at.frame].depth) + n.need > Automaton::kDeepest) continue;
    if (visited_slots_.size() >= kMostVisits || !first_visit(at.node, at.frame)) continue;
    // Another iteration of a repetition, or what follows it.
    const auto iterate = [&](uint32_t repeat, uint32_t count, uint32_t below) {
      const Automaton::Node& r = automaton_[repeat];
      if (count >= r.min) todo_.push_back({r.next, below});
      if (count < r.max) todo_.push_back({r.first, push(repeat, count + 1, below)});
    };
    switch (n.kind) {
      case Kind::kBytes:
        reached_.push_back(at);
        break;
      case Kind::kSplit:
        for (const uint32_t target : automaton_.targets(n)) todo_.push_back({target, at.frame});
        break;
      case Kind::kCall:
        todo_.push_back({n.first, n.next == Automaton::kReturn ? at.frame : push(at.node, 0, at.frame)});
        break;
      case Kind::kRepeat:
        iterate(at.node, 0, at.frame);
        break;
      case Kind::kReturn: {
        const Frame top = frames_[at.frame];
        if (at.frame == kNoFrame)
          reached_.push_back(at);
        else if (automaton_[top.node].kind == Kind::kCall)
          todo_.push_back({automaton_[top.node].next, top.below});
        else
          iterate(top.node, top.count, top.below);
        break;
      }
    }
  }
}

Matcher::State Matcher::take_reached() {
  for (const uint32_t slot : visited_slots_) visited_[slot] = UINT64_MAX;
  visited_slots_.clear();
  if (reached_.empty()) return kDead;
  std::sort(reached_.begin(), reached_.end());
  if (reached_.size() > kMostPlaces) reached_.resize(kMostPlaces);
  uint64_t hash = reached_.size();
  for (const Place& p : reached_) hash = mixed(hash, both(p.node, p.frame));
  const auto places_of = [this](uint32_t i) {
    return std::span(places_).subspan(states_[i].first, states_[i].count);
  };
  uint32_t state = state_numbers_.find(hash, [&](uint32_t i) {
    return std::equal(reached_.begin(), reached_.end(), places_of(i).begin(), places_of(i).end());
  });
  if (state == NumberTable::kNone) {
    state = static_cast<uint32_t>(states_.size());
    Known known;
    known.first = static_cast<uint32_t>(places_.size());
    known.count = static_cast<uint32_t>(reached_.size());
    known.complete = reached_[0] == Place{Automaton::kReturn, kNoFrame};
    states_.push_back(known);
    places_.insert(places_.end(), reached_.begin(), reached_.end());
    state_numbers_.insert(hash, state);
  }
  reached_.clear();
  return state;
}

void Matcher::make_row(State state) {
  struct Way {
    uint8_t first, last;
    uint32_t next, frame;
  };
  std::vector<Way> ways;
  std::array<bool, 257> begins = {};  // whether a piece may begin with this byte
  for (uint32_t i = 0; i < states_[state].count; ++i) {
    const Place p = places_[states_[state].first + i];
    const Automaton::Node& n = automaton_[p.node];
    if (n.kind != Automaton::Kind::kBytes) continue;
    for (const Automaton::Edge& e : automaton_.edges(n)) {
      ways.push_back({e.first, e.last, e.next, p.frame});
      begins[e.first] = begins[size_t(e.last) + 1] = true;
    }
  }
  std::vector<Piece> pieces;
  for (size_t first = 0; first < 256;) {
    size_t last = first;
    while (!begins[last + 1] && last + 1 < 256) ++last;
    for (const Way& w : ways)
      if (w.first <= first && first <= w.last) reach(w.next, w.frame);
    if (const State next = take_reached(); next != kDead)
      pieces.push_back({static_cast<uint8_t>(first), static_cast<uint8_t>(last), next});
    first = last + 1;
  }
  Row row;
  if (pieces.size() > kMostPieces) {
    std::array<State, 256>& steps = dense_.emplace_back();
    for (const Piece& p : pieces) std::fill(steps.begin() + p.first, steps.begin() + p.last + 1, p.next);
    row.dense = &steps;
  } else {
    row.first = static_cast<uint32_t>(pieces_.size());
    row.count = static_cast<uint32_t>(pieces.size());
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  }
  states_[state].row = static_cast<uint32_t>(rows_.size());
  rows_.push_back(row);
}

// ---- ordinary text ----

namespace {

// The first bytes of ordinary characters outside ASCII, how many bytes follow, and the range of the second.
struct Lead {
  uint8_t first, last;
  uint32_t more;
  uint8_t low, high;
};
constexpr Lead kLeads[] = {{0xC2, 0xDF, 1, 0x80, 0xBF}, {0xE0, 0xE0, 2, 0xA0, 0xBF},
                           {0xE1, 0xEC, 2, 0x80, 0xBF}, {0xED, 0xED, 2, 0x80, 0x9F},
                           {0xEE, 0xEF, 2, 0x80, 0xBF}, {0xF0, 0xF0, 3, 0x90, 0xBF},
                           {0xF1, 0xF3, 3, 0x80, 0xBF}, {0xF4, 0xF4, 3, 0x80, 0x8F}};

}  // namespace

bool Matcher::leads(State state, uint8_t first, uint8_t last, uint32_t more, State to) {
  State seen = kDead;
  for (uint32_t b = first; b <= last; ++b) {
    const State next = step(state, static_cast<uint8_t>(b));
    if (next == kDead) return false;
    if (next == seen) continue;
    seen = next;
    if (more == 0 ? next != to : !leads(next, 0x80, 0xBF, more - 1, to)) return false;
  }
  return true;
}

Matcher::Plain Matcher::find_plain(State state) {
  Plain found;
  for (uint32_t b = 0; b < 0x80; ++b) {
    if (!PlainSet::plain(b)) continue;
    const State next = step(state, static_cast<uint8_t>(b));
    if (next == kDead) continue;
    if (found.next == kDead) found.next = next;
    if (next != found.next) return {};
    found.allowed.add(b);
  }
  // The other characters must all be refused, or all lead to the same state.
  uint32_t refused = 0, lead = 0;
  for (const Lead& l : kLeads)
    for (uint32_t b = l.first; b <= l.last; ++b) {
      ++lead;
      const State next = step(state, static_cast<uint8_t>(b));
      if (next == kDead)
        ++refused;
      else if (found.next == kDead || refused || !leads(next, l.low, l.high, l.more - 1, found.next))
        return {};
    }
  if (refused == 0) found.allowed.add(kLastCode);
  if (refused != 0 && refused != lead) return {};
  found.uniform = true;
  return found;
}

const Matcher::Plain& Matcher::plain(State state) {
  if (states_[state].plain == NumberTable::kNone) {
    const Plain found = find_plain(state);
    states_[state].plain = static_cast<uint32_t>(plain_.size());
    plain_.push_back(found);
  }
  return plain_[states_[state].plain];
}

// ---- saving ----

// For each place: its node, the number of its frames, and these from the top down.
std::vector<uint32_t> Matcher::save(State state) const {
  std::vector<uint32_t> saved;
  const Known& known = states_[state];
  for (uint32_t i = known.first; i < known.first + known.count; ++i) {
    const Place& p = places_[i];
    saved.push_back(p.node);
    saved.push_back(frames_[p.frame].depth);
    for (uint32_t f = p.frame; f != kNoFrame; f = frames_[f].below) {
      saved.push_back(frames_[f].node);
      saved.push_back(frames_[f].count);
    }
  }
  return saved;
}

Matcher::State Matcher::load(std::span<const uint32_t> saved) {
  for (size_t at = 0; at < saved.size();) {
    const uint32_t node = saved[at], depth = saved[at + 1];
    const auto frames = saved.subspan(at + 2, 2 * size_t(depth));
    uint32_t frame = kNoFrame;
    for (size_t i = depth; i-- > 0;) frame = push(frames[2 * i], frames[2 * i + 1], frame);
    reached_.push_back({node, frame});
    at += 2 + frames.size();
  }
  return take_reached();
}

}  // namespace thimble::grammar
