// Any bytes as a grammar: it is refused with one sentence, or its texts can be generated and always end.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tests/support/grammar_vocabulary.h"
#include "text/grammar/languages.h"

// Input: a byte that chooses the language (s, r or g), a byte as a random seed, and the text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace thimble;
  if (size < 2) return 0;
  static const test::GrammarVocabulary vocabulary;
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
  const auto syntax = data[0] == 's'   ? grammar::read_json_schema(text)
                      : data[0] == 'r' ? grammar::read_regex(text)
                                       : grammar::read_gbnf(text);
  if (!syntax.ok()) {
    if (syntax.status().message().empty()) std::abort();
    return 0;
  }
  auto automaton = grammar::Automaton::make(*syntax);
  if (!automaton.ok()) {
    if (automaton.status().message().empty()) std::abort();
    return 0;
  }
  const grammar::TokenGrammar tokens(vocabulary.trie, std::move(*automaton));
  grammar::TokenGrammar::Place place = tokens.start();
  grammar::TokenMask mask(vocabulary.trie->tokens());
  uint64_t random = data[1];
  for (int n = 0; n < 50; ++n) {
    tokens.allowed(place, mask);
    std::vector<int32_t> ids;
    for (uint32_t id = 0; id < vocabulary.trie->tokens(); ++id)
      if (mask[static_cast<int32_t>(id)]) ids.push_back(static_cast<int32_t>(id));
    if (ids.empty()) std::abort();
    const int32_t id = ids[splitmix64(random) % ids.size()];
    if (!tokens.allows(place, id) || !tokens.take(place, id)) std::abort();
    if (vocabulary.trie->end_mask()[id]) break;
  }
  return 0;
}
