// The tokenizer on top of both kinds of vocabulary: special tokens, BOS, and detokenization.
#include "text/tokenizer.h"

#include <algorithm>

#include "gguf/gguf.h"
#include "text/encoder.h"
#include "text/utf8.h"
#include "text/vocabulary.h"

namespace thimble {

struct Tokenizer::Impl {
  Vocabulary vocabulary;
  std::unique_ptr<Encoder> encoder;
  bool adds_bos = false;
  bool phi3 = false;
  // White space across which no token continues from an ASCII letter, neither a token of the encoder nor a
  // user-defined or special token.
  std::string ends_words;
  uint32_t longest_piece = 0;
  std::vector<std::string> warnings;

  // Whether a token has no text. Control and unknown tokens have none; user-defined tokens have exactly their
  // own text.
  bool silent(int32_t id) const {
    const TokenType type = vocabulary.type(id);
    return type == TokenType::kControl || type == TokenType::kUnknown;
  }
  // Phi-3's marks remove the white space after them. GGUF files do not say so.
  bool strips_after(int32_t id) const {
    const std::string_view text = vocabulary.text(id);
    return phi3 && ((text.starts_with("<|") && text != "<|endoftext|>") || text == "</s>");
  }
  // Whether a token is shown as its vocabulary text.
  bool literal(int32_t id) const {
    const TokenType type = vocabulary.type(id);
    return type == TokenType::kUserDefined || type == TokenType::kMark;
  }
};

namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Whether a token continues from an ASCII letter to this white space.
bool holds_word_end(std::string_view text, char space) {
  for (size_t at = 1; at < text.size(); ++at)
    if (text[at] == space && is_letter(text[at - 1])) return true;
  return false;
}

// Chooses the pre-tokenizer of a BPE file. An unknown name does not make the model unusable, because the
// default cuts most text in the same way.
Result<const PreTokenizer*> choose_pre_tokenizer(const Gguf& file, std::string_view model,
                                                 std::vector<std::string>& warnings) {
  if (model == "gemma4") return find_pre_tokenizer("gemma4");
  THIMBLE_LET(name, file.get_string("tokenizer.ggml.pre"));
  if (name)
    if (const PreTokenizer* found = find_pre_tokenizer(*name)) return found;
  const std::string asks =
      name ? "asks for the pre-tokenizer " + in_quotes(*name) + ", which is not known here"
           : "does not name its pre-tokenizer (tokenizer.ggml.pre)";
  warnings.push_back(error(Code::kUnsupported,
                           "%s %s; text is cut the default way, and some of it becomes other tokens than the "
                           "model learnt",
                           file.name().c_str(), asks.c_str())
                         .message());
  return find_pre_tokenizer("default");
}

Result<std::unique_ptr<Encoder>> make_encoder(const Gguf& file, std::string_view model,
                                              const Vocabulary& vocabulary,
                                              std::vector<std::string>& warnings) {
  if (model == "llama") return make_sentencepiece(file, vocabulary);
  THIMBLE_LET(pre_tokenizer, choose_pre_tokenizer(file, model, warnings));
  return make_bpe(file, vocabulary, *pre_tokenizer);
}

}  // namespace

