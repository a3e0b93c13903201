// Tests the tool calls that models write: each format, in pieces of any size, and the calls that the models'
// own chat templates write.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "gguf/gguf.h"
#include "templates/chat/writer.h"
#include "tests/support/answer_parts.h"
#include "tests/support/data.h"
#include "tests/support/gguf_writer.h"
#include "text/tokenizer.h"

namespace app::serve {
namespace {

// A request's tools: a function with a parameter of each type, and one without parameters.
const char* const kTools = R"([{"type": "function", "function": {"name": "look", "description": "d",
  "parameters": {"type": "object", "properties": {
    "text": {"type": "string", "description": "d"}, "digits": {"type": "string", "description": "d"},
    "count": {"type": "integer", "description": "d"}, "share": {"type": "number", "description": "d"},
    "fast": {"type": "boolean", "description": "d"}, "slow": {"type": "boolean", "nullable": true, "description": "d"},
    "names": {"type": "array", "items": {"type": "string"}, "description": "d"},
    "where": {"type": "object", "properties": {"x": {"type": "integer"}}, "description": "d"},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}], "description": "d"}},
    "required": ["text"]}}},
  {"type": "function", "function": {"name": "now", "description": "d",
    "parameters": {"type": "object", "properties": {}}}}])";

void expect(const std::vector<Answer>& answers) { expect_parts(answers, {}, Json::parse(kTools)); }

// Expects that these texts stay texts.
void expect_text(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) expect({{text, "[" + text + "]"}});
}

TEST(ServeCalls, InTags) {
  const std::string qwen =
      "<tool_call>\n<function=look>\n<parameter=text>\ntwo\nlines\n</parameter>\n<parameter=count>\n3\n"
      "</parameter>\n</function>\n</tool_call>";
  expect({
      {"I look.\n\n" + qwen, R"([I look.]look({"text":"two\nlines","count":3}))"},
      {qwen + "\n" + qwen, R"(look({"text":"two\nlines","count":3})look({"text":"two\nlines","count":3}))"},
      {"<tool_call>\n<function=now>\n</function>\n</tool_call>", "now({})"},
      {"<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call> x",
       "now({})now({})[x]"},
      {"<tool_call><function=now></function>", "now({})"},  // the turn ended before the closing mark
      // Qwen's models at times leave out the mark or the tag.
      {"<function=now>\n</function>\n</tool_call>\nx", "now({})[x]"},
      {"<function=now>\n</function> <b>", "now({})[<b>]"},
      {"<tool_call>\n<function=look>\n<parameter=count>\n3\n</parameter>\n</tool_call>",
       R"(look({"count":3}))"},
      // A value may contain the tags around it.
      {"<tool_call>\n<function=look>\n<parameter=text>\nI write </parameter> and </tool_call>\n</parameter>\n"
       "</function>\n</tool_call>",
       R"(look({"text":"I write </parameter> and </tool_call>"}))"},
      // In a list, it may contain even what comes after a value.
      {"<tool_call>\n<function=look>\n<parameter=names>\n[\"</parameter>\\n</function>\", "
       "\"</parameter></function>\"]\n"
       "</parameter>\n</function>\n</tool_call>",
       R"(look({"names":["</parameter>\n</function>","</parameter></function>"]}))"},
      {R"(<function=look>{"count": 3}</function>)", R"(look({"count":3}))"},
      {R"(<function name="look"><param name="text"><![CDATA[a<b
c]]></param><param name="count">3</param></function>)",
       R"(look({"text":"a<b\nc","count":3}))"},
      {"<seed:tool_call>\n<function=look>\n<parameter=text>a</parameter>\n</function>\n</seed:tool_call>",
       R"(look({"text":"a"}))"},
      {"<minimax:tool_call>\n<invoke name=\"look\">\n<parameter name=\"text\">3</parameter>\n</invoke>\n"
       "<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
       R"(look({"text":"3"})now({}))"},
      {"<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke "
       "name=\"other\">\n<\uff5cDSML\uff5cparameter name=\"a\" "
       "string=\"true\">3</\uff5cDSML\uff5cparameter>\n<\uff5cDSML\uff5cparameter name=\"b\" "
       "string=\"false\">3"
       "</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
       R"(other({"a":"3","b":3}))"},
  });
  expect_text({
      "<tool_call>\n<function=look>\n<parameter=count>\n3",
      "<tool_call>\n<function=look>\n<param",
      "<tool_call>\n<function=>\n</function>\n</tool_call>",
      "<tool_call>\n<function=look>\nwords\n</function>\n</tool_call>",
      "A call begins with <function=NAME> there.",
      "<minimax:tool_call>words</minimax:tool_call>",
  });
}

