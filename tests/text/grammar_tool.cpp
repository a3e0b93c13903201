// Runs grammars for tests/text/grammar_fuzz.py. Reads one request a line from standard input and answers each
// with one line:
//   schema JSON | regex "..." | gbnf "..."   makes the grammar: "ok", or "error " and the sentence
//   sample SEED                              a text of the grammar from random logits, as a JSON string
//   accepts "..."                            "yes" or "no": whether the text can be generated, token by token
// The optional argument is a GGUF file whose vocabulary is used instead of a small one.
#include <cstdio>
#include <iostream>
#include <string>

#include "tests/support/grammar_vocabulary.h"
#include "text/grammar/languages.h"
#include "text/json.h"

namespace {

using namespace thimble;

std::string answer(const test::GrammarVocabulary& vocabulary, std::shared_ptr<grammar::TokenGrammar>& current,
                   const std::string& line) {
  const std::string verb = line.substr(0, line.find(' ')),
                    rest = line.substr(std::min(line.size(), verb.size() + 1));
  const auto text = [&] {
    JsonReader reader(rest, "the request");
    return *reader.string();
  };
  if (verb == "sample") {
    uint64_t seed = std::stoull(rest);
    const std::optional<std::string> made = test::sample_text(*current, seed);
    return made ? json_quoted(*made) : "unfinished";
  }
  if (verb == "accepts") return test::reaches(*current, text()) ? "yes" : "no";
  const auto syntax = verb == "schema"  ? grammar::read_json_schema(rest)
                      : verb == "regex" ? grammar::read_regex(text())
                                        : grammar::read_gbnf(text());
  if (!syntax.ok()) return "error " + syntax.status().message();
  auto automaton = grammar::Automaton::make(*syntax);
  if (!automaton.ok()) return "error " + automaton.status().message();
  current = std::make_shared<grammar::TokenGrammar>(vocabulary.trie, std::move(*automaton));
  return "ok";
}

}  // namespace

int main(int argc, char** argv) {
  const test::GrammarVocabulary vocabulary(argc > 1 ? argv[1] : "");
  std::shared_ptr<grammar::TokenGrammar> current;
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << answer(vocabulary, current, line) << "\n" << std::flush;
  }
  return 0;
}
