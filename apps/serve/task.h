// What a request asks of the model and what comes of it, whichever wire format both are written in.
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

// A request that is not served: an HTTP status and one sentence for who sent it.
struct Refusal : std::runtime_error {
  Refusal(int status_, const std::string& message, std::string code_ = "")
      : std::runtime_error(message), status(status_), code(std::move(code_)) {}
  int status;
  std::string code;  // OpenAI's name for it, "context_length_exceeded"; may be empty
};

// How an answer begins, by the end of its prompt.
struct Opening {
  enum class Kind {
    kPlain,
    kThought,  // in a thought, up to `thought_end`
    kHarmony   // in the header of a message of gpt-oss' format
  };
  Kind kind = Kind::kPlain;
  std::string thought_end;
  bool goes_on = false;  // in the middle of the text that the conversation's last message begins
};

// What is not said is the command's flags to decide.
struct Task {
  // A conversation for the chat template: an array of objects, each with a "role", and "content" as one text.
  // null: a prompt that is read as it stands, as text or as token ids.
  Json messages;
  Json tools;             // an array as OpenAI writes it, which the chat template gets; null: none
  Json variables;         // of the chat template, an object; null: none
  Json begun;             // a message of the assistant that the answer goes on with; null: none
  Opening opening;        // known once the prompt is
  bool one_call = false;  // of a tool at most: what the model calls after it is left out
  std::string prompt;
  std::vector<int32_t> ids;

  std::optional<double> temperature, top_p, min_p, repeat_penalty;
  std::optional<uint32_t> top_k, repeat_last;
  std::optional<uint64_t> seed;
  std::optional<int64_t> max_tokens;
  std::vector<std::string> stops;  // texts that end the answer and are no part of it
  bool logprobs = false;
  uint32_t top_logprobs = 0;  // alternatives to each token
  bool watch = false;         // note what the answer attends to
};

// A request in a wire format: the task, and how the answer is to be written.
struct Asked {
  Task task;
  bool stream = false;
  bool stream_usage = false;  // OpenAI's stream_options.include_usage
};

struct TokenLogprob {
  std::string bytes;
  double logprob = 0;  // natural, before temperature and filters
  std::vector<std::pair<std::string, double>> top;
};

struct Piece {
  std::string text;  // whole code points; may be empty
  std::vector<TokenLogprob> logprobs;
};

enum class Ending {
  kEnd,       // the model ended it
  kStopText,  // one of the task's stops
  kLength     // max_tokens, or no room for more
};

struct Usage {
  uint64_t prompt = 0;     // tokens, those that were not read again included
  uint64_t cached = 0;     // of which not read again
  uint64_t generated = 0;  // the one that ended the answer included
};

// What an answer is called.
struct Identity {
  std::string id;  // without the format's prefix
  int64_t created = 0;
  std::string model;
};

// Writes one answer in a wire format: begin, pieces, end, each as the bytes to send now. Where the answer is
// not streamed all but the last are empty.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;
  virtual std::string begin(const Usage& usage) = 0;
  virtual std::string piece(const Piece& piece) = 0;
  // `stop`: the text that ended it, for kStopText.
  virtual std::string end(Ending ending, const std::string& stop, const Usage& usage) = 0;
  // Bytes that it keeps for the end, next to the answer's text.
  virtual size_t kept_bytes() const { return 0; }
  // What ends a stream that can no longer have another HTTP status.
  virtual std::string failure(const Refusal& refusal) = 0;
};

}  // namespace serve

}  // namespace app
