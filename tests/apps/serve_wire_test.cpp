// Tests the wire formats of thimble serve: the meaning of requests, and the bytes of answers.
#include <gtest/gtest.h>

#include <set>

#include "apps/serve/answer.h"
#include "apps/serve/api_anthropic.h"
#include "apps/serve/api_openai.h"
#include "apps/serve/call_grammar.h"
#include "apps/serve/filters.h"
#include "apps/serve/json.h"
#include "tests/support/answer_parts.h"

namespace app::serve {
namespace {

const Identity kWho{"7", 1700000000, "tiny"};
const std::string kHead = R"("created":1700000000,"model":"tiny","choices":)";

Asked asked(bool stream) {
  Asked a;
  a.stream = stream;
  return a;
}

// The status with which a body is refused; 0: it is accepted.
template <typename Read>
int status_of(Read read, const std::string& body) {
  try {
    read(parse_object(body));
    return 0;
  } catch (const Refusal& refusal) {
    return refusal.status;
  }
}

// ---- JSON from strangers ----

TEST(ServeJson, IsBoundedInDepthAndValues) {
  EXPECT_NO_THROW(parse_object(R"({"a":[[1]]})"));
  const std::string deep = "{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}";
  EXPECT_THROW(parse_object(deep), Refusal);
  std::string many = "{\"a\":[0";
  for (int i = 0; i < 1 << 18; ++i) many += ",0";
  EXPECT_THROW(parse_object(many + "]}"), Refusal);
  std::string names = "{\"a\":0";
  for (int i = 0; i < 1024; ++i) names += ",\"" + std::to_string(i) + "\":0";
  EXPECT_THROW(parse_object(names + "}"), Refusal);
}

// JSON inside JSON: arguments from a client, and a call from a model. Half a million levels would end the
// process; such values stay text.
TEST(ServeJson, IsBoundedInTextsThatAreJson) {
  const std::string deep(500'000, '[');
  const Json call = {{"function", {{"name", "f"}, {"arguments", deep + std::string(deep.size(), ']')}}}};
  const Json message = {{"role", "assistant"}, {"tool_calls", Json::array({call})}};
  const Asked asked = read_chat_completion(parse_object(write_json({{"messages", Json::array({message})}})));
  EXPECT_TRUE(asked.task.messages[0]["tool_calls"][0]["function"]["arguments"].is_string());
  AnswerFilter filter({}, Json::array());
  const std::string text = "<tool_call>{\"name\": \"f\", \"arguments\": " + deep + "</tool_call>";
  std::vector<Part> parts = filter.push(text);
  for (const Part& part : parts) EXPECT_FALSE(part.is_call());
}

TEST(ServeJson, RefusesBodiesThatAreNotUtf8OrNotObjects) {
  for (const char* text :
       {"", "{", "[]", "1", "null", "{\"a\":\"\xff\"}", "{\"a\":\"\\ud800\"}", "{\"a\":1e999}"})
    EXPECT_THROW(parse_object(text), Refusal) << text;
}

TEST(ServeJson, WritesInvalidUtf8AsReplacementCharacters) {
  EXPECT_EQ(write_json({{"a", "x\xff"}}), "{\"a\":\"x\xEF\xBF\xBD\"}");
}

// ---- filters ----

TEST(ServeStops, EndAtTheFirstAndHoldBackWhatMayBeginOne) {
  StopFilter filter({"END", "NOW"});
  EXPECT_EQ(filter.push("one E"), "one ");
  EXPECT_EQ(filter.push("N"), "");
  EXPECT_EQ(filter.push("X NO"), "ENX ");
  EXPECT_EQ(filter.push("W and END"), "");
  ASSERT_NE(filter.met(), nullptr);
  EXPECT_EQ(*filter.met(), "NOW");
  EXPECT_EQ(filter.push("more"), "");
  EXPECT_EQ(filter.finish(), "");
}

TEST(ServeStops, GiveWhatWasHeldBackAtTheEnd) {
  StopFilter filter({"END"});
  EXPECT_EQ(filter.push("the EN"), "the ");
  EXPECT_EQ(filter.finish(), "EN");
  EXPECT_EQ(filter.met(), nullptr);
}

const std::string kCall = R"(<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>)";

TEST(ServeTools, CallsAreFoundHoweverTheTextIsCut) {
  expect_parts({
      {"plain <b> text\n", "[plain <b> text\n]"},
      {"Let me see.\n" + kCall, R"([Let me see.]add({"a":1}))"},
      {kCall + "\n" + kCall + "\n", R"(add({"a":1})add({"a":1}))"},
      {"\n" + kCall + "\n\ndone", R"(add({"a":1})[done])"},
      {R"(<tool_call>{"name": "now"})", "now({})"},  // the turn ended before the closing mark
      {"<tool_call>no JSON</tool_call> x", "[<tool_call>no JSON</tool_call> x]"},
      {R"(<tool_call>{"name": "add", "arguments": 1}</tool_call>)",
       R"([<tool_call>{"name": "add", "arguments": 1}</tool_call>])"},
      {"a <tool_ca", "[a <tool_ca]"},
      {"a <tool_call>", "[a <tool_call>]"},
      {"I write <tool_call> first.\n" + kCall, R"([I write <tool_call> first.]add({"a":1}))"},
      {"<tool_call>{'a': 1}</tool_call> " + kCall, R"([<tool_call>{'a': 1}</tool_call>]add({"a":1}))"},
      {R"(<tool_call>{"name": "say", "arguments": {"t": "</tool_call>"}}</tool_call>)",
       R"(say({"t":"</tool_call>"}))"},
  });
  expect_parts({{kCall + " ", "[" + kCall + " ]"}}, {}, nullptr);
}

TEST(ServeTools, CallsAreFoundWithoutTheirMarksAtTheBeginning) {
  const std::string bare = R"({"name": "add", "arguments": {"t": "}"}})",
                    json = R"({"name": "Ann", "age": 3})";
  expect_parts({
      {bare, R"(add({"t":"}"}))"},
      {" " + bare + "\n" + bare + "\ndone", R"(add({"t":"}"})add({"t":"}"})[done])"},
      {R"({ "name" : "add", "parameters": {"a": 1} })", R"(add({"a":1}))"},
      {"<think>\na\n</think>\n\n" + bare, R"({a}add({"t":"}"}))"},
      {"As JSON: " + bare, "[As JSON: " + bare + "]"},
      {json, "[" + json + "]"},
      {R"({"name": "Ann"})", R"([{"name": "Ann"}])"},
      {R"({"a": 1} )", R"([{"a": 1} ])"},
      {R"({"name": "ad)", R"([{"name": "ad])"},
      {"{", "[{]"},
      {"{" + std::string(100, ' ') + "\"name\": 1}", "[{" + std::string(100, ' ') + "\"name\": 1}]"},
  });
  expect_parts({{bare, "[" + bare + "]"}}, {}, nullptr);
}

// Models that were not trained with tools write calls as they write code.
TEST(ServeTools, AFencedBlockThatIsExactlyACallOfAToolCounts) {
  const Json tools = Json::array({{{"type", "function"}, {"function", {{"name", "add"}}}}});
  const std::string call = R"({"name": "add", "arguments": {"t": "```"}})", made = R"(add({"t":"```"}))";
  const auto block = [](const std::string& text) { return "```json\n" + text + "\n```"; };
  const std::string other = block(R"({"name": "rm", "arguments": {}})"), code = "```python\nadd(1)\n```",
                    more = block(call + "\n// so"), without = block(R"({"name": "add"})"),
                    data = block(R"({"name": "add", "age": 3})");
  expect_parts(
      {
          {block(call), made},
          {"I add.\n\n" + block(call) + "\n", "[I add.]" + made},
          {"```\n[" + call + ", " + call + "]\n```\nDone.", made + made + "[Done.]"},
          {"```tool_call\n" + call + "```", made},
          {"```json\n" + call, made},  // the turn ended before the fence
          {"<think>\na\n</think>\n" + block(call), "{a}" + made},
          {"<think>" + block(call) + "</think>no", "{" + block(call) + "}[no]"},
          {block(call) + block(call), made + made},
          {code + "\n" + block(call), "[" + code + "]" + made},
          {other, "[" + other + "]"},  // no such tool
          {more, "[" + more + "]"},
          {without, "[" + without + "]"},
          {data, "[" + data + "]"},
          {"Write ```" + call + "``` so.", "[Write ```" + call + "``` so.]"},
          {"```json\n{\"na", "[```json\n{\"na]"},
          {"```js", "[```js]"},
          {"a ``", "[a ``]"},
      },
      {}, tools);
  expect_parts({{block(call), "[" + block(call) + "]"}}, {}, nullptr);
}

Json tool_named(const char* name, const Json& parameters, bool strict = false) {
  return {{"type", "function"},
          {"function", {{"name", name}, {"parameters", parameters}, {"strict", strict}}}};
}

TEST(ServeTools, TheSchemaOfACallHasThoseOfItsTools) {
  const Json point =
      Json::parse(R"({"type":"object","properties":{"at":{"$ref":"#/$defs/p"},"all":{"$ref":"#"}},
      "$defs":{"p":{"type":"array","items":{"$ref":"#/$defs/p"}}}})");
  const Json tools = Json::array({tool_named("draw", point, true), tool_named("stop", Json::object())});
  const Json one = call_schema(tools, "draw", true);
  EXPECT_EQ(one["properties"]["name"], Json({{"const", "draw"}}));
  EXPECT_EQ(one["required"], Json({"name", "arguments"}));
  const Json& arguments = one["properties"]["arguments"];
  EXPECT_EQ(arguments["properties"]["at"]["$ref"], "#/properties/arguments/$defs/p");
  EXPECT_EQ(arguments["properties"]["all"]["$ref"], "#/properties/arguments");
  EXPECT_EQ(arguments["$defs"]["p"]["items"]["$ref"], "#/properties/arguments/$defs/p");
  const Json all = call_schema(tools, "", true);
  ASSERT_EQ(all["anyOf"].size(), 2u);
  EXPECT_EQ(all["anyOf"][0]["properties"]["arguments"]["properties"]["at"]["$ref"],
            "#/anyOf/0/properties/arguments/$defs/p");
  // A tool without parameters has no arguments.
  EXPECT_EQ(all["anyOf"][1]["properties"]["arguments"]["additionalProperties"], false);
  // Only the arguments of strict tools are checked where the model chooses.
  EXPECT_EQ(call_schema(tools, "", false)["anyOf"][1]["properties"]["arguments"], Json({{"type", "object"}}));
}

