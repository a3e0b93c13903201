// Times masks of grammars over a model's vocabulary: grammar_bench MODEL.gguf
//
// Each case is a grammar and a text of it. The text is tokenised as the model would write it, and the mask of
// each token is computed: first with a new grammar, then again with what it remembers. Times are those of one
// thread.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/support/grammar_vocabulary.h"
#include "text/grammar/languages.h"

namespace thimble {
namespace {

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Case {
  const char* name;
  Result<grammar::Syntax> (*read)(std::string_view);
  std::string grammar, text;
};

std::string repeated(const std::string& text, size_t times) {
  std::string all;
  while (times-- > 0) all += text;
  return all;
}

const std::string kPerson =
    R"({"name": "Ada Lovelace", "age": 36, "email": "ada.lovelace@example.org", "tags": ["mathematics", "poetry", "engines"], )"
    R"("bio": "An English mathematician and writer, known for her work on Charles Babbage's \"Analytical Engine\".\nShe saw more in it than a calculator.", )"
    R"("born": "1815-12-10", "address": {"street": "12 St James's Square", "city": "London", "zip": "SW1Y 4JH"}})";
const std::string kPersonSchema =
    R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150},)"
    R"("email":{"type":"string"},"tags":{"type":"array","items":{"type":"string"}},"bio":{"type":"string"},)"
    R"("born":{"type":"string","format":"date"},"address":{"type":"object","properties":{"street":{"type":"string"},)"
    R"("city":{"type":"string"},"zip":{"type":"string"}},"required":["street","city","zip"],"additionalProperties":false}},)"
    R"("required":["name","age","email","tags","bio","born","address"],"additionalProperties":false})";

std::string limited(std::string schema) {
  const std::string plain = R"("type":"string"})", bounded = R"("type":"string","maxLength":300})";
  for (size_t at = 0; (at = schema.find(plain, at)) != std::string::npos; at += bounded.size())
    schema.replace(at, plain.size(), bounded);
  return schema;
}

std::vector<Case> cases() {
  std::string words = "{\"enum\":[";
  for (int i = 0; i < 2000; ++i)
    words += (i ? ",\"city number " : "\"city number ") + std::to_string(i * 7919) + "\"";
  return {{"schema of a person", grammar::read_json_schema, kPersonSchema, kPerson},
          {"the same, maxLength 300", grammar::read_json_schema, limited(kPersonSchema), kPerson},
          {"any JSON object", grammar::read_json_schema, R"({"type":"object"})", kPerson},
          {"any JSON, nested", grammar::read_json_schema, "true",
           repeated("{\"a\": [", 20) + "1" + repeated("]}", 20)},
          {"long string", grammar::read_json_schema, R"({"type":"string"})",
           "\"" + repeated("The quick brown fox jumps over the lazy dog, again and again. ", 20) + "\""},
          {"2000 words", grammar::read_json_schema, words + "]}", "\"city number 7974433\""},
          {"regex of letters, counted", grammar::read_regex, "[A-Za-z ]{10,300}",
           repeated("the quick brown fox ", 10)},
          {"GBNF of lines", grammar::read_gbnf, "root ::= (\"- \" [^\\n]+ \"\\n\")+",
           repeated("- milk, eggs & \"good\" bread\n", 20)}};
}

void report(const char* name, const char* pass, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  double sum = 0;
  for (const double t : times) sum += t;
  const auto at = [&](double share) {
    return times[static_cast<size_t>(share * static_cast<double>(times.size() - 1))];
  };
  std::printf("%-26s %-6s %6zu %9.1f %9.1f %9.1f %9.1f\n", name, pass, times.size(),
              sum / static_cast<double>(times.size()), at(0.5), at(0.95), times.back());
}

void run(const Case& c, const test::GrammarVocabulary& vocabulary) {
  const double start = now();
  const auto syntax = c.read(c.grammar);
  auto automaton = syntax.ok() ? grammar::Automaton::make(*syntax) : syntax.status();
  if (!automaton.ok()) {
    std::printf("%s: %s\n", c.name, automaton.status().message().c_str());
    return;
  }
  const grammar::TokenGrammar grammar(vocabulary.trie, std::move(*automaton));
  const double made = now() - start;
  const std::vector<Token> tokens = vocabulary.tokenizer.tokenize(c.text, false, false);
  grammar::TokenMask mask(vocabulary.trie->tokens());
  for (const char* pass : {"first", "again"}) {
    grammar::TokenGrammar::Place place = grammar.start();
    std::vector<double> times, takes;
    for (const Token& token : tokens) {
      const double begin = now();
      grammar.allowed(place, mask);
      times.push_back(now() - begin);
      const double taken = now();
      if (!mask[token.id] || !grammar.take(place, token.id)) {
        std::printf("%s: a token is refused: %s\n", c.name,
                    std::string(vocabulary.tokenizer.text(token.id)).c_str());
        return;
      }
      takes.push_back(now() - taken);
    }
    report(c.name, pass, times);
    if (std::string(pass) == "again") report("", "take", takes);
  }
  std::printf("%-26s made in %.0f us, holds %.1f MiB\n", "", made,
              static_cast<double>(grammar.host_bytes()) / (1 << 20));
}

}  // namespace
}  // namespace thimble

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: grammar_bench MODEL.gguf\n");
    return 2;
  }
  const double start = thimble::now();
  const thimble::test::GrammarVocabulary vocabulary(argv[1]);
  std::printf("%u tokens, read and sorted in %.0f ms, %.1f MiB\n", vocabulary.trie->tokens(),
              (thimble::now() - start) / 1000,
              static_cast<double>(vocabulary.trie->host_bytes()) / (1 << 20));
  std::printf("%-26s %-6s %6s %9s %9s %9s %9s  us for a mask\n", "", "", "tokens", "mean", "median", "95 %",
              "most");
  for (const thimble::Case& c : thimble::cases()) thimble::run(c, vocabulary);
  return 0;
}
