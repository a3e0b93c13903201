#include "text/vocabulary.h"

#include <algorithm>
#include <bit>

#include "base/fnv1a.h"
#include "gguf/gguf.h"
#include "text/utf8.h"

namespace thimble {
namespace {

// Texts that end a turn or a text in known models. The eos of a file is often only one of them.
constexpr std::string_view kEndTexts[] = {"<|eot_id|>",
                                          "<|im_end|>",
                                          "<|end|>",
                                          "<|return|>",
                                          "<|call|>",
                                          "<|flush|>",
                                          "<|calls|>",
                                          "<end_of_turn>",
                                          "<|endoftext|>",
                                          "</s>",
                                          "<|eom_id|>",
                                          "<EOT>",
                                          "_<EOT>",
                                          "[EOT]",
                                          "[EOS]",
                                          "<|end_of_text|>",
                                          "<eos>",
                                          "<turn|>",
                                          "<end_of_utterance>",
                                          "<|tool_response>",
                                          "<\uff5cend\u2581of\u2581sentence\uff5c>",
                                          "[e~["};

// Whether the token stands for its text, or for bytes.
bool plain(TokenType type) {
  return type != TokenType::kControl && type != TokenType::kMark && type != TokenType::kUnknown;
}

}  // namespace

void RowTable::reserve(size_t rows) {
  slots_.assign(std::bit_ceil(2 * rows + 1), -1);
  mask_ = slots_.size() - 1;
}

void RowTable::insert(uint64_t hash, int32_t row) {
  size_t i = hash & mask_;
  while (slots_[i] >= 0) i = (i + 1) & mask_;
  slots_[i] = row;
}

// The high bits are shifted down, because the table's mask uses the low bits.
uint64_t hash_bytes(std::string_view bytes) {
  const uint64_t hash = fnv1a(bytes);
  return hash ^ hash >> 32;
}

uint64_t hash_pair(int32_t left, int32_t right) {
  const uint64_t both =
      static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  const uint64_t hash = both * 0x9e3779b97f4a7c15u;  // Fibonacci hashing: the high bits are the best mixed
  return hash >> 32;
}

void TokenTexts::set(const std::vector<std::string_view>& texts, std::vector<int32_t> ids) {
  sorted_.clear();
  first_bytes_.reset();
  for (const int32_t id : ids) {
    if (texts[id].empty()) continue;
    sorted_.push_back({texts[id], id});
    first_bytes_.set(static_cast<uint8_t>(texts[id][0]));
  }
  std::sort(sorted_.begin(), sorted_.end(),
            [](const Entry& a, const Entry& b) { return a.text != b.text ? a.text < b.text : a.id < b.id; });
}

int32_t TokenTexts::longest_at_start(std::string_view text) const {
  if (text.empty() || !first_bytes_.test(static_cast<uint8_t>(text[0]))) return -1;
  int32_t best = -1;
  auto first = sorted_.begin(), last = sorted_.end();
  // [first, last) are the entries that begin with text[0, depth). Entries of exactly that length come first.
  for (size_t depth = 0; first != last; ++depth) {
    if (first->text.size() == depth) best = first->id;
    while (first != last && first->text.size() == depth) ++first;
    if (depth == text.size()) break;
    const auto byte = static_cast<uint8_t>(text[depth]);
    const auto at_depth = [depth](const Entry& e) { return static_cast<uint8_t>(e.text[depth]); };
    first = std::lower_bound(first, last, byte, [&](const Entry& e, uint8_t b) { return at_depth(e) < b; });
    last = std::upper_bound(first, last, byte, [&](uint8_t b, const Entry& e) { return b < at_depth(e); });
  }
  return best;
}

Result<Vocabulary> Vocabulary::load(const Gguf& file) {
  Vocabulary v;
  THIMBLE_LET(texts, file.get_strings("tokenizer.ggml.tokens"));
  if (!texts || texts->empty() || texts->size() > INT32_MAX)
    return error(Code::kFormat, "%s: tokenizer.ggml.tokens is %s; convert the model again",
                 file.name().c_str(),
                 !texts           ? "missing"
                 : texts->empty() ? "empty"
                                  : "too long");
  v.texts_ = std::move(*texts);
  const size_t size = v.texts_.size();

  v.types_.assign(size, TokenType::kNormal);
  THIMBLE_LET(types, file.get_ints("tokenizer.ggml.token_type"));
  if (types) {
    if (types->size() != size)
      return error(Code::kFormat,
                   "%s: tokenizer.ggml.token_type has %zu entries for %zu tokens; convert the model again",
                   file.name().c_str(), types->size(), size);
    for (size_t id = 0; id < size; ++id)
      if ((*types)[id] >= 1 && (*types)[id] <= 6) v.types_[id] = static_cast<TokenType>((*types)[id]);
  }

  v.by_text_.reserve(size);
  for (size_t id = 0; id < size; ++id) {
    v.longest_text_ = std::max(v.longest_text_, v.texts_[id].size());
    if (!v.texts_[id].empty() && v.find(v.texts_[id]) < 0)
      v.by_text_.insert(hash_bytes(v.texts_[id]), static_cast<int32_t>(id));
  }

  THIMBLE_TRY(v.load_ids(file));
  std::vector<int32_t> user_defined, special;
  for (size_t id = 0; id < size; ++id) {
    if (v.types_[id] == TokenType::kUserDefined) user_defined.push_back(static_cast<int32_t>(id));
    if (v.types_[id] == TokenType::kUserDefined || !plain(v.types_[id]))
      special.push_back(static_cast<int32_t>(id));
  }
  v.user_defined_.set(v.texts_, std::move(user_defined));
  v.special_.set(v.texts_, std::move(special));
  return v;
}

Status Vocabulary::load_ids(const Gguf& file) {
  // Old files of SentencePiece models do not contain these ids. In other vocabularies <s> may be an HTML tag,
  // and many models have no BOS.
  THIMBLE_LET(model, file.get_string("tokenizer.ggml.model"));
  THIMBLE_LET(bos, get_id(file, "tokenizer.ggml.bos_token_id", model == "llama" ? find("<s>") : -1));
  THIMBLE_LET(listed, get_ids(file, "tokenizer.ggml.eos_token_ids"));
  THIMBLE_LET(eos, get_id(file, "tokenizer.ggml.eos_token_id", listed.empty() ? find("</s>") : listed[0]));
  THIMBLE_LET(unknown, get_id(file, "tokenizer.ggml.unknown_token_id", find("<unk>")));
  THIMBLE_LET(suppressed, get_ids(file, "tokenizer.ggml.suppress_tokens"));
  suppressed_ = std::move(suppressed);
  bos_ = bos;
  eos_ = eos;
  unknown_ = unknown;

  THIMBLE_TRY(load_ends(file, listed));
  if (bos_ >= 0) make_control(bos_);
  return {};
}

Status Vocabulary::load_ends(const Gguf& file, const std::vector<int32_t>& listed) {
  THIMBLE_LET(turn, get_id(file, "tokenizer.ggml.eot_token_id", -1));
  THIMBLE_LET(message, get_id(file, "tokenizer.ggml.eom_token_id", -1));
  // A code completion model ends with these tokens if the file does not say which.
  THIMBLE_LET(pad, get_id(file, "tokenizer.ggml.fim_pad_token_id",
                          first_of({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"})));
  THIMBLE_LET(repository,
              get_id(file, "tokenizer.ggml.fim_rep_token_id",
                     first_of({"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"})));
  THIMBLE_LET(separator, get_id(file, "tokenizer.ggml.fim_sep_token_id", first_of({"<|file_sep|>"})));
  ends_ = {eos_, turn, message, pad, repository, separator};
  ends_.insert(ends_.end(), listed.begin(), listed.end());
  for (const std::string_view text : kEndTexts) ends_.push_back(find(text));
  std::erase_if(ends_, [](int32_t id) { return id < 0; });
  for (const int32_t id : ends_) make_control(id);

  // gpt-oss writes <|end|> after each part of an answer, and <|return|> or <|call|> after the last part.
  for (const std::string_view text : {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"})
    if (const int32_t id = find(text); id >= 0) types_[id] = TokenType::kMark;
  if (first_of({"<|return|>", "<|flush|>"}) >= 0 && first_of({"<|call|>", "<|calls|>"}) >= 0)
    drop_end("<|end|>", TokenType::kMark);
  // In Gemma 4, </s> is one of several HTML tags.
  if (find("<|tool_response>") >= 0) drop_end("</s>", TokenType::kNormal);
  return {};
}

// Reads a token id from the file. Returns `absent` if there is none.
Result<int32_t> Vocabulary::get_id(const Gguf& file, const char* key, int32_t absent) {
  THIMBLE_LET(id, file.get_uint(key));
  if (!id) return absent;
  if (*id == UINT32_MAX) return -1;  // some writers store -1
  if (*id < size()) return static_cast<int32_t>(*id);
  pass_over(file, key, std::to_string(*id));
  return absent;
}

// Reads a list of ids, which may be missing.
Result<std::vector<int32_t>> Vocabulary::get_ids(const Gguf& file, const char* key) {
  std::vector<int32_t> ids;
  THIMBLE_LET(listed, file.get_ints(key));
  if (!listed) return ids;
  for (const int64_t id : *listed) {
    if (id >= 0 && id < static_cast<int64_t>(size()))
      ids.push_back(static_cast<int32_t>(id));
    else if (id != -1)
      pass_over(file, key, std::to_string(id));
  }
  return ids;
}

void Vocabulary::pass_over(const Gguf& file, const char* key, const std::string& id) {
  warnings_.push_back(error(Code::kFormat,
                            "%s: %s is %s, but the vocabulary has %u tokens; the id is ignored",
                            file.name().c_str(), key, id.c_str(), size())
                          .message());
}

// Makes a token a control token, whatever its type in the file, so that ordinary text cannot start or end
// anything. A token that spells a byte is an exception, because the byte must keep its token. This occurs in
// vocabularies without an end token.
void Vocabulary::make_control(int32_t id) {
  const std::string_view text = texts_[id];
  const bool spells =
      types_[id] == TokenType::kByte || (!text.empty() && first_code_point(text).size == text.size());
  if (!spells) types_[id] = TokenType::kControl;
}

int32_t Vocabulary::first_of(std::initializer_list<std::string_view> texts) const {
  for (const std::string_view text : texts)
    if (const int32_t id = find(text); id >= 0) return id;
  return -1;
}

void Vocabulary::drop_end(std::string_view text, TokenType type) {
  const int32_t id = find(text);
  if (id >= 0 && std::erase(ends_, id) > 0) types_[id] = type;
}

bool Vocabulary::ends_generation(int32_t id) const {
  return std::find(ends_.begin(), ends_.end(), id) != ends_.end();
}

int32_t Vocabulary::find(std::string_view text) const {
  return by_text_.find(hash_bytes(text), [&](int32_t id) { return texts_[id] == text; });
}

int32_t Vocabulary::find_plain(std::string_view text) const {
  const int32_t id = find(text);
  return !plain(type(id)) || type(id) == TokenType::kByte ? -1 : id;
}

uint64_t Vocabulary::host_bytes() const {
  return texts_.capacity() * sizeof texts_[0] + types_.capacity() * sizeof types_[0] + by_text_.host_bytes() +
         user_defined_.host_bytes() + special_.host_bytes() +
         (ends_.capacity() + suppressed_.capacity()) * sizeof ends_[0];
}

}  // namespace thimble