TEST(ServeTools, AreTextIfTheTemplateHasNone) {
  const Json call = {{"type", "function"}, {"function", {{"name", "add"}, {"arguments", {{"a", 1}}}}}};
  const Json messages = Json::array({{{"role", "system"}, {"content", "Be brief."}},
                                     {{"role", "user"}, {"content", "1+2?"}},
                                     {{"role", "assistant"}, {"content", ""}, {"tool_calls", {call}}},
                                     {{"role", "tool"}, {"content", "3"}}});
  Json out = with_calls_as_text(messages);
  EXPECT_EQ(out[0], messages[0]);
  describe_tools(Json::array({tool_named("add", Json::object())}), out);
  const std::string system = out[0]["content"];
  EXPECT_EQ(system.find("Be brief.\n\nYou may call these functions:\n{\"name\":\"add\""), 0u) << system;
  EXPECT_EQ(out[2], (Json{{"role", "assistant"}, {"content", R"({"name":"add","arguments":{"a":1}})"}}));
  EXPECT_EQ(out[3], (Json{{"role", "user"}, {"content", "The function returned:\n3"}}));
}

TEST(ServeTools, ACallBeginsAsThePromptDescribesIt) {
  EXPECT_EQ(call_mark("in <tool_call></tool_call> tags:\n<tool_call>\n{\"name\": <name>"), "<tool_call>\n");
  EXPECT_EQ(call_mark("<tool_call>\n<function=name>"), "");
  const auto notation = [](const char* prompt) { return described_calls(prompt).notation; };
  EXPECT_EQ(notation("<tool_call></tool_call> tags:\n<tool_call>\n<function=name>"), CallNotation::kTags);
  EXPECT_EQ(notation("<tool_call>\n{\"name\": <name>"), CallNotation::kJson);
  EXPECT_EQ(described_calls("no tools").format, nullptr);
  EXPECT_EQ(call_mark("no tools"), "");
}

TEST(ServeTools, ThePlaceOfAnAnswerIsKnown) {
  using Place = AnswerFilter::Place;
  const auto place = [](const std::string& text, const Opening& opening = {}) {
    AnswerFilter filter(opening, Json::array());
    filter.push(text);
    return filter.place();
  };
  EXPECT_EQ(place(""), Place::kStart);
  EXPECT_EQ(place("\n"), Place::kStart);
  EXPECT_EQ(place("a"), Place::kInside);
  EXPECT_EQ(place("{"), Place::kInside);
  EXPECT_EQ(place("<think>a"), Place::kBefore);
  EXPECT_EQ(place("<think>a</think>\n\n"), Place::kStart);
  EXPECT_EQ(place("a <tool_call>"), Place::kCall);
  EXPECT_EQ(place("<tool_call>\n"), Place::kCall);
  EXPECT_EQ(place("<tool_call>{"), Place::kInside);
  EXPECT_EQ(place("<|tool_call_start|>"), Place::kCall);
  const Opening thought = opening_of("<|im_start|>assistant\n<think>\n");
  EXPECT_EQ(place("", thought), Place::kBefore);
  EXPECT_EQ(place("a</think>", thought), Place::kStart);
  const Opening harmony = opening_of("<|start|>assistant");
  EXPECT_EQ(place("", harmony), Place::kBefore);
  EXPECT_EQ(place("<|channel|>analysis<|message|>", harmony), Place::kBefore);
  EXPECT_EQ(place("<|channel|>analysis<|message|>a<|end|>", harmony), Place::kBefore);
  EXPECT_EQ(
      place("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>", harmony),
      Place::kStart);
  EXPECT_EQ(place("<|channel|>final<|message|>a", harmony), Place::kInside);
  EXPECT_EQ(place("<|channel|>commentary to=functions.f json<|message|>", harmony), Place::kCall);
  EXPECT_EQ(place("<|channel|>commentary to=functions.f json<|message|>{", harmony), Place::kInside);
  const Opening solar = opening_of("<|begin|>assistant");
  EXPECT_EQ(place("", solar), Place::kStart);
  EXPECT_EQ(place("<|think|>a", solar), Place::kBefore);
  EXPECT_EQ(place("<|think|>a<|end|>", solar), Place::kBefore);
  EXPECT_EQ(place("<|think|>a<|end|><|begin|>assistant", solar), Place::kStart);
  EXPECT_EQ(place("<|think|>a<|end|><|begin|>assistant<|content|>", solar), Place::kStart);
  EXPECT_EQ(place("<|content|>a", solar), Place::kInside);
  EXPECT_EQ(place("<|tool_calls|>", solar), Place::kCall);
  EXPECT_EQ(place("<|inner_prefix|>a<|tools_prefix|>"), Place::kCall);
}

