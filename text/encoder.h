// What the two kinds of vocabulary have in common: an Encoder, and the merging of neighbours that both are
// made of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"
#include "text/vocabulary.h"

namespace thimble {

class Gguf;

class Encoder {
 public:
  virtual ~Encoder() = default;
  // Gives the tokens of text that holds no special token and is at most kLongestText bytes. `starts`: it is
  // the first, or follows a special token. Offsets count from `offset`.
  virtual void encode(std::string_view text, uint64_t offset, bool starts, const TokenSink& sink) const = 0;
  // Appends the bytes of a token that is not special.
  virtual void append_bytes(int32_t id, std::string& out) const = 0;
  // Whether text may be cut in front of this white space where it follows an ASCII letter: both parts become
  // the tokens that they are in the whole, the second as text that does not start.
  virtual bool cuts_before(char space) const = 0;
  // encode puts a space in front of text that starts.
  virtual bool adds_space() const = 0;
  virtual bool adds_bos() const = 0;  // where the file does not say
  virtual uint64_t host_bytes() const = 0;
};

// Positions in a text are 32 bits, and SentencePiece writes three bytes for a space.
inline constexpr size_t kLongestText = size_t{1} << 30;

// The vocabulary must outlive the encoder. make_bpe takes rows of any kind.
Result<std::unique_ptr<Encoder>> make_bpe(const Gguf&, const Vocabulary&, const PreTokenizer&);
Result<std::unique_ptr<Encoder>> make_sentencepiece(const Gguf&, const Vocabulary&);

// A stretch of text that is one token now; -1 while it is none.
struct Symbol {
  uint32_t at, size;  // bytes; size 0: merged into the symbol before it
  int32_t id;
  uint32_t previous, next;
};

// What two neighbours become, and when: the lowest cost first, the leftmost among equals.
struct Merge {
  int32_t id;  // -1: they stay apart
  uint32_t cost;
};

// The merges that a BPE file lists, by rank.
class MergeTable {
 public:
  static Result<MergeTable> load(const Gguf&, const Vocabulary&);
  Merge of(int32_t left, int32_t right) const;
  uint64_t host_bytes() const { return pairs_.capacity() * sizeof pairs_[0] + by_pair_.host_bytes(); }

 private:
  struct Pair {
    int32_t left, right, merged;
  };
  int32_t rank(int32_t left, int32_t right) const;  // or -1

  std::vector<Pair> pairs_;  // by rank
  RowTable by_pair_;
};

std::unique_ptr<Encoder> make_raw_bpe(const Vocabulary&, const PreTokenizer&, MergeTable);

// Merges neighbours until none can be. A heap of candidates keeps that at n log n for any text, and at 40
// bytes a symbol. Kept between texts for its memory.
class Merger {
 public:
  // For a text of at most so many symbols.
  void clear(size_t most) {
    symbols_.clear();
    symbols_.reserve(most);
  }
  // The next symbol of the text, adjacent to the one before.
  void add(uint32_t size, int32_t id) {
    const auto i = static_cast<uint32_t>(symbols_.size());
    const uint32_t at = i > 0 ? symbols_[i - 1].at + symbols_[i - 1].size : 0;
    symbols_.push_back({at, size, id, i - 1, i + 1});
  }

  // `merge(left, right)` gives the Merge of two symbols. Calls `emit(symbol)` for what remains, in order.
  template <typename MergeOf, typename Emit>
  void run(const MergeOf& merge, const Emit& emit) {
    const auto offer = [&](uint32_t left, uint32_t right) {
      if (left >= symbols_.size() || right >= symbols_.size()) return;
      const Merge m = merge(symbols_[left], symbols_[right]);
      if (m.id < 0) return;
      if (heap_.size() == heap_.capacity()) drop_outdated();
      heap_.push_back({m.cost, left, symbols_[left].size + symbols_[right].size, m.id});
      std::push_heap(heap_.begin(), heap_.end(), later);
    };
    // Room for a candidate between any two symbols, and a quarter more: so many are outdated when it is full.
    heap_.reserve(symbols_.size() + symbols_.size() / 4 + 4);
    for (uint32_t i = 1; i < symbols_.size(); ++i) offer(i - 1, i);
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), later);
      const Candidate c = heap_.back();
      heap_.pop_back();
      if (outdated(c)) continue;
      Symbol& left = symbols_[c.left];
      Symbol& right = symbols_[left.next];
      left.size = c.size;
      left.id = c.id;
      left.next = right.next;
      if (right.next < symbols_.size()) symbols_[right.next].previous = c.left;
      right.size = 0;
      offer(left.previous, c.left);
      offer(c.left, left.next);
    }
    for (const Symbol& s : symbols_)
      if (s.size > 0) emit(s);
  }

 private:
  struct Candidate {
    uint32_t cost, left, size;
    int32_t id;
  };
  // Neighbours only grow, so the same size at the same place means the same pair.
  bool outdated(const Candidate& c) const {
    const Symbol& left = symbols_[c.left];
    return left.size == 0 || left.next >= symbols_.size() || left.size + symbols_[left.next].size != c.size;
  }
  void drop_outdated() {
    std::erase_if(heap_, [&](const Candidate& c) { return outdated(c); });
    std::make_heap(heap_.begin(), heap_.end(), later);
  }
  static bool later(const Candidate& a, const Candidate& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.left > b.left;
  }

  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
};

}  // namespace thimble