TEST(ServeCalls, InTagsInTags) {
  const std::string m = "]<]minimax[>[";
  const auto tag = [&](const std::string& name, const std::string& value) {
    return m + "<" + name + ">" + value + m + "</" + name + ">";
  };
  const auto call = [&](const std::string& inside, const std::string& name = "look") {
    return m + "<tool_call>\n" + m + "<invoke name=\"" + name + "\">" + inside + m + "</invoke>\n" + m +
           "</tool_call>";
  };
  expect({
      {"I look." + call(tag("text", "3") + tag("count", "3")), R"([I look.]look({"text":"3","count":3}))"},
      {call(tag("names", tag("item", "a <b>") + tag("item", "2"))), R"(look({"names":["a <b>","2"]}))"},
      {call(tag("names", "") + tag("where", "") + tag("text", "")),
       R"(look({"names":[],"where":{},"text":""}))"},
      {call(tag("where", tag("x", "1") + tag("y", tag("item", tag("item", "2"))))),
       R"(look({"where":{"x":1,"y":[[2]]}}))"},
      {call(tag("unknown", tag("item", "2") + "\n" + tag("item", "b"))), R"(look({"unknown":[2,"b"]}))"},
      {call("", "now"), "now({})"},
      {m + "<tool_call>\n" + m + "<invoke name=\"now\">" + m + "</invoke>\n" + m + "<invoke name=\"now\">" +
           m + "</invoke>\n" + m + "</tool_call> x",
       "now({})now({})[x]"},
      {m + "<tool_call>" + m + "<invoke name=\"now\">" + m + "</invoke>", "now({})"},
  });
  std::string deep = "x";
  for (int i = 0; i < 100; ++i) deep = tag("item", deep);
  expect_text({
      call(tag("text", deep)),
      call("words"),
      call(m + "<text>a" + m + "</other>"),
      m + "<tool_call>words" + m + "</tool_call>",
      m + "<tool_call>" + m + "<invoke name=\"look\">" + m + "<text>a",
      "The mark is " + m + ".",
  });
  // A null value is not written, so a missing member that is required and may be null is null.
  const Json tools = Json::parse(R"([{"type": "function", "function": {"name": "look", "parameters": {
      "type": "object", "required": ["a", "b", "c"], "properties": {
        "a": {"type": ["string", "null"]}, "b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
        "c": {"type": "string"}, "d": {"type": ["string", "null"]}},
      "$defs": {"b": {"type": "object", "required": ["e"], "properties": {"e": {"type": ["integer", "null"]},
        "f": {"type": "string"}}}}}}}])");
  expect_parts(
      {
          {call(""), R"(look({"a":null,"b":null}))"},
          {call(tag("a", "null") + tag("b", tag("f", "12"))),
           R"(look({"a":"null","b":{"f":"12","e":null}}))"},
          {call(tag("b", "")), R"(look({"b":{"e":null},"a":null}))"},
      },
      {}, tools);
}

TEST(ServeCalls, InTagsOfKeysAndValues) {
  expect({
      {"<tool_call>look<arg_key>text</arg_key><arg_value>3</arg_value><arg_key>count</arg_key>"
       "<arg_value>3</arg_value></tool_call>",
       R"(look({"text":"3","count":3}))"},
      {"I look.<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>a </arg_value> "
       "b</arg_value>\n</tool_call>\n",
       R"([I look.]look({"text":"a </arg_value> b"}))"},
      {"<tool_call>now</tool_call>", "now({})"},
      {"<tool_calls:opensource>\n<tool_call:opensource>look<tool_sep:opensource>\n<arg_key:opensource>text"
       "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
       "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
       R"(look({"text":"3"})now({}))"},
      {"<tool_call>now\n</tool_call><tool_call>now</tool_call>", "now({})now({})"},
  });
  expect_text({
      "<tool_call>then</tool_call>",  // no function has this name
      "<tool_call>look<arg_key>text</arg_key>",
      "<tool_call>look<arg_key>text</arg_key>words</tool_call>",
      "A call is between <tool_call> and </tool_call>.",
  });
}