Tokenizer::Tokenizer() = default;
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Result<Tokenizer> Tokenizer::load(const Gguf& file) {
  THIMBLE_LET(model, file.get_string("tokenizer.ggml.model"));
  if (!model)
    return error(Code::kUnsupported,
                 "%s has no tokenizer (key tokenizer.ggml.model); give token ids, or convert it again",
                 file.name().c_str());
  if (*model != "gpt2" && *model != "llama" && *model != "gemma4")
    return error(Code::kUnsupported,
                 "%s: tokenizers of the kind '%.*s' are not supported, only gpt2, llama and gemma4",
                 file.name().c_str(), static_cast<int>(std::min<size_t>(model->size(), 64)), model->data());

  Tokenizer tokenizer;
  tokenizer.impl_ = std::make_unique<Impl>();
  Impl& impl = *tokenizer.impl_;
  THIMBLE_LET(vocabulary, Vocabulary::load(file));
  impl.vocabulary = std::move(vocabulary);
  impl.warnings = impl.vocabulary.warnings();
  THIMBLE_LET(encoder, make_encoder(file, *model, impl.vocabulary, impl.warnings));
  impl.encoder = std::move(encoder);
  THIMBLE_LET(adds_bos, file.get_bool("tokenizer.ggml.add_bos_token"));
  // Gemma 4 needs BOS, but early files say otherwise.
  const bool adds = *model == "gemma4" || adds_bos.value_or(impl.encoder->adds_bos());
  impl.adds_bos = adds && impl.vocabulary.bos() >= 0;
  THIMBLE_LET(architecture, file.get_string("general.architecture"));
  impl.phi3 = *model == "llama" && architecture.value_or("") == "phi3";

  for (const char space : {' ', '\n', '\r'}) {
    bool cuts = impl.encoder->cuts_before(space);
    for (uint32_t id = 0; cuts && id < impl.vocabulary.size(); ++id) {
      const auto token = static_cast<int32_t>(id);
      cuts =
          !(impl.silent(token) || impl.literal(token)) || !holds_word_end(impl.vocabulary.text(token), space);
    }
    if (cuts) impl.ends_words += space;
  }

  std::string piece;
  for (uint32_t id = 0; id < impl.vocabulary.size(); ++id) {
    piece.clear();
    tokenizer.append_piece(static_cast<int32_t>(id), true, piece);
    impl.longest_piece = std::max(impl.longest_piece, static_cast<uint32_t>(piece.size()));
  }
  return tokenizer;
}

uint32_t Tokenizer::size() const { return impl_ ? impl_->vocabulary.size() : 0; }
int32_t Tokenizer::bos() const { return impl_ ? impl_->vocabulary.bos() : -1; }
int32_t Tokenizer::eos() const { return impl_ ? impl_->vocabulary.eos() : -1; }
bool Tokenizer::adds_bos() const { return impl_ && impl_->adds_bos; }
const std::vector<std::string>& Tokenizer::warnings() const {
  static const std::vector<std::string> none;
  return impl_ ? impl_->warnings : none;
}
const std::vector<int32_t>& Tokenizer::suppressed() const {
  static const std::vector<int32_t> none;
  return impl_ ? impl_->vocabulary.suppressed() : none;
}
bool Tokenizer::ends_generation(int32_t id) const { return impl_ && impl_->vocabulary.ends_generation(id); }
bool Tokenizer::is_text(int32_t id) const {
  if (!impl_ || !impl_->vocabulary.valid(id) || impl_->vocabulary.ends_generation(id)) return false;
  const TokenType type = impl_->vocabulary.type(id);
  return type == TokenType::kNormal || type == TokenType::kUserDefined || type == TokenType::kByte;
}
uint32_t Tokenizer::longest_piece() const { return impl_ ? impl_->longest_piece : 0; }
std::string_view Tokenizer::text(int32_t id) const { return impl_ ? impl_->vocabulary.text(id) : ""; }
int32_t Tokenizer::find(std::string_view text) const { return impl_ ? impl_->vocabulary.find(text) : -1; }

std::vector<Token> Tokenizer::tokenize(std::string_view text, bool add_bos, bool parse_special) const {
  std::vector<Token> tokens;
  tokenize(text, add_bos, parse_special, [&](Token token) { tokens.push_back(token); });
  return tokens;
}

