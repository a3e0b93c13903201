// The expressions are written out over a table of character classes and not given to a regex library: PCRE2
// and ICU are not there for mingw-w64, each weighs more than this whole library, and a backtracking engine
// takes quadratic time on a long run of spaces. Every function here looks at a run once. Case folding is
// ASCII, as in the vocabularies' own code.
#include "runtime/tokenizer/pretokenizer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include "runtime/tokenizer/unicode_table.h"
#include "runtime/tokenizer/utf8.h"

namespace thimble {
namespace {

constexpr CharClass search_class(uint32_t value) {
  const auto after = std::upper_bound(std::begin(kCharRanges), std::end(kCharRanges), value,
                                      [](uint32_t v, const CharRange& range) { return v < range.first; });
  if (after == std::begin(kCharRanges) || value > std::prev(after)->last) return CharClass::kOther;
  return std::prev(after)->is;
}

constexpr auto kAscii = [] {
  std::array<CharClass, 128> classes{};
  for (uint32_t i = 0; i < 128; ++i) classes[i] = search_class(i);
  return classes;
}();

struct Char {
  uint32_t value;
  uint32_t size;  // 0 at the end of the piece
  CharClass is;
};

// Bytes that are no UTF-8 are characters of class kOther.
Char char_at(std::string_view piece, size_t at) {
  if (at >= piece.size()) return {0, 0, CharClass::kOther};
  const CodePoint c = first_code_point(piece.substr(at));
  return {c.value, c.size, c.value < 128 ? kAscii[c.value] : search_class(c.value)};
}

using Test = bool (*)(const Char&);

bool letter(const Char& c) { return c.is == CharClass::kLetter || c.is == CharClass::kCasedLetter; }
bool number(const Char& c) { return c.is == CharClass::kNumber; }
bool space(const Char& c) { return c.is == CharClass::kSpace; }
bool newline(const Char& c) { return c.size > 0 && (c.value == '\n' || c.value == '\r'); }
// [^\s\p{L}\p{N}]
bool sign(const Char& c) { return c.size > 0 && !letter(c) && !number(c) && !space(c); }

size_t run_end(std::string_view piece, size_t at, Test test) {
  for (Char c = char_at(piece, at); test(c); c = char_at(piece, at)) at += c.size;
  return at;
}

// X+
template <Test test>
Step run(std::string_view piece, size_t at) {
  const size_t end = run_end(piece, at, test);
  return end > at ? Step{end - at, true} : Step{char_at(piece, at).size, false};
}

// X
template <Test test>
Step single(std::string_view piece, size_t at) {
  const Char c = char_at(piece, at);
  return {c.size, test(c)};
}

// \s?X+
template <Test test>
Step spaced_run(std::string_view piece, size_t at) {
  const Char c = char_at(piece, at);
  const size_t begin = !test(c) && space(c) ? at + c.size : at;
  const size_t end = run_end(piece, begin, test);
  return end > begin ? Step{end - at, true} : Step{c.size, false};
}

// \s+(?!\S)|\s+ : a run of spaces, less its last one where something follows (which then takes that one
// along).
Step spaces(std::string_view piece, size_t at) {
  size_t last = at, end = at;
  for (Char c = char_at(piece, at); space(c); c = char_at(piece, end)) {
    last = end;
    end += c.size;
  }
  return {(end == piece.size() || last == at ? end : last) - at, true};
}

// 's|'t|'re|'ve|'m|'ll|'d ; its length, or 0.
size_t contraction(std::string_view piece, size_t at, bool any_case) {
  if (piece[at] != '\'') return 0;
  for (const std::string_view tail : {"s", "t", "re", "ve", "m", "ll", "d"}) {
    const std::string_view there = piece.substr(at + 1, tail.size());
    if (std::equal(tail.begin(), tail.end(), there.begin(), there.end(),
                   [&](char a, char b) { return a == b || (any_case && a - 'a' + 'A' == b); }))
      return 1 + tail.size();
  }
  return 0;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
Step gpt2(std::string_view piece, size_t at) {
  if (const size_t size = contraction(piece, at, false)) return {size, true};
  const size_t begin = piece[at] == ' ' ? at + 1 : at;
  for (const Test test : {letter, number, sign}) {
    const size_t end = run_end(piece, begin, test);
    if (end > begin) return {end - at, true};
  }
  return spaces(piece, at);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}|
// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
template <int digits>
Step llama3(std::string_view piece, size_t at) {
  if (const size_t size = contraction(piece, at, true)) return {size, true};
  const Char c = char_at(piece, at);
  if (!newline(c) && !number(c)) {
    const size_t begin = letter(c) ? at : at + c.size;
    const size_t end = run_end(piece, begin, letter);
    if (end > begin) return {end - at, true};
  }
  if (number(c)) {
    size_t end = at + c.size;
    for (int i = 1; i < digits && number(char_at(piece, end)); ++i) end += char_at(piece, end).size;
    return {end - at, true};
  }
  const size_t begin = c.value == ' ' ? at + 1 : at;
  if (const size_t end = run_end(piece, begin, sign); end > begin)
    return {run_end(piece, end, newline) - at, true};
  size_t after_newline = at;
  size_t end = at;
  for (Char s = c; space(s); s = char_at(piece, end)) {
    end += s.size;
    if (newline(s)) after_newline = end;
  }
  return after_newline > at ? Step{after_newline - at, true} : spaces(piece, at);
}

// [\p{P}$+<=>^~|]
bool default_punctuation(const Char& c) {
  return c.is == CharClass::kPunctuation ||
         (c.size == 1 && c.value < 128 &&
          std::string_view("$+<=>^~|").find(static_cast<char>(c.value)) != std::string_view::npos);
}

// [0-9][0-9][0-9]
Step three_digits(std::string_view piece, size_t at) {
  const std::string_view three = piece.substr(at, 3);
  const bool match = three.size() == 3 && three.find_first_not_of("0123456789") == std::string_view::npos;
  return {match ? 3u : char_at(piece, at).size, match};
}

// The letters of deepseek-llm's expression, a list of ranges there: cased letters without these.
bool deepseek_letter(const Char& c) {
  constexpr uint32_t kAbsent[][2] = {{0x0560, 0x0588},   {0x10C7, 0x10FF},   {0x1C80, 0x1C88},
                                     {0x1FBE, 0x1FBE},   {0x2D00, 0x2D2D},   {0xA790, 0xAB6F},
                                     {0x10570, 0x105BC}, {0x16E40, 0x16E7F}, {0x1D400, 0x1DFFF}};
  if (c.is != CharClass::kCasedLetter) return false;
  return std::none_of(std::begin(kAbsent), std::end(kAbsent),
                      [&](const uint32_t(&r)[2]) { return c.value >= r[0] && c.value <= r[1]; });
}

// [!-/:-~！-／：-～‘-‟　-。]
bool deepseek_punctuation(const Char& c) {
  const auto in = [&](uint32_t first, uint32_t last) { return c.value >= first && c.value <= last; };
  return in('!', '/') || in(':', '~') || in(0xFF01, 0xFF0F) || in(0xFF1A, 0xFF5E) || in(0x2018, 0x201F) ||
         in(0x3000, 0x3002);
}

// [一-龥ࠀ-一가-퟿]
bool deepseek_cjk(const Char& c) {
  return (c.value >= 0x0800 && c.value <= 0x9FA5) || (c.value >= 0xAC00 && c.value <= 0xD7FF);
}

// \s+$
Step spaces_at_end(std::string_view piece, size_t at) {
  const size_t end = run_end(piece, at, space);
  return end > at ? Step{end - at, end == piece.size()} : Step{char_at(piece, at).size, false};
}

// Names that share a row's expressions in published files: llama-v3 and falcon3 with llama-bpe, dbrx (Phi-4)
// without taking pieces whole, deepseek-r1-qwen with qwen2.
constexpr PreTokenizer kPreTokenizers[] = {
    {"default", {run<default_punctuation>, gpt2, run<number>, three_digits}, false, false},
    {"gpt-2", {gpt2}, false, false},
    {"llama-bpe", {llama3<3>}, true, true},
    {"llama3", {llama3<3>}, true, true},
    {"llama-v3", {llama3<3>}, true, true},
    {"falcon3", {llama3<3>}, true, true},
    {"dbrx", {llama3<3>}, false, false},
    {"smaug-bpe", {llama3<3>}, false, false},
    {"qwen2", {llama3<1>}, false, false},
    {"deepseek-r1-qwen", {llama3<1>}, false, false},
    {"starcoder", {single<number>, gpt2}, false, false},
    {"smollm", {single<number>, gpt2}, false, false},
    {"deepseek-llm",
     {single<newline>, spaced_run<deepseek_letter>, spaced_run<deepseek_punctuation>, spaces_at_end,
      run<deepseek_cjk>, run<number>},
     false,
     false},
};

void split_from(const PreTokenizer& scheme, size_t pass, std::string_view piece,
                const std::function<void(std::string_view)>& emit) {
  if (piece.empty()) return;
  if (pass == std::size(scheme.passes) || !scheme.passes[pass]) return emit(piece);
  size_t gap = 0;  // where what matched nothing begins
  for (size_t at = 0; at < piece.size();) {
    const Step step = scheme.passes[pass](piece, at);
    if (step.match) {
      split_from(scheme, pass + 1, piece.substr(gap, at - gap), emit);
      split_from(scheme, pass + 1, piece.substr(at, step.size), emit);
      gap = at + step.size;
    }
    at += step.size;
  }
  split_from(scheme, pass + 1, piece.substr(gap), emit);
}

}  // namespace

const PreTokenizer* find_pre_tokenizer(std::string_view name) {
  const auto* found = std::find_if(std::begin(kPreTokenizers), std::end(kPreTokenizers),
                                   [&](const PreTokenizer& p) { return name == p.name; });
  return found == std::end(kPreTokenizers) ? nullptr : found;
}

std::string pre_tokenizer_names() {
  std::string names;
  for (const PreTokenizer& p : kPreTokenizers) names += (names.empty() ? "" : ", ") + std::string(p.name);
  return names;
}

void split(const PreTokenizer& scheme, std::string_view text,
           const std::function<void(std::string_view)>& emit) {
  split_from(scheme, 0, text, emit);
}

}  // namespace thimble