TEST(ServeTools, ArgumentsAreThoseThatWereWritten) {
  const auto call = [](const std::string& json) { return "<tool_call>" + json + "</tool_call>"; };
  expect_parts({
      {call(R"({"name": "add", "parameters": {"a": 1}})"), R"(add({"a":1}))"},
      {call(R"({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}})"),
       R"(add({"a":1}))"},
      {call(R"({"arguments": "{\"a\": 1}", "name": "add"})"), R"(add({"a":1}))"},
      {call(R"({"name": "add", "arguments": ""})"), "add({})"},
      {call(R"({"name": "add", "arguments": null})"), "add({})"},
      {call(R"({"name": "add", "arguments": {"a": 12345678901234567890123, "b": 1.10, "c": 1e2}})"),
       R"(add({"a":12345678901234567890123,"b":1.10,"c":1e2}))"},
      {call("{\"name\": \"say\", \"arguments\": {\"t\": \"a\nb  c\"}}"), R"(say({"t":"a\u000ab  c"}))"},
  });
  // A function call without its arguments would do something else.
  for (const char* other :
       {R"({"name": "rm", "args": {"p": "/tmp/x"}})", R"({"name": "rm", "p": "/tmp/x"})",
        R"({"name": "rm", "argu\u006dents": {"p": "/tmp/x"}})", R"({"name": "rm", "arguments": []})"})
    expect_parts({{call(other), "[" + call(other) + "]"}});
}

// ---- thoughts ----

TEST(ServeThoughts, AreApartFromTheAnswer) {
  expect_parts({
      {"<think>\nTwo and\n\ntwo.\n</think>\n\nFour.\n", "{Two and\n\ntwo.}[Four.\n]"},
      {"<think>\n\n</think>\n\nFour.", "[Four.]"},
      {" [THINK]a[/THINK]b", "{a}[b]"},
      {"<|channel>thought\na\n<channel|>b", "{a}[b]"},
      {"<think:opensource>a</think:opensource>b", "{a}[b]"},
      {"<|inner_prefix|>a<|inner_suffix|>b", "{a}[b]"},
      {"<think>cut", "{cut}"},
      {"Say <think> and </think>.", "[Say <think> and </think>.]"},
      {"<thin", "[<thin]"},
  });
  Opening opened = opening_of("<|im_start|>assistant\n<think>\n");
  expect_parts({{"Two.\n</think>\n\nFour.", "{Two.}[Four.]"}, {"cut", "{cut}"}}, opened);
  opened.goes_on = true;
  expect_parts({{"<think> is a mark.", "[<think> is a mark.]"}}, opened);
}

TEST(ServeThoughts, HoldNoCalls) {
  const std::string draft =
      "<think>\nMaybe <tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>?\n</think>\n\n";
  expect_parts({
      {draft + kCall, R"({Maybe <tool_call>{"name": "rm", "arguments": {}}</tool_call>?}add({"a":1}))"},
      {"<think>I write <tool_call> now</think>" + kCall, R"({I write <tool_call> now}add({"a":1}))"},
  });
}

TEST(ServeThoughts, ApertusCallsInTheMiddle) {
  const std::string now = R"(<|tools_prefix|>[{"now": {}}]<|tools_suffix|>)";
  const std::vector<Answer> answers = {
      {"<|inner_prefix|>I look." + now, "{I look.}now({})"},
      {"<|inner_prefix|>I look." + now + "So.<|inner_suffix|>Four." + now + "five",
       "{I look.}now({}){So.}[Four.]now({})[five]"},
      {"<|inner_prefix|>a <|tools_prefix|> b<|inner_suffix|>c", "{a <|tools_prefix|> b}[c]"},
      {"<|inner_prefix|>a<|tools_prefix|>[", "{a<|tools_prefix|>[}"},
  };
  expect_parts(answers);
  expect_parts({{"<|inner_prefix|>I look." + now, "{I look." + now + "}"}}, {}, nullptr);
}

TEST(ServeThoughts, MessagesOfSolarOpen) {
  const Opening solar = opening_of("<|begin|>user<|content|>2+2?<|end|><|begin|>assistant");
  const std::string thought = "<|think|>Two and two.<|end|>", turn = "<|begin|>assistant",
                    call =
                        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>look<|tool_call:"
                        "args|>{\"a\": 1}<|tool_call:end|>";
  expect_parts(
      {
          {thought + turn + "<|content|>Four.<|end|>", "{Two and two.}[Four.]"},
          {"<|content|>Four.\n", "[Four.\n]"},
          {thought + turn + thought + turn + "<|content|>Four.", "{Two and two.\n\nTwo and two.}[Four.]"},
          {thought + turn + call, R"({Two and two.}look({"a":1}))"},
          {thought + turn + "<|content|>I look.<|end|>" + turn + call + "<|calls|>",
           R"({Two and two.}[I look.]look({"a":1}))"},
          {"<|think|>cut", "{cut}"},
          {thought + "<|begin|>assis", "{Two and two.}"},
          {thought + "<|begin|>Four.", "{Two and two.}[Four.]"},
          {"No mark.<|end|>", "[No mark.]"},
          {"<|begin|><|begin|><|tools_prefix|><|end|>", "[<|tools_prefix|><|end|>]"},
          {"<|content|>I write <|think|>.", "[I write <|think|>.]"},
      },
      solar);
  const std::string text = "<|tool_calls|>{}";
  expect_parts({{text, "[" + text + "]"}}, solar, nullptr);
  Opening going_on = solar;
  going_on.goes_on = true;
  expect_parts({{"ur.<|end|>", "[ur.]"}}, going_on);
}

TEST(ServeTools, RecipientsOfFunctionary) {
  const Opening opening = opening_of("<|start_header_id|>assistant<|end_header_id|>\n\n>>>");
  const Json tools = Json::parse(R"([{"type": "function", "function": {"name": "add"}}])");
  expect_parts(
      {
          {"all\nIt is 3.", "[It is 3.]"},
          {"all\nI add.\n>>>add\n{\"a\": 1}", R"([I add.]add({"a":1}))"},
          {"add\n{\"a\": 1}>>>add\n{}", R"(add({"a":1})add({}))"},
          {"It is 3.", "[It is 3.]"},
          {"sub\n{}", "[sub\n{}]"},
          {"all", ""},
      },
      opening, tools);
  expect_parts({{"all\nIt is 3.", "[It is 3.]"}, {"add\n{}", "[add\n{}]"}}, opening, nullptr);
  AnswerFilter filter(opening, tools);
  EXPECT_TRUE(filter.names());
  EXPECT_EQ(filter.place(), AnswerFilter::Place::kStart);
  filter.push("a");
  EXPECT_EQ(filter.place(), AnswerFilter::Place::kBefore);
  filter.push("ll\n");
  EXPECT_FALSE(filter.names());
  EXPECT_EQ(filter.place(), AnswerFilter::Place::kStart);
  EXPECT_EQ(begun_answer(opening, {{"role", "assistant"}, {"content", "It"}}, "<think>"), "all\nIt");
}

TEST(ServeThoughts, ChannelsOfHarmony) {
  const Opening harmony = opening_of("<|start|>user<|message|>2+2?<|end|><|start|>assistant");
  const std::string analysis = "<|channel|>analysis<|message|>Two and two.<|end|>";
  expect_parts(
      {
          {analysis + "<|start|>assistant<|channel|>final<|message|>Four.", "{Two and two.}[Four.]"},
          {analysis + "<|start|>assistant<|channel|>final<|message|>Four.<|return|>",
           "{Two and two.}[Four.]"},
          {analysis + "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>", "{Two and two.\n\nSo.}"},
          {analysis +
               "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
               "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"a\": 1}<|call|>",
           R"({Two and two.}[I look.]look({"a":1}))"},
          {analysis + "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
           "{Two and two.}now({})"},
          {"<|channel|>commentary to=functions.look<|message|>no JSON<|call|>", "[no JSON]"},
          {analysis + "<|start|>assistant<|chan", "{Two and two.}"},
          {"No channels.", "[No channels.]"},
          {"No <|message|>.", "[No <|message|>.]"},
          {"<|start|><|start|>" + std::string(600, 'x'), "[" + std::string(600, 'x') + "]"},
      },
      harmony);
  expect_parts({{"<|channel|>commentary to=functions.look<|message|>{}<|call|>", "[{}]"}}, harmony, nullptr);
  Opening going_on = harmony;
  going_on.goes_on = true;
  expect_parts({{"ur.<|return|>", "[ur.]"}}, going_on);
}

TEST(ServeThoughts, AnAnswerIsBegunInItsFormat) {
  Json message = {{"role", "assistant"}, {"content", "Fo"}};
  const Opening plain, thought = opening_of("<think>\n"), harmony = opening_of("<|start|>assistant"),
                       solar = opening_of("<|begin|>assistant");
  EXPECT_EQ(begun_answer(plain, message, "<think>"), "Fo");
  EXPECT_EQ(begun_answer(thought, message, "<think>"), "\n</think>\n\nFo");
  EXPECT_EQ(begun_answer(harmony, message, "<think>"), "<|channel|>final<|message|>Fo");
  EXPECT_EQ(begun_answer(solar, message, "<think>"), "<|content|>Fo");
  set_thoughts(message, "T");
  EXPECT_EQ(begun_answer(plain, message, "<think>"), "<think>\nT\n</think>\n\nFo");
  EXPECT_EQ(begun_answer(thought, message, "<think>"), "T\n</think>\n\nFo");
  EXPECT_EQ(begun_answer(harmony, message, "<think>"),
            "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>Fo");
  EXPECT_EQ(begun_answer(solar, message, "<think>"), "<|think|>T<|end|><|begin|>assistant<|content|>Fo");
}

// A begun answer has its thoughts between the model's own marks.
TEST(ServeThoughts, BegunAnswersHaveTheMarksOfTheModel) {
  const Json message = {{"role", "assistant"}, {"content", "Four"}, {"reasoning_content", "2 + 2"}};
  const std::pair<const char*, const char*> kWritten[] = {
      {"<think>", "<think>\n2 + 2\n</think>\n\nFour"},
      {"[THINK]", "[THINK]2 + 2[/THINK]Four"},
      {"<seed:think>", "<seed:think>2 + 2</seed:think>\nFour"},
      {"<|channel>thought", "<|channel>thought\n2 + 2\n<channel|>Four"},
      {"<|inner_prefix|>", "<|inner_prefix|>2 + 2<|inner_suffix|>Four"}};
  for (const auto& [mark, written] : kWritten) {
    EXPECT_EQ(begun_answer({}, message, mark), written);
    EXPECT_EQ(begun_answer({}, {{"content", "Four"}}, mark), "Four");
    const Opening opened = opening_of(std::string("<|assistant|>") + mark);
    ASSERT_EQ(opened.kind, Opening::Kind::kThought);
    // Whatever the model's mark is, the prompt's mark is closed.
    const std::string rest = std::string(written).substr(std::string(written).find('2'));
    EXPECT_EQ(begun_answer(opened, message, "<mm:think>"), rest);
  }
}

// ---- OpenAI ----

TEST(ServeOpenAi, ReadsAConversationForTheTemplate) {
  const Asked a = read_chat_completion(parse_object(R"({
    "messages": [
      {"role": "developer", "content": "Be brief."},
      {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}]},
      {"role": "assistant", "content": null, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "2"}],
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 1, "max_completion_tokens": 7, "stop": "x",
    "logprobs": true, "top_logprobs": 2, "stream": true, "stream_options": {"include_usage": true}})"));
  EXPECT_EQ(write_json(a.task.messages),
            R"([{"role":"system","content":"Be brief."},{"role":"user","content":"1+1?"},)"
            R"({"role":"assistant","content":"","tool_calls":[{"type":"function","function":)"
            R"({"name":"add","arguments":{"a":1}},"id":"c1"}]},)"
            R"({"role":"tool","content":"2","tool_call_id":"c1"}])");
  EXPECT_EQ(write_json(a.task.tools), R"([{"type":"function","function":{"name":"add"}}])");
  EXPECT_EQ(a.task.temperature, 0.5);
  EXPECT_EQ(a.task.top_p, 0.9);
  EXPECT_EQ(a.task.seed, 3u);
  EXPECT_EQ(a.task.max_tokens, 7);
  EXPECT_EQ(a.task.stops, std::vector<std::string>{"x"});
  EXPECT_TRUE(a.task.logprobs && a.stream && a.stream_usage);
  EXPECT_EQ(a.task.top_logprobs, 2u);
}

