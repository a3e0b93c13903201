// The expressions are matched by our own code and not by a library. PCRE2 and ICU are not available for
// mingw-w64 and Android, each of them is larger than this whole library, and neither guarantees linear time
// on a long run of spaces.
#include "text/pretokenizer.h"

#include <algorithm>
#include <iterator>

namespace thimble {
namespace {

// Parts that several expressions share. They follow the expressions published with the models, because the
// models were trained with these. llama.cpp cuts some text differently: it treats letters beyond ASCII as
// both upper and lower case, drops \p{M} in places, and does not count ~ as a symbol. A long s (U+017F)
// equals an s if case is ignored.
#define CONTRACTION "(?:'[sS\u017f]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
#define WORD R"([^\r\n\p{L}\p{N}]?\p{L}+)"
#define SIGNS R"( ?[^\s\p{L}\p{N}]+[\r\n]*)"
#define CODE_SIGNS R"( ?[^\s\p{L}\p{N}]+[\r\n/]*)"
#define SPACES R"(\s*[\r\n]+|\s+(?!\S)|\s+)"
#define LLAMA3(digits) CONTRACTION "|" WORD R"(|\p{N})" digits "|" SIGNS "|" SPACES
// Capitals followed by small letters, or capitals alone: "camel|Case", "HTTPServer". Letters without case and
// marks belong to both. `but` excludes characters.
#define CASED_WORDS(but, tail)                                                                            \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M})" but R"(]*[\p{Ll}\p{Lm}\p{Lo}\p{M})" but "]+" tail \
  R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M})" but R"(]+[\p{Ll}\p{Lm}\p{Lo}\p{M})" but "]*" tail
#define O200K(digits) CASED_WORDS("", CONTRACTION "?") R"(|\p{N})" digits "|" CODE_SIGNS "|" SPACES
#define CJK "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
// \p{Han} of Unicode 15.0.
#define HAN                                                                                    \
  "\u2e80-\u2e99\u2e9b-\u2ef3\u2f00-\u2fd5\u3005\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf" \
  "\u4e00-\u9fff\uf900-\ufa6d\ufa70-\ufad9\U00016fe2-\U00016fe3\U00016ff0-\U00016ff1"          \
  "\U00020000-\U0002a6df\U0002a700-\U0002b739\U0002b740-\U0002b81d\U0002b820-\U0002cea1"       \
  "\U0002ceb0-\U0002ebe0\U0002f800-\U0002fa1d\U00030000-\U0003134a\U00031350-\U000323af"

constexpr Pass kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr Pass kLlama3 = LLAMA3("{1,3}");
constexpr Pass kQwen2 = LLAMA3("");
constexpr Pass kQwen35 =
    CONTRACTION R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)" SPACES;
constexpr Pass kUfakzeka = WORD R"(|\p{N}|)" SIGNS "|" SPACES;
constexpr Pass kO200k = O200K("{1,3}");
constexpr Pass kYoutu = O200K("");
constexpr Pass kTekken = CASED_WORDS("", "") R"(|\p{N}|)" CODE_SIGNS "|" SPACES;
constexpr Pass kKimi =
    "[" HAN "]+|" CASED_WORDS("--[" HAN "]", CONTRACTION "?") R"(|\p{N}{1,3}|)" SIGNS "|" SPACES;
constexpr Pass kSeedCoder = CONTRACTION "|" WORD R"(|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|)" SPACES;
constexpr Pass kExaoneMoe = CONTRACTION
    R"(|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|)" SPACES;
constexpr Pass kJais2 = CONTRACTION
    "|" WORD R"(|\p{N}{1,3}|)" SIGNS
    R"(|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S))"
    R"(|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1})";
#define DEEPSEEK_WORDS                                                                      \
  R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)" \
  R"(| ?[\p{P}\p{S}]+)"
constexpr Pass kDeepseekV3 = DEEPSEEK_WORDS R"([\r\n]*|)" SPACES;
constexpr Pass kSpark = DEEPSEEK_WORDS R"(|[\r\n]|\s+(?!\S)|\s+)";
constexpr Pass kCjkRuns = "[" CJK "]+";
constexpr Pass kNumber = R"(\p{N})";
constexpr Pass kNumbers = R"(\p{N}+)";
constexpr Pass kThreeNumbers = R"(\p{N}{1,3})";
constexpr Pass kThreesFromRight = {R"(\p{N}+)", true};
constexpr Pass kThreeDigits = "[0-9][0-9][0-9]";
constexpr Pass kLines = R"([^\n]+|[\n]+)";
constexpr Pass kPoro = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+";
constexpr Pass kDeepseekLetters =
    "\\s?["
    "A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF"
    "\u0370-\u0373\u0376-\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5"
    "\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA"
    "\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45"
    "\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FC2-\u1FC4"
    "\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107"
    "\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F"
    "\u2145-\u2149\u214E\u2183-\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2-\u2CF3\uA640-\uA66D"
    "\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17"
    "\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB"
    "\U00010C80-\U00010CB2\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943"
    "]+";

