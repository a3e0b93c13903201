// Helpers for tests of the C API: handles that free themselves, calls that must succeed, and models.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/data.h"
#include "tests/support/tiny_model.h"
#include "thimble/thimble.h"

namespace thimble {

struct Free {
  void operator()(thimble_model* model) const { thimble_model_free(model); }
  void operator()(thimble_heads* heads) const { thimble_heads_free(heads); }
  void operator()(thimble_session* session) const { thimble_session_free(session); }
};
using ModelHandle = std::unique_ptr<thimble_model, Free>;
using HeadsHandle = std::unique_ptr<thimble_heads, Free>;
using SessionHandle = std::unique_ptr<thimble_session, Free>;
using Tokens = std::vector<int32_t>;

struct Error : thimble_error {
  Error() : thimble_error{} { struct_size = sizeof(thimble_error); }
};

// EXPECT_OK(thimble_session_flush(session, &e), e): fails with the message.
#define EXPECT_OK(call, e) EXPECT_EQ(call, THIMBLE_OK) << (e).message

// Expects one sentence for the user: not empty, without a line break, and without a full stop, which would be
// doubled.
inline void expect_sentence(const Error& e) {
  const std::string_view text(e.message);
  EXPECT_GT(text.size(), 10u) << text;
  EXPECT_EQ(text.find('\n'), text.npos) << text;
  EXPECT_NE(text.back(), '.') << text;
}

// ---- models ----

inline std::string demo_path() { return project_file("models/thimble-demo-28m-q8_0.gguf"); }
inline std::string demo_heads_path() { return project_file("models/thimble-demo-28m.locret.gguf"); }

// Multiplies every element of a tensor by `factor`.
inline GgufWriter scaled(GgufWriter w, const std::string& name, float factor) {
  for (const GgufWriter::Tensor& tensor : std::vector<GgufWriter::Tensor>(w.tensors)) {
    if (tensor.name != name) continue;
    std::vector<float> values(tensor.data.size() / sizeof(float));
    std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
    for (float& v : values) v *= factor;
    w.tensor(name, tensor.shape, values);
  }
  return w;
}

// A model that computes in microseconds: tiny_model() with small weights, 512 positions, and tokens for every
// byte (in the spelling of byte-level BPE), for 'th', and for the end.
inline constexpr uint32_t kSmallVocab = 258;
inline constexpr int32_t kSmallEnd = 257;
inline GgufWriter small_model() {
  GgufWriter w = tiny_model("llama");
  uint32_t state = 1;
  const auto weights = [&](size_t count) {  // uniform in [-1, 1]
    std::vector<float> values(count);
    for (float& v : values) {
      state = state * 1664525u + 1013904223u;
      v = static_cast<float>(state >> 8) / float(1 << 23) - 1.0f;
    }
    return values;
  };
  std::vector<GgufWriter::Tensor> tensors = w.tensors;
  for (GgufWriter::Tensor& t : tensors) {
    if (t.shape.back() == 6) t.shape.back() = kSmallVocab;
    const size_t count = t.shape[0] * (t.shape.size() > 1 ? t.shape[1] : 1);
    w.tensor(t.name, t.shape, t.shape.size() == 1 ? std::vector<float>(count, 1.0f) : weights(count));
  }
  std::vector<std::string> tokens;
  const auto utf8 = [](uint32_t c) {
    if (c < 0x80) return std::string(1, static_cast<char>(c));
    return std::string{static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 0x3f))};
  };
  for (uint32_t byte = 0, others = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    tokens.push_back(utf8(printable ? byte : 256 + others++));
  }
  tokens.push_back("th");
  tokens.push_back("<|end|>");
  std::vector<int32_t> types(kSmallVocab, 1);
  types.back() = 3;
  w.set("llama.context_length", 512u).set("llama.vocab_size", kSmallVocab);
  w.set("tokenizer.ggml.model", "gpt2")
      .set("tokenizer.ggml.pre", "llama-bpe")
      .set("tokenizer.ggml.tokens", tokens);
  w.set("tokenizer.ggml.token_type", types).set("tokenizer.ggml.merges", std::vector<std::string>{"t h"});
  w.set("tokenizer.ggml.eos_token_id", uint32_t(kSmallEnd));
  return w;
}

inline thimble_status try_open(const FileBytes& bytes, ModelHandle& model, Error& e) {
  thimble_model* raw = nullptr;
  const thimble_status status = thimble_model_open_buffer(bytes.data(), bytes.size(), nullptr, &raw, &e);
  model.reset(raw);
  return status;
}

inline ModelHandle open_model(const std::string& path) {
  Error e;
  thimble_model* model = nullptr;
  EXPECT_OK(thimble_model_open(path.c_str(), nullptr, &model, &e), e);
  return ModelHandle(model);
}

inline HeadsHandle open_heads(const ModelHandle& model, const std::string& path) {
  Error e;
  thimble_heads* heads = nullptr;
  EXPECT_OK(thimble_heads_open(model.get(), path.c_str(), &heads, &e), e);
  return HeadsHandle(heads);
}

// Heads that give the second layer's KV head seven times the pool of the first's.
inline GgufWriter uneven_heads() {
  return tiny_heads("llama").set("retainer.budget", std::vector<float>{0.25f, 1.75f});
}

