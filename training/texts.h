// The texts that retainers are trained with: a part of a book with facts hidden at the ends of its sentences,
// then every question about them with its answer, as the model's chat format writes them.
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
  std::vector<int32_t> prompt, answer;  // as it stands behind the text, up to the answer; the answer's tokens
  std::vector<std::string> expected;    // what a right answer must contain; empty: a check does not ask it
};

// What follows a text, and then is forgotten: questions with their answers, or the text itself once more.
struct Tail {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> marked;  // of each token whether its query makes labels
  // Of the text's tokens it labels those of [first, end), and their weight is counted among these, the first
  // `sinks`, and its own.
  uint32_t sinks = 0, first = 0, end = 0;

  void add(const std::vector<int32_t>& more, uint32_t mark) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    marked.resize(tokens.size(), mark);
  }
};

struct TrainingText {
  std::vector<int32_t> tokens;
  std::vector<Question> questions;
  std::vector<Tail> tails;  // each follows the text by itself

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

// Tokens that the instruction to repeat a text takes at most.
constexpr uint32_t kInstructionTokens = 128;

// How many tokens a text of training has, whole runs of them: `wanted`, 0: 6144, or as many as the model's
// context allows when questions take half as many behind it, or, `repeated`, the text itself once more.
// Unsupported where that is too short to learn from.
Result<uint32_t> length_of_texts(const Model&, uint32_t wanted, bool repeated);

class TextMaker {
 public:
  // Reads the files: books in plain UTF-8 text, or JSON lines of prompts and answers (conversations.h).
  // Refuses what is neither, and too little of it. `tokens`: of each text; `tail_tokens`: of its questions
  // and answers at most.
  static Result<TextMaker> open(std::shared_ptr<const Model>, const std::vector<std::string>& files,
                                uint32_t tokens, uint32_t tail_tokens, uint64_t seed);

  bool has_books() const { return has_books_; }
  // Prompts, as many as there are of at least a run of tokens and at most `count`, chosen by the seed, each
  // with its answers behind it. Of a chat that begins with a shorter one, its turns up to that many tokens
  // are the prompt. A longer prompt than a text loses its middle: what is asked stands at either end.
  std::vector<TrainingText> answered(uint32_t count) const;

  // The number-th text: the same for a seed, wherever and in whatever order texts are made. Those that are
  // held out come from the last fifth of the books, in which the others have no part.
  TrainingText make(uint64_t number, bool held_out) const;
  // The number-th text with what is hidden in it. A repetition of the whole text follows it, and no question.
  TrainingText repeated(uint64_t number, bool held_out) const;

  uint32_t tokens() const { return tokens_; }
  uint64_t book_hash() const { return hash_; }  // of all books' bytes

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
  // A question as the text's first turn ends with it, or as a turn of its own.
  std::vector<int32_t> prompt_of(const std::string& question, bool first) const;
  bool ends_sentence(int32_t token) const { return ends_[static_cast<size_t>(token)]; }

  std::shared_ptr<const Model> model_;
  uint32_t tokens_, tail_tokens_;
  uint64_t seed_, hash_ = 0;
  std::vector<int32_t> read_, held_out_;  // tokens of books, of prompts, and of chats
  bool has_books_ = false;
  std::vector<MappedFile> files_;        // of JSON lines
  std::vector<std::string_view> lines_;  // of these, with prompts and answers, and not held out
  std::vector<bool> ends_;               // of each token of the vocabulary
  // How the chat format opens the first turn of a user and a later one, closes it up to the answer, and ends
  // an answer.
  bool chats_ = false;  // the model has a chat template or format; else questions are plain text
  std::string opening_, next_opening_, closing_;
  std::vector<int32_t> end_of_answer_, after_answer_;
};

}  // namespace thimble