TEST(ServeCalls, OfGemma) {
  const std::string q = "<|\"|>";
  const auto call = [](const std::string& inside) { return "<|tool_call>" + inside + "<tool_call|>"; };
  expect({
      {call("call:look{count:3,text:" + q + "a \"b\", {c}" + q + "}"),
       R"(look({"count":3,"text":"a \"b\", {c}"}))"},
      {call("call:look{names:[" + q + "a" + q + "," + q + "b" + q + "],where:{x:1,y:[true,null,-0.5]}}"),
       R"(look({"names":["a","b"],"where":{"x":1,"y":[true,null,-0.5]}}))"},
      {call("call:look{" + q + "text" + q + ":" + q + q + "}"), R"(look({"text":""}))"},
      {call("call:now{}") + call("call:now{}"), "now({})now({})"},
      {"<|tool_call>call:now{}", "now({})"},
      {call("call:look{text:Rome, count:3}"), R"(look({"text":"Rome","count":3}))"},  // without its quotes
      {"<|channel>thought\nI look.\n<channel|>" + call("call:now{}"), "{I look.}now({})"},
      {call("call:look{text:" + q + "a<tool_call|>b" + q + "}"), R"(look({"text":"a<tool_call|>b"}))"},
      {"I write <|tool_call> first. " + call("call:now{}"), "[I write <|tool_call> first.]now({})"},
  });
  expect_text({
      call("call:look{text:" + q + "a}"),
      call("call:look{a:1,}"),
      call("call:look{a}"),
      call("call:look{a:" + std::string(100, '[') + "1" + std::string(100, ']') + "}"),
      call("look{}"),
      call("call:{}"),
      "<|tool_call>call:loo",
  });
}