inline HeadsHandle open_heads(const ModelHandle& model, const FileBytes& bytes) {
  Error e;
  thimble_heads* heads = nullptr;
  EXPECT_OK(thimble_heads_open_buffer(model.get(), bytes.data(), bytes.size(), &heads, &e), e);
  return HeadsHandle(heads);
}

// The small model and the bytes of its file.
struct SmallModel {
  const FileBytes bytes = small_model().bytes();
  const FileBytes heads_bytes = tiny_heads("llama").bytes();
  ModelHandle model;
  HeadsHandle heads;
  SmallModel() {
    Error e;
    EXPECT_OK(try_open(bytes, model, e), e);
    heads = open_heads(model, heads_bytes);
  }
};

// ---- sessions ----

// A plan reserves room for more ops of recorded programs than the small model's programs have, whose actual
// size is counted. Everything else is allocated as planned.
inline constexpr uint64_t kProgramRoom = 133 << 10;  // 293 ops of 464 bytes

inline thimble_session_options default_options() {
  thimble_session_options options;
  thimble_session_options_init(&options, sizeof options);
  options.device = "cpu";  // the budgets of these tests are for the CPU
  return options;
}

// Two threads, a pool of 64, chunks of 16.
inline thimble_session_options window_options() {
  thimble_session_options options = default_options();
  options.threads = 2;
  options.retention = THIMBLE_RETENTION_WINDOW;
  options.pool = 64;
  options.chunk = 16;
  options.local = 8;
  options.max_new = 24;
  return options;
}

inline SessionHandle create(const ModelHandle& model, const thimble_session_options& options) {
  Error e;
  thimble_session* session = nullptr;
  EXPECT_OK(thimble_session_create(model.get(), &options, &session, &e), e);
  return SessionHandle(session);
}

inline void feed(const SessionHandle& session, const Tokens& tokens) {
  Error e;
  EXPECT_OK(thimble_session_feed(session.get(), tokens.data(), tokens.size(), &e), e);
}

inline int32_t step(const SessionHandle& session) {
  Error e;
  int32_t token = -1;
  EXPECT_OK(thimble_session_step(session.get(), &token, &e), e);
  return token;
}

inline Tokens steps(const SessionHandle& session, size_t count) {
  Tokens tokens;
  while (tokens.size() < count) tokens.push_back(step(session));
  return tokens;
}

inline std::vector<float> logits(const SessionHandle& session) {
  Error e;
  const float* values = nullptr;
  uint32_t count = 0;
  EXPECT_OK(thimble_session_logits(session.get(), &values, &count, &e), e);
  return std::vector<float>(values, values + count);
}

inline Tokens kept(const SessionHandle& session, uint32_t layer, uint32_t kv_head) {
  Error e;
  uint64_t count = 0;
  thimble_session_kept(session.get(), layer, kv_head, nullptr, 0, &count, &e);
  Tokens positions(count);
  EXPECT_OK(thimble_session_kept(session.get(), layer, kv_head, positions.data(), count, &count, &e), e);
  return positions;
}

inline thimble_stats stats(const SessionHandle& session) {
  Error e;
  thimble_stats value = {};
  value.struct_size = sizeof value;
  EXPECT_OK(thimble_session_stats(session.get(), &value, &e), e);
  return value;
}

inline thimble_session_options decided_options(const SessionHandle& session) {
  Error e;
  thimble_session_options value = {};
  value.struct_size = sizeof value;
  EXPECT_OK(thimble_session_get_options(session.get(), &value, &e), e);
  return value;
}

inline thimble_memory memory(const SessionHandle& session) {
  Error e;
  thimble_memory value = {};
  value.struct_size = sizeof value;
  EXPECT_OK(thimble_session_memory(session.get(), &value, &e), e);
  return value;
}

inline thimble_memory plan(const ModelHandle& model, const thimble_session_options& options) {
  Error e;
  thimble_memory value = {};
  value.struct_size = sizeof value;
  EXPECT_OK(thimble_session_plan(model.get(), &options, &value, &e), e);
  return value;
}

// ---- text ----

inline Tokens tokenize(const ModelHandle& model, std::string_view text, uint32_t flags = 0) {
  Error e;
  uint64_t count = 0;
  thimble_tokenize(model.get(), text.data(), text.size(), flags, nullptr, nullptr, 0, &count, &e);
  Tokens ids(count);
  EXPECT_OK(
      thimble_tokenize(model.get(), text.data(), text.size(), flags, ids.data(), nullptr, count, &count, &e),
      e);
  return ids;
}

inline std::string detokenize(const ModelHandle& model, const Tokens& ids, uint32_t flags = 0) {
  Error e;
  uint64_t length = 0;
  thimble_detokenize(model.get(), ids.data(), ids.size(), flags, nullptr, 0, &length, &e);
  std::string text(length, '\0');
  EXPECT_OK(thimble_detokenize(model.get(), ids.data(), ids.size(), flags, text.data(), length, &length, &e),
            e);
  return text;
}

// Token ids without close repetitions, for prompts of any length.
inline Tokens any_tokens(size_t count, uint32_t vocab = kSmallVocab) {
  Tokens tokens(count);
  uint32_t state = 7;
  for (int32_t& token : tokens) {
    state = state * 1664525u + 1013904223u;
    token = static_cast<int32_t>((state >> 8) % vocab);
  }
  return tokens;
}

}  // namespace thimble
