// Byte-level BPE (tokenizer.ggml.model = gpt2): the text of a token spells each byte as one printable
// character.
#include <array>

#include "gguf/gguf.h"
#include "text/encoder.h"
#include "text/utf8.h"

namespace thimble {
namespace {

// The character that spells a byte: the byte itself if it is printable in Latin-1, else the next free
// character from U+0100.
constexpr auto kCharOfByte = [] {
  std::array<uint16_t, 256> chars{};
  uint16_t next = 0x100;
  for (uint16_t b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD);
    chars[b] = printable ? b : next++;
  }
  return chars;
}();

constexpr auto kByteOfChar = [] {
  std::array<int16_t, 0x144> bytes{};
  bytes.fill(-1);
  for (int16_t b = 0; b < 256; ++b) bytes[kCharOfByte[static_cast<size_t>(b)]] = b;
  return bytes;
}();

void append_spelled(uint8_t byte, std::string& out) {
  const uint16_t c = kCharOfByte[byte];
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

class Bpe : public Encoder {
 public:
  Bpe(const Vocabulary& vocabulary, const PreTokenizer& scheme, MergeTable merges)
      : vocabulary_(vocabulary), splitter_(scheme), flags_(scheme.flags), merges_(std::move(merges)) {
    for (uint32_t b = 0; b < 256; ++b) {
      std::string spelled;
      append_spelled(static_cast<uint8_t>(b), spelled);
      byte_ids_[b] = vocabulary.find_plain(spelled);
    }
  }

  void encode(std::string_view text, uint64_t offset, bool, const TokenSink& sink) const override {
    Merger merger;
    std::string spelled;
    const auto merge = [&](const Symbol& left, const Symbol& right) { return merges_.of(left.id, right.id); };
    splitter_.split(text, [&](std::string_view piece) {
      const uint64_t begin = offset + static_cast<uint64_t>(piece.data() - text.data());
      if ((flags_ & kWhole) && piece.size() <= vocabulary_.longest_text()) {
        spelled.clear();
        for (const char byte : piece) append_spelled(static_cast<uint8_t>(byte), spelled);
        if (const int32_t id = vocabulary_.find_plain(spelled); id >= 0) return sink({id, begin});
      }
      merger.clear(piece.size());
      for (const char byte : piece) merger.add(1, byte_ids_[static_cast<uint8_t>(byte)]);
      merger.run(merge, [&](const Symbol& s) {
        // Some vocabularies lack tokens for bytes that never occur in UTF-8 (starcoder: 0xFF). These bytes
        // are lost.
        if (s.id >= 0) sink({s.id, begin + s.at});
      });
    });
  }

  void append_bytes(int32_t id, std::string& out) const override {
    const std::string_view text = vocabulary_.text(id);
    for (size_t at = 0; at < text.size();) {
      const CodePoint c = first_code_point(text.substr(at));
      const int byte = c.value < kByteOfChar.size() ? kByteOfChar[c.value] : -1;
      if (byte >= 0) {
        out += static_cast<char>(byte);
      } else {
        out += text.substr(at, c.size);  // not a spelling: the token was added as plain text
      }
      at += c.size;
    }
  }

  bool cuts_before(char space) const override { return splitter_.cuts_before(space); }
  bool adds_space() const override { return false; }
  bool adds_bos() const override { return flags_ & kBos; }
  uint64_t host_bytes() const override { return sizeof *this + merges_.host_bytes(); }

 private:
  const Vocabulary& vocabulary_;
  Splitter splitter_;
  uint8_t flags_;
  std::array<int32_t, 256> byte_ids_;
  MergeTable merges_;
};

}  // namespace

// Merges of tokens that do not exist can never happen, so they are left out.
Result<MergeTable> MergeTable::load(const Gguf& file, const Vocabulary& vocabulary) {
  THIMBLE_LET(merges, file.get_strings("tokenizer.ggml.merges"));
  if (!merges || merges->size() > INT32_MAX)
    return error(Code::kFormat, "%s: tokenizer.ggml.merges is %s; convert the model again",
                 file.name().c_str(), merges ? "too long" : "missing");
  MergeTable table;
  table.pairs_.reserve(merges->size());
  table.by_pair_.reserve(merges->size());
  std::string both;
  for (const std::string_view merge : *merges) {
    const size_t gap = merge.find(' ', 1);
    if (gap == std::string_view::npos) continue;
    both.assign(merge.substr(0, gap)).append(merge.substr(gap + 1));
    const Pair pair = {vocabulary.find(merge.substr(0, gap)), vocabulary.find(merge.substr(gap + 1)),
                       vocabulary.find_plain(both)};
    if (pair.left < 0 || pair.right < 0 || pair.merged < 0 || table.rank(pair.left, pair.right) >= 0)
      continue;
    table.by_pair_.insert(hash_pair(pair.left, pair.right), static_cast<int32_t>(table.pairs_.size()));
    table.pairs_.push_back(pair);
  }
  return table;
}

int32_t MergeTable::rank(int32_t left, int32_t right) const {
  return by_pair_.find(hash_pair(left, right), [&](int32_t rank) {
    return pairs_[rank].left == left && pairs_[rank].right == right;
  });
}

Merge MergeTable::of(int32_t left, int32_t right) const {
  const int32_t found = rank(left, right);
  return found < 0 ? Merge{-1, 0} : Merge{pairs_[found].merged, static_cast<uint32_t>(found)};
}

Result<std::unique_ptr<Encoder>> make_bpe(const Gguf& file, const Vocabulary& vocabulary,
                                          const PreTokenizer& scheme) {
  THIMBLE_LET(merges, MergeTable::load(file, vocabulary));
  if (scheme.flags & kRaw) return make_raw_bpe(vocabulary, scheme, std::move(merges));
  return std::unique_ptr<Encoder>(std::make_unique<Bpe>(vocabulary, scheme, std::move(merges)));
}

}  // namespace thimble
