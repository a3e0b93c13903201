// The common base of both kinds of vocabulary: the Encoder interface, and the merging of neighbouring symbols
// that both use.
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
  // Emits the tokens of a text without special tokens, at most kLongestText bytes long. `starts` says that
  // the text is the first one or follows a special token. Token offsets start at `offset`.
  virtual void encode(std::string_view text, uint64_t offset, bool starts, const TokenSink& sink) const = 0;
  // Appends the bytes of a token that is not special.
  virtual void append_bytes(int32_t id, std::string& out) const = 0;
  // Whether a text may be cut before this white space if it follows an ASCII letter. Both parts then give the
  // same tokens as the whole text, the second part encoded with `starts` false.
  virtual bool cuts_before(char space) const = 0;
  // Whether encode() adds a space before a text that starts.
  virtual bool adds_space() const = 0;
  virtual bool adds_bos() const = 0;  // the default if the file does not say
  virtual uint64_t host_bytes() const = 0;
};

// Positions in a text have 32 bits, and SentencePiece writes a space as three bytes.
inline constexpr size_t kLongestText = size_t{1} << 30;

// The vocabulary must outlive the encoder. make_bpe accepts any pre-tokenizer.
Result<std::unique_ptr<Encoder>> make_bpe(const Gguf&, const Vocabulary&, const PreTokenizer&);
Result<std::unique_ptr<Encoder>> make_sentencepiece(const Gguf&, const Vocabulary&);

// A range of text that is one token at this point. id is -1 if it is not a token.
struct Symbol {
  // In bytes. Size 0 means that the symbol was merged into the previous one.
  uint32_t at, size;
  int32_t id;
  uint32_t previous, next;
};

// The token that two neighbours merge into, and its cost. The lowest cost merges first; among equals, the
// leftmost.
struct Merge {
  int32_t id;  // -1: the neighbours do not merge
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
  int32_t rank(int32_t left, int32_t right) const;  // -1 if there is no such merge

  std::vector<Pair> pairs_;  // by rank
  RowTable by_pair_;
};

std::unique_ptr<Encoder> make_raw_bpe(const Vocabulary&, const PreTokenizer&, MergeTable);

// Merges neighbours until no pair can merge. A heap of candidates keeps the time at n log n for any text, and
// memory at 40 bytes per symbol. An object is reused between texts to keep its memory.
class Merger {
 public:
  // `most` is the largest number of symbols in the text.
  void clear(size_t most) {
    symbols_.clear();
    symbols_.reserve(most);
  }
  // Adds the next symbol, which follows the previous one in the text.
  void add(uint32_t size, int32_t id) {
    const auto i = static_cast<uint32_t>(symbols_.size());
    const uint32_t at = i > 0 ? symbols_[i - 1].at + symbols_[i - 1].size : 0;
    symbols_.push_back({at, size, id, i - 1, i + 1});
  }

  // `merge(left, right)` returns the Merge of two symbols. `emit(symbol)` is called for each remaining
  // symbol, in order.
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
    // Reserves one candidate per pair of neighbours, and a quarter more. When the heap is full, at least that
    // quarter is outdated.
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
  // Symbols only grow, so the same size at the same place means the same pair.
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
