#include "text/grammar/token_trie.h"

#include <algorithm>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace thimble::grammar {
namespace {

constexpr size_t kMostSets = 16;  // whose masks are remembered

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
  std::vector<Made> made(tokens_);
  for (uint32_t i = 0; i < tokens_; ++i) {
    const auto id = static_cast<int32_t>(i);
    begins_.push_back(static_cast<uint32_t>(bytes_.size()));
    if (tokenizer.ends_generation(id)) {
      ends_.push_back(id);
      end_mask_.set(id);
    }
    if (!tokenizer.is_text(id)) {
      if (end_mask_[id] || i > kLargestControl) continue;
      bytes_ += control_bytes(id);
      other.push_back(id);
      continue;
    }
    tokenizer.append_piece(id, false, bytes_);
    std::string_view text = std::string_view(bytes_).substr(begins_[i]);
    // No text of a grammar has the byte that begins the bytes of a control token.
    if (text.size() > UINT16_MAX || text.find(kControlByte) != text.npos) bytes_.resize(begins_[i]);
    if (bytes_.size() == begins_[i]) continue;
    bool is_plain = true;
    for (Made& m = made[i]; !text.empty() && is_plain; ++m.length) {
      const CodePoint c = first_code_point(text);
      is_plain = c.value < kInvalidUtf8 && PlainSet::plain(c.value) && m.length < kLongestPlain;
      if (is_plain) m.of.add(c.value);
      text.remove_prefix(c.size);
    }
    (is_plain ? plain : other).push_back(id);
  }
  begins_.push_back(static_cast<uint32_t>(bytes_.size()));
  plain_ = make_trie(*this, std::move(plain));
  other_ = make_trie(*this, std::move(other));
  for (const int32_t id : plain_.ids) made_.push_back(made[static_cast<size_t>(id)]);
}

void TokenTrie::add_plain(const PlainSet& set, uint32_t length, TokenMask& mask) const {
  const std::scoped_lock lock(mutex_);
  auto known = std::find_if(masks_.begin(), masks_.end(), [&](const auto& m) { return m->set == set; });
  if (known == masks_.end()) {
    if (masks_.size() < kMostSets) {
      known = masks_.insert(masks_.end(), std::make_unique<PlainMasks>());
    } else {
      known = masks_.begin() + static_cast<std::ptrdiff_t>(next_mask_++ % kMostSets);
    }
    PlainMasks& m = **known;
    m.set = set;
    m.of_length.assign(kLongestPlain + 1, TokenMask(tokens_));
    for (size_t i = 0; i < made_.size(); ++i)
      if (set.holds(made_[i].of)) m.of_length[made_[i].length].set(plain_.ids[i]);
    for (uint32_t l = 1; l <= kLongestPlain; ++l) m.of_length[l].add(m.of_length[l - 1]);
  }
  mask.add((*known)->of_length[length]);
}

uint64_t TokenTrie::host_bytes() const {
  const std::scoped_lock lock(mutex_);
  return bytes_.capacity() + begins_.capacity() * sizeof begins_[0] + bytes_of(plain_) + bytes_of(other_) +
         made_.capacity() * sizeof(Made) +
         masks_.size() * (kLongestPlain + 1) * end_mask_.words().size_bytes();
}

}  // namespace thimble::grammar
