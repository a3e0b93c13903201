// Tests grammars of tool calls: whatever is generated from random logits is read as calls whose arguments
// meet the tools' schemas.
#include <gtest/gtest.h>

#include "apps/serve/call_format.h"
#include "apps/serve/call_grammar.h"
#include "apps/serve/json.h"
#include "tests/support/answer_parts.h"
#include "tests/support/grammar_vocabulary.h"
#include "text/grammar/languages.h"

namespace app::serve {
namespace {

using thimble::grammar::TokenGrammar;
using thimble::test::GrammarVocabulary;

// A style: what a template writes for a call without arguments, and the marks that may be tokens.
struct Style {
  const char* written;
  std::vector<std::string> marks;
};
const std::vector<Style> kStyles = {
    {"<tool_call>\n<function=f>\n</function>\n</tool_call>", {"<tool_call>", "</tool_call>", "</parameter>"}},
    {"<tool_call>f</tool_call>",
     {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}},
    {"<function=f>{}</function>", {"</function>"}},
    {"<function=f>\n</function>", {"</parameter>"}},
    {"<function name=\"f\"></function>", {"</param>"}},
    {"<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>", {"</seed:tool_call>", "</parameter>"}},
    {"<minimax:tool_call>\n<invoke name=\"f\">\n</invoke>\n</minimax:tool_call>",
     {"</minimax:tool_call>", "</parameter>"}},
    {"<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name=\"f\">",
     {"\uff5cDSML\uff5c", "</\uff5cDSML\uff5cparameter>"}},
    {"<|tool_call>call:f{}<tool_call|>", {"<|tool_call>", "<tool_call|>", "<|\"|>"}},
    {"<|tool_call_start|>[f()]<|tool_call_end|>", {"<|tool_call_start|>", "<|tool_call_end|>"}},
    {"[TOOL_CALLS]f[ARGS]{}", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}},
    {"<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f",
     {"<\uff5ctool\u2581calls\u2581end\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>",
      "<\uff5ctool\u2581sep\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"}},
    {"<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>",
     {"</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>",
      "<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>",
      "</arg_value:opensource>"}},
    {"<|tool_calls|><|tool_call:begin|>call00000<|tool_call:name|>f<|tool_call:args|>{}",
     {"<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>"}},
    {"<|tools_prefix|>[{\"f\": {}}]", {"<|tools_suffix|>"}},
    {">>>f\n{}", {}},
    {"]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke "
     "name=\"f\">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
     {"]<]minimax[>["}},
    {R"([TOOL_CALLS][{"name": "f", "arguments": {}, "id": "call00000"}])", {"[TOOL_CALLS]"}},
    {R"(<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>)", {"<TOOLCALL>", "</TOOLCALL>"}},
    {R"(<|START_ACTION|>[ {"tool_call_id": "0", "tool_name": "f", "parameters": {}} ]<|END_ACTION|>)",
     {"<|START_ACTION|>", "<|END_ACTION|>"}},
    {R"(function call<|role_sep|> {"name": "f", "arguments": {}})", {"<|role_sep|>"}},
    {R"(<tool_call>{"name": "f", "arguments": {}}</tool_call>)", {"</tool_call>"}},
    {"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
     {"<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
      "<|tool_call_end|>"}},
};

const char* const kTools = R"([
  {"type": "function", "function": {"name": "look", "strict": true, "parameters": {
    "type": "object", "properties": {
      "text": {"type": "string"},
      "kind": {"enum": ["a", "b <c>", "null", "12", "it's \"so\"\n"]},
      "code": {"type": "string", "pattern": "^[^a]{2}[<>x]$"},
      "day": {"type": "string", "format": "date"},
      "short": {"type": "string", "minLength": 1, "maxLength": 3},
      "count": {"type": "integer", "minimum": -3, "maximum": 12},
      "share": {"type": "number"},
      "fast": {"type": "boolean"},
      "names": {"type": "array", "items": {"type": "string", "enum": ["x", "y, z"]}, "maxItems": 2},
      "where": {"$ref": "#/$defs/where"},
      "color": {"$ref": "#/$defs/color"},
      "any": {}},
    "required": ["text", "kind", "code", "count", "where", "color"], "additionalProperties": false,
    "$defs": {"color": {"type": "string", "enum": ["1", "true", "red"]},
              "where": {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string"},
                        "in": {"$ref": "#/$defs/where"}}, "required": ["x"]}}}}},
  {"type": "function", "function": {"name": "now", "strict": true, "parameters": {"type": "object", "properties": {}}}},
  {"type": "function", "function": {"name": "free", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}])";

