// A vocabulary for grammars, with tokens that cross the borders of JSON's syntax and of code points, and
// texts that random logits generate.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "base/splitmix64.h"
#include "gguf/gguf.h"
#include "tests/support/byte_vocabulary.h"
#include "text/grammar/token_grammar.h"
#include "text/tokenizer.h"

namespace thimble::test {

class GrammarVocabulary {
 public:
  // `path`: a GGUF file, or empty for the small vocabulary, to which `more` tokens of a type are added.
  explicit GrammarVocabulary(const std::string& path = "", const std::vector<std::string>& more = {},
                             int32_t type_of_more = 1) {
    if (path.empty()) {
      std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "<|control|>"};
      std::vector<int32_t> types = {2, 3, 3, 3};
      for (const char* text :
           {"{\"",  "\":",  "\":\"", "\",\"",  "\"}",    "},{",      "[{",     "}]",           "[]",  "{}",
            "\",",  "\"]",  "],",    "[[",     "]]",     "true",     "false",  "null",         "tru", "e,",
            "12",   "00",   "1.",    ".5",     "-1",     "e+",       "1e",     "ab",           "abc", "name",
            "nam",  "e\":", "id",    "a\"",    "\"a",    "b\":",     "the",    "\\n",          "\\u", "\\\"",
            "\\\\", "D8",   "3D",    "\\uD83", "\u00e9", "\u00e9t",  "\u4f60", "\u4f60\u597d", "-0",  "2024",
            "-01",  "T00",  ":00",   "00Z",    "aaaa",   "aaaaaaaa", "\n",     "a b",          "0,",  "1]"}) {
        tokens.emplace_back(text);
        types.push_back(1);
      }
      tokens.insert(tokens.end(), more.begin(), more.end());
      types.resize(tokens.size(), type_of_more);
      GgufWriter w;
      set_byte_vocabulary(w, tokens, types, 2);
      bytes_ = w.bytes();
      load(lend(bytes_), "the vocabulary");
    } else {
      load(MappedFile::open(path), path);
    }
  }

  Tokenizer tokenizer;
  std::shared_ptr<const grammar::TokenTrie> trie;

 private:
  void load(Result<MappedFile> map, std::string name) {
    map_ = std::make_unique<MappedFile>(std::move(*map));
    gguf_ = std::make_unique<Gguf>(std::move(*Gguf::parse(*map_, std::move(name))));
    tokenizer = std::move(*Tokenizer::load(*gguf_));
    trie = std::make_shared<const grammar::TokenTrie>(tokenizer);
  }

  FileBytes bytes_;
  std::unique_ptr<MappedFile> map_;
  std::unique_ptr<Gguf> gguf_;
};

// Samples tokens with random logits until the text ends. After some tokens it prefers those that close what
// is open. Nothing: the text did not end within 2000 tokens.
inline std::optional<std::string> sample_text(const grammar::TokenGrammar& grammar, uint64_t seed) {
  const grammar::TokenTrie& trie = grammar.trie();
  grammar::TokenGrammar::Place place = grammar.start();
  grammar::TokenMask mask(trie.tokens());
  std::string text;
  const uint64_t patience = splitmix64(seed) % 60;
  for (uint64_t n = 0; n < 2000; ++n) {
    grammar.allowed(place, mask);
    int32_t best = -1;
    double most = -1;
    for (uint32_t i = 0; i < trie.tokens(); ++i) {
      const auto id = static_cast<int32_t>(i);
      if (!mask[id]) continue;
      double logit = static_cast<double>(splitmix64(seed) >> 40);
      if (n >= patience) {
        const std::string_view piece = trie.text(id);
        if (trie.end_mask()[id]) logit *= 64;
        if (piece == "\"" || piece == "}" || piece == "]") logit *= 16;
        if (piece == ",") logit *= 8;  // ends a number
        if (piece.find_first_of("{[.eE+-\\") != std::string_view::npos) logit /= 16;
      }
      if (logit > most) {
        most = logit;
        best = id;
      }
    }
    if (best < 0 || !grammar.take(place, best)) return std::nullopt;
    if (trie.end_mask()[best]) return text;
    text += trie.text(best);
  }
  return std::nullopt;
}

// Whether the text can be generated, and at each place every token that the text begins with is allowed.
inline bool reaches(const grammar::TokenGrammar& grammar, std::string_view text) {
  const grammar::TokenTrie& trie = grammar.trie();
  grammar::TokenGrammar::Place place = grammar.start();
  grammar::TokenMask mask(trie.tokens());
  while (!text.empty()) {
    grammar.allowed(place, mask);
    int32_t single = -1;
    for (uint32_t i = 0; i < trie.tokens(); ++i) {
      const auto id = static_cast<int32_t>(i);
      const std::string_view piece = trie.text(id);
      if (piece.empty() || !text.starts_with(piece)) continue;
      if (!mask[id]) return false;
      if (piece.size() == 1) single = id;
    }
    if (single < 0 || !grammar.take(place, single)) return false;
    text.remove_prefix(1);
  }
  grammar.allowed(place, mask);
  return grammar.complete(place) && mask[trie.ends()[0]];
}

}  // namespace thimble::test
