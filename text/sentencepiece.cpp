// SentencePiece-style BPE (tokenizer.ggml.model = llama): spaces become U+2581, the neighbours with the best
// score merge, and characters without a token are spelled with byte tokens <0x00> to <0xFF>. Gemma 4 and
// others do the same to pieces of text, with a list of merges instead of scores.
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <optional>

#include "gguf/gguf.h"
#include "text/encoder.h"
#include "text/utf8.h"

namespace thimble {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581

// A cost with the reverse order of the score: a higher score has a lower cost. NaN is the worst score.
uint32_t cost_of(float score) {
  if (std::isnan(score)) return UINT32_MAX;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// The value of "<0xAB>", or -1.
int byte_value(std::string_view text) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  return digit(text[3]) < 0 || digit(text[4]) < 0 ? -1 : digit(text[3]) * 16 + digit(text[4]);
}

class SentencePiece : public Encoder {
 public:
  SentencePiece(const Vocabulary& vocabulary, std::vector<float> scores, bool adds_space)
      : vocabulary_(vocabulary), scores_(std::move(scores)), adds_space_(adds_space) {
    byte_ids_.fill(vocabulary.unknown());
    for (uint32_t id = 0; id < vocabulary.size(); ++id) {
      const auto token = static_cast<int32_t>(id);
      const std::string_view text = vocabulary.text(token);
      if (const int byte = byte_value(text); byte >= 0) byte_ids_[static_cast<size_t>(byte)] = token;
      if (!plain(token)) continue;
      words_are_independent_ &= !holds_space_inside(text);
      lines_are_independent_ &= line_end(text, 1) == text.size();
    }
  }

  SentencePiece(const Vocabulary& vocabulary, const PreTokenizer& scheme, MergeTable merges)
      : SentencePiece(vocabulary, {}, false) {
    splitter_.emplace(scheme);
    merges_ = std::move(merges);
  }

  void encode(std::string_view text, uint64_t offset, bool starts, const TokenSink& sink) const override {
    Scratch scratch;
    if (splitter_)
      return splitter_->split(text, [&](std::string_view piece) {
        const uint64_t begin = offset + static_cast<uint64_t>(piece.data() - text.data());
        const int32_t id = piece[0] == '\n' ? vocabulary_.find_plain(piece) : -1;
        if (id >= 0) return sink({id, begin});  // a run of newlines stays whole
        encode_word(piece, begin, false, scratch, sink);
      });
    bool prefix = starts && adds_space_;
    for (size_t at = 0; at < text.size(); prefix = false) {
      const size_t end = words_are_independent_   ? word_end(text, at)
                         : lines_are_independent_ ? line_end(text, at + kPart)
                                                  : text.size();
      encode_word(text.substr(at, end - at), offset + at, prefix, scratch, sink);
      at = end;
    }
  }

  void append_bytes(int32_t id, std::string& out) const override {
    const std::string_view text = vocabulary_.text(id);
    if (const int byte = byte_value(text); byte >= 0) {
      out += static_cast<char>(byte);
      return;
    }
    for (size_t at = 0; at < text.size();) {
      const size_t next = std::min(text.find(kSpace, at), text.size());
      out += text.substr(at, next - at);
      if (next < text.size()) out += ' ';
      at = next + kSpace.size();
    }
  }

  bool cuts_before(char space) const override {
    if (splitter_) return splitter_->cuts_before(space);
    return space == ' ' ? words_are_independent_ : space == '\n' && lines_are_independent_;
  }
  bool adds_space() const override { return adds_space_; }
  bool adds_bos() const override { return !splitter_; }
  uint64_t host_bytes() const override {
    return sizeof *this + scores_.capacity() * sizeof scores_[0] + merges_.host_bytes();
  }

 private:
  struct Scratch {
    std::string spelled;
    Merger merger;
  };

  bool plain(int32_t id) const { return vocabulary_.find_plain(vocabulary_.text(id)) == id; }

  // Whether a space follows another character.
  static bool holds_space_inside(std::string_view text) {
    while (text.starts_with(kSpace)) text.remove_prefix(kSpace.size());
    return text.find(kSpace) != std::string_view::npos;
  }

  // The end of the word at `at`, which is where the spaces of the next word begin.
  static size_t word_end(std::string_view text, size_t at) {
    for (size_t i = at + 1; i < text.size(); ++i)
      if (text[i] == ' ' && text[i - 1] != ' ' && !text.substr(at, i - at).ends_with(kSpace)) return i;
    return text.size();
  }

