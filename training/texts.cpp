#include "training/texts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/fnv1a.h"
#include "base/mapped_file.h"
#include "text/utf8.h"
#include "training/conversations.h"
#include "training/samples.h"

namespace thimble {
namespace {

constexpr uint32_t kLeastTokens = 1024;  // of the books; less is not a long text

std::string_view contents(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size())};
}

Status check_text(std::string_view text, const std::string& path) {
  if (text.empty())
    return error(Code::kFormat, "%s is empty; give a plain text, a book for example", path.c_str());
  if (text.find('\0') != std::string_view::npos)
    return error(Code::kFormat, "%s is not a text: it holds zero bytes; give a plain text file in UTF-8",
                 path.c_str());
  for (std::string_view rest = text; !rest.empty();) {
    const CodePoint point = first_code_point(rest);
    if (point.value >= kInvalidUtf8)
      return error(Code::kFormat, "%s is not UTF-8: byte %zu does not begin a character; convert it first",
                   path.c_str(), text.size() - rest.size());
    rest.remove_prefix(point.size);
  }
  const size_t first = text.find_first_not_of(" \t\r\n"),
               second = text.find_first_not_of(" \t\r\n", first + 1);
  if (first != std::string_view::npos && second != std::string_view::npos && text[first] == '[' &&
      text[second] == '{')
    return error(Code::kFormat,
                 "%s is an array of JSON; write each of its objects on a line of its own (jq -c '.[]')",
                 path.c_str());
  return {};
}

}  // namespace

Result<uint32_t> length_of_texts(const Model& model, uint32_t wanted, bool repeated) {
  constexpr uint32_t kTextTokens = 6144, kLeastTextTokens = 1024;
  if (wanted && wanted < kLeastTextTokens)
    return error(Code::kInvalidArgument, "texts of %u tokens are too short for training; give at least %u",
                 wanted, kLeastTextTokens);
  const uint32_t context = model.info.context_length;
  uint32_t tokens = wanted ? wanted : kTextTokens;
  if (context) {
    const uint32_t asked = context / 3 * 2,
                   again = (std::max(context, kInstructionTokens) - kInstructionTokens) / 2;
    tokens = std::min(tokens, repeated ? again : asked);
  }
  tokens = tokens / kRunTokens * kRunTokens;
  if (tokens < kLeastTextTokens)
    return error(Code::kUnsupported,
                 "a context of %u tokens is too short for training; training needs at least %u", context,
                 2 * kLeastTextTokens + kInstructionTokens);
  return tokens;
}

Result<TextMaker> TextMaker::open(std::shared_ptr<const Model> model, const std::vector<std::string>& files,
                                  uint32_t tokens, uint32_t tail_tokens, uint64_t seed) {
  if (!model->tokenizer.ok())
    return error(Code::kUnsupported, "the model cannot turn text into tokens: %s",
                 model->description_of_tokenizer_error.c_str());
  TextMaker maker(model, tokens, tail_tokens, seed);
  maker.hash_ = kFnv1aBasis;
  for (const std::string& path : files) {
    THIMBLE_LET(file, MappedFile::open(path));
    THIMBLE_TRY(check_text(contents(file), path));
    maker.hash_ = fnv1a(contents(file), maker.hash_);
    if (is_json_lines(contents(file)))
      THIMBLE_TRY(maker.add_lines(std::move(file), path));
    else
      maker.add_book(contents(file));
  }
  if (maker.read_.size() + maker.held_out_.size() < kLeastTokens || maker.held_out_.size() < kLeastTokens / 5)
    return error(
        Code::kInvalidArgument,
        "the files of --data hold %zu tokens, %zu of them to be held out; at least %u are needed, and a "
        "whole book is better",
        maker.read_.size() + maker.held_out_.size(), maker.held_out_.size(), kLeastTokens);
  maker.ends_.resize(model->tokenizer.size());
  for (uint32_t id = 0; id < model->tokenizer.size(); ++id) {
    std::string piece;
    model->tokenizer.append_piece(static_cast<int32_t>(id), false, piece);
    const bool line = !piece.empty() && piece.back() == '\n';
    while (!piece.empty() && (piece.back() == ' ' || piece.back() == '"' || piece.back() == '\''))
      piece.pop_back();
    maker.ends_[id] =
        line || (!piece.empty() && std::string_view(".!?\n").find(piece.back()) != std::string_view::npos);
  }
  THIMBLE_TRY(maker.find_format());
  return maker;
}

