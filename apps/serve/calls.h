// Reads the tool calls in a model's answer. Each family of models writes them in its own format.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/task.h"

namespace app::serve {

struct ToolCall {
  std::string name;
  std::string arguments;  // a JSON object as text; numbers are as the model wrote them
};

// The types of the parameters of a request's tools. Some formats write texts without quotes, so that only the
// type says whether 12 is a text or a number.
class ToolTypes {
 public:
  // `tools`: an array in OpenAI's form, or null.
  explicit ToolTypes(const Json& tools);
  bool has(std::string_view tool) const { return tools_.find(tool) != tools_.end(); }
  // Whether a parameter may be a text.
  bool may_be_text(std::string_view tool, std::string_view parameter) const;
  // The schema of a tool's arguments; null: not known.
  const Json& schema(std::string_view tool) const;
  // The JSON of an argument that a model wrote without quotes.
  std::string json(std::string_view tool, std::string_view parameter, std::string_view written) const;

 private:
  // The types of a parameter; 0: any.
  unsigned types(std::string_view tool, std::string_view parameter) const;

  using Parameters = std::map<std::string, unsigned, std::less<>>;  // a bit for each type
  std::map<std::string, Parameters, std::less<>> tools_;
  std::map<std::string, std::shared_ptr<const Json>, std::less<>> schemas_;
};

// The first mark in a text that opens calls.
struct OpenMark {
  size_t at = std::string_view::npos;  // npos: there is none
  std::string_view mark;
  const CallFormat* format = nullptr;
};
OpenMark find_open_mark(std::string_view text);
// The number of bytes at the end of a text that may be the beginning of such a mark.
size_t begun_open_mark(std::string_view text);
// Whether a format of calls uses this token.
bool is_call_mark(std::string_view token);

enum class Found {
  kMore,  // more text is needed to decide
  kNone,  // the text is not a call in this format
  kCalls
};
// Reads the calls after an opening mark, up to the mark that closes them. `last`: no text follows, which
// closes calls too. If calls are found, `length` is their length with the closing mark. Text that is added
// later does not change what was found.
Found read_calls(const CallFormat& format, std::string_view text, bool last, const ToolTypes& types,
                 std::vector<ToolCall>& calls, size_t& length);

// All formats.
std::vector<const CallFormat*> call_formats();
std::string_view open_mark(const CallFormat& format);
// The notation in which a format is read unless a prompt or a template shows another.
CallNotation usual_notation(const CallFormat& format);
// How a prompt with tools describes calls between <tool_call> and </tool_call>. Other formats are not looked
// for.
CallStyle described_calls(std::string_view prompt);
// How a chat template wrote a call without arguments.
CallStyle written_calls(std::string_view text);
// How calls are written if a prompt with tools has the mark of Granite 3, whose template writes none.
CallStyle mentioned_calls(std::string_view prompt);
// What a call in JSON begins with, as a prompt with tools describes it; "": no mark.
std::string call_mark(std::string_view prompt);
// For a chat template without tools: describes them in the system message, which is the first.
void describe_tools(const Json& tools, Json& messages);
// The messages for a chat template without calls: they and their results are text.
Json with_calls_as_text(const Json& messages);
// Reads an object or array of calls in JSON: {"name": ..., "arguments": {...}}. Returns whether there is
// nothing else in it. `bare`: the object has no marks around it, so it is a call only if it has arguments.
bool read_json_calls(std::string_view written, bool bare, std::vector<ToolCall>& calls);
// The arguments of a call as an object. They are written as an object, or as a text that contains one;
// missing arguments are an empty object. Returns "" for anything else.
std::string arguments_json(std::string_view written);

// Removes the white space between the tokens of JSON, and escapes control characters in its texts, which JSON
// does not allow but models write.
std::string compact_json(std::string_view json);
// The end of the JSON value that begins at `at`.
size_t json_value_end(std::string_view json, size_t at);

}  // namespace app::serve