  // The first position from `at` on where a newline follows an ASCII letter.
  static size_t line_end(std::string_view text, size_t at) {
    const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    for (size_t i = at; i < text.size(); ++i)
      if (text[i] == '\n' && letter(text[i - 1])) return i;
    return text.size();
  }

  void encode_word(std::string_view text, uint64_t offset, bool prefix, Scratch& scratch,
                   const TokenSink& sink) const {
    std::string& spelled = scratch.spelled;
    spelled.assign(prefix ? kSpace : "");
    for (const char c : text) {
      if (c == ' ') {
        spelled += kSpace;
      } else {
        spelled += c;
      }
    }
    const std::string_view all = spelled;
    scratch.merger.clear(all.size());
    for (size_t at = 0; at < all.size();) {
      const uint32_t size = first_code_point(all.substr(at)).size;
      scratch.merger.add(size, vocabulary_.find_plain(all.substr(at, size)));
      at += size;
    }
    const auto merge = [&](const Symbol& left, const Symbol& right) {
      if (splitter_) return merges_.of(left.id, right.id);
      const size_t size = size_t{left.size} + right.size;
      const int32_t id =
          size > vocabulary_.longest_text() ? -1 : vocabulary_.find_plain(all.substr(left.at, size));
      return id < 0 ? Merge{-1, 0} : Merge{id, cost_of(scores_[id])};
    };
    // Symbols come in order, so the position in the text advances together with the position in its spelling.
    size_t at = 0;
    uint32_t spelled_at = prefix ? static_cast<uint32_t>(kSpace.size()) : 0;
    scratch.merger.run(merge, [&](const Symbol& s) {
      const bool space = at < text.size() && text[at] == ' ';
      if (s.id >= 0) {
        sink({s.id, offset + at});
      } else {
        for (uint32_t i = 0; i < s.size; ++i) {
          const int32_t id = byte_ids_[static_cast<uint8_t>(all[s.at + i])];
          // A byte that has no token in the vocabulary is lost.
          if (id >= 0) sink({id, offset + at + (space || s.at < spelled_at ? 0 : i)});
        }
      }
      while (spelled_at < s.at + s.size)
        spelled_at += text[at++] == ' ' ? static_cast<uint32_t>(kSpace.size()) : 1;
    });
  }

  const Vocabulary& vocabulary_;
  std::vector<float> scores_;  // of each token; empty if there is a splitter_
  std::optional<Splitter> splitter_;
  MergeTable merges_;  // for the pieces of splitter_
  std::array<int32_t, 256> byte_ids_;
  bool adds_space_;
  // No token continues after a space that follows another character, so nothing merges across words. Words
  // are encoded one by one, which needs little memory. True for Llama 2, Mistral and Phi-3.
  bool words_are_independent_ = true;
  // No token contains a newline after an ASCII letter, so nothing merges across such newlines, as in Gemma 3.
  // Long texts are encoded in parts of at least kPart bytes.
  bool lines_are_independent_ = true;
  static constexpr size_t kPart = 4096;
};

}  // namespace

std::unique_ptr<Encoder> make_raw_bpe(const Vocabulary& vocabulary, const PreTokenizer& scheme,
                                      MergeTable merges) {
  return std::make_unique<SentencePiece>(vocabulary, scheme, std::move(merges));
}

Result<std::unique_ptr<Encoder>> make_sentencepiece(const Gguf& file, const Vocabulary& vocabulary) {
  THIMBLE_LET(scores, file.get_floats("tokenizer.ggml.scores"));
  if (!scores)
    return error(Code::kFormat, "%s: tokenizer.ggml.scores is missing; convert the model again",
                 file.name().c_str());
  if (scores->size() != vocabulary.size())
    return error(Code::kFormat,
                 "%s: tokenizer.ggml.scores has %zu entries for %u tokens; convert the model again",
                 file.name().c_str(), scores->size(), vocabulary.size());
  THIMBLE_LET(adds_space, file.get_bool("tokenizer.ggml.add_space_prefix"));
  return std::unique_ptr<Encoder>(
      std::make_unique<SentencePiece>(vocabulary, std::move(*scores), adds_space.value_or(true)));
}

}  // namespace thimble
