// A model file that heads can be trained for in a second or two.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/byte_vocabulary.h"
#include "tests/support/gguf_writer.h"

namespace thimble {

// One layer of 16 channels and a vocabulary of bytes.
inline GgufWriter model_of_bytes() {
  GgufWriter w;
  uint64_t state = 1;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape, float mean) {
    std::vector<float> values(shape[0] * (shape.size() > 1 ? shape[1] : 1));
    for (float& v : values) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      v = mean + static_cast<float>(state >> 40) / float(1 << 23) - 1;
    }
    w.tensor(name, std::move(shape), values);
  };
  w.set("general.architecture", "llama").set("general.name", "bytes");
  w.set("llama.context_length", 2400u).set("llama.block_count", 1u).set("llama.embedding_length", 16u);
  w.set("llama.feed_forward_length", 16u).set("llama.attention.head_count", 2u);
  w.set("llama.attention.head_count_kv", 1u).set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  const std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "\u2581"};
  test::set_byte_vocabulary(w, tokens, {2, 3, 3, 1}, 2);
  add("token_embd.weight", {16, tokens.size() + 256}, 0);
  add("output_norm.weight", {16}, 1.5f);
  add("blk.0.attn_norm.weight", {16}, 1.5f);
  add("blk.0.ffn_norm.weight", {16}, 1.5f);
  for (const char* name : {"attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
    add(std::string("blk.0.") + name + ".weight", {16, 16}, 0);
  for (const char* name : {"attn_k", "attn_v"}) add(std::string("blk.0.") + name + ".weight", {16, 8}, 0);
  return w;
}

}  // namespace thimble
