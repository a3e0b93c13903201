// A vocabulary of bytes, in the form of SentencePiece.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/gguf_writer.h"

namespace thimble::test {

// `tokens` with these types, the second of which is BOS, followed by one token per byte.
inline void set_byte_vocabulary(GgufWriter& w, std::vector<std::string> tokens, std::vector<int32_t> types,
                                uint32_t eos) {
  for (int byte = 0; byte < 256; ++byte) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", static_cast<unsigned>(byte));
    tokens.push_back(text);
    types.push_back(6);
  }
  const std::vector<float> scores(tokens.size());
  w.set("tokenizer.ggml.model", "llama").set("tokenizer.ggml.tokens", tokens);
  w.set("tokenizer.ggml.token_type", types).set("tokenizer.ggml.scores", scores);
  w.set("tokenizer.ggml.bos_token_id", 1u).set("tokenizer.ggml.eos_token_id", eos);
}

}  // namespace thimble::test