void Tokenizer::tokenize(std::string_view text, bool add_bos, bool parse_special, const TokenSink& sink,
                         bool continues) const {
  if (!impl_) return;
  const Vocabulary& vocabulary = impl_->vocabulary;
  const TokenTexts& special = parse_special ? vocabulary.special() : vocabulary.user_defined();
  if (add_bos && impl_->adds_bos) sink({vocabulary.bos(), 0});

  size_t begin = 0;            // the end of the last special token
  std::vector<size_t> guards;  // guards in this range, which are left out
  std::string plain;
  const auto encode_until = [&](size_t end) {
    std::string_view stretch = text.substr(begin, end - begin);
    TokenSink placed;
    if (!guards.empty()) {
      plain.clear();
      for (size_t i = 0, from = begin; i <= guards.size(); ++i) {
        const size_t to = i < guards.size() ? guards[i] : end;
        plain += text.substr(from, to - from);
        from = to + kGuard.size();
      }
      stretch = plain;
      // Converts offsets in `plain` to offsets in the text.
      placed = [&, passed = size_t{0}](Token token) mutable {
        token.offset += passed * kGuard.size();
        for (; passed < guards.size() && guards[passed] <= token.offset; ++passed)
          token.offset += kGuard.size();
        sink(token);
      };
    }
    for (size_t at = 0; at < stretch.size(); at += kLongestText)
      impl_->encoder->encode(stretch.substr(at, kLongestText), begin + at,
                             at == 0 && !(continues && begin == 0), placed ? placed : sink);
    guards.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    if (parse_special && rest.starts_with(kGuard) &&
        special.longest_at_start(rest.substr(kGuard.size())) >= 0) {
      guards.push_back(at);
      at += kGuard.size() + 1;
      continue;
    }
    const int32_t id = special.longest_at_start(rest);
    if (id < 0) {
      ++at;
      continue;
    }
    encode_until(at);
    sink({id, at});
    at += vocabulary.text(id).size();
    if (impl_->strips_after(id)) at = std::min(text.find_first_not_of(" \t\n\v\f\r", at), text.size());
    begin = at;
  }
  encode_until(text.size());
}

size_t Tokenizer::cut(std::string_view text) const {
  if (!impl_) return 0;
  for (size_t at = text.size(); at-- > 1;)
    if (is_letter(text[at - 1]) && impl_->ends_words.find(text[at]) != std::string::npos) return at;
  return 0;
}

std::optional<std::string> Tokenizer::guard(std::string_view text, bool but_marks) const {
  if (!impl_) return std::nullopt;
  std::string guarded;
  size_t from = 0;  // start of the text that is not in `guarded` yet
  const Vocabulary& vocabulary = impl_->vocabulary;
  for (size_t at = 0; at < text.size();) {
    const int32_t id = vocabulary.special().longest_at_start(text.substr(at));
    const TokenType type = vocabulary.type(id);
    const bool whole =
        id >= 0 && (type == TokenType::kUserDefined || (but_marks && type == TokenType::kMark));
    if (id >= 0 && !whole) {
      guarded.append(text.substr(from, at - from)).append(kGuard);
      from = at;
    }
    // Another special text may begin inside one that stays text.
    at += whole ? vocabulary.text(id).size() : 1;
  }
  if (guarded.empty()) return std::nullopt;
  return guarded.append(text.substr(from));
}

void Tokenizer::append_piece(int32_t id, bool special, std::string& out) const {
  if (!impl_ || !impl_->vocabulary.valid(id)) return;
  if (impl_->silent(id) || impl_->literal(id)) {
    if (special || impl_->literal(id)) out += impl_->vocabulary.text(id);
  } else {
    impl_->encoder->append_bytes(id, out);
  }
}

std::string Tokenizer::detokenize(const int32_t* ids, size_t count, bool special) const {
  std::string text;
  if (!impl_) return text;
  bool starts = true;  // the encoder adds its space here
  for (size_t i = 0; i < count; ++i) {
    const size_t end = text.size();
    append_piece(ids[i], special, text);
    const bool plain = !impl_->silent(ids[i]) && !impl_->literal(ids[i]);
    if (plain && starts && impl_->encoder->adds_space() && text.size() > end && text[end] == ' ')
      text.erase(end, 1);
    starts = !plain;
  }
  return text;
}

uint64_t Tokenizer::host_bytes() const {
  return impl_ ? sizeof *impl_ + impl_->vocabulary.host_bytes() + impl_->encoder->host_bytes() : 0;
}

}  // namespace thimble
