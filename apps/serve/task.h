// A request to the model and its answer, independent of the wire format.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace app {

using Json = nlohmann::ordered_json;

namespace serve {

// The refusal of a request: an HTTP status and one sentence for the client.
struct Refusal : std::runtime_error {
  Refusal(int status_, const std::string& message, std::string code_ = "")
      : std::runtime_error(message), status(status_), code(std::move(code_)) {}
  int status;
  std::string code;  // OpenAI's name for the error, such as "context_length_exceeded"; may be empty
};

// How an answer begins, which follows from the end of its prompt.
struct Opening {
  enum class Kind {
    kPlain,
    kThought,   // in a thought, up to `thought_end`
    kHarmony,   // in the header of a message of gpt-oss' format
    kSolar,     // the same for Solar Open's format
    kRecipient  // after Functionary 3.2's mark, where the recipient of the answer comes
  };
  Kind kind = Kind::kPlain;
  std::string thought_end;
  bool goes_on = false;  // the answer continues the text of the conversation's last message
};

// What an answer must be, from where it begins after thoughts.
struct Form {
  enum class Kind { kAny, kSchema, kRegex, kGbnf };
  Kind kind = Kind::kAny;
  std::string text;  // a JSON schema, a regular expression, or a grammar in llama.cpp's notation
};

// A place in a conversation that other requests share, as its client says: after so many bytes of the content
// of the last of these messages.
struct Mark {
  size_t messages, bytes;
};

// How a model writes calls of tools (calls.h): the format, and the notation of what is between its marks.
struct CallFormat;
enum class CallNotation {
  kJson,        // {"name": ..., "arguments": {...}}
  kTags,        // a tag for each parameter
  kJsonInTags,  // a tag for the function, around its arguments
  kKeys,        // GLM's keys and values
  kGemma,
  kPython,  // LFM2's
  kDeepSeek,
  kKimi,
  kSolar,
  kNested,     // MiniMax M3's tags in tags
  kRecipient,  // Functionary 3.2's NAME, a line break and {...}
  kNamed,      // Apertus' {NAME: {...}}
  kArguments   // Mistral's NAME[ARGS]{...}
};
struct CallMember {
  enum class Kind { kName, kArguments, kId };
  Kind kind;
  std::string key;
  size_t length;  // of the text that is its value
};
struct CallStyle {
  const CallFormat* format = nullptr;  // null: not known
  CallNotation notation = CallNotation::kJson;
  // Of calls in JSON: their members in order, none if they are not known, and whether they are in a list.
  std::vector<CallMember> members = {};
  bool list = false;
};

// A request's values. For a missing value, the command's flags decide.
struct Task {
  // A conversation for the chat template: an array of objects, each with a "role", and "content" as one text.
  // null: the prompt is read as it is, as text or as token ids.
  Json messages;
  Json tools;              // an array in OpenAI's form, which is passed to the chat template; null: none
  Json variables;          // an object with the variables of the chat template; null: none
  Json begun;              // an assistant message that the answer continues; null: none
  Opening opening;         // known when the prompt is known
  bool one_call = false;   // the answer has at most one tool call; further calls are left out
  bool must_call = false;  // the answer is a tool call
  std::string only_tool;   // the tool that it calls; "": any
  std::vector<Mark> marks;
  std::string call_mark;  // what a call in JSON begins with; known when the prompt is known
  CallStyle call_style;   // likewise: how the chat template writes calls
  bool is_chat = false;   // likewise: the prompt is a conversation
  Form form;              // of an answer that is not a call
  std::string prompt;
  std::vector<int32_t> ids;

  std::optional<double> temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
  std::optional<uint32_t> top_k, repeat_last;
  std::optional<uint64_t> seed;
  std::optional<int64_t> max_tokens;
  uint32_t answers = 1;         // number of answers to the prompt; the i-th is sampled with seed + i
  std::vector<int32_t> biased;  // tokens, and what is added to the logit of each
  std::vector<float> biases;
  std::vector<std::string> stops;  // texts that end the answer and do not belong to it
  std::vector<int32_t> stop_ids;   // tokens that do the same
  bool ignores_end = false;        // tokens that end an answer do not end this one
  bool logprobs = false;
  uint32_t top_logprobs = 0;  // number of alternatives for each token
  bool watch = false;         // record what the answer attends to
};

// A request in a wire format: the task, and the form of the answer.
struct Asked {
  Task task;
  bool stream = false;
  bool stream_usage = false;  // OpenAI's stream_options.include_usage
};

struct TokenLogprob {
  std::string bytes;
  double logprob = 0;  // natural logarithm, before temperature and filters
  std::vector<std::pair<std::string, double>> top;
};

struct Piece {
  std::string text;  // whole code points; may be empty
  std::vector<TokenLogprob> logprobs;
};

enum class Ending {
  kEnd,       // the model ended the answer
  kStopText,  // one of the task's stops, or of its tokens that stop
  kLength     // max_tokens, or no room for more
};

struct Usage {
  uint64_t prompt = 0;     // all tokens of the prompt, including those that were not read again
  uint64_t cached = 0;     // tokens of the prompt that were not read again
  uint64_t generated = 0;  // generated tokens, including the one that ended the answer
  uint64_t saved = 0;      // tokens of the prompt that are not `cached`, and that a file holds from now on
};

// The id, time and model name of an answer.
struct Identity {
  std::string id;  // without the format's prefix
  int64_t created = 0;
  std::string model;
};

// Writes one answer in a wire format. The functions for the beginning, each piece and the end return the
// bytes to send now. If the answer is not streamed, only the end returns any.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;
  virtual std::string begin(const Usage& usage) = 0;
  virtual std::string piece(const Piece& piece) = 0;
  // One of several answers ended, and the next one begins.
  virtual std::string next(Ending) { return ""; }
  // `stop`: the text that ended the answer, for kStopText.
  virtual std::string end(Ending ending, const std::string& stop, const Usage& usage) = 0;
  // The bytes that the writer keeps until the end, in addition to the answer's text.
  virtual size_t kept_bytes() const { return 0; }
  // The last event of a stream that fails, whose HTTP status can no longer change.
  virtual std::string failure(const Refusal& refusal) = 0;
};

}  // namespace serve

}  // namespace app
