// The wire formats of thimble serve: what requests mean, and answers to the byte.
#include <gtest/gtest.h>

#include "apps/serve/api_anthropic.h"
#include "apps/serve/api_openai.h"
#include "apps/serve/filters.h"
#include "apps/serve/json.h"

namespace app::serve {
namespace {

const Identity kWho{"7", 1700000000, "tiny"};
const std::string kHead = R"("created":1700000000,"model":"tiny","choices":)";

Asked asked(bool stream) {
  Asked a;
  a.stream = stream;
  return a;
}

// The status that a body is refused with; 0: it is not.
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

// JSON inside of JSON: arguments that a client gives, a call that a model writes. Half a million levels would
// end the process; they stay text.
TEST(ServeJson, IsBoundedInTextsThatAreJson) {
  const std::string deep(500'000, '[');
  const Json call = {{"function", {{"name", "f"}, {"arguments", deep + std::string(deep.size(), ']')}}}};
  const Json message = {{"role", "assistant"}, {"tool_calls", Json::array({call})}};
  const Asked asked = read_chat_completion(parse_object(write_json({{"messages", Json::array({message})}})));
  EXPECT_TRUE(asked.task.messages[0]["tool_calls"][0]["function"]["arguments"].is_string());
  ToolCallFilter filter;
  const std::string text = "<tool_call>{\"name\": \"f\", \"arguments\": " + deep + "</tool_call>";
  std::vector<Part> parts = filter.push(text);
  for (const Part& part : parts) EXPECT_FALSE(part.is_call());
}

TEST(ServeJson, RefusesWhatIsNoUtf8AndNoObject) {
  for (const char* text :
       {"", "{", "[]", "1", "null", "{\"a\":\"\xff\"}", "{\"a\":\"\\ud800\"}", "{\"a\":1e999}"})
    EXPECT_THROW(parse_object(text), Refusal) << text;
}

TEST(ServeJson, WritesWhatIsNoUtf8AsReplacements) {
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

// All parts of a text that comes in pieces of so many bytes: texts in brackets, calls as NAME(ARGUMENTS).
std::string parts_of(const std::string& text, size_t size) {
  ToolCallFilter filter;
  std::string out, words;
  const auto add = [&](const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      if (!part.is_call()) {
        words += part.text;
        continue;
      }
      if (!words.empty()) out += "[" + std::exchange(words, {}) + "]";
      out += part.name + "(" + part.arguments + ")";
    }
  };
  for (size_t at = 0; at < text.size(); at += size) add(filter.push(text.substr(at, size)));
  add(filter.finish());
  return words.empty() ? out : out + "[" + words + "]";
}

TEST(ServeTools, CallsAreFoundHoweverTheTextIsCut) {
  const std::string kCall = R"(<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>)";
  const struct {
    std::string text, parts;
  } kCases[] = {
      {"plain <b> text\n", "[plain <b> text\n]"},
      {"Let me see.\n" + kCall, R"([Let me see.]add({"a":1}))"},
      {kCall + "\n" + kCall + "\n", R"(add({"a":1})add({"a":1}))"},
      {"\n" + kCall + "\n\ndone", R"(add({"a":1})[done])"},
      {R"(<tool_call>{"name": "now"})", "now({})"},  // the turn ended instead
      {"<tool_call>no JSON</tool_call> x", "[<tool_call>no JSON</tool_call> x]"},
      {R"(<tool_call>{"name": "add", "arguments": 1}</tool_call>)",
       R"([<tool_call>{"name": "add", "arguments": 1}</tool_call>])"},
      {"a <tool_ca", "[a <tool_ca]"},
  };
  for (const auto& c : kCases) {
    for (size_t size = 1; size <= c.text.size(); size += 3)
      EXPECT_EQ(parts_of(c.text, size), c.parts) << size;
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
       {R"("n":1})", R"("frequency_penalty":0.0})", R"("logit_bias":{}})", R"("tool_choice":"none"})",
        R"("response_format":{"type":"text"}})", R"("stop":null})", R"("user":"me"})"})
    EXPECT_EQ(status_of(read_chat_completion, kBegin + fine), 0) << fine;
  for (const char* wrong :
       {R"("n":2})", R"("frequency_penalty":1})", R"("logit_bias":{"1":1}})", R"("tool_choice":"required"})",
        R"("response_format":{"type":"json_object"}})", R"("stop":[""]})", R"("temperature":3})",
        R"("max_tokens":1.5})", R"("stream":"yes"})", R"("top_logprobs":1})", R"("tools":{}})"})
    EXPECT_EQ(status_of(read_chat_completion, kBegin + wrong), 400) << wrong;
  EXPECT_EQ(status_of(read_completion, R"({"prompt":"a","echo":true})"), 400);
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
  const std::string kCall = R"(<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>)";
  const auto writer = write_chat_completion(kWho, a);
  writer->piece({kCall, {}});
  EXPECT_NE(
      writer->end(Ending::kEnd, "", {})
          .find(
              R"({"role":"assistant","content":null,"tool_calls":[{"id":"call_7_0","type":"function",)"
              R"("function":{"name":"add","arguments":"{\"a\":1}"}}]},"logprobs":null,"finish_reason":"tool_calls"})"),
      std::string::npos);
  a.stream = true;
  const auto streamed = write_chat_completion(kWho, a);
  EXPECT_NE(streamed->piece({kCall, {}})
                .find(R"("delta":{"tool_calls":[{"index":0,"id":"call_7_0","type":"function",)"
                      R"("function":{"name":"add","arguments":"{\"a\":1}"}}]})"),
            std::string::npos);
  const auto plain = write_chat_completion(kWho, asked(false));  // nobody gave it tools
  plain->piece({"<tool_call>", {}});
  EXPECT_NE(plain->end(Ending::kEnd, "", {}).find(R"("content":"<tool_call>")"), std::string::npos);
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

TEST(ServeAnthropic, WritesAMessage) {
  const auto writer = write_message(kWho, asked(false));
  writer->begin({10, 4, 0});
  writer->piece({"Hello", {}});
  EXPECT_EQ(
      writer->end(Ending::kStopText, "x", {10, 4, 3}),
      R"({"id":"msg_7","type":"message","role":"assistant","model":"tiny","content":[{"type":"text","text":"Hello"}],)"
      R"("stop_reason":"stop_sequence","stop_sequence":"x","usage":{"input_tokens":6,)"
      R"("cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":3}})");
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
      R"({"type":"tool_use","id":"toolu_7_1","name":"f","input":{}}})"
      "\n\nevent: content_block_delta\n"
      R"(data: {"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{}"}})"
      "\n\nevent: content_block_stop\n"
      R"(data: {"type":"content_block_stop","index":1})"
      "\n\n");
  EXPECT_EQ(
      writer->end(Ending::kEnd, "", {1, 0, 9}),
      "event: message_delta\n"
      R"(data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":9}})"
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
