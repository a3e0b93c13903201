// Runs an automaton over bytes. A state is the set of all places where the text so far may stand. States are
// made when they are first reached, and their steps are remembered, so that text of a known form costs one
// look-up a byte.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "text/grammar/automaton.h"

namespace thimble::grammar {

// A set of ordinary characters: those that have no meaning in the syntax of strings, which is why long texts
// consist of them. ASCII characters are members one by one; all others are members together.
struct PlainSet {
  uint64_t bits[2] = {};

  static bool plain(uint32_t code) { return code >= 0x20 && code != '"' && code != '\\' && code != 0x7F; }
  // `code` is plain.
  void add(uint32_t code) {
    const uint32_t bit = code < 0x7F ? code : 0x7F;
    bits[bit / 64] |= uint64_t(1) << (bit % 64);
  }
  bool empty() const { return !(bits[0] | bits[1]); }
  bool holds(const PlainSet& other) const {
    return !(other.bits[0] & ~bits[0]) && !(other.bits[1] & ~bits[1]);
  }
  bool operator==(const PlainSet&) const = default;
};

// Numbers of keys that are stored elsewhere, found by their hash. The caller compares the keys.
class NumberTable {
 public:
  template <typename Equal>
  uint32_t find(uint64_t hash, Equal equal) const {
    for (size_t i = hash & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].number == kNone) return kNone;
      if (slots_[i].hash == hash && equal(slots_[i].number)) return slots_[i].number;
    }
  }
  void insert(uint64_t hash, uint32_t number);
  void clear();

  static constexpr uint32_t kNone = UINT32_MAX;

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t number = kNone;
  };
  std::vector<Slot> slots_ = std::vector<Slot>(64);
  size_t used_ = 0;
};

// For one thread at a time.
class Matcher {
 public:
  using State = uint32_t;
  static constexpr State kDead = 0;  // nothing that begins with this text is allowed

  explicit Matcher(Automaton automaton);

  State start() const { return start_; }
  State step(State state, uint8_t byte) {
    const Row& row = row_of(state);
    if (row.dense) return (*row.dense)[byte];
    for (uint32_t i = row.first; i < row.first + row.count; ++i)
      if (byte >= pieces_[i].first && byte <= pieces_[i].last) return pieces_[i].next;
    return kDead;
  }
  // Whether the text may end here.
  bool complete(State state) const { return states_[state].complete; }

  // A state as numbers that stay valid after clear(), and back.
  std::vector<uint32_t> save(State state) const;
  State load(std::span<const uint32_t> saved);
  // Forgets all states, because they take memory. States must then be loaded again.
  void clear();
  size_t states() const { return states_.size(); }
  uint64_t host_bytes() const;

  // What ordinary characters (PlainSet) may come next, if all of them lead to the same state.
  struct Plain {
    bool uniform = false;  // otherwise the rest says nothing
    State next = kDead;
    PlainSet allowed;
  };
  const Plain& plain(State state);

 private:
  // An open call or repetition. `node` says which.
  struct Frame {
    uint32_t node, count, below, depth;
  };
  // Where the text may stand: before a node that reads bytes, or at the end (Automaton::kReturn).
  struct Place {
    uint32_t node, frame;

    auto operator<=>(const Place&) const = default;
  };
  struct Piece {  // the bytes that lead to the same state
    uint8_t first, last;
    State next;
  };
  struct Row {
    const std::array<State, 256>* dense = nullptr;  // of a state with many pieces
    uint32_t first = 0, count = 0;                  // its pieces otherwise
  };
  struct Known {
    uint32_t first = 0, count = 0;  // of its places
    uint32_t row = NumberTable::kNone;
    uint32_t plain = NumberTable::kNone;
    bool complete = false;
  };
  static constexpr uint32_t kNoFrame = 0;

  const Row& row_of(State state) {
    if (states_[state].row == NumberTable::kNone) make_row(state);
    return rows_[states_[state].row];
  }
  void make_row(State state);
  // Whether this range of bytes leads to states from which `more` continuation bytes all lead to `to`.
  bool leads(State state, uint8_t first, uint8_t last, uint32_t more, State to);
  Plain find_plain(State state);
  uint32_t push(uint32_t node, uint32_t count, uint32_t below);
  // Adds the places that are reached from a node without reading a byte.
  void reach(uint32_t node, uint32_t frame);
  // The state of the places that were reached since the last call.
  State take_reached();
  bool first_visit(uint32_t node, uint32_t frame);

  const Automaton automaton_;
  State start_ = kDead;
  std::vector<Frame> frames_;
  NumberTable frame_numbers_;
  std::vector<Known> states_;
  NumberTable state_numbers_;
  std::vector<Place> places_;
  std::vector<Row> rows_;
  std::vector<Piece> pieces_;
  std::deque<std::array<State, 256>> dense_;
  std::vector<Plain> plain_;
  // Scratch memory of reach().
  std::vector<Place> todo_, reached_;
  std::vector<uint64_t> visited_ = std::vector<uint64_t>(64, UINT64_MAX);
  std::vector<uint32_t> visited_slots_;
};

}  // namespace thimble::grammar
