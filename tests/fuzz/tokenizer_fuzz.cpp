// Any bytes are split without loss, tokenized in order and within the text, and decoded again. Any vocabulary
// is refused or usable.
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/gguf_writer.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"

namespace {

using namespace thimble;

void require(bool holds) {
  if (!holds) std::abort();
}

// One name per list of expressions. Inputs refer to them by number, so new ones go at the end.
constexpr const char* kPre[] = {"default",
                                "gpt-2",
                                "llama-bpe",
                                "qwen2",
                                "starcoder",
                                "deepseek-llm",
                                "unheard-of",
                                "qwen35",
                                "gpt-4o",
                                "tekken",
                                "gemma4",
                                "sarvam-moe",
                                "falcon",
                                "minicpm5",
                                "deepseek-coder",
                                "viking",
                                "kimi-k2",
                                "deepseek-v3",
                                "seed-coder",
                                "exaone-moe",
                                "laguna",
                                "jais-2",
                                "youtu",
                                "tiny_aya",
                                "afmoe",
                                "superbpe",
                                "poro-chat",
                                "chameleon",
                                "granite-embed-multi-97m",
                                "ufakzeka",
                                "spark2_5",
                                "whitespace"};

bool is_raw(const std::string& pre) { return pre == "gemma4" || pre == "sarvam-moe" || pre == "whitespace"; }

void expect_pieces(const char* pre, std::string_view text) {
  const PreTokenizer* scheme = find_pre_tokenizer(pre);
  require(scheme || std::string_view(pre) == "unheard-of");
  if (!scheme) return;
  size_t at = 0;
  Splitter(*scheme).split(text, [&](std::string_view piece) {
    require(!piece.empty() && piece.data() == text.data() + at);
    at += piece.size();
  });
  require(at == text.size());
}

// Makes a vocabulary from the input: each byte below 0x20 ends a token and gives its type.
GgufWriter vocabulary(bool sentencepiece, const char* pre, std::string_view bytes) {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", ""}, merges;
  std::vector<int32_t> types = {2, 3, 3, 1};
  std::vector<float> scores = {0, 0, 0, 0};
  for (int b = 0; (sentencepiece || is_raw(pre)) && b < 256; b += 3) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02hhX>", static_cast<unsigned char>(b));
    tokens.push_back(text);
    types.push_back(6);
    scores.push_back(0);
  }
  for (const char c : bytes) {
    if (static_cast<uint8_t>(c) >= 0x20) {
      tokens.back() += c;
      continue;
    }
    if (tokens.back().size() > 1)
      merges.push_back(tokens.back().substr(0, 1) + " " + tokens.back().substr(1));
    types.back() = c;
    scores.back() = static_cast<float>(c) - 8;
    tokens.emplace_back();
    types.push_back(1);
    scores.push_back(static_cast<float>(tokens.size() % 7));
  }
  GgufWriter w;
  const std::string model = sentencepiece ? "llama" : std::string(pre) == "gemma4" ? "gemma4" : "gpt2";
  w.set("tokenizer.ggml.model", model).set("tokenizer.ggml.pre", pre);
  w.set("general.architecture", bytes.size() % 2 ? "phi3" : "llama").set("tokenizer.ggml.tokens", tokens);
  w.set("tokenizer.ggml.token_type", types).set("tokenizer.ggml.scores", scores);
  return w.set("tokenizer.ggml.merges", merges);
}

}  // namespace

// Input: a byte that chooses the kind, a byte that says how much of the rest is vocabulary, the vocabulary,
// and the text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::string_view text = rest.substr(rest.size() * data[1] / 256);
  const char* pre = kPre[(data[0] >> 1) % std::size(kPre)];
  expect_pieces(pre, text);
  const GgufWriter writer = vocabulary(data[0] & 1, pre, rest.substr(0, rest.size() - text.size()));
  const FileBytes bytes = writer.bytes();
  const MappedFile file = lend(bytes);
  const auto gguf = Gguf::parse(file, "fuzz");
  require(gguf.ok());
  const auto tokenizer = Tokenizer::load(*gguf);
  if (!tokenizer.ok()) {
    require(!tokenizer.status().message().empty());
    return 0;
  }
  for (const bool special : {false, true}) {
    const std::vector<Token> tokens = tokenizer->tokenize(text, true, special);
    std::vector<int32_t> ids;
    uint64_t offset = 0;
    for (const Token& t : tokens) {
      require(t.id >= 0 && static_cast<uint32_t>(t.id) < tokenizer->size());
      require(t.offset >= offset && t.offset <= text.size());
      offset = t.offset;
      ids.push_back(t.id);
    }
    const std::string back = tokenizer->detokenize(ids.data(), ids.size(), special);
    require(back.size() <= ids.size() * tokenizer->longest_piece());
    Utf8Stream stream;
    std::string whole;
    stream.push(text, whole);
    stream.finish(whole);
    require(whole.size() <= 3 * text.size());
  }
  return 0;
}