constexpr PreTokenizer kPreTokenizers[] = {
    {"default", {R"([\p{P}\$\+<=>\^~\|]+)", kGpt2, kNumbers, kThreeDigits}},
    {"gpt-2", {kGpt2}},
    {"phi-2", {kGpt2}},
    {"jina-es", {kGpt2}},
    {"jina-de", {kGpt2}},
    {"jina-v2-es", {kGpt2}},
    {"jina-v2-de", {kGpt2}},
    {"jina-v1-en", {kGpt2}},
    {"jina-v2-code", {kGpt2}},
    {"roberta-bpe", {kGpt2}},
    {"gigachat", {kGpt2}},
    {"a.x-4.0", {kGpt2}},
    {"mellum", {kGpt2}},
    {"modern-bert", {kGpt2}},
    {"exaone4", {kGpt2}},
    {"mpt", {kGpt2}},
    {"olmo", {kGpt2}},
    {"jais", {kGpt2}},
    {"trillion", {kGpt2}},
    {"granite-docling", {kGpt2}},
    {"llama3", {kLlama3}, kWhole | kBos},
    {"llama-v3", {kLlama3}, kWhole | kBos},
    {"llama-bpe", {kLlama3}, kWhole | kBos},
    {"falcon3", {kLlama3}, kWhole | kBos},
    {"falcon-h1", {kLlama3}, kWhole | kBos},
    {"pixtral", {kLlama3}, kWhole | kBos},
    {"midm-2.0", {kLlama3}, kWhole | kBos},
    {"lfm2", {kLlama3}, kWhole | kBos},
    {"jina-v5-nano", {kLlama3}, kWhole | kBos},
    {"dbrx", {kLlama3}},
    {"smaug-bpe", {kLlama3}},
    {"glm4", {kLlama3}},
    {"chatglm-bpe", {kLlama3}},
    {"qwen2", {kQwen2}},
    {"deepseek-r1-qwen", {kQwen2}},
    {"kormo", {kQwen2}},
    {"f2llmv2", {kQwen2}},
    {"hunyuan", {kQwen2}},
    {"solar-open", {kQwen2}},
    {"grok-2", {kQwen2}},
    {"stablelm2", {kQwen2}},
    {"megrez", {kQwen2}},
    {"qwen35", {kQwen35}},
    {"ufakzeka", {kUfakzeka}},
    {"gpt-4o", {kO200k}},
    {"llama4", {kO200k}},
    {"kanana2", {kO200k}},
    {"talkie", {kO200k}},
    {"minimax-m2", {kO200k}},
    {"granite-embed-multi-97m", {kO200k}, kWhole},
    {"tekken", {kTekken}, kWhole | kBos},
    {"gemma4", {kLines}, kRaw},
    {"granite-embed-multi-311m", {kLines}, kRaw},
    {"sarvam-moe", {kLines}, kRaw},
    {"whitespace", {R"(\S+)"}, kRaw},
    {"starcoder", {kNumber, kGpt2}},
    {"refact", {kNumber, kGpt2}},
    {"codeshell", {kNumber, kGpt2}},
    {"exaone", {kNumber, kGpt2}},
    {"minerva-7b", {kNumber, kGpt2}},
    {"mellum2", {kNumber, kGpt2}},
    {"smollm", {kNumber, kGpt2}},
    {"command-r", {kNumber, kGpt2}},
    {"falcon", {R"([\p{P}\$\+<=>\^~\|`]+)", kGpt2, kThreeDigits}},
    {"deepseek-v3", {kThreeNumbers, kCjkRuns, kDeepseekV3}},
    {"hunyuan-dense", {kThreeNumbers, kCjkRuns, kDeepseekV3}},
    {"joyai-llm", {kThreeNumbers, kCjkRuns, kDeepseekV3}},
    {"hy_v4", {kThreeNumbers, kCjkRuns, kDeepseekV3}},
    {"spark2_5", {kThreeNumbers, kCjkRuns, kSpark, kNumber}},
    {"deepseek-llm",
     {R"([\r\n])", kDeepseekLetters, "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
      R"(\s+$)", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", kNumbers}},
    {"deepseek-coder",
     {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", kNumber}},
    {"minicpm5", {kThreeNumbers, LLAMA3("+")}, kWhole},
    {"bailingmoe", {kQwen2}},
    {"bailingmoe2", {kQwen2}},
    {"llada-moe", {kQwen2}},
    {"seed-coder", {kSeedCoder}},
    {"exaone-moe", {kExaoneMoe}},
    {"laguna", {kLines, kQwen2}},
    {"jais-2", {kJais2}},
    {"youtu",
     {"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-"
      "\u303f"
      "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[" CJK "]+",
      kYoutu},
     kWhole},
    {"tiny_aya", {kNumbers, kThreesFromRight, kO200k}},
    {"cohere2moe", {kNumbers, kThreesFromRight, kO200k}},
    {"afmoe",
     {kNumbers, kThreesFromRight,
      "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-"
      "\u0e7f"
      "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
      kDeepseekV3}},
    {"superbpe", {kNumbers, {"[0-9]+", true}}},
    {"poro-chat", {kPoro}},
    {"bloom", {kPoro}},
    {"gpt3-finnish", {kPoro}},
    {"viking", {kPoro, kNumber}},
    {"chameleon",
     {"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\t\n]|    |  )", kNumber,
      R"([\p{P}!-/:-@\[-`{-~])", kGpt2},
     kBos},
    {"kimi-k2", {kKimi}},
};

#undef CONTRACTION
#undef WORD
#undef SIGNS
#undef CODE_SIGNS
#undef SPACES
#undef LLAMA3
#undef CASED_WORDS
#undef DEEPSEEK_WORDS
#undef O200K
#undef CJK
#undef HAN

}  // namespace

const PreTokenizer* find_pre_tokenizer(std::string_view name) {
  const auto* found = std::find_if(std::begin(kPreTokenizers), std::end(kPreTokenizers),
                                   [&](const PreTokenizer& p) { return name == p.name; });
  return found == std::end(kPreTokenizers) ? nullptr : found;
}

std::vector<std::string> pre_tokenizer_names() {
  std::vector<std::string> names;
  for (const PreTokenizer& p : kPreTokenizers) names.emplace_back(p.name);
  return names;
}

Splitter::Splitter(const PreTokenizer& scheme) {
  for (const Pass& pass : scheme.passes)
    if (pass.pattern) steps_.push_back({Expression(pass.pattern), pass.threes});
  for (const char space : {'\n', '\r', ' '})
    if (cuts_at(std::string("ab") + space + "ab", 2)) ends_words_ += space;
}

bool Splitter::cuts_at(std::string_view text, size_t place) const {
  bool cuts = false;
  split(text, [&](std::string_view piece) { cuts = cuts || piece.data() == text.data() + place; });
  return cuts;
}

// The state of one text while it passes through the steps.
struct Splitter::Run {
  const std::vector<Step>& steps;
  std::string_view text;
  const std::function<void(std::string_view)>& emit;
  std::vector<Char> chars = characters(text);
  std::vector<Expression::Search> searches = {};
  size_t emitted = 0;  // bytes

  void piece(size_t step, size_t begin, size_t end) {
    if (begin == end) return;
    if (step == steps.size()) return emit_chars(begin, end);
    size_t from = begin;
    const auto cut = [&](size_t at) {
      piece(step + 1, from, at);
      from = at;
    };
    for (size_t at = begin; at < end;) {
      const size_t found = searches[step].match(at, end);
      if (found > at && steps[step].threes) {
        for (size_t place = at + (found - at) % 3; place < found; place += 3) cut(place);
      } else if (found > at) {
        cut(at);
        cut(found);
      }
      at = std::max(found, at + 1);
    }
    cut(end);
  }

  void emit_chars(size_t begin, size_t end) {
    size_t size = 0;
    for (size_t i = begin; i < end; ++i) size += chars[i].size;
    emit(text.substr(emitted, size));
    emitted += size;
  }
};

void Splitter::split(std::string_view text, const std::function<void(std::string_view)>& emit,
                     size_t part) const {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  while (!text.empty()) {
    size_t end = text.size() > part ? std::max<size_t>(part, 1) : text.size();
    while (end < text.size() && !(letter(text[end - 1]) && cuts_before(text[end]))) ++end;
    Run run{steps_, text.substr(0, end), emit};
    for (const Step& step : steps_) run.searches.emplace_back(step.expression, run.chars);
    run.piece(0, 0, run.chars.size());
    text.remove_prefix(end);
  }
}

}  // namespace thimble