// A mark in a grammar: control tokens by number, and text.
std::string spelled(const GrammarVocabulary& vocabulary, const std::vector<std::string>& marks,
                    std::string_view mark) {
  std::string expression, words;
  const auto add_words = [&] {
    if (!words.empty()) expression += " " + write_json(std::exchange(words, {}));
  };
  while (!mark.empty()) {
    const auto known = std::find_if(marks.begin(), marks.end(), [&](const std::string& m) {
      return mark.starts_with(m) && vocabulary.trie->is_control(vocabulary.tokenizer.find(m));
    });
    if (known == marks.end()) {
      words += mark[0];
      mark.remove_prefix(1);
      continue;
    }
    add_words();
    expression += " <[" + std::to_string(vocabulary.tokenizer.find(*known)) + "]>";
    mark.remove_prefix(known->size());
  }
  add_words();
  return "(" + expression + ")";
}

std::shared_ptr<TokenGrammar> compiled(const GrammarVocabulary& vocabulary,
                                       const thimble::Result<thimble::grammar::Syntax>& syntax) {
  EXPECT_TRUE(syntax.ok()) << syntax.status().message();
  if (!syntax.ok()) return nullptr;
  auto automaton = thimble::grammar::Automaton::make(*syntax);
  EXPECT_TRUE(automaton.ok()) << automaton.status().message();
  if (!automaton.ok()) return nullptr;
  return std::make_shared<TokenGrammar>(vocabulary.trie, std::move(*automaton));
}

// A text of the grammar from random logits; nothing: it did not end. After some tokens it prefers the end,
// marks, and what ends values.
std::optional<std::string> sampled(const GrammarVocabulary& vocabulary, const TokenGrammar& grammar,
                                   uint64_t seed) {
  const auto& trie = grammar.trie();
  TokenGrammar::Place place = grammar.start();
  thimble::grammar::TokenMask mask(trie.tokens());
  std::string text;
  const uint64_t patience = thimble::splitmix64(seed) % 60;
  for (uint64_t n = 0; n < 3000; ++n) {
    grammar.allowed(place, mask);
    int32_t best = -1;
    double most = -1;
    for (int32_t id = 0; id < static_cast<int32_t>(trie.tokens()); ++id) {
      if (!mask[id]) continue;
      double logit = static_cast<double>(thimble::splitmix64(seed) >> 40);
      const std::string_view piece = trie.text(id);
      if (n >= patience && trie.end_mask()[id]) logit *= 64;
      const bool closes = trie.is_control(id) || piece.starts_with("</") || piece.ends_with("|>") ||
                          piece == "\"" || piece == "\n";
      if (n >= patience && closes) logit *= 64;
      if (n >= patience && piece.size() == 1 && std::string_view("]}</").find(piece) != piece.npos)
        logit *= 16;
      if (n >= patience && !closes && piece.find_first_of("{[.eE+-\\") != piece.npos) logit /= 16;
      if (logit > most) most = logit, best = id;
    }
    if (best < 0 || !grammar.take(place, best)) return std::nullopt;
    if (trie.end_mask()[best]) return text;
    vocabulary.tokenizer.append_piece(best, true, text);
  }
  return std::nullopt;
}

