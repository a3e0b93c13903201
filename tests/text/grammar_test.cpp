// Grammars: what the three languages allow, and that masks agree with the matcher.
#include <gtest/gtest.h>

#include "tests/support/grammar_vocabulary.h"
#include "text/grammar/languages.h"

namespace thimble {
namespace {

using test::reaches;
using test::sample_text;

const test::GrammarVocabulary& vocabulary() {
  static const test::GrammarVocabulary the;
  return the;
}

std::shared_ptr<grammar::TokenGrammar> over_tokens(const Result<grammar::Syntax>& syntax) {
  EXPECT_TRUE(syntax.ok()) << syntax.status().message();
  if (!syntax.ok()) return nullptr;
  auto automaton = grammar::Automaton::make(*syntax);
  EXPECT_TRUE(automaton.ok()) << automaton.status().message();
  if (!automaton.ok()) return nullptr;
  return std::make_shared<grammar::TokenGrammar>(vocabulary().trie, std::move(*automaton));
}

std::string refusal(const Result<grammar::Syntax>& syntax) {
  if (!syntax.ok()) return syntax.status().message();
  const auto automaton = grammar::Automaton::make(*syntax);
  return automaton.ok() ? "" : automaton.status().message();
}

struct Texts {
  const char* grammar;
  std::vector<const char*> valid, wrong;
};

void expect_texts(Result<grammar::Syntax> (*read)(std::string_view), const std::vector<Texts>& cases) {
  for (const Texts& c : cases) {
    SCOPED_TRACE(c.grammar);
    const auto made = over_tokens(read(c.grammar));
    if (!made) continue;
    for (const char* text : c.valid) EXPECT_TRUE(reaches(*made, text)) << text;
    for (const char* text : c.wrong) EXPECT_FALSE(reaches(*made, text)) << text;
  }
}

struct Refused {
  const char* grammar;
  const char* message;
};
void expect_refused(Result<grammar::Syntax> (*read)(std::string_view), const std::vector<Refused>& cases) {
  for (const Refused& c : cases) {
    const std::string message = refusal(read(c.grammar));
    EXPECT_NE(message.find(c.message), std::string::npos) << c.grammar << "\n" << message;
  }
}

TEST(Grammar, RegularExpressionsMatchWholeTexts) {
  expect_texts(grammar::read_regex,
               {{"ab*c", {"ac", "abc", "abbbc"}, {"", "ab", "abcc", "xac"}},
                {"^(?:a|bc)+$", {"a", "bc", "abca"}, {"", "b", "ab"}},
                {"[a-c]{2,3}", {"ab", "abc"}, {"a", "abca", "ad"}},
                {"x{4}", {"xxxx"}, {"xxx", "xxxxx"}},
                {"x{5,}", {"xxxxx", "xxxxxxxxx"}, {"xxxx"}},
                {"(?:ab){4,5}", {"abababab", "ababababab"}, {"ababab", "abababababab"}},
                {"(a?){0,5}b", {"b", "ab", "aaaaab"}, {"aaaaaab"}},
                {"\\d+\\.\\d{2}", {"3.14", "10.00"}, {"3.1", ".14", "3.145"}},
                {"[^a-z]", {"A", "\u00e9", "\u4f60", "\n"}, {"b", "AB"}},
                {"\u4f60[\u00e0-\u00ef]", {"\u4f60\u00e9"}, {"\u4f60", "\u4f60\u00f0", "\u4f60\xC3"}},
                {".", {"a", "\U0001F600"}, {"\n", "ab", ""}},
                {"\\u00e9\\x41\\u{1F600}", {"\u00e9A\U0001F600"}, {"\u00e9A"}},
                {"\\uD83D\\uDE00", {"\U0001F600"}, {"\uFFFD"}},
                {"\\p{Lu}\\P{Lu}", {"Ab", "\u00c9\u00e9"}, {"AB", "ab"}},
                {"a|", {"", "a"}, {"b"}},
                {"\\w+@[\\w.]+", {"a_1@b.c"}, {"@b", "a@"}},
                {"[\\]\\-a]+", {"]-a"}, {"\\"}},
                {"(?<name>a)", {"a"}, {"b"}}});
  expect_refused(grammar::read_regex, {{"(a", "lacks a )"},
                                       {"a)", "without a ("},
                                       {"[a", "lacks a ]"},
                                       {"*a", "repeats nothing"},
                                       {"a{3,2}", "larger than the largest"},
                                       {"(?=a)", "look-ahead"},
                                       {"(?<=a)", "look-behind"},
                                       {"(a)\\1", "back-reference"},
                                       {"\\bword", "word boundary"},
                                       {"a^b", "anchor inside, which is not supported, at byte 1"},
                                       {"[b-a]", "backwards"},
                                       {"[]", "can never be completed"},
                                       {"\xFF", "UTF-8"}});
}

TEST(Grammar, GbnfMatchesItsRootRule) {
  expect_texts(
      grammar::read_gbnf,
      {{"root ::= \"yes\" | \"no\"", {"yes", "no"}, {"", "yesno", "n"}},
       {"# a comment\nroot ::= item (\",\" item)*  # more\nitem ::= [0-9]+ |\n  \"x\"\n",
        {"1", "12,x,3"},
        {"", "1,", ",x"}},
       {"root ::= \"(\" root \")\" | \"a\"", {"a", "((a))"}, {"((a)", "()", "a)"}},
       {"root ::= a b\na ::= \"x\"?\nb ::= \"y\"{2,3}", {"yy", "xyyy"}, {"xy", "xyyyy"}},
       {"root ::= [^\"\\\\\\x7F\\x00-\\x1F]* \"\\n\"", {"a\u4f60\n", "\n"}, {"a", "\"\n"}},
       {"root ::= (\"a\"\n | \"b\")+\n", {"abba"}, {"", "c"}},
       {"root ::= \"a\" %json {\"type\": \"integer\"} | b\nb ::= %json {\"enum\":[\"}\\\"{\"]} \"c\"",
        {"a12", "\"}\\\"{\"c"},
        {"a", "a1.5", "\"}\"c"}},
       {"root ::= \"a\\fb\\b\"", {"a\fb\b"}, {"afbb"}},  // escapes that JSON writes
       {"root ::= . \"\\u00e9\"", {"x\u00e9", "\n\u00e9"}, {"\u00e9"}},
       {"root ::= list\nlist ::= \"-\" [a-z]+ \"\\n\" list | \"\"", {"", "-a\n-bc\n"}, {"-a", "-\n"}}});
  expect_refused(grammar::read_gbnf,
                 {{"a ::= \"x\"", "lacks a rule \"root\""},
                  {"root ::= b", "rule b is used but not defined"},
                  {"root ::= root \"x\" | \"y\"", "rule root begins with itself"},
                  {"root ::= a root | \"y\"\na ::= \"x\"?", "rule root begins with itself"},
                  {"root ::= \"x\" root", "rule root can never be completed"},
                  {"root ::= \"x", "inside of quotes"},
                  {"root = \"x\"", "lacks ::="},
                  {"root ::= \"x\"\nroot ::= \"y\"", "twice, in line 2"},
                  {"root ::= <think>", "names a token by its text"},
                  {"root ::= <[3>", "lacks ]>"},
                  {"root ::= <[]>", "lacks a number"},
                  {"root ::= <[16777216]>", "above 16777215"},
                  {"root ::= %json(q) {}", "lacks a comma"},
                  {"root ::= %json(q, t) {}\nq ::= \"\"", "the grammar's rule t"},
                  {"root ::= %json 5", "lacks a JSON schema, {...}, after %json"},
                  {"root ::= %json {\"type\": \"integer\"", "lacks a JSON schema"},
                  {"root ::= %json {\"type\": \"word\"}", "JSON schema, #"},
                  {"root ::= \"x\" )", "fits nowhere"},
                  {"", "lacks a rule \"root\""}});
}

TEST(Grammar, SchemasDescribeJson) {
  expect_texts(
      grammar::read_json_schema,
      {{R"({"type":"object"})",
        {"{}", R"({"a": [1, {"b":null}],"c":"\u00e9\ud83d\ude00"})", "{ }"},
        {"[]", "1", R"({"a":1,})", "{  }", R"({"a":"\ud83d"})", R"({a:1})"}},
       {"true", {"1", "\"x\"", "[[],{}]", "-0.5e+3", "false"}, {"01", "1.", "tru", "+1", "'x'", "1e100"}},
       {R"({"type":"object","properties":{"name":{"type":"string"},"id":{"type":"integer"}},"required":["name","id"],"additionalProperties":false})",
        {R"({"name":"x","id":1})", "{\n\"name\": \"\",\n\"id\":-7\n}"},
        {R"({"id":1,"name":"x"})", R"({"name":"x"})", R"({"name":"x","id":1,"a":2})",
         R"({"name":"x","id":1.5})", "{}"}},
       {R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"}},"required":["b"]})",
        {R"({"b":null})", R"({"a":null,"b":null})", R"({"b":null,"c":null})",
         R"({"a":null,"b":null,"c":null})"},
        {R"({"a":null})", R"({,"b":null})", R"({"b":null,})", R"({"a":null,"c":null})", "{}"}},
       {R"({"type":"object","properties":{"a":{"type":"null"}}})", {"{}", R"({"a":null})"}, {R"({"b":1})"}},
       {R"({"type":"object","properties":{"ab":{"type":"null"}},"additionalProperties":{"type":"integer"}})",
        {"{}", R"({"ab":null,"a":1,"abc":2,"b":3})", R"({"a":1})", R"({"ab":null})"},
        {R"({"ab":1})", R"({"a":1,"ab":2})", R"({"a":null})"}},
       {R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":3})",
        {"[true]", "[true, false,true]"},
        {"[]", "[true,false,true,false]", "[1]"}},
       {R"({"type":"array","items":{"type":"integer"},"minItems":6})",
        {"[1,2,3,4,5,6]", "[1,2,3,4,5,6,7]"},
        {"[1,2,3,4,5]"}},
       {R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
       {R"({"type":"string","minLength":2,"maxLength":4})",
        {R"("ab")", R"("你好你好")", R"("\n\u0041x")", R"("\ud83d\ude00a")"},
        {R"("a")", R"("abcde")", R"("\n")"}},
       {R"({"type":"string","pattern":"^[a-z]+$"})", {R"("abc")"}, {R"("")", R"("aB")"}},
       {R"({"type":"string","pattern":"b"})", {R"("b")", R"("abc")"}, {R"("ac")"}},
       {R"({"type":"string","pattern":"^a|b$"})", {R"("axy")", R"("xyb")"}, {R"("xay")"}},
       {R"({"type":"string","pattern":"^[\"\\\\\n]$"})", {R"("\"")", R"("\\")", R"("\n")"}, {R"("n")"}},
       {R"({"enum":["a",1,null,{"k":[true]}]})",
        {R"("a")", "1", "null", R"({"k": [true]})"},
        {R"("b")", "2", "{}"}},
       {R"({"const":"a\"b"})", {R"("a\"b")"}, {R"("ab")"}},
       {R"({"enum":["a",1],"type":"string"})", {R"("a")"}, {"1"}},
       {R"({"type":["string","null"],"maxLength":1})", {"null", R"("x")"}, {R"("xy")", "1"}},
       {R"({"anyOf":[{"type":"integer"},{"type":"string"}]})", {"1", R"("x")"}, {"null"}},
       {R"({"type":"object","properties":{"k":{"type":"integer"}},"anyOf":[{"required":["k"]},{"properties":{"m":{"const":2}},"required":["m"]}]})",
        {R"({"k":1})", R"({"k":1,"m":2})", R"({"m":2})"},
        {"{}", R"({"m":3})"}},
       {R"({"$defs":{"n":{"type":"object","properties":{"next":{"anyOf":[{"$ref":"#/$defs/n"},{"type":"null"}]}},"required":["next"]}},"$ref":"#/$defs/n"})",
        {R"({"next":null})", R"({"next":{"next":{"next":null}}})"},
        {"{}", R"({"next":{}})"}},
       {R"({"type":"object","properties":{"children":{"type":"array","items":{"$ref":"#"}}},"required":["children"]})",
        {R"({"children":[]})", R"({"children":[{"children":[]},{"children":[{"children":[]}]}]})"},
        {R"({"children":[{}]})"}},
       {R"({"type":"integer","minimum":-3,"maximum":120})",
        {"-3", "-1", "0", "7", "99", "100", "120"},
        {"-4", "121", "00", "-0", "1000", "1.0"}},
       {R"({"type":"integer","exclusiveMinimum":99})", {"100", "999", "1000000"}, {"99", "5", "-100"}},
       {R"({"type":"integer","maximum":-15})", {"-15", "-99", "-100"}, {"-14", "0", "-1", "15"}},
       {R"({"type":"number","minimum":-1.5,"exclusiveMaximum":2.25})",
        {"-1.5", "-1.50", "-1.49", "-0.1", "0", "2", "2.2", "2.249"},
        {"-1.51", "2.25", "2.250", "2.3", "3", "-2", "1e0"}},
       {R"({"type":"number","minimum":0.05})", {"0.05", "0.1", "3", "12.5"}, {"0", "0.04", "0.049", "-1"}},
       {R"({"type":"number","exclusiveMinimum":1,"exclusiveMaximum":2})",
        {"1.1", "1.001", "1.999"},
        {"1", "2", "1.0", "2.0"}},
       {R"({"type":"integer","multipleOf":7})", {"0", "7", "14", "-21", "700"}, {"8", "1", "13"}},
       {R"({"type":"integer","multipleOf":5,"minimum":3,"maximum":21})", {"5", "20"}, {"0", "25", "3"}},
       {R"({"type":"number","multipleOf":0.01})", {"1", "1.5", "1.25"}, {"1.255"}},
       {R"({"format":"date","type":"string"})",
        {R"("2024-02-29")", R"("1999-12-31")"},
        {R"("2023-02-29")", R"("2024-04-31")", R"("2024-13-01")", R"("0000-01-01")"}},
       {R"({"format":"time","type":"string"})",
        {R"("23:59:59Z")", R"("00:00:00.5+02:00")"},
        {R"("24:00:00Z")", R"("12:00")"}},
       {R"({"format":"date-time","type":"string"})",
        {R"("2024-01-01T00:00:00Z")"},
        {R"("2024-01-01 00:00:00Z")"}},
       {R"({"format":"uuid","type":"string"})",
        {R"("123e4567-e89b-12d3-a456-426614174000")"},
        {R"("123e4567e89b12d3a456426614174000")"}},
       {R"({"format":"ipv6","type":"string"})",
        {R"("::1")", R"("1:2:3:4:5:6:7:8")", R"("fe80::1:2")", R"("::")"},
        {R"("1:2")", R"(":::")", R"("1:2:3:4:5:6:7::8")"}}});
}

TEST(Grammar, SchemasThatCannotBeMetOrAreNotSupportedAreRefusedWithTheirPath) {
  expect_refused(
      grammar::read_json_schema,
      {{"{", "byte"},
       {"1", "#: a schema must be"},
       {"false", "#: false allows no value"},
       {R"({"type":"object","properties":{"a":{"type":"string","minLength":3,"maxLength":2}}})",
        "#/properties/a/minLength: is larger than maxLength"},
       {R"({"properties":{"x/y":{"type":"strin"}}})", "#/properties/x~1y/type: this type is not known"},
       {R"({"uniqueItems":true})", "#/uniqueItems: this keyword is not supported"},
       {R"({"oneOf":[]})", "#/oneOf"},
       {R"({"allOf":[{"properties":{"a":true}}],"additionalProperties":false})",
        "#/allOf/0: additionalProperties"},
       {R"({"anyOf":[]})", "#/anyOf: must be a list"},
       {R"({"anyOf":[{"type":"null"},{"not":{}}]})", "#/anyOf/1/not"},
       {R"({"enum":[]})", "#/enum: no value"},
       {R"({"enum":[1],"type":"string"})", "#/enum: no value"},
       {R"({"$ref":"#/$defs/a"})", "which the schema does not have"},
       {R"({"$ref":"http://x"})", "only references inside"},
       {R"({"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"})",
        "#/$defs/a: the value begins with itself"},
       {R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})", "can never be completed"},
       {R"({"type":"object","properties":{"a":true},"required":["b"],"additionalProperties":false})",
        "#/required: asks for \"b\""},
       {R"({"type":"object","properties":{"a":false},"required":["a"]})",
        "#/properties/a: the property is required"},
       {R"({"type":"integer","minimum":1.2,"maximum":1.8})", "no integer is between"},
       {R"({"type":"number","minimum":2,"exclusiveMaximum":2})", "no number is between"},
       {R"({"type":"string","format":"color"})", "#/format: this format is not supported"},
       {R"j({"type":"string","pattern":"(?=a)"})j", "#/pattern: the regular expression has look-ahead"},
       {R"({"items":{"items":{"pattern":"("}}})", "#/items/items/pattern"},
       {R"({"type":"array","items":{"type":"string"},"minItems":2,"maxItems":1})", "#/minItems"},
       {R"({"a":1,"a":2})", "two members of the same name"}});
}

TEST(Grammar, MasksAreWhatTheMatcherAllows) {
  const std::vector<Result<grammar::Syntax>> all = [] {
    std::vector<Result<grammar::Syntax>> v;
    v.push_back(grammar::read_json_schema("true"));
    v.push_back(grammar::read_json_schema(R"({"type":"array","items":{"type":"string","maxLength":7}})"));
    v.push_back(grammar::read_json_schema(R"({"type":"string","minLength":3,"maxLength":30})"));
    v.push_back(grammar::read_regex("(?:[a-z ]{3,9}\u00e9|\u4f60.{2,5})*"));
    v.push_back(grammar::read_gbnf("root ::= [^\"]* \"\\\"\" root?"));
    v.push_back(grammar::read_gbnf("root ::= ([^\"]* <[3]>)* \"\\\"\" root?"));
    return v;
  }();
  for (size_t g = 0; g < all.size(); ++g) {
    const auto made = over_tokens(all[g]);
    const grammar::TokenTrie& trie = made->trie();
    for (uint64_t seed = 0; seed < 10; ++seed) {
      grammar::TokenGrammar::Place place = made->start();
      uint64_t random = seed;
      for (int n = 0; n < 40; ++n) {
        grammar::TokenMask mask(trie.tokens());
        made->allowed(place, mask);
        std::vector<int32_t> ids;
        for (uint32_t i = 0; i < trie.tokens(); ++i) {
          const auto id = static_cast<int32_t>(i);
          ASSERT_EQ(mask[id], made->allows(place, id)) << "grammar " << g << " token " << trie.text(id);
          if (mask[id]) ids.push_back(id);
        }
        ASSERT_FALSE(ids.empty());
        ASSERT_TRUE(made->take(place, ids[splitmix64(random) % ids.size()]));
      }
    }
  }
}

TEST(Grammar, OnlyEndsAreAllowedAfterTheText) {
  const auto made = over_tokens(grammar::read_regex("a"));
  const grammar::TokenTrie& trie = made->trie();
  grammar::TokenGrammar::Place place = made->start();
  EXPECT_FALSE(made->complete(place));
  EXPECT_FALSE(made->allows(place, trie.ends()[0]));
  EXPECT_FALSE(made->allows(place, -1));
  EXPECT_FALSE(made->allows(place, 3)) << "a control token";
  ASSERT_TRUE(made->take(place, vocabulary().tokenizer.find("<0x61>")));
  EXPECT_TRUE(made->complete(place));
  for (int n = 0; n < 2; ++n) {
    grammar::TokenMask mask;
    made->allowed(place, mask);
    EXPECT_EQ(mask, trie.end_mask());
    ASSERT_TRUE(made->take(place, trie.ends()[0]));
  }
}

TEST(Grammar, ControlTokensAreAllowedWhereTheyAreNamed) {
  const auto made = over_tokens(grammar::read_gbnf("root ::= [^b]* <[3]> \"b\""));
  const int32_t control = vocabulary().tokenizer.find("<|control|>"),
                a = vocabulary().tokenizer.find("<0x61>"), b = vocabulary().tokenizer.find("<0x62>");
  ASSERT_EQ(control, 3);
  grammar::TokenGrammar::Place place = made->start();
  grammar::TokenMask mask;
  const auto expect_allowed = [&](bool the_control, bool the_a, bool the_b) {
    made->allowed(place, mask);
    EXPECT_EQ(mask[control], the_control);
    EXPECT_EQ(mask[a], the_a);
    EXPECT_EQ(mask[b], the_b);
    EXPECT_FALSE(mask[1]) << "another control token";
    EXPECT_FALSE(mask[vocabulary().tokenizer.find("<0xFF>")]) << "a byte that no text has";
  };
  expect_allowed(true, true, false);
  ASSERT_TRUE(made->take(place, a));
  expect_allowed(true, true, false);
  ASSERT_TRUE(made->take(place, control));
  expect_allowed(false, false, true);
  ASSERT_TRUE(made->take(place, b));
  EXPECT_TRUE(made->complete(place));
  // The text of a control token is not the token.
  EXPECT_FALSE(reaches(*made, "<|control|>b"));
}

TEST(Grammar, StringsOfASchemaCanStandInOtherQuotes) {
  const std::string rules = "\nq ::= \"'\"\nt ::= [^']*\nnone ::= \"\"";
  const auto of = [&](const char* root) {
    return grammar::read_gbnf("root ::= " + std::string(root) + rules);
  };
  const auto object = over_tokens(
      of(R"(%json(q, t) {"properties":{"a":{"type":"string"},"b c":{"enum":["x\"<",["y"],{"k":1}]},"d":{}},
            "required":["a"]})"));
  for (const char* text : {"{a:'say \"<hi>\"'}", "{a:'',\n'b c':'x\"<',d:{k:['z'],'y y':1}}",
                           "{a:'','b c':['y']}", "{a:'','b c':{k:1}}"})
    EXPECT_TRUE(reaches(*object, text)) << text;
  for (const char* text : {"{\"a\":'x'}", "{'a':'x'}", "{a:\"x\"}", "{a:'',b c:['y']}", "{a:'\\''}"})
    EXPECT_FALSE(reaches(*object, text)) << text;
  // Strings that must have a length or a pattern have no "<".
  const auto pattern = over_tokens(of(R"j(%json(none, t) {"type":"string","pattern":"^(?:[<-?]|\"\n)$"})j"));
  for (const char* text : {"=", "?", "\"\n"}) EXPECT_TRUE(reaches(*pattern, text)) << text;
  for (const char* text : {"<", "\"=\"", "\\n"}) EXPECT_FALSE(reaches(*pattern, text)) << text;
  const auto counted = over_tokens(of(R"(%json(none, t) {"type":"string","minLength":2,"maxLength":2})"));
  for (const char* text : {"\"\n", "\\'"}) EXPECT_TRUE(reaches(*counted, text)) << text;
  for (const char* text : {"a", "abc", "a<"}) EXPECT_FALSE(reaches(*counted, text)) << text;
}

TEST(Grammar, DeepTextsCanAlwaysBeCompleted) {
  const auto made = over_tokens(grammar::read_json_schema("true"));
  grammar::TokenGrammar::Place place = made->start();
  const int32_t open = vocabulary().tokenizer.find("[[");
  int depth = 0;
  while (made->take(place, open)) ++depth;
  EXPECT_GT(depth, 200);
  const int32_t close = vocabulary().tokenizer.find("<0x5D>");
  int closed = 0;
  while (made->take(place, close)) ++closed;
  EXPECT_TRUE(made->complete(place));
  EXPECT_EQ(closed, 2 * depth);
}

TEST(Grammar, ATextIsNotBegunThatNeedsMoreDepthThanThereIs) {
  const auto made = over_tokens(grammar::read_gbnf(
      "root ::= \"[\" root \"]\" | \"<\" p \">\"\np ::= \"p\" q \"p\"\nq ::= \"q\" r \"q\"\n"
      "r ::= \"r\" | \"rr\""));
  grammar::TokenGrammar::Place place = made->start();
  const auto take = [&](char c) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(c));
    return made->take(place, vocabulary().tokenizer.find(name));
  };
  int depth = 0;
  while (take('[')) ++depth;
  EXPECT_GT(depth, 1000);
  for (const char c : std::string_view("<pqrqp>")) EXPECT_TRUE(take(c)) << c;
  while (depth-- > 0) EXPECT_TRUE(take(']'));
  EXPECT_TRUE(made->complete(place));
}