TEST(ServeCalls, AsPythonWritesThem) {
  const auto call = [](const std::string& inside) {
    return "<|tool_call_start|>" + inside + "<|tool_call_end|>";
  };
  expect({
      {call(R"([look(text='a', count=3, fast=True, slow=None)])"),
       R"(look({"text":"a","count":3,"fast":true,"slow":null}))"},
      {call(R"([look(text="it's", names=['a', "b",], where={'x': 1, "y": (1.5,)}), now()])") + "I look.",
       R"(look({"text":"it's","names":["a","b"],"where":{"x":1,"y":[1.5]}})now({})[I look.])"},
      {call(R"([look(text='it's, well, "so"')])"), R"(look({"text":"it's, well, \"so\""}))"},
      {call(R"([look(text='a\'b\n\x41\u00e9\\')])"), R"(look({"text":"a'b\nAé\\"}))"},
      {call(R"([look(text="\/\uD83D\ude00.")])"), R"(look({"text":"/😀."}))"},
      {call("now()"), "now({})"},
      {"<|tool_call_start|>[now()]", "now({})"},
      {call(R"([{"name": "look", "arguments": {"count": 3}}])"), R"(look({"count":3}))"},
  });
  expect_text({
      call("[look('a')]"),
      call("[look(count=three)]"),
      call("[look(text='a]"),
      call("look"),
      call("[]"),
      call("[look(a=" + std::string(100, '[') + "1" + std::string(100, ']') + ")]"),
      "<|tool_call_start|>[look(",
  });
}

TEST(ServeCalls, InListsOfJson) {
  const std::string list =
                        R"([{"name": "look", "arguments": {"count": 3}}, {"name": "now", "arguments": {}}])",
                    both = R"(look({"count":3})now({}))";
  expect({
      {"<TOOLCALL>" + list + "</TOOLCALL>", both},
      {"<|tool_call|>" + list, both},
      {"[TOOL_CALLS]" + list, both},
      {"\n\nfunction call<|role_sep|>\n{\"name\": \"now\", \"arguments\": {}}", "now({})"},
      {"[TOOL_CALLS]" + list + " x", both + "[x]"},
      {"<tool_call>\n" + list + "\n</tool_call>", both},
      {"<tool_call>\n{\"name\": \"now\"}\n{\"name\": \"now\"}\n</tool_call>", "now({})now({})"},
      {"<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", "
       "\"tool_name\": "
       "\"look\", \"parameters\": {\"count\": 3}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"now\", "
       "\"parameters\": {}}\n]<|END_ACTION|>",
       "{I look.}" + both},
  });
  expect_text({
      "<TOOLCALL>[]</TOOLCALL>",
      R"(<TOOLCALL>[{"name": "now"}, 3]</TOOLCALL>)",
      R"(<TOOLCALL>[{"name": "now"} {"name": "now"}</TOOLCALL>)",
      R"(<|START_ACTION|>[{"tool_name": "rm", "args": {"path": "/"}}]<|END_ACTION|>)",
      "<|tool_call|>[",
      "[TOOL_CALLS] is a mark.",
  });
}

TEST(ServeCalls, BetweenSeparators) {
  const std::string begin = "<\uff5ctool\u2581calls\u2581begin\uff5c>",
                    end = "<\uff5ctool\u2581calls\u2581end\uff5c>",
                    one = "<\uff5ctool\u2581call\u2581begin\uff5c>",
                    done = "<\uff5ctool\u2581call\u2581end\uff5c>", sep = "<\uff5ctool\u2581sep\uff5c>";
  expect({
      {begin + one + "look" + sep + R"({"count": 3})" + done + one + "now" + sep + "{}" + done + end,
       R"(look({"count":3})now({}))"},
      {"I look." + begin + one + "function" + sep + "look\n```json\n{\"count\": 3}\n```" + done + "\n" + one +
           "function" + sep + "now\n```json\n{}\n```" + done + end,
       R"([I look.]look({"count":3})now({}))"},
      {begin + one + "now" + sep + "{}" + done, "now({})"},
      {"<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"
       "\"count\": 3}"
       "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
       "<|tool_calls_section_end|>",
       R"(look({"count":3})now({}))"},
      {R"([TOOL_CALLS]look[ARGS]{"text": "a[TOOL_CALLS]"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{})",
       R"(look({"text":"a[TOOL_CALLS]"})now({}))"},
  });
  const std::string solar =
      "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>look<|tool_call:args|>";
  expect({
      {"I look." + solar +
           R"({"count": 3}<|tool_call:end|><|tool_call:begin|>a<|tool_call:name|>now<|tool_call:args|>{})"
           "<|tool_call:end|><|calls|>",
       R"([I look.]look({"count":3})now({}))"},
      {solar + "{}<|tool_call:end|>", "look({})"},  // the mark that ends calls may end the turn
      {R"(<|tools_prefix|>[{"look": {"count": 3}}, {"now": {}}]<|tools_suffix|>)",
       R"(look({"count":3})now({}))"},
      {R"(<|tools_prefix|>[{"now": {}}])", "now({})"},
  });
  expect({
      {"I look.\n>>>look\n{\"count\": 3}>>>now\n{}", R"([I look.]look({"count":3})now({}))"},
      {">>> now\n>>>now {}\n>>>now\n{}", "[>>> now\n>>>now {}]now({})"},
  });
  expect_text({">>>then\n{}", ">>>now\n", ">>>now\n3", ">>>", ">>>>", "a > b >>> c"});
  expect_text({
      solar + "3<|tool_call:end|><|calls|>",
      "<|tools_prefix|>[]<|tools_suffix|>",
      R"(<|tools_prefix|>[{"look": {}, "now": {}}]<|tools_suffix|>)",
      R"(<|tools_prefix|>[{"look": 3}]<|tools_suffix|>)",
      R"(<|tools_prefix|>{"look": {}}<|tools_suffix|>)",
  });
  expect_text({
      begin + one + "look" + sep + "count" + done + end,
      begin + "words" + end,
      begin + one + "function" + sep + "look\n```json\n{\"count\": 3}\n" + done + end,
      "<|tool_calls_section_begin|><|tool_call_begin|>look:0<|tool_call_argument_begin|>[]<|tool_call_end|>",
      "[TOOL_CALLS]look[ARGS]3",
  });
}

// Formats that write texts without quotes say nothing about types, so the tool's schema decides.
TEST(ServeCalls, HaveValuesOfTheTypesThatTheToolNames) {
  const auto value = [](const std::string& name, const std::string& written) {
    return "<tool_call>look<arg_key>" + name + "</arg_key><arg_value>" + written + "</arg_value></tool_call>";
  };
  const std::vector<std::pair<std::string, std::string>> values[] = {
      {{"text", "3"}, {"", R"("3")"}},
      {{"text", "true"}, {"", R"("true")"}},
      {{"text", " a "}, {"", R"(" a ")"}},
      {{"text", R"({"a": 1})"}, {"", R"("{\"a\": 1}")"}},
      {{"count", "3"}, {"", "3"}},
      {{"count", "three"}, {"", R"("three")"}},
      {{"count", "3 4"}, {"", R"("3 4")"}},
      {{"share", "1.50"}, {"", "1.50"}},
      {{"fast", "True"}, {"", "true"}},
      {{"slow", "None"}, {"", "null"}},
      {{"names", "['a', \"b\"]"}, {"", R"(["a","b"])"}},
      {{"where", "{'x': True}"}, {"", R"({"x":true})"}},
      {{"where", "{x}"}, {"", R"("{x}")"}},
      {{"either", "3"}, {"", "3"}},
      {{"either", "true"}, {"", R"("true")"}},
      {{"unknown", "3"}, {"", "3"}},
      {{"unknown", "three"}, {"", R"("three")"}},
      {{"unknown", "\"three\""}, {"", R"("\"three\"")"}},
      {{"unknown", "[1, 2]"}, {"", "[1,2]"}},
  };
  for (const auto& one : values)
    expect({{value(one[0].first, one[0].second), "look({\"" + one[0].first + "\":" + one[1].second + "})"}});
}

TEST(ServeCalls, AreSeenAlthoughTheirMarksAreControlTokens) {
  for (const char* mark :
       {"<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", "<|\"|>", "<arg_key>",
        "<|tool_call_start|>", "<|START_ACTION|>", "[ARGS]", "<\uff5ctool\u2581sep\uff5c>"})
    EXPECT_TRUE(is_mark(mark)) << mark;
  for (const char* other : {"", "<|im_end|>", "<turn|>"}) EXPECT_FALSE(is_mark(other)) << other;
}

// ---- calls that templates write ----

// A tokenizer without marks, which a writer needs.
struct Plain {
  Plain() {
    thimble::GgufWriter w;
    w.set("tokenizer.ggml.model", "llama")
        .set("tokenizer.ggml.tokens", std::vector<std::string>{"<s>", "</s>"});
    w.set("tokenizer.ggml.token_type", std::vector<int32_t>{3, 3});
    w.set("tokenizer.ggml.scores", std::vector<float>{0, 0});
    bytes = w.bytes();
    file = thimble::lend(bytes);
    gguf = std::move(*thimble::Gguf::parse(file, "plain"));
    tokenizer = std::move(*thimble::Tokenizer::load(gguf));
  }
  thimble::FileBytes bytes;
  thimble::MappedFile file;
  thimble::Gguf gguf;
  thimble::Tokenizer tokenizer;
};

// What a template writes after the question: an answer with `count` calls of look(arguments).
std::string answer_with_calls(const thimble::ChatWriter& writer, const Plain& plain, const Json& arguments,
                              size_t count) {
  const Json call = {
      {"id", "abcdefghi"}, {"type", "function"}, {"function", {{"name", "look"}, {"arguments", arguments}}}};
  const Json answer = {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array_t(count, call)}};
  const std::string messages = Json::array({{{"role", "user"}, {"content", "QUESTION"}}, answer}).dump();
  const std::string variables =
      Json{{"tools", Json::parse(kTools)}, {"functions", ""}, {"datetime", "now"}}.dump();
  thimble::Conversation c;
  c.messages_json = messages;
  c.variables_json = variables;
  const auto text = writer.write(c, plain.tokenizer);
  return text.ok() ? text->substr(std::min(text->size(), text->rfind("QUESTION"))) : "";
}

TEST(ServeCalls, AreThoseThatTheModelsTemplatesWrite) {
  const std::string folder = thimble::shared_file("data/templates");
  THIMBLE_NEEDS(folder);
  const Plain plain;
  // Templates whose calls have no marks that are read here; they write none, JSON alone, or their own form.
  const std::set<std::string> others = {"Apriel-1.6-15b-Thinker-fixed",
                                        "CohereForAI-c4ai-command-r-plus-tool_use",

                                        "GigaChat3.1-10B-A1.8B",
                                        "HuggingFaceTB-SmolLM3-3B",
                                        "LFM2-8B-A1B",
                                        "LFM2.5-Instruct",
                                        "fireworks-ai-llama-3-firefunction-v2",
                                        "google-gemma-2-2b-it",
                                        "ibm-granite-granite-3.3-2B-Instruct",
                                        "llama-cpp-deepseek-r1",
                                        "llama-cpp-rwkv-world",
                                        "meta-llama-Llama-3.1-8B-Instruct",
                                        "meta-llama-Llama-3.2-3B-Instruct",
                                        "meta-llama-Llama-3.3-70B-Instruct",
                                        "microsoft-Phi-3.5-mini-instruct",
                                        "openai-gpt-oss-120b",
                                        "unsloth-Apriel-1.5"};
  const std::string one_call = "GigaChat3-10B-A1.8B";  // writes the first of several
  std::set<std::string> silent;
  size_t templates = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".jinja") continue;
    const std::string name = entry.path().stem();
    SCOPED_TRACE(name);
    ++templates;
    std::ifstream file(entry.path(), std::ios::binary);
    const auto writer = thimble::ChatWriter::from_source(
        std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()));
    ASSERT_TRUE(writer.ok()) << writer.status().message();
    for (const char* written :
         {R"({"text":"Zürich"})", "{}", R"({"text":"two\nlines, \"quoted\" & <b>","digits":"12"})",
          R"({"text":"true"})", R"({"text":"</parameter> <arg_value> } ] , it's"})", R"({"text":" a "})",
          R"({"count":-3,"share":0.5,"fast":true,"names":["a","b, c"],"where":{"x":1,"y":[true,null]}})",
          R"({"slow":null})", R"({"names":[],"where":{}})", R"({"either":"some text"})",
          R"({"either":12})"}) {
      SCOPED_TRACE(written);
      const Json arguments = Json::parse(written);
      size_t count = 2;
      std::string answer = answer_with_calls(*writer, plain, arguments, count);
      if (answer.empty()) answer = answer_with_calls(*writer, plain, arguments, count = 1);
      const size_t open = find_open_mark(answer).at;
      AnswerFilter filter({}, Json::parse(kTools));
      std::vector<Part> parts, rest;
      if (open != std::string::npos) parts = filter.push(answer.substr(open));
      rest = filter.finish();
      parts.insert(parts.end(), rest.begin(), rest.end());
      std::erase_if(parts, [](const Part& part) { return !part.is_call(); });
      if (parts.empty()) silent.insert(name);
      if (others.count(name)) continue;
      const CallStyle style = written_calls(answer);
      EXPECT_TRUE(style.notation != CallNotation::kJson || !style.members.empty()) << answer;
      EXPECT_EQ(parts.size(), name == one_call ? 1 : count) << answer;
      for (const Part& part : parts) {
        EXPECT_EQ(part.name, "look");
        // Some templates sort the members.
        auto expected = nlohmann::json::parse(written);
        if (name == "MiniMax-M3") {  // null leaves no trace
          expected.erase("slow");
          if (expected.contains(nlohmann::json::json_pointer("/where/y"))) expected["where"]["y"][1] = "";
        }
        EXPECT_EQ(nlohmann::json::parse(part.arguments), expected) << answer;
      }
    }
  }
  EXPECT_EQ(templates, 65u);
  EXPECT_EQ(silent, others);
}

}  // namespace
}  // namespace app::serve