class CallGrammars : public testing::TestWithParam<std::tuple<size_t, int32_t>> {
 protected:
  const Style& style_ = kStyles[std::get<0>(GetParam())];
  const GrammarVocabulary vocabulary_{"", style_.marks, std::get<1>(GetParam())};
  const Json tools_ = Json::parse(kTools);

  std::string grammar_of(const Json& tools, bool all, bool native = true) const {
    const auto spell = [this](std::string_view mark) { return spelled(vocabulary_, style_.marks, mark); };
    return call_grammar(written_calls(style_.written), tools, {all, true, spell, native});
  }
};

// Without quotes, a text cannot be told from a number.
TEST_P(CallGrammars, RefuseStrictToolsThatTheChatTemplatesFormatCannotShow) {
  const auto tools = [](const char* type) {
    return Json::parse(R"([{"type": "function", "function": {"name": "look", "strict": true, "parameters":
        {"type": "object", "properties": {"day": {"type": )" +
                       std::string(type) + "}}}}}]");
  };
  const Json simple = tools(R"("integer")"), mixed = tools(R"(["string", "integer"])");
  const bool cannot = !grammar_of(simple, true).empty() && grammar_of(mixed, true).empty();
  std::string refused;
  try {
    grammar_of(mixed, false);
  } catch (const Refusal& refusal) {
    refused = refusal.what();
  }
  EXPECT_EQ(refused, cannot ? "the strict tool \"look\" cannot be called in this model's format: "
                              "#/properties/day allows values of several types"
                            : "");
  // MiniMax M3's tags must match, so its calls are always checked.
  const bool nests = std::string_view(style_.written).starts_with("]<]minimax");
  if (!nests && !grammar_of(simple, false).empty()) {
    EXPECT_NE(grammar_of(mixed, false, false), "");
  }
}

TEST_P(CallGrammars, AllowOnlyCallsWhoseArgumentsMeetTheirSchemas) {
  std::map<std::string, std::shared_ptr<TokenGrammar>> schemas;  // of the arguments of each tool
  for (const Json& tool : tools_) {
    const std::string schema = is_strict(tool) ? write_json(arguments_schema(tool)) : R"({"type": "object"})";
    schemas[tool["function"]["name"]] = compiled(vocabulary_, thimble::grammar::read_json_schema(schema));
  }
  const std::string written = grammar_of(tools_, false);
  ASSERT_FALSE(written.empty());
  const auto grammar = compiled(vocabulary_, thimble::grammar::read_gbnf(written));
  ASSERT_TRUE(grammar) << written;
  const std::string mark(open_mark(*written_calls(style_.written).format));
  size_t finished = 0;
  std::set<std::string> called;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::optional<std::string> text = sampled(vocabulary_, *grammar, seed);
    if (!text) continue;
    ++finished;
    AnswerFilter filter({}, tools_);
    std::vector<Part> parts = filter.push("I look." + mark + *text), rest = filter.finish();
    parts.insert(parts.end(), rest.begin(), rest.end());
    ASSERT_GE(parts.size(), 2u) << *text;
    EXPECT_EQ(parts[0].text, "I look.");
    for (size_t i = 1; i < parts.size(); ++i) {
      ASSERT_TRUE(parts[i].is_call()) << *text;
      ASSERT_TRUE(schemas.count(parts[i].name)) << *text;
      called.insert(parts[i].name);
      ASSERT_TRUE(thimble::test::reaches(*schemas[parts[i].name], parts[i].arguments))
          << parts[i].name << parts[i].arguments << "\n"
          << *text;
    }
  }
  EXPECT_GE(finished, 50u);
  EXPECT_EQ(called.size(), 3u);
}

// A call in JSON has the members that the template writes.
TEST(CallGrammar, OfListsHasTheMembersOfTheTemplate) {
  const GrammarVocabulary vocabulary("", {}, 3);
  const Json tools = Json::parse(kTools);
  const auto grammar_of = [&](const CallStyle& style) {
    return call_grammar(style, Json::array({tools[1]}),
                        {true, false, [](std::string_view mark) {
                           return mark.empty() ? "\"\"" : write_json(std::string(mark));
                         }});
  };
  const auto allows = [&](const std::string& written, const std::string& text) {
    const auto grammar =
        compiled(vocabulary, thimble::grammar::read_gbnf(grammar_of(written_calls(written))));
    return grammar && thimble::test::reaches(*grammar, text);
  };
  const std::string mistral = R"([{"name": "now", "arguments": {}, "id": "abcdefghi"}])",
                    cohere = R"([ {"tool_call_id": "0", "tool_name": "now", "parameters": {}} ])";
  EXPECT_TRUE(allows("[TOOL_CALLS]" + mistral, mistral));
  EXPECT_FALSE(allows("[TOOL_CALLS]" + mistral, R"([{"name": "now", "arguments": {}}])"));
  EXPECT_FALSE(allows("[TOOL_CALLS]" + mistral, R"({"name": "now", "arguments": {}, "id": "abcdefghi"})"));
  EXPECT_TRUE(allows("<|START_ACTION|>" + cohere + "<|END_ACTION|>", cohere + "<|END_ACTION|>"));
  EXPECT_FALSE(allows("<|START_ACTION|>" + cohere + "<|END_ACTION|>", mistral + "<|END_ACTION|>"));
  // Members that are not known are not written.
  for (const char* other :
       {R"([TOOL_CALLS][{"name": "now"}])", R"([TOOL_CALLS][{"name": "now", "arguments": "{}"}])",
        R"([TOOL_CALLS][{"function": {"name": "now", "arguments": {}}}])"})
    EXPECT_EQ(grammar_of(written_calls(other)), "") << other;
  EXPECT_FALSE(grammar_of(mentioned_calls("Write <|tool_call|> and a list.")).empty());
  EXPECT_EQ(mentioned_calls("").format, nullptr);
}

// The calls of MiniMax M3, which has no null and no names in quotes.
class NestedCalls : public testing::Test {
 protected:
  const GrammarVocabulary vocabulary_{"", {}, 3};
  const CallStyle style_ = written_calls("]<]minimax[>[<tool_call>");

  static Json tool(const std::string& properties, bool strict = true) {
    return Json::parse(R"({"function": {"name": "look", "strict": )" +
                       std::string(strict ? "true" : "false") +
                       R"(, "parameters": {"type": "object", "properties": )" + properties + "}}}");
  }
  std::string grammar_of(const Json& tool, bool all) const {
    return call_grammar(style_, Json::array({tool}),
                        {all, false, [](std::string_view mark) { return write_json(std::string(mark)); }});
  }
};

TEST_F(NestedCalls, LeaveNullOut) {
  Json look = tool(R"({
    "names": {"type": "array", "items": {"type": ["string", "null"], "pattern": "^[a-z]{3}$"}, "minItems": 1, "maxItems": 2},
    "where": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    "color": {"enum": ["red", "blue", null]}})");
  Json& parameters = look["function"]["parameters"];
  parameters["required"] = {"names", "where", "color"};
  parameters["$defs"] = Json::parse(R"({"place": {"type": "object", "required": ["x"], "properties": {
    "y": {"type": "boolean"}, "x": {"anyOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]}}}})");
  const auto grammar = compiled(vocabulary_, thimble::grammar::read_gbnf(grammar_of(look, false)));
  const auto schema = compiled(vocabulary_, thimble::grammar::read_json_schema(write_json(parameters)));
  ASSERT_TRUE(grammar && schema);
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::optional<std::string> text = sampled(vocabulary_, *grammar, seed);
    if (!text) continue;
    AnswerFilter filter({}, Json::array({look}));
    const std::vector<Part> parts = filter.push(std::string(kNestedOpen) + *text);
    ASSERT_EQ(parts.size(), 1u) << *text;
    // What was left out is read last, so put the members in order.
    const Json read = Json::parse(parts[0].arguments);
    Json ordered;
    for (const char* name : {"names", "where", "color"}) ordered[name] = read.at(name);
    EXPECT_TRUE(thimble::test::reaches(*schema, write_json(ordered))) << parts[0].arguments << "\n" << *text;
  }
  const std::string m(kTagMark);
  const auto tag = [&](const std::string& name, const std::string& value) {
    return m + "<" + name + ">" + value + m + "</" + name + ">";
  };
  const auto allows = [&](const std::string& where, const std::string& color) {
    return thimble::test::reaches(*grammar, m + "<invoke name=\"look\">" + tag("names", tag("item", "abc")) +
                                                where + color + m + "</invoke>\n" + m + "</tool_call>");
  };
  EXPECT_TRUE(allows("", ""));
  EXPECT_TRUE(allows(tag("where", ""), tag("color", "red")));
  EXPECT_TRUE(allows(tag("where", tag("y", "true") + tag("x", "a")), ""));
  EXPECT_FALSE(allows("", tag("color", "null")));
  EXPECT_FALSE(allows(tag("where", tag("x", "null")), ""));
}