TEST(Grammar, LongListsOfWordsShareTheirBeginnings) {
  std::string schema = "{\"enum\": [\"\", \"a\"";
  for (int i = 0; i < 20000; ++i) schema += ", \"word " + std::to_string(i) + "\"";
  const auto made = over_tokens(grammar::read_json_schema(schema + "]}"));
  for (const char* text : {"\"\"", "\"a\"", "\"word 0\"", "\"word 19999\"", "\"word 1999\""})
    EXPECT_TRUE(reaches(*made, text)) << text;
  for (const char* text : {"\"word\"", "\"word 20000\"", "\"word 00\"", "a"})
    EXPECT_FALSE(reaches(*made, text));
}

TEST(Grammar, GrammarsThatAskForTooMuchWorkAreRefused) {
  const auto refused = [](const Result<grammar::Syntax>& syntax) {
    EXPECT_NE(refusal(syntax).find("too large"), std::string::npos) << refusal(syntax);
  };
  std::string schema = R"({"$ref":"#/$defs/0","$defs":{"40":{"type":"object"})";
  for (int i = 0; i < 40; ++i) {  // each reference is followed twice
    const std::string next = R"({"$ref":"#/$defs/)" + std::to_string(i + 1) + "\"}";
    schema += ",\"" + std::to_string(i) + R"(":{"type":"object","anyOf":[)" + next + "," + next + "]}";
  }
  refused(grammar::read_json_schema(schema + "}}"));
  refused(grammar::read_regex("(((((((a|){0,16}){0,16}){0,16}){0,16}){0,16}){0,16}){0,16}"));
  std::string chain;  // each rule may be empty only if the next one may
  for (int i = 0; i < 20000; ++i) chain += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + "\n";
  refused(grammar::read_gbnf(chain + "r20000 ::= \"\"\nroot ::= r0"));
  std::string schemas = "root ::=";
  for (int i = 0; i < 100000; ++i) schemas += " %json {}";
  refused(grammar::read_gbnf(schemas));
  EXPECT_NE(refusal(grammar::read_regex("a" + std::string(100000, '*'))), "");
  EXPECT_NE(refusal(grammar::read_gbnf("root ::= \"a\"" + std::string(100000, '+'))), "");
}

TEST(Grammar, PlacesSurviveForgottenStates) {
  // A text that reaches so many states that they are forgotten several times.
  const auto made = over_tokens(grammar::read_regex("[a-z]{100000}"));
  grammar::TokenGrammar::Place place = made->start();
  const int32_t eight = vocabulary().tokenizer.find("aaaaaaaa");
  for (int n = 0; n < 100000 / 8; ++n) ASSERT_TRUE(made->take(place, eight)) << n;
  EXPECT_TRUE(made->complete(place));
}

TEST(Grammar, SampledTextsCanBeReached) {
  for (
      const char* schema :
      {R"({"type":"object","properties":{"a":{"type":"string"},"b":{"type":"array","items":{"type":"number"}}}})",
       "true", R"({"type":"string","format":"date-time"})"}) {
    const auto made = over_tokens(grammar::read_json_schema(schema));
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const auto text = sample_text(*made, seed);
      ASSERT_TRUE(text) << seed;
      EXPECT_TRUE(reaches(*made, *text)) << *text;
    }
  }
}

}  // namespace
}  // namespace thimble
