#include "text/grammar/token_trie.h"

#include <algorithm>

#include "text/grammar/matcher.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace thimble::grammar {
namespace {

// The number of code points of ordinary text, or 0 if it is not.
uint32_t plain_length(std::string_view text) {
  uint32_t length = 0;
  for (; !text.empty(); ++length) {
    const CodePoint c = first_code_point(text);
    if (c.value >= kInvalidUtf8 || !in_plain_text(c.value)) return 0;
    text.remove_prefix(c.size);
  }
  return length;
}

Trie make_trie(const TokenTrie& all, std::vector<int32_t> ids) {
  std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return all.text(a) != all.text(b) ? all.text(a) < all.text(b) : a < b;
  });
  Trie trie;
  std::vector<uint32_t> open;  // the nodes from the root to the last text
  std::string_view last;
  const auto close = [&](size_t depth) {
    for (; open.size() > depth; open.pop_back())
      trie.nodes[open.back()].after = static_cast<uint32_t>(trie.nodes.size());
  };
  for (const int32_t id : ids) {
    const std::string_view text = all.text(id);
    const auto common = static_cast<size_t>(
        std::mismatch(last.begin(), last.end(), text.begin(), text.end()).second - text.begin());
    close(common);
    for (size_t depth = common; depth < text.size(); ++depth) {
      open.push_back(static_cast<uint32_t>(trie.nodes.size()));
      trie.nodes.push_back({0, static_cast<uint32_t>(trie.ids.size()), static_cast<uint16_t>(depth + 1),
                            static_cast<uint8_t>(text[depth]), 0});
    }
    Trie::Node& node = trie.nodes[open.back()];
    if (node.count == 0) node.ids = static_cast<uint32_t>(trie.ids.size());
    if (node.count == UINT8_MAX) continue;  // so many names for one text are a joke
    ++node.count;
    trie.ids.push_back(id);
    last = text;
  }
  close(0);
  return trie;
}

uint64_t bytes_of(const Trie& trie) {
  return trie.nodes.capacity() * sizeof trie.nodes[0] + trie.ids.capacity() * sizeof trie.ids[0];
}

}  // namespace

bool TokenMask::none() const {
  return std::all_of(words_.begin(), words_.end(), [](uint64_t word) { return word == 0; });
}

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : tokens_(tokenizer.size()), end_mask_(tokens_) {
  std::vector<int32_t> plain, other;
  plain_masks_.assign(kLongestPlain + 1, TokenMask(tokens_));
  for (uint32_t i = 0; i < tokens_; ++i) {
    const auto id = static_cast<int32_t>(i);
    begins_.push_back(static_cast<uint32_t>(bytes_.size()));
    if (tokenizer.ends_generation(id)) {
      ends_.push_back(id);
      end_mask_.set(id);
    }
    if (!tokenizer.is_text(id)) continue;
    tokenizer.append_piece(id, false, bytes_);
    const std::string_view text = std::string_view(bytes_).substr(begins_[i]);
    if (text.size() > UINT16_MAX) bytes_.resize(begins_[i]);
    if (bytes_.size() == begins_[i]) continue;
    const uint32_t length = plain_length(text);
    const bool is_plain = length > 0 && length <= kLongestPlain;
    (is_plain ? plain : other).push_back(id);
    for (uint32_t l = length; is_plain && l <= kLongestPlain; ++l) plain_masks_[l].set(id);
  }
  begins_.push_back(static_cast<uint32_t>(bytes_.size()));
  plain_ = make_trie(*this, std::move(plain));
  other_ = make_trie(*this, std::move(other));
}

uint64_t TokenTrie::host_bytes() const {
  return bytes_.capacity() + begins_.capacity() * sizeof begins_[0] + bytes_of(plain_) + bytes_of(other_) +
         plain_masks_.size() * plain_masks_[0].words().size_bytes();
}

}  // namespace thimble::grammar