TEST_F(NestedCalls, ThatCannotBeWrittenAreRefusedByTheirPlace) {
  const std::pair<const char*, const char*> kSchemas[] = {
      {R"({"a": {"type": ["string", "integer"]}})", "#/properties/a allows values of several types"},
      {R"({"a": {"type": "object"}})", "#/properties/a is an object whose properties are not named"},
      {R"({"a": {"type": "array", "items": {"type": "object", "properties": {"b>": {"type": "null"}}}}})",
       "#/properties/a/items/properties/b> has a name that cannot be a tag"},
      {R"({"a": {"type": "object", "properties": {}, "required": ["b"], "additionalProperties": false}})",
       "#/properties/a says more than which properties there are"},
      {R"({"a": {"minLength": 2}})", "#/properties/a does not say its type"},
  };
  for (const auto& [properties, why] : kSchemas) {
    EXPECT_EQ(grammar_of(tool(properties), true), "") << properties;  // written in JSON instead
    try {
      grammar_of(tool(properties), false);
      ADD_FAILURE() << properties;
    } catch (const Refusal& refusal) {
      EXPECT_EQ(refusal.what(),
                std::string("the strict tool \"look\" cannot be called in this model's format: ") + why);
    }
    // Other tools are not checked then.
    const std::string free = grammar_of(tool(properties, false), false), m = "]<]minimax[>[";
    const auto grammar = compiled(vocabulary_, thimble::grammar::read_gbnf(free));
    ASSERT_TRUE(grammar);
    EXPECT_TRUE(thimble::test::reaches(*grammar, m + "<invoke name=\"look\">" + m + "<a>" + m + "<b>2" + m +
                                                     "</b>" + m + "</a>" + m + "</invoke>\n" + m +
                                                     "</tool_call>"));
  }
}

// Without its type, an object whose only member is an item would be read as a list.
TEST_F(NestedCalls, HaveNoItemsWhereAListMayBe) {
  Json look = tool(R"({"item": {"type": "string"}})");
  EXPECT_NE(grammar_of(look, true), "");
  look["function"]["parameters"].erase("type");
  EXPECT_EQ(grammar_of(look, true), "");
}

INSTANTIATE_TEST_SUITE_P(Styles, CallGrammars,
                         testing::Combine(testing::Range(size_t{0}, kStyles.size()), testing::Values(3, 4)),
                         [](const auto& made) {  // marks are control tokens, or text
                           return std::to_string(std::get<0>(made.param)) +
                                  (std::get<1>(made.param) == 3 ? "Control" : "Text");
                         });

}  // namespace
}  // namespace app::serve
