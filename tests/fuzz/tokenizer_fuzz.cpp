// Any bytes tokenise, in order and inside the text, and decode again; any vocabulary is refused or usable.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/tokenizer/tokenizer.h"
#include "tests/support/gguf_writer.h"

namespace {

using namespace thimble;

void require(bool holds) {
  if (!holds) std::abort();
}

// Cuts a vocabulary out of the input: each byte below 0x20 ends a token and gives its type.
GgufWriter vocabulary(bool sentencepiece, const char* pre, std::string_view bytes) {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", ""}, merges;
  std::vector<int32_t> types = {2, 3, 3, 1};
  std::vector<float> scores = {0, 0, 0, 0};
  for (int b = 0; sentencepiece && b < 256; b += 3) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", static_cast<unsigned>(b));
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
  w.set("tokenizer.ggml.model", sentencepiece ? "llama" : "gpt2").set("tokenizer.ggml.pre", pre);
  w.set("general.architecture", bytes.size() % 2 ? "phi3" : "llama").set("tokenizer.ggml.tokens", tokens);
  w.set("tokenizer.ggml.token_type", types).set("tokenizer.ggml.scores", scores);
  return w.set("tokenizer.ggml.merges", merges);
}

}  // namespace

// Input: one byte that chooses the kind, one that says how much of the rest is vocabulary, then that and the
// text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  constexpr const char* kPre[] = {"default",   "gpt-2",        "llama-bpe", "qwen2",
                                  "starcoder", "deepseek-llm", "unheard-of"};
  const std::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::string_view text = rest.substr(rest.size() * data[1] / 256);
  const GgufWriter writer =
      vocabulary(data[0] & 1, kPre[(data[0] >> 1) % 7], rest.substr(0, rest.size() - text.size()));
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
