// The formats of tool calls, for the code that reads calls and the code that makes grammars of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/calls.h"

namespace app::serve {

struct CallReader;

// A call whose function and parameters are tags.
struct CallTags {
  std::string_view call, named, ends;                // <function=, >, </function>
  std::string_view parameter, key_ends, value_ends;  // <parameter=, >, </parameter>
  bool lines = false;                                // values have lines of their own
  bool typed = false;                                // the tag of a parameter says whether it is a text
  std::string_view value = "";  // <arg_value>, if it is not a part of the parameter's tag
};

// A format of calls with marks around them.
struct CallFormat {
  using Read = bool (*)(CallReader&, const CallFormat&, const ToolTypes&, std::vector<ToolCall>&);
  std::string_view open, close;  // `close` is empty if the calls themselves say where they end
  Read read;
  CallNotation notation = CallNotation::kJson;  // of most models that have this format
  const CallTags* tags = nullptr;
  bool block = false;  // several calls may be between the marks
};

// Marks inside of calls.
constexpr std::string_view kGemmaQuote = "<|\"|>";
constexpr std::string_view kDeepSeekBegin = "<\uff5ctool\u2581call\u2581begin\uff5c>",
                           kDeepSeekSeparator = "<\uff5ctool\u2581sep\uff5c>",
                           kDeepSeekEnd = "<\uff5ctool\u2581call\u2581end\uff5c>";
constexpr std::string_view kKimiBegin = "<|tool_call_begin|>",
                           kKimiArguments = "<|tool_call_argument_begin|>", kKimiEnd = "<|tool_call_end|>",
                           kKimiPrefix = "functions.";
constexpr std::string_view kMistralId = "[CALL_ID]", kMistralArguments = "[ARGS]";
constexpr CallTags kKeyTags = {"",    "",    "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>",
                               false, false, "<arg_value>"};
constexpr CallTags kHyTags = {"<tool_call:opensource>",
                              "<tool_sep:opensource>",
                              "</tool_call:opensource>",
                              "<arg_key:opensource>",
                              "</arg_key:opensource>",
                              "</arg_value:opensource>",
                              false,
                              false,
                              "<arg_value:opensource>"};
constexpr std::string_view kSolarBegin = "<|tool_call:begin|>", kSolarName = "<|tool_call:name|>",
                           kSolarArguments = "<|tool_call:args|>", kSolarEnd = "<|tool_call:end|>";
constexpr std::string_view kRecipientMark = ">>>";
// What comes before each tag of MiniMax M3.
constexpr std::string_view kTagMark = "]<]minimax[>[", kNestedOpen = "]<]minimax[>[<tool_call>",
                           kNestedClose = "]<]minimax[>[</tool_call>", kItem = "item";

// Types of values, one bit each.
enum SchemaType : unsigned {
  kText = 1,
  kInteger = 2,
  kNumber = 4,
  kBoolean = 8,
  kObject = 16,
  kArray = 32,
  kNull = 64
};
// The types that a JSON schema allows; 0: it does not say. `root`: the schema in which references are looked
// up.
unsigned types_of(const Json& schema, const Json& root);
// The schema that a reference leads to, or the schema itself if it is not a reference.
const Json& resolved(const Json& schema, const Json& root);
// The only schema of a choice that allows something else than null, or the schema itself if there are more.
const Json& not_null(const Json& schema, const Json& root);

}  // namespace app::serve