TEST(ServeOpenAi, RefusesWhatItWouldIgnore) {
  const std::string kBegin = R"({"messages":[{"role":"user","content":"a"}],)";
  for (const char* fine :
       {R"("n":1})", R"("frequency_penalty":-2})", R"("logit_bias":{}})", R"("tool_choice":"none"})",
        R"("response_format":{"type":"text"}})", R"("stop":null})", R"("user":"me"})", R"("grammar":null})",
        R"("modalities":["text"]})", R"("ignore_eos":false})", R"("parallel_tool_calls":false})",
        R"("ignore_eos":true,"max_tokens":5})", R"("stop_token_ids":[1,2]})", R"("repetition_penalty":1.1})",
        R"("guided_regex":"a+"})", R"("guided_choice":["a","b"]})", R"("structured_outputs":{"json":{}}})",
        R"("store":false,"metadata":{"a":"b"},"service_tier":"auto","prompt_cache_key":"k"})"})
    EXPECT_EQ(status_of(read_chat_completion, kBegin + fine), 0) << fine;
  for (const char* wrong : {R"("n":0})",
                            R"("n":17})",
                            R"("frequency_penalty":2.5})",
                            R"("presence_penalty":"much"})",
                            R"("logit_bias":{"1":101}})",
                            R"("logit_bias":{"a":1}})",
                            R"("logit_bias":[1]})",
                            R"("tool_choice":"required"})",
                            R"("tool_choice":"sometimes"})",
                            R"("response_format":{"type":"xml"}})",
                            R"("response_format":{"type":"json_schema"}})",
                            R"("guided_json":"{"})",
                            R"("guided_json":{},"grammar":"root ::= \"a\""})",
                            R"("guided_choice":[1]})",
                            R"("structured_outputs":{"regex":"a","choice":["a"]}})",
                            R"("structured_outputs":{"whitespace_pattern":"a"}})",
                            R"("stop":[""]})",
                            R"("temperature":3})",
                            R"("max_tokens":1.5})",
                            R"("stream":"yes"})",
                            R"("top_logprobs":1})",
                            R"("tools":{}})",
                            R"("tools":[{"type":"custom","custom":{"name":"f"}}]})",
                            R"("ignore_eos":true})",
                            R"("stop_token_ids":[-1]})",
                            R"("stop_token_ids":["a"]})",
                            R"("modalities":["text","audio"]})",
                            R"("min_p":2})",
                            R"("repeat_penalty":0})",
                            R"("chat_template_kwargs":{"messages":[]}})",
                            R"("continue_final_message":true})",
                            R"("add_generation_prompt":false})"})
    EXPECT_EQ(status_of(read_chat_completion, kBegin + wrong), 400) << wrong;
  for (const std::string name : {"guided_whitespace_pattern", "functions", "typical_p", "top_K"}) {
    try {
      read_chat_completion(parse_object(kBegin + "\"" + name + "\":{\"a\":1}}"));
      ADD_FAILURE() << name;
    } catch (const Refusal& refusal) {
      EXPECT_EQ(refusal.status, 400);
      EXPECT_NE(std::string(refusal.what()).find("\"" + name + "\""), std::string::npos) << refusal.what();
    }
  }
  EXPECT_EQ(status_of(read_completion, R"({"prompt":"a","messages":[]})"), 400);
  EXPECT_EQ(status_of(read_completion, R"({"prompt":"a","echo":true})"), 400);
}