// The last fifth of a book is held out.
void TextMaker::add_book(std::string_view text) {
  const std::vector<int32_t> book = tokenize(std::string(text));
  const auto cut = book.begin() + static_cast<ptrdiff_t>(book.size() / 5 * 4);
  read_.insert(read_.end(), book.begin(), cut);
  held_out_.insert(held_out_.end(), cut, book.end());
  has_books_ = true;
}

// The last fifth of the lines is held out. Prompts and the texts of chats also serve as a book, up to the
// length of a long book.
Status TextMaker::add_lines(MappedFile file, const std::string& path) {
  constexpr size_t kMostTokens = 1 << 20;
  constexpr size_t kLeastLines = 5;
  const std::vector<NumberedLine> lines = lines_of(contents(file));
  if (lines.size() < kLeastLines)
    return error(Code::kInvalidArgument,
                 "%s holds %zu lines; at least %zu are needed, as a fifth of them is held out", path.c_str(),
                 lines.size(), kLeastLines);
  const size_t cut = lines.size() - lines.size() / 5;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string where = path + ", line " + std::to_string(lines[i].number);
    THIMBLE_LET(conversation, read_conversation(lines[i].text, where));
    if (conversation.prompt.empty()) continue;
    if (i < cut) lines_.push_back(lines[i].text);
    std::vector<int32_t>& tokens = i < cut ? read_ : held_out_;
    if (tokens.size() >= kMostTokens) continue;
    std::string text = conversation.prompt + "\n";
    if (const auto& turns = conversation.replies.front(); turns.size() > 1)
      for (const std::string& turn : turns) text += turn + "\n";
    const std::vector<int32_t> read = tokenize(text);
    tokens.insert(tokens.end(), read.begin(), read.end());
  }
  files_.push_back(std::move(file));
  return {};
}

// Marks the answers, and the token before each answer.
Tail TextMaker::reply_to(const std::vector<std::string>& turns, uint32_t text_tokens) const {
  Tail tail{.end = text_tokens};
  tail.add(tokenize(closing_, false, true), 0);
  for (size_t i = 0; i < turns.size(); ++i) {
    if (i % 2) {
      tail.add(prompt_of(turns[i], false), 0);
      continue;
    }
    if (!tail.marked.empty()) tail.marked.back() = 1;
    tail.add(answer_of(turns[i]), 1);
    tail.add(after_answer_, 0);
  }
  if (tail.tokens.size() > tail_tokens_) {
    tail.tokens.resize(tail_tokens_);
    tail.marked.resize(tail_tokens_);
  }
  return tail;
}

