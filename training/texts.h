// The texts that retainers are trained with. A text is a part of a book with facts inserted at the ends of
// sentences, followed by every question about them with its answer, in the model's chat format.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "runtime/model/model.h"
#include "templates/chat/writer.h"
#include "training/facts.h"

namespace thimble {

struct Question {
  // `prompt` is everything after the text up to the answer.
  std::vector<int32_t> prompt, answer;
  // Strings that a right answer must contain. Empty if a check does not ask the question.
  std::vector<std::string> expected;
};

// Tokens that are read after a text and then dropped: questions with their answers, or the text once more.
struct Tail {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> marked;  // for each token, whether its query contributes to the labels
  // The tail labels the text's tokens [first, end). Their attention weights are normalised over these tokens,
  // the first `sinks` tokens and the tail's own tokens.
  uint32_t sinks = 0, first = 0, end = 0;

  void add(const std::vector<int32_t>& more, uint32_t mark) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    marked.resize(tokens.size(), mark);
  }
};

struct TrainingText {
  std::vector<int32_t> tokens;
  std::vector<Question> questions;
  std::vector<Tail> tails;  // each follows the text independently

  uint64_t all_tokens() const {
    uint64_t all = tokens.size();
    for (const Tail& tail : tails) all += tail.tokens.size();
    return all;
  }
  uint32_t longest_tail() const {
    size_t longest = 0;
    for (const Tail& tail : tails) longest = std::max(longest, tail.tokens.size());
    return static_cast<uint32_t>(longest);
  }
};

// The largest number of tokens in the instruction to repeat a text.
constexpr uint32_t kInstructionTokens = 128;

// Tokens per training text, a multiple of kRunTokens. `wanted` 0 means 6144. The length is limited by the
// model's context, which must also hold the questions (half the length of the text) or, with `repeated`, the
// text once more. Unsupported if the result is too short to train with.
Result<uint32_t> length_of_texts(const Model&, uint32_t wanted, bool repeated);

class TextMaker {
 public:
  // Reads the files: books in plain UTF-8 text, or JSON lines of prompts and answers (conversations.h).
  // Refuses other files, and files with too little text. `tokens` is the length of each text. `tail_tokens`
  // limits its questions and answers.
  static Result<TextMaker> open(std::shared_ptr<const Model>, const std::vector<std::string>& files,
                                uint32_t tokens, uint32_t tail_tokens, uint64_t seed);

  bool has_books() const { return has_books_; }
  // Up to `count` prompts of at least kRunTokens tokens, chosen by the seed, each followed by its answers. If
  // a chat begins with a shorter prompt, its turns up to that many tokens become the prompt. A prompt longer
  // than a text loses its middle, because instructions and questions are usually at the beginning or the end.
  std::vector<TrainingText> answered(uint32_t count) const;

  // Text `number`. It depends only on the seed and the number, not on the order of calls. Held-out texts come
  // from the last fifth of the books, which the other texts never use.
  TrainingText make(uint64_t number, bool held_out) const;
  // Text `number` with its hidden facts. A repetition of the whole text follows it, without questions.
  TrainingText repeated(uint64_t number, bool held_out) const;

  uint32_t tokens() const { return tokens_; }
  uint64_t book_hash() const { return hash_; }  // of the bytes of all books

 private:
  TextMaker(std::shared_ptr<const Model> model, uint32_t tokens, uint32_t tail_tokens, uint64_t seed)
      : model_(std::move(model)), tokens_(tokens), tail_tokens_(tail_tokens), seed_(seed) {}

  Status find_format();
  Result<std::string> write_chat(std::vector<ChatMessage> messages, bool first) const;
  void add_book(std::string_view text);
  Status add_lines(MappedFile file, const std::string& path);
  Tail reply_to(const std::vector<std::string>& turns, uint32_t text_tokens) const;
  std::vector<int32_t> tokenize(const std::string& text, bool first = false, bool special = false) const;
  std::vector<int32_t> part_of_book(Random&, uint32_t tokens, bool held_out) const;
  std::vector<Fact> facts_for(Random&, uint32_t room) const;
  std::vector<Fact> quotes_of(Random&, const std::vector<int32_t>& part) const;
  uint32_t end_of_sentence(const std::vector<int32_t>& part, uint32_t at) const;
  std::vector<int32_t> answer_of(const std::string& answer) const;
  // A question that ends the text's first turn, or one that is a turn of its own.
  std::vector<int32_t> prompt_of(const std::string& question, bool first) const;
  bool ends_sentence(int32_t token) const { return ends_[static_cast<size_t>(token)]; }

  std::shared_ptr<const Model> model_;
  uint32_t tokens_, tail_tokens_;
  uint64_t seed_, hash_ = 0;
  std::vector<int32_t> read_, held_out_;  // tokens of books, prompts and chats
  bool has_books_ = false;
  std::vector<MappedFile> files_;  // JSON lines files
  // The lines of files_ with prompts and answers, without the held-out ones.
  std::vector<std::string_view> lines_;
  std::vector<bool> ends_;  // for each token of the vocabulary, whether it ends a sentence
  // The parts of the chat format: what opens a user's first turn, what opens a later turn, what closes a turn
  // up to the answer, and what ends an answer.
  // Whether the model has a chat template or a known chat format. If not, questions are plain text.
  bool chats_ = false;
  std::string opening_, next_opening_, closing_;
  std::vector<int32_t> end_of_answer_, after_answer_;
};

}  // namespace thimble