TEST(ServeOpenAi, ReadsWhatTheAnswerMustBe) {
  const std::string kBegin = R"({"messages":[{"role":"user","content":"a"}],)";
  const auto form = [&](const std::string& fields) {
    return read_chat_completion(parse_object(kBegin + fields + "}")).task.form;
  };
  for (
      const char* schema :
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"array"}}})",
       R"("guided_json":{"type":"array"})", R"("guided_json":"{\"type\": \"array\"}")",
       R"("json_schema":{"type":"array"})",
       R"("response_format":{"type":"json_object","schema":{"type":"array"}})"}) {
    EXPECT_EQ(form(schema).kind, Form::Kind::kSchema) << schema;
    EXPECT_EQ(form(schema).text, R"({"type":"array"})") << schema;
  }
  EXPECT_EQ(form(R"("response_format":{"type":"json_object"})").text, R"({"type":"object"})");
  EXPECT_EQ(form(R"("response_format":{"type":"text"})").kind, Form::Kind::kAny);
  EXPECT_EQ(form(R"("grammar":"root ::= \"a\"")").kind, Form::Kind::kGbnf);
}

TEST(ServeOpenAi, ReadsWhichToolsMustBeCalled) {
  const std::string kBegin = R"({"messages":[{"role":"user","content":"a"}],"tools":[
      {"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}],"tool_choice":)";
  const auto task = [&](const std::string& choice) {
    return read_chat_completion(parse_object(kBegin + choice + "}")).task;
  };
  EXPECT_TRUE(task(R"("required")").must_call);
  EXPECT_FALSE(task(R"("auto")").must_call);
  EXPECT_TRUE(task(R"("none")").tools.is_null());
  EXPECT_EQ(task(R"({"type":"function","function":{"name":"g"}})").only_tool, "g");
  const Task allowed = task(
      R"({"type":"allowed_tools","allowed_tools":{"mode":"required","tools":[{"type":"function","function":{"name":"g"}}]}})");
  EXPECT_TRUE(allowed.must_call);
  EXPECT_EQ(allowed.tools.size(), 1u);
  EXPECT_EQ(status_of(read_chat_completion, kBegin + R"({"type":"function","function":{"name":"h"}}})"), 400);
}

TEST(ServeOpenAi, ReadsHowToSample) {
  const std::string kSampling = R"("top_k":-1,"min_p":0.1,"repeat_penalty":1.1,"repeat_last_n":8})";
  for (const Asked& a :
       {read_chat_completion(parse_object(R"({"messages":[{"role":"user","content":"a"}],)" + kSampling)),
        read_completion(parse_object(R"({"prompt":"a",)" + kSampling))}) {
    EXPECT_EQ(a.task.top_k, 0u);
    EXPECT_EQ(a.task.min_p, 0.1);
    EXPECT_EQ(a.task.repeat_penalty, 1.1);
    EXPECT_EQ(a.task.repeat_last, 8u);
  }
}

// Tests the variables about thinking that a template gets; variables that the request sets for the template
// take precedence.
TEST(ServeOpenAi, ReadsHowMuchToThink) {
  const auto variables = [](const std::string& fields) {
    return write_json(
        read_chat_completion(parse_object(R"({"messages":[{"role":"user","content":"a"}])" + fields + "}"))
            .task.variables);
  };
  EXPECT_EQ(variables(""), "null");
  EXPECT_EQ(variables(R"(,"enable_thinking":false)"), R"({"enable_thinking":false})");
  EXPECT_EQ(variables(R"(,"reasoning_effort":"none")"),
            R"({"reasoning_effort":"none","enable_thinking":false})");
  EXPECT_EQ(variables(R"(,"reasoning_effort":"high","chat_template_kwargs":{"enable_thinking":false,"x":1})"),
            R"({"reasoning_effort":"high","enable_thinking":false,"x":1})");
}

TEST(ServeOpenAi, ReadsThoughtsAndArgumentsOfEarlierTurns) {
  const auto read = [](const std::string& fields) {
    return read_chat_completion(
               parse_object(R"({"messages":[{"role":"assistant","content":"a",)" + fields + "}]}"))
        .task.messages[0];
  };
  for (const char* name : {"reasoning_content", "reasoning", "thinking"})
    EXPECT_EQ(write_json(read("\"" + std::string(name) + "\":\"T\"")),
              R"({"role":"assistant","content":"a","reasoning_content":"T","reasoning":"T","thinking":"T"})");
  for (const char* none : {R"(,"arguments":"")", R"(,"arguments":" ")", R"(,"arguments":null)",
                           R"(,"arguments":"null")", R"(,"arguments":"{}")", ""})
    EXPECT_EQ(write_json(
                  read(R"("tool_calls":[{"function":{"name":"f")" + std::string(none) + "}}]")["tool_calls"]),
              R"([{"type":"function","function":{"name":"f","arguments":{}}}])")
        << none;
}

// Integers of any length come back as the model wrote them, so that the conversation stays the same.
TEST(ServeJson, KeepsTheDigitsOfLargeIntegers) {
  for (const char* json :
       {"123456789012345678901234567890", "-18446744073709551616", "[1,[18446744073709551616],{}]",
        R"({"a":{"b":98765432109876543210,"c":[]},"d":"98765432109876543210","e":1.5,"f":null})"})
    EXPECT_EQ(write_json(parse_bounded(json)), json);
  EXPECT_EQ(write_json(parse_bounded("[12345678901234567890.5, 1e30]")), "[1.2345678901234567e+19,1e+30]");
  EXPECT_EQ(parse_bounded("98765432109876543210"), parse_bounded("98765432109876543210"));
  EXPECT_NE(parse_bounded("98765432109876543210"), parse_bounded("98765432109876543211"));
  // No field takes one.
  for (const char* field : {R"("max_tokens":98765432109876543210)", R"("temperature":98765432109876543210)",
                            R"("seed":98765432109876543210)", R"("stop":98765432109876543210)",
                            R"("prompt":98765432109876543210)", R"("prompt":[98765432109876543210])"})
    EXPECT_EQ(status_of(read_completion, R"({"prompt":"a",)" + std::string(field) + "}"), 400) << field;

  const std::string arguments = R"({"a":[98765432109876543210],"b":-1})";
  const Json call = {{"id", "c"}, {"function", {{"name", "f"}, {"arguments", arguments}}}};
  const std::string openai = R"({"messages":[{"role":"assistant","tool_calls":[)" + write_json(call) + "]}]}";
  EXPECT_NE(write_json(read_chat_completion(parse_object(openai)).task.messages)
                .find(R"("arguments":)" + arguments),
            std::string::npos);
  const std::string anthropic =
      R"({"max_tokens":9,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":)" +
      arguments + R"(}]},{"role":"user","content":"a"}]})";
  EXPECT_NE(
      write_json(read_message(parse_object(anthropic)).task.messages).find(R"("arguments":)" + arguments),
      std::string::npos);
}