std::vector<TrainingText> TextMaker::answered(uint32_t count) const {
  constexpr uint32_t kLeastPrompt = 256;
  constexpr size_t kMostReplies = 4;
  std::vector<size_t> order(lines_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  Random r = random_of(seed_, 0x6c696e65u);
  r.shuffle(order);
  std::vector<TrainingText> texts;
  for (size_t next = 0; next < order.size() && texts.size() < count; ++next) {
    // The line was read successfully before.
    const AnsweredPrompt conversation = *read_conversation(lines_[order[next]], "");
    TrainingText text;
    const auto add = [&text](const std::vector<int32_t>& more) {
      text.tokens.insert(text.tokens.end(), more.begin(), more.end());
    };
    add(tokenize(opening_, true, true));
    add(tokenize(conversation.prompt));
    std::vector<std::vector<std::string>> replies = conversation.replies;
    std::vector<std::string>& turns = replies.front();
    // The number of turns of a chat that become the prompt: as many as a text needs, because later turns ask
    // for early content.
    size_t read = 0;
    while (text.tokens.size() < kLeastPrompt && replies.size() == 1 && read + 2 < turns.size()) {
      add(tokenize(closing_, false, true));
      add(answer_of(turns[read]));
      add(after_answer_);
      add(tokenize(next_opening_, false, true));
      add(tokenize(turns[read + 1]));
      read += 2;
    }
    turns.erase(turns.begin(), turns.begin() + static_cast<ptrdiff_t>(read));
    if (text.tokens.size() > tokens_)
      text.tokens.erase(text.tokens.begin() + tokens_ / 2, text.tokens.end() - (tokens_ - tokens_ / 2));
    if (text.tokens.size() < kLeastPrompt) continue;
    for (size_t i = 0; i < std::min(replies.size(), kMostReplies); ++i)
      text.tails.push_back(reply_to(replies[i], static_cast<uint32_t>(text.tokens.size())));
    texts.push_back(std::move(text));
  }
  return texts;
}

// Writes two turns, and finds what the format puts around them.
Status TextMaker::find_format() {
  const std::string mark = "@@@";
  const Result<std::string> turn = write_chat({{"user", mark}}, true),
                            next = write_chat({{"user", mark}}, false),
                            turns = write_chat({{"user", "?"}, {"assistant", mark}}, true);
  if (!turn.ok() || !next.ok() || !turns.ok()) {  // not a chat model, or a template that needs more than this
    opening_ = "";
    next_opening_ = "\n\nQuestion: ";
    closing_ = "\nAnswer:";
    after_answer_ = tokenize("\n");
    return {};
  }
  chats_ = true;
  const auto around = [&](const std::string& text, std::string& before, std::string& after) {
    const size_t at = text.find(mark);
    if (at == std::string::npos) return false;
    before = text.substr(0, at);
    after = text.substr(at + mark.size());
    return true;
  };
  std::string unused, ending;
  if (!around(*turn, opening_, closing_) || !around(*next, next_opening_, unused) ||
      !around(*turns, unused, ending))
    return error(
        Code::kUnsupported,
        "the model's chat template drops the text of a message; train with another file of the model");
  // Of the text after an answer, only the token that ends it is kept. The next turn supplies the rest.
  for (const int32_t token : tokenize(ending, false, true)) {
    end_of_answer_.push_back(token);
    if (model_->tokenizer.ends_generation(token)) break;
  }
  return {};
}

// The text of a conversation. If a user spoke last, it goes up to the start of the next answer. `first` says
// that nothing precedes it.
Result<std::string> TextMaker::write_chat(std::vector<ChatMessage> messages, bool first) const {
  const bool asks = messages.back().role == "user";
  return model_->chat.write({.messages = std::move(messages), .add_assistant = asks, .continues = !first},
                            model_->tokenizer);
}

std::vector<int32_t> TextMaker::tokenize(const std::string& text, bool first, bool special) const {
  std::vector<int32_t> ids;
  for (const Token& token : model_->tokenizer.tokenize(text, first, special)) ids.push_back(token.id);
  return ids;
}

// Starts at the beginning of a sentence. A short book is continued from its beginning.
std::vector<int32_t> TextMaker::part_of_book(Random& r, uint32_t tokens, bool held_out) const {
  const std::vector<int32_t>& book = held_out ? held_out_ : read_;
  const auto size = static_cast<uint32_t>(book.size());
  constexpr uint32_t kSentence = 400;  // largest length of a sentence in tokens, with rare exceptions
  uint32_t at = r.below(size > tokens + kSentence ? size - tokens - kSentence : size);
  for (uint32_t tried = 0; tried < kSentence && !ends_sentence(book[(at + size - 1) % size]); ++tried) ++at;
  std::vector<int32_t> part(tokens);
  for (uint32_t i = 0; i < tokens; ++i) part[i] = book[(at + i) % size];
  return part;
}

// Random numbers of facts of each kind. At least half of the text remains for the book.
std::vector<Fact> TextMaker::facts_for(Random& r, uint32_t room) const {
  constexpr uint32_t kTokensOfFact = 24, kTokensOfPair = 36;  // a generous estimate
  const uint32_t most = room / 4 / kTokensOfFact;
  std::vector<Fact> facts;
  std::set<std::string> subjects;
  const auto add = [&](Fact fact) {
    if (subjects.insert(fact.subject).second) facts.push_back(std::move(fact));
  };
  for (uint32_t n = r.between(std::min(4u, most), std::min(40u, most)); n; --n) add(make_fact(r));
  if (r.chance(0.6)) add(make_key(r, false));
  if (r.chance(0.6)) add(make_key(r, true));
  if (r.chance(0.5)) add(make_values(r));
  if (r.chance(0.5))
    for (uint32_t n = r.between(2, 3); n; --n) add(make_chain(r));
  if (r.chance(0.4)) add(make_count(r, r.between(20, std::max(20u, room / kTokensOfFact / 2))));
  if (r.chance(0.5)) {
    const uint32_t language = r.below(kLanguages);
    for (uint32_t n = r.between(2, std::clamp(room / 8 / kTokensOfPair, 2u, 12u)); n; --n)
      add(make_code(r, language));
  }
  const double most_pairs = std::min(60.0, static_cast<double>(room) / 4 / kTokensOfPair);
  if (most_pairs >= 2 && r.chance(0.8)) {
    const bool hex = r.chance(0.5);
    for (auto n = static_cast<uint32_t>(2 * std::pow(most_pairs / 2, r.uniform())); n; --n)
      add(make_pair(r, hex));
  }
  return facts;
}

std::vector<int32_t> TextMaker::prompt_of(const std::string& question, bool first) const {
  if (!chats_) return tokenize(next_opening_ + question + closing_);
  if (first) {
    std::vector<int32_t> prompt = tokenize("\n\n" + question);
    const std::vector<int32_t> closing = tokenize(closing_, false, true);
    prompt.insert(prompt.end(), closing.begin(), closing.end());
    return prompt;
  }
  // find_format() has written such a turn with this template, so writing it cannot fail.
  return tokenize(*write_chat({{"user", question}}, false), false, true);
}

std::vector<int32_t> TextMaker::answer_of(const std::string& answer) const {
  std::vector<int32_t> tokens = tokenize(chats_ ? answer : " " + answer);
  tokens.insert(tokens.end(), end_of_answer_.begin(), end_of_answer_.end());
  return tokens;
}

// The end of the sentence that contains the token at `at`.
uint32_t TextMaker::end_of_sentence(const std::vector<int32_t>& part, uint32_t at) const {
  while (at < part.size() && !(at > 0 && ends_sentence(part[at - 1]))) ++at;
  return at;
}

// Facts that ask how a few sentences of the part continue.
std::vector<Fact> TextMaker::quotes_of(Random& r, const std::vector<int32_t>& part) const {
  constexpr uint32_t kMost = 4, kRoom = 200;
  constexpr size_t kLeastBytes = 12;  // of the quoted words
  std::vector<Fact> quotes;
  if (part.size() < kRoom) return quotes;
  for (uint32_t n = r.below(kMost + 1); n; --n) {
    const uint32_t at = end_of_sentence(part, r.below(static_cast<uint32_t>(part.size())));
    const uint32_t quoted = r.between(6, 10), wanted = r.between(6, 14);
    if (at + quoted + wanted > part.size()) continue;
    const auto words = [&](uint32_t first, uint32_t count) {
      std::string text = model_->tokenizer.detokenize(part.data() + first, count, false);
      text.erase(0, text.find_first_not_of(" \n"));
      return text;
    };
    std::string begin = words(at, quoted);
    const std::string end = words(at + quoted, wanted);
    std::replace(begin.begin(), begin.end(), '\n', ' ');
    if (begin.size() < kLeastBytes || end.empty() || end.find('\n') != std::string::npos) continue;
    quotes.push_back({"", {}, "Continue the quote: \"" + begin + "\"", end, {}});
  }
  return quotes;
}

TrainingText TextMaker::repeated(uint64_t number, bool held_out) const {
  TrainingText text = make(number, held_out);
  text.questions.clear();
  text.tails.clear();
  const auto opening =
      static_cast<uint32_t>(std::min<size_t>(tokens_, tokenize(opening_, true, true).size()));
  Tail tail{.end = tokens_};
  // The instruction that KVzap uses.
  tail.add(tokenize("\n\nRepeat the previous context exactly."), 0);
  tail.add(chats_ ? tokenize(closing_, false, true) : tokenize("\n\n"), 0);
  tail.add({text.tokens.begin() + opening, text.tokens.end()}, 1);
  text.tails.push_back(std::move(tail));
  return text;
}

TrainingText TextMaker::make(uint64_t number, bool held_out) const {
  Random r = random_of(seed_, 2 * number + held_out);
  TrainingText text;
  text.tokens = tokenize(opening_ + make_introduction(r) + "\n", true, true);

  // Chooses the facts that fit into the text; their questions go after the text. Quotes are chosen last and
  // use the remaining space.
  struct Hidden {
    std::vector<int32_t> tokens;
    uint32_t at;    // token of the book before which it is inserted
    uint32_t fact;  // index of its fact; the sentences stand in this order
  };
  std::vector<Hidden> hidden;
  std::vector<Fact> asked;
  auto room = tokens_ - static_cast<uint32_t>(std::min<size_t>(tokens_, text.tokens.size()));
  uint32_t tail_room = tail_tokens_;
  const auto take_question = [&](const Fact& fact) {
    const size_t needed =
        std::max(prompt_of(fact.question, true).size(), prompt_of(fact.question, false).size()) +
        answer_of(fact.answer).size() + after_answer_.size();
    if (needed > tail_room) return false;
    tail_room -= static_cast<uint32_t>(needed);
    asked.push_back(fact);
    return true;
  };
  const std::vector<Fact> facts = facts_for(r, room);
  for (uint32_t i = 0; i < facts.size(); ++i) {
    std::vector<Hidden> sentences;
    size_t tokens = 0;
    for (const std::string& sentence : facts[i].sentences) {
      const bool own_line = sentence.find('\n') != std::string::npos || !r.chance(0.7);
      sentences.push_back({tokenize((own_line ? "\n" : " ") + sentence), 0, i});
      tokens += sentences.back().tokens.size();
    }
    if (tokens + tokens_ / 4 > room || !take_question(facts[i])) continue;
    room -= static_cast<uint32_t>(tokens);
    hidden.insert(hidden.end(), sentences.begin(), sentences.end());
  }

  const std::vector<int32_t> part = part_of_book(r, room, held_out);
  const auto anywhere = [&] { return end_of_sentence(part, r.below(room + 1)); };
  const bool as_list = r.chance(0.6);  // whether all facts that may be listed stand in one place
  const uint32_t place_of_list = anywhere();
  for (size_t first = 0, end; first < hidden.size(); first = end) {
    std::vector<uint32_t> places;
    for (end = first; end < hidden.size() && hidden[end].fact == hidden[first].fact; ++end)
      places.push_back(facts[hidden[end].fact].listed && as_list ? place_of_list : anywhere());
    std::sort(places.begin(), places.end());
    for (size_t i = first; i < end; ++i) hidden[i].at = places[i - first];
  }
  std::stable_sort(hidden.begin(), hidden.end(),
                   [](const Hidden& a, const Hidden& b) { return a.at < b.at; });
  auto next = part.begin();
  const auto add_part = [&](uint32_t end) {
    text.tokens.insert(text.tokens.end(), next, part.begin() + end);
    next = part.begin() + end;
  };
  for (const Hidden& h : hidden) {
    add_part(h.at);
    text.tokens.insert(text.tokens.end(), h.tokens.begin(), h.tokens.end());
  }
  add_part(room);

  for (const Fact& quote : quotes_of(r, part)) take_question(quote);
  r.shuffle(asked);
  Tail tail{.end = static_cast<uint32_t>(text.tokens.size())};
  for (const Fact& fact : asked) {
    const std::vector<int32_t> answer = answer_of(fact.answer);
    tail.add(prompt_of(fact.question, text.questions.empty()), 0);
    tail.marked.back() = 1;  // this token's query predicts the answer's first token
    tail.add(answer, 1);
    tail.add(after_answer_, 0);
    text.questions.push_back({prompt_of(fact.question, true), answer, fact.expected});
  }
  text.tails.push_back(std::move(tail));
  return text;
}

}  // namespace thimble