TEST(ServeAnthropic, AMarkNamesTheMessageThatItsBlockBecomes) {
  const Task task = read_message(parse_object(R"({"max_tokens":9,"messages":[
    {"role":"user","content":"a"},
    {"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]},
    {"role":"user","content":[{"type":"text","text":"four","cache_control":{"type":"ephemeral"}},
      {"type":"tool_result","tool_use_id":"c","content":"result","cache_control":{"type":"ephemeral"}},
      {"type":"text","text":"more"}]}]})"))
                        .task;
  ASSERT_EQ(task.messages.size(), 4u);
  std::vector<std::string> marked;
  for (const Mark& mark : task.marks)
    marked.push_back(task.messages[mark.messages - 1]["content"].get<std::string>().substr(0, mark.bytes));
  EXPECT_EQ(marked, (std::vector<std::string>{"result", "four"}));
}

TEST(ServeOpenAi, GoesOnWithTheLastMessageIfItIsToldTo) {
  const std::string kMessages =
      R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}])";
  EXPECT_TRUE(read_chat_completion(parse_object(kMessages + "}")).task.begun.is_null());
  for (const char* fields : {R"(,"continue_final_message":true})",
                             R"(,"continue_final_message":true,"add_generation_prompt":false})"}) {
    const Asked a = read_chat_completion(parse_object(kMessages + fields));
    EXPECT_EQ(a.task.messages.size(), 1u);
    EXPECT_EQ(write_json(a.task.begun), R"({"role":"assistant","content":"b"})");
  }
}

TEST(ServeOpenAi, APromptIsOneTextOrTokenIds) {
  EXPECT_EQ(read_completion(parse_object(R"({"prompt":["a b"]})")).task.prompt, "a b");
  EXPECT_EQ(read_completion(parse_object(R"({"prompt":[1,2]})")).task.ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(read_completion(parse_object(R"({"prompt":[[3]]})")).task.ids, std::vector<int32_t>{3});
  for (const char* wrong :
       {"{}", R"({"prompt":""})", R"({"prompt":[]})", R"({"prompt":["a","b"]})", R"({"prompt":[-1]})",
        R"({"prompt":[1,"a"]})", R"({"prompt":[4294967296]})", R"({"prompt":7})"})
    EXPECT_EQ(status_of(read_completion, wrong), 400) << wrong;
}

TEST(ServeOpenAi, WritesAChatCompletion) {
  const auto writer = write_chat_completion(kWho, asked(false));
  EXPECT_EQ(writer->begin({10, 4, 0}), "");
  EXPECT_EQ(writer->piece({"Hel", {}}), "");
  EXPECT_EQ(writer->piece({"lo", {}}), "");
  EXPECT_EQ(
      writer->end(Ending::kEnd, "", {10, 4, 3}),
      R"({"id":"chatcmpl-7","object":"chat.completion",)" + kHead +
          R"([{"index":0,"message":{"role":"assistant","content":"Hello"},"logprobs":null,"finish_reason":"stop"}],)"
          R"("usage":{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,)"
          R"("prompt_tokens_details":{"cached_tokens":4}}})");
}

TEST(ServeOpenAi, StreamsAChatCompletion) {
  const std::string kChunk = R"(data: {"id":"chatcmpl-7","object":"chat.completion.chunk",)" + kHead;
  Asked a = asked(true);
  a.stream_usage = true;
  const auto writer = write_chat_completion(kWho, a);
  EXPECT_EQ(
      writer->begin({10, 0, 0}),
      kChunk +
          R"([{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],)"
          "\"usage\":null}\n\n");
  EXPECT_EQ(writer->piece({"Hi", {}}),
            kChunk +
                R"([{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null})"
                "\n\n");
  EXPECT_EQ(writer->piece({"", {}}), "");
  EXPECT_EQ(writer->end(Ending::kLength, "", {10, 0, 1}),
            kChunk +
                R"([{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null})"
                "\n\n" +
                kChunk +
                R"([],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11,)"
                R"("prompt_tokens_details":{"cached_tokens":0}}})"
                "\n\ndata: [DONE]\n\n");
}

TEST(ServeOpenAi, WritesCallsOfTools) {
  Asked a = asked(false);
  a.task.tools = Json::array();
  const auto writer = write_chat_completion(kWho, a);
  writer->piece({kCall, {}});
  EXPECT_NE(
      writer->end(Ending::kEnd, "", {})
          .find(
              R"({"role":"assistant","content":null,"tool_calls":[{"id":"000000700","type":"function",)"
              R"("function":{"name":"add","arguments":"{\"a\":1}"}}]},"logprobs":null,"finish_reason":"tool_calls"})"),
      std::string::npos);
  a.stream = true;
  const auto streamed = write_chat_completion(kWho, a);
  EXPECT_NE(streamed->piece({kCall, {}})
                .find(R"("delta":{"tool_calls":[{"index":0,"id":"000000700","type":"function",)"
                      R"("function":{"name":"add","arguments":"{\"a\":1}"}}]})"),
            std::string::npos);
  const auto plain = write_chat_completion(kWho, asked(false));  // the request has no tools
  plain->piece({"<tool_call>", {}});
  EXPECT_NE(plain->end(Ending::kEnd, "", {}).find(R"("content":"<tool_call>")"), std::string::npos);
}

TEST(ServeTools, OneCallIsMadeIfNoMoreIsWanted) {
  const std::string kTools = R"("tools":[{"type":"function","function":{"name":"add"}}])";
  const std::string kUse =
      R"({"max_tokens":9,"messages":[{"role":"user","content":"a"}],"tools":[{"name":"add"}])";
  const auto calls = [](AnswerWriter& writer) {
    writer.piece({kCall + kCall, {}});
    const std::string whole = writer.end(Ending::kEnd, "", {});
    size_t count = 0;
    for (size_t at = 0; (at = whole.find(R"("name":"add")", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  for (const bool many : {true, false}) {
    const std::string openai = R"({"messages":[{"role":"user","content":"a"}],"parallel_tool_calls":)" +
                               std::string(many ? "true," : "false,") + kTools + "}";
    EXPECT_EQ(calls(*write_chat_completion(kWho, read_chat_completion(parse_object(openai)))),
              many ? 2u : 1u);
    const std::string anthropic = kUse + R"(,"tool_choice":{"type":"auto","disable_parallel_tool_use":)" +
                                  (many ? "false}}" : "true}}");
    EXPECT_EQ(calls(*write_message(kWho, read_message(parse_object(anthropic)))), many ? 2u : 1u);
  }
}

TEST(ServeOpenAi, WritesThoughts) {
  const auto writer = write_chat_completion(kWho, asked(false));
  writer->piece({"<think>Two.</think>Four.", {}});
  EXPECT_NE(writer->end(Ending::kEnd, "", {})
                .find(R"("message":{"role":"assistant","content":"Four.","reasoning_content":"Two."})"),
            std::string::npos);
  Asked a = asked(true);
  a.task.logprobs = true;
  const auto streamed = write_chat_completion(kWho, a);
  EXPECT_EQ(streamed->piece({"<think>", {{"<think>", -1, {}}}}), "");
  const std::string thought = streamed->piece({"Two.", {{"Two.", -2, {}}}});
  EXPECT_NE(
      thought.find(R"("delta":{"reasoning_content":"Two."},"logprobs":{"content":[{"token":"<think>",)"),
      std::string::npos)
      << thought;
  EXPECT_NE(thought.find(R"({"token":"Two.",)"), std::string::npos) << thought;
}

TEST(ServeOpenAi, NamesEachCallWithNineLettersAndDigits) {
  std::set<std::string> ids;
  for (const char* id : {"7", "8", "00000001234567890"})
    for (size_t i = 0; i < 40; ++i) {
      ids.insert(call_id({id, 0, ""}, i));
      EXPECT_EQ(ids.rbegin()->size(), 9u);
      EXPECT_EQ(ids.rbegin()->find_first_not_of("0123456789abcdefghijklmnopqrstuvwxyz"), std::string::npos);
    }
  EXPECT_EQ(ids.size(), 120u);
}

TEST(ServeOpenAi, WritesProbabilities) {
  Asked a = asked(false);
  a.task.logprobs = true;
  const Piece piece{"é", {{"\xC3\xA9", -0.5, {{"\xC3\xA9", -0.5}, {"e", -1}}}}};
  const auto chat = write_chat_completion(kWho, a);
  chat->piece(piece);
  EXPECT_NE(
      chat->end(Ending::kEnd, "", {})
          .find(
              R"("logprobs":{"content":[{"token":"é","logprob":-0.5,"bytes":[195,169],"top_logprobs":[)"
              R"({"token":"é","logprob":-0.5,"bytes":[195,169]},{"token":"e","logprob":-1.0,"bytes":[101]}]}]})"),
      std::string::npos);
  const auto text = write_completion(kWho, a);
  text->piece(piece);
  text->piece({"x", {{"x", -2, {}}}});
  EXPECT_NE(text->end(Ending::kEnd, "", {})
                .find(R"("logprobs":{"tokens":["é","x"],"token_logprobs":[-0.5,-2.0],)"
                      R"("top_logprobs":[{"é":-0.5,"e":-1.0},{}],"text_offset":[0,1]})"),
            std::string::npos);
  const auto cut = write_completion(kWho, a);  // a character in two tokens
  cut->piece({"", {{"\xE2\x82", -1, {}}}});
  cut->piece({"€", {{"\xAC", -1, {}}}});
  cut->piece({"y", {{"y", -1, {}}}});
  EXPECT_NE(cut->end(Ending::kEnd, "", {}).find(R"("text_offset":[0,1,1]})"), std::string::npos);
}

// Probabilities are inserted at their own place for every text of an answer.
TEST(ServeOpenAi, WritesProbabilitiesIfTheAnswerLooksLikeTheirField) {
  const std::string words = R"({"logprobs":null,"finish_reason":null})";
  Asked a = asked(false);
  a.task.logprobs = true;
  for (const bool chat : {true, false}) {
    const auto writer = chat ? write_chat_completion(kWho, a) : write_completion(kWho, a);
    writer->piece({words, {{"{", -1, {}}}});
    const Json answer = Json::parse(writer->end(Ending::kLength, "", {2, 0, 1}));
    const Json& choice = answer.at("choices").at(0);
    EXPECT_EQ(chat ? choice.at("message").at("content") : choice.at("text"), words);
    EXPECT_EQ(choice.at("logprobs").size(), chat ? 1u : 4u);
    EXPECT_EQ(choice.at("finish_reason"), "length");
    EXPECT_EQ(answer.at("usage").at("total_tokens"), 3);
  }
}

TEST(ServeOpenAi, WritesACompletion) {
  const auto writer = write_completion(kWho, asked(false));
  writer->piece({"ab", {}});
  EXPECT_EQ(
      writer->end(Ending::kStopText, "c", {2, 0, 2}),
      R"({"id":"cmpl-7","object":"text_completion",)" + kHead +
          R"([{"index":0,"text":"ab","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":2,)"
          R"("completion_tokens":2,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}})");
  const auto streamed = write_completion(kWho, asked(true));
  EXPECT_EQ(streamed->begin({}), "");
  EXPECT_EQ(streamed->piece({"ab", {}}),
            R"(data: {"id":"cmpl-7","object":"text_completion",)" + kHead +
                R"([{"index":0,"text":"ab","logprobs":null,"finish_reason":null}]})"
                "\n\n");
}

TEST(ServeOpenAi, WritesErrors) {
  EXPECT_EQ(openai_error(Refusal(400, "too long", "context_length_exceeded")),
            R"({"error":{"message":"too long","type":"invalid_request_error","param":null,)"
            R"("code":"context_length_exceeded"}})");
  EXPECT_EQ(openai_error(Refusal(429, "full")),
            R"({"error":{"message":"full","type":"rate_limit_error","param":null,"code":null}})");
}

// ---- Anthropic ----

TEST(ServeAnthropic, ReadsBlocksAsMessagesForTheTemplate) {
  const Asked a = read_message(parse_object(R"({
    "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x"], "top_k": 3,
    "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
    "messages": [
      {"role": "user", "content": "1+1?"},
      {"role": "assistant", "content": [{"type": "text", "text": "Well."},
                                        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                                   {"type": "text", "text": "So?"}]}]})"));
  EXPECT_EQ(write_json(a.task.messages),
            R"([{"role":"system","content":"Be brief."},{"role":"user","content":"1+1?"},)"
            R"({"role":"assistant","content":"Well.","tool_calls":[{"type":"function","function":)"
            R"({"name":"add","arguments":{"a":1}},"id":"t1"}]},)"
            R"({"role":"tool","content":"2","tool_call_id":"t1"},{"role":"user","content":"So?"}])");
  EXPECT_EQ(
      write_json(a.task.tools),
      R"([{"type":"function","function":{"name":"add","description":"Adds.","parameters":{"type":"object"}}}])");
  EXPECT_EQ(a.task.stops, std::vector<std::string>{"x"});
  EXPECT_EQ(a.task.top_k, 3u);
  for (const char* wrong :
       {R"({"messages":[{"role":"user","content":"a"}]})", R"({"max_tokens":1,"messages":[]})",
        R"({"max_tokens":1,"messages":[{"role":"system","content":"a"}]})",
        R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"image"}]}]})",
        R"({"max_tokens":1,"messages":[{"role":"user","content":[1]}]})"})
    EXPECT_EQ(status_of(read_message, wrong), 400) << wrong;
}

TEST(ServeAnthropic, RefusesWhatItWouldIgnore) {
  const std::string kBegin = R"({"max_tokens":1,"messages":[{"role":"user","content":"a"}],)";
  for (const char* fine :
       {R"("metadata":{"user_id":"me"},"cache_control":{"type":"ephemeral"}})", R"("service_tier":"auto"})",
        R"("output_config":{"effort":"low"}})", R"("thinking":{"type":"enabled","budget_tokens":1024}})",
        R"("context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}})",
        R"("tools":[{"type":"custom","name":"f","input_schema":{}}]})"})
    EXPECT_EQ(status_of(read_message, kBegin + fine), 0) << fine;
  for (const char* wrong : {R"("output_config":{"format":{"type":"json_object"}}})", R"("mcp_servers":[{}]})",
                            R"("output_format":{"type":"json_schema"}})", R"("thinking":{"type":"much"}})",
                            R"("thinking":{"type":"adaptive","display":"omitted"}})", R"("min_p":0.1})",
                            R"("context_management":{"edits":[{"type":"clear_tool_uses_20250919"}]}})",
                            R"("tools":[{"type":"web_search_20250305","name":"web_search"}]})",
                            R"("tool_choice":{"type":"auto","name":"f"}})"})
    EXPECT_EQ(status_of(read_message, kBegin + wrong), 400) << wrong;
}

TEST(ServeAnthropic, ReadsThinkingAndErrorsOfTools) {
  const Asked a = read_message(parse_object(R"({
    "max_tokens": 5, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
    "messages": [
      {"role": "user", "content": "1+1?"},
      {"role": "assistant", "content": [{"type": "thinking", "thinking": "T", "signature": ""},
                                        {"type": "redacted_thinking", "data": "x"},
                                        {"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": true, "content": "no"}]}]})"));
  EXPECT_EQ(write_json(a.task.messages[1]),
            R"({"role":"assistant","content":"","reasoning_content":"T","reasoning":"T","thinking":"T",)"
            R"("tool_calls":[{"type":"function","function":{"name":"add","arguments":{}},"id":"t1"}]})");
  EXPECT_EQ(write_json(a.task.messages[2]), R"({"role":"tool","content":"Error: no","tool_call_id":"t1"})");
  EXPECT_EQ(write_json(a.task.variables), R"({"enable_thinking":false,"reasoning_effort":"low"})");
}

TEST(ServeAnthropic, GoesOnWithALastMessageOfTheAssistant) {
  const Asked a = read_message(parse_object(
      R"({"max_tokens":5,"messages":[{"role":"user","content":"1+1?"},{"role":"assistant","content":"It is"}]})"));
  EXPECT_EQ(write_json(a.task.messages), R"([{"role":"user","content":"1+1?"}])");
  EXPECT_EQ(write_json(a.task.begun), R"({"role":"assistant","content":"It is"})");
  const std::string kUse = R"([{"type":"tool_use","id":"t","name":"f"}])";
  for (const std::string& messages :
       {std::string(R"([{"role":"assistant","content":"It is"}])"),
        R"([{"role":"user","content":"a"},{"role":"assistant","content":)" + kUse + "}]"})
    EXPECT_EQ(status_of(read_message, R"({"max_tokens":5,"messages":)" + messages + "}"), 400) << messages;
}

TEST(ServeAnthropic, CountsWithoutALimit) {
  EXPECT_EQ(status_of(read_message_to_count, R"({"model":"m","messages":[{"role":"user","content":"a"}]})"),
            0);
  EXPECT_EQ(status_of(read_message_to_count, R"({"messages":[]})"), 400);
}

TEST(ServeAnthropic, WritesThoughtsAndArgumentsAsTheyWere) {
  Asked a = asked(false);
  a.task.tools = Json::array();
  const std::string answer =
      R"(<think>T</think>Well.<tool_call>{"name":"f","arguments":{"n":12345678901234567890123}}</tool_call>)";
  const auto writer = write_message(kWho, a);
  writer->piece({answer, {}});
  const std::string whole = writer->end(Ending::kEnd, "", {});
  EXPECT_NE(
      whole.find(
          R"("content":[{"type":"thinking","thinking":"T","signature":""},{"type":"text","text":"Well."},)"
          R"({"type":"tool_use","id":"000000700","name":"f","input":{"n":12345678901234567890123}}],)"),
      std::string::npos)
      << whole;
  a.stream = true;
  const std::string streamed = write_message(kWho, a)->piece({"<think>T</think>Well. ", {}});
  EXPECT_EQ(
      streamed,
      "event: content_block_start\n"
      R"(data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}})"
      "\n\nevent: content_block_delta\n"
      R"(data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"T"}})"
      "\n\nevent: content_block_stop\n"
      R"(data: {"type":"content_block_stop","index":0})"
      "\n\nevent: content_block_start\n"
      R"(data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}})"
      "\n\nevent: content_block_delta\n"
      R"(data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Well."}})"
      "\n\n");
}

TEST(ServeAnthropic, WritesAMessage) {
  const auto writer = write_message(kWho, asked(false));
  writer->begin({10, 4, 0});
  writer->piece({"Hello", {}});
  EXPECT_EQ(
      writer->end(Ending::kStopText, "x", {10, 4, 3, 5}),
      R"({"id":"msg_7","type":"message","role":"assistant","model":"tiny","content":[{"type":"text","text":"Hello"}],)"
      R"("stop_reason":"stop_sequence","stop_sequence":"x","usage":{"input_tokens":1,)"
      R"("cache_creation_input_tokens":5,"cache_read_input_tokens":4,"output_tokens":3}})");
}

TEST(ServeAnthropic, StreamsTextAndCalls) {
  Asked a = asked(true);
  a.task.tools = Json::array();
  const auto writer = write_message(kWho, a);
  EXPECT_EQ(
      writer->begin({1, 0, 0}),
      "event: message_start\n"
      R"(data: {"type":"message_start","message":{"id":"msg_7","type":"message","role":"assistant",)"
      R"("model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,)"
      R"("cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}})"
      "\n\n");
  EXPECT_EQ(
      writer->piece({"Well. <tool_call>{\"name\":\"f\"}</tool_call>", {}}),
      "event: content_block_start\n"
      R"(data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}})"
      "\n\nevent: content_block_delta\n"
      R"(data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Well."}})"
      "\n\nevent: content_block_stop\n"
      R"(data: {"type":"content_block_stop","index":0})"
      "\n\nevent: content_block_start\n"
      R"(data: {"type":"content_block_start","index":1,"content_block":)"
      R"({"type":"tool_use","id":"000000700","name":"f","input":{}}})"
      "\n\nevent: content_block_delta\n"
      R"(data: {"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{}"}})"
      "\n\nevent: content_block_stop\n"
      R"(data: {"type":"content_block_stop","index":1})"
      "\n\n");
  EXPECT_EQ(
      writer->end(Ending::kEnd, "", {1, 0, 9}),
      "event: message_delta\n"
      R"(data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":1,)"
      R"("cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":9}})"
      "\n\nevent: message_stop\n"
      R"(data: {"type":"message_stop"})"
      "\n\n");
}

TEST(ServeAnthropic, WritesErrors) {
  EXPECT_EQ(anthropic_error(Refusal(401, "no key")),
            R"({"type":"error","error":{"type":"authentication_error","message":"no key"}})");
}

}  // namespace
}  // namespace app::serve
