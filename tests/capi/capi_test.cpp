// Tests the C API as a program uses it: opening, text, reading, generating, reading the state.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "tests/capi/handles.h"

namespace thimble {
namespace {

// ---- the library ----

TEST(Library, IsTheVersionOfItsHeader) {
  const std::string header = std::to_string(THIMBLE_VERSION_MAJOR) + "." +
                             std::to_string(THIMBLE_VERSION_MINOR) + "." +
                             std::to_string(THIMBLE_VERSION_PATCH);
  EXPECT_EQ(thimble_version(), header);
  EXPECT_EQ(thimble_abi_version(), THIMBLE_ABI);
  const std::string info = thimble_build_info();
  EXPECT_EQ(info.find("thimble " + header + ", "), 0u) << info;
  EXPECT_NE(info.find("++ "), info.npos) << info;
  EXPECT_NE(info.find("cpu"), info.npos) << info;
}

TEST(Library, NamesEveryStatusCode) {
  const std::pair<thimble_status, const char*> codes[] = {{THIMBLE_OK, "OK"},
                                                          {THIMBLE_INVALID_ARGUMENT, "INVALID_ARGUMENT"},
                                                          {THIMBLE_UNSUPPORTED, "UNSUPPORTED"},
                                                          {THIMBLE_IO, "IO"},
                                                          {THIMBLE_FORMAT, "FORMAT"},
                                                          {THIMBLE_MISMATCH, "MISMATCH"},
                                                          {THIMBLE_BUDGET, "BUDGET"},
                                                          {THIMBLE_OUT_OF_MEMORY, "OUT_OF_MEMORY"},
                                                          {THIMBLE_CONTEXT_FULL, "CONTEXT_FULL"},
                                                          {THIMBLE_CANNOT_REWIND, "CANNOT_REWIND"},
                                                          {THIMBLE_INTERRUPTED, "INTERRUPTED"},
                                                          {THIMBLE_BUSY, "BUSY"},
                                                          {THIMBLE_DEVICE_LOST, "DEVICE_LOST"},
                                                          {THIMBLE_NOT_FINITE, "NOT_FINITE"},
                                                          {THIMBLE_INTERNAL, "INTERNAL"}};
  for (const auto& [code, name] : codes) {
    EXPECT_STREQ(thimble_status_name(code), name);
    EXPECT_GT(std::strlen(thimble_status_text(code)), 5u) << name;
  }
  EXPECT_STREQ(thimble_status_name(12345), "UNKNOWN");
  EXPECT_NE(thimble_status_text(-1), nullptr);
}

TEST(Library, NamesItsPolicies) {
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_NONE), "none");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_WINDOW), "window");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_RANDOM), "random");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_LOCRET), "locret");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_KEYDIFF), "keydiff");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_TOVA), "tova");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_REREAD), "reread");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_ADORE), "adore");
  EXPECT_STREQ(thimble_retention_name(THIMBLE_RETENTION_MIX), "mix");
  EXPECT_STREQ(thimble_selection_name(THIMBLE_SELECTION_DENSE), "dense");
  EXPECT_STREQ(thimble_selection_name(THIMBLE_SELECTION_TOKENSELECT), "tokenselect");
  EXPECT_STREQ(thimble_selection_name(THIMBLE_SELECTION_QUEST), "quest");
  for (const int32_t none : {-1, 9, 1 << 30}) {
    EXPECT_EQ(thimble_retention_name(none), nullptr) << none;
    EXPECT_EQ(thimble_selection_name(none), nullptr) << none;
  }
  EXPECT_EQ(thimble_selection_name(3), nullptr);
}

TEST(Library, SaysWhatARetentionDoesAndNeeds) {
  const uint32_t trained = THIMBLE_TRAIT_EVICTS | THIMBLE_TRAIT_SHARES | THIMBLE_TRAIT_RETAINER;
  const std::pair<int32_t, uint32_t> expected[] = {
      {THIMBLE_RETENTION_NONE, 0},
      {THIMBLE_RETENTION_WINDOW, THIMBLE_TRAIT_EVICTS},
      {THIMBLE_RETENTION_RANDOM, THIMBLE_TRAIT_EVICTS},
      {THIMBLE_RETENTION_LOCRET, trained},
      {THIMBLE_RETENTION_KEYDIFF, THIMBLE_TRAIT_EVICTS | THIMBLE_TRAIT_SHARES},
      {THIMBLE_RETENTION_TOVA, THIMBLE_TRAIT_EVICTS},
      {THIMBLE_RETENTION_REREAD, THIMBLE_TRAIT_EVICTS},
      {THIMBLE_RETENTION_ADORE,
       THIMBLE_TRAIT_EVICTS | THIMBLE_TRAIT_EVICTS_EACH | THIMBLE_TRAIT_CONTROLLER | THIMBLE_TRAIT_REMEMBERS},
      {THIMBLE_RETENTION_MIX, trained},
      {THIMBLE_RETENTION_DEFAULT, 0},
      {9, 0}};
  for (const auto& [retention, bits] : expected)
    EXPECT_EQ(thimble_retention_traits(retention), bits) << retention;
}

TEST(Library, ListsTheProcessorAsADevice) {
  Error e;
  uint32_t count = 0;
  EXPECT_OK(thimble_device_count(&count, &e), e);
  ASSERT_GE(count, 1u);
  thimble_device_info info = {};
  info.struct_size = sizeof info;
  EXPECT_OK(thimble_device_get(0, &info, &e), e);
  EXPECT_STREQ(info.name, "cpu");
  EXPECT_GT(info.total_bytes, info.free_bytes);
  EXPECT_GT(info.free_bytes, 0u);
  EXPECT_GT(std::strlen(info.description), 0u);
  EXPECT_EQ(thimble_device_get(count, &info, &e), THIMBLE_INVALID_ARGUMENT);
}

// ---- models ----

TEST(OpenedModel, TellsWhatItIs) {
  const ModelHandle model = open_model(demo_path());
  Error e;
  thimble_model_info info = {};
  info.struct_size = sizeof info;
  EXPECT_OK(thimble_model_get_info(model.get(), &info, &e), e);
  EXPECT_EQ(info.has_weights, 1u);
  EXPECT_EQ(info.has_tokenizer, 1u);
  EXPECT_EQ(info.layers, 8u);
  EXPECT_EQ(info.d_model, 512u);
  EXPECT_EQ(info.heads, 8u);
  EXPECT_EQ(info.kv_heads, 2u);
  EXPECT_EQ(info.head_dim, 64u);
  EXPECT_EQ(info.d_ff, 1536u);
  EXPECT_EQ(info.vocab, 8192u);
  EXPECT_EQ(info.context_length, 16384u);
  EXPECT_EQ(info.bos, 0);
  EXPECT_EQ(info.eos, 3);
  EXPECT_EQ(info.file_bytes, std::filesystem::file_size(demo_path()));
  EXPECT_EQ(info.kv_bytes_per_token, 8u * 2 * 64 * 2 * 2);
  EXPECT_NEAR(static_cast<double>(info.parameters), 28e6, 1e6);
  EXPECT_STREQ(info.architecture, "llama");
  EXPECT_STREQ(info.quantization, "q8_0");
  EXPECT_STREQ(info.chat_format, "jinja");
  EXPECT_STREQ(info.chat_problem, "");
  EXPECT_GT(std::strlen(info.name), 0u);
}

// A model in which the last 8 rows of the matrices belong to no token, and have the largest logits.
GgufWriter padded_model() {
  GgufWriter w = small_model();
  for (const GgufWriter::Tensor& t : std::vector<GgufWriter::Tensor>(w.tensors)) {
    if (t.shape.back() != kSmallVocab) continue;
    std::vector<float> values(t.data.size() / sizeof(float));
    std::memcpy(values.data(), t.data.data(), t.data.size());
    if (t.name == "output.weight")
      for (size_t i = 0; i < 4 * t.shape[0]; ++i) {  // for every sign, one of each pair is the largest
        const size_t pair = (kSmallVocab - 8) * t.shape[0] + i;
        values[pair] *= 100;
        values[pair + 4 * t.shape[0]] = -values[pair];
      }
    w.tensor(t.name, t.shape, values);
  }
  const auto shortened = [](auto list) {
    list.resize(kSmallVocab - 8);
    return list;
  };
  std::vector<std::string> tokens;
  for (uint32_t id = 0; id < kSmallVocab - 8; ++id) tokens.push_back("t" + std::to_string(id));
  w.set("tokenizer.ggml.tokens", tokens).set("tokenizer.ggml.merges", std::vector<std::string>{});
  w.set("tokenizer.ggml.token_type", shortened(std::vector<int32_t>(kSmallVocab, 1)));
  return w.set("tokenizer.ggml.eos_token_id", 0u);
}

TEST(OpenedModel, NeverGeneratesARowThatNoTokenHas) {
  constexpr uint32_t kTokens = kSmallVocab - 8;
  for (const bool tied : {false, true}) {
    GgufWriter w = padded_model();
    if (tied) {  // the output matrix is also the embedding
      const auto output = std::find_if(w.tensors.begin(), w.tensors.end(),
                                       [](const auto& t) { return t.name == "output.weight"; });
      GgufWriter::Tensor both = *output;
      w.erase_tensor("output.weight");
      const auto embedding = std::find_if(w.tensors.begin(), w.tensors.end(),
                                          [](const auto& t) { return t.name == "token_embd.weight"; });
      embedding->data = both.data;
    }
    const FileBytes bytes = w.bytes();
    ModelHandle model;
    Error e;
    ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
    for (const float temperature : {0.0f, 1.0f, 100.0f}) {
      const SessionHandle session = create(model, window_options());
      thimble_sampler_options sampler;
      thimble_sampler_options_init(&sampler, sizeof sampler);
      sampler.temperature = temperature;
      EXPECT_OK(thimble_session_set_sampler(session.get(), &sampler, &e), e);
      feed(session, {1, 2, int32_t(kSmallVocab) - 1});  // padding ids may be read
      for (int i = 0; i < 20; ++i) {
        EXPECT_LT(step(session), int32_t(kTokens)) << temperature;
        const float* logits = nullptr;
        uint32_t count = 0;
        EXPECT_OK(thimble_session_logits(session.get(), &logits, &count, &e), e);
        ASSERT_EQ(count, kTokens);
      }
      // Log-probabilities include only the tokens that may follow, and their probabilities sum to 1.
      double sum = 0;
      for (int32_t id = 0; id < int32_t(kSmallVocab); ++id) {
        float logprob = 0;
        thimble_session* copy = nullptr;
        EXPECT_OK(thimble_session_clone(session.get(), &copy, &e), e);
        const SessionHandle twin(copy);
        EXPECT_OK(thimble_session_score(copy, &id, 1, &logprob, &e), e);
        EXPECT_EQ(std::isinf(logprob), id >= int32_t(kTokens)) << id;
        sum += std::exp(double(logprob));
      }
      EXPECT_NEAR(sum, 1, 1e-3);
    }
  }
}

TEST(OpenedModel, NeverGeneratesATokenThatItsFileSuppresses) {
  GgufWriter w = small_model();
  std::vector<int32_t> suppressed;
  for (int i = 0; i < 4; ++i) {  // each is generated with the earlier ones suppressed
    w.set("tokenizer.ggml.suppress_tokens", suppressed);
    const FileBytes bytes = w.bytes();
    ModelHandle model;
    Error e;
    ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
    for (const float temperature : {100.0f, 0.0f}) {
      const SessionHandle session = create(model, window_options());
      thimble_sampler_options sampler;
      thimble_sampler_options_init(&sampler, sizeof sampler);
      sampler.temperature = temperature;
      EXPECT_OK(thimble_session_set_sampler(session.get(), &sampler, &e), e);
      feed(session, {1, 2, 3});
      int32_t token = -1;
      for (int n = 0; n < 50; ++n) {
        token = step(session);
        EXPECT_EQ(std::count(suppressed.begin(), suppressed.end(), token), 0) << token;
      }
      if (temperature == 0) suppressed.push_back(token);
    }
  }
}

TEST(OpenedModel, PrintsItsMetadata) {
  GgufWriter w = small_model();
  std::string long_text = "a";  // so that byte 4096 is inside a code point
  while (long_text.size() < 5000) long_text += "\xc3\xa9";
  w.set("general.license", std::string("mit\xff"))
      .set("test.flag", true)
      .set("test.small", -5)
      .set("test.real", 0.25f);
  w.set("test.array", std::vector<uint32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}).set("test.long", long_text);
  const FileBytes bytes = w.bytes();
  ModelHandle model;
  Error e;
  ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
  uint64_t count = 0;
  EXPECT_OK(thimble_model_metadata_count(model.get(), &count, &e), e);
  EXPECT_EQ(count, w.keys.size());
  std::map<std::string, std::string> metadata;
  for (uint64_t i = 0; i < count; ++i) {
    char key[256], value[8192];
    uint64_t key_length = 0, value_length = 0;
    EXPECT_OK(thimble_model_metadata_get(model.get(), i, key, sizeof key, &key_length, value, sizeof value,
                                         &value_length, &e),
              e);
    metadata[std::string(key, key_length)] = std::string(value, value_length);
  }
  EXPECT_EQ(metadata["general.architecture"], "llama");
  EXPECT_EQ(metadata["general.license"], "mit\xef\xbf\xbd");
  EXPECT_EQ(metadata["llama.context_length"], "512");
  EXPECT_EQ(metadata["test.flag"], "true");
  EXPECT_EQ(metadata["test.small"], "-5");
  EXPECT_EQ(metadata["test.real"], "0.25");
  EXPECT_EQ(metadata["test.array"], "[1, 2, 3, 4, 5, 6, 7, 8, ... 10 in all]");
  EXPECT_EQ(metadata["test.long"], long_text.substr(0, 4095));

  uint64_t key_length = 0, value_length = 0;
  EXPECT_EQ(
      thimble_model_metadata_get(model.get(), 0, nullptr, 0, &key_length, nullptr, 0, &value_length, &e),
      THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(key_length, std::strlen("general.architecture"));
  EXPECT_EQ(value_length, std::strlen("llama"));
  EXPECT_EQ(
      thimble_model_metadata_get(model.get(), count, nullptr, 0, &key_length, nullptr, 0, &value_length, &e),
      THIMBLE_INVALID_ARGUMENT);
}

TEST(OpenedModel, ListsItsTensors) {
  const ModelHandle model = open_model(demo_path());
  Error e;
  uint64_t count = 0;
  EXPECT_OK(thimble_model_tensor_count(model.get(), &count, &e), e);
  EXPECT_EQ(count, 74u);
  thimble_tensor_info info = {};
  info.struct_size = sizeof info;
  EXPECT_OK(thimble_model_tensor_get(model.get(), 1, &info, &e), e);
  EXPECT_STREQ(info.name, "token_embd.weight");
  EXPECT_STREQ(info.type, "q8_0");
  EXPECT_EQ(info.dims, 2u);
  EXPECT_EQ(info.shape[0], 512u);
  EXPECT_EQ(info.shape[1], 8192u);
  EXPECT_EQ(info.shape[2], 1u);
  EXPECT_EQ(info.bytes, 512u * 8192 / 32 * 34);
  EXPECT_EQ(thimble_model_tensor_get(model.get(), count, &info, &e), THIMBLE_INVALID_ARGUMENT);
}

TEST(OpenedModel, IsTheSameFromAPathADescriptorAndMemory) {
  const FileBytes bytes = small_model().bytes();
  const std::string path = testing::TempDir() + "thimble-capi-small.gguf";
  small_model().write(path);
  Error e;
  thimble_model* raw = nullptr;
  const int descriptor = open(path.c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  EXPECT_OK(thimble_model_open_fd(descriptor, nullptr, &raw, &e), e);
  close(descriptor);
  const ModelHandle from_descriptor(raw);
  const ModelHandle from_path = open_model(path);
  std::filesystem::remove(path);  // the mapping keeps the file's contents
  ModelHandle from_memory;
  EXPECT_OK(try_open(bytes, from_memory, e), e);

  const Tokens prompt = any_tokens(40);
  std::vector<std::vector<float>> results;
  for (const ModelHandle* model :
       std::initializer_list<const ModelHandle*>{&from_path, &from_descriptor, &from_memory}) {
    const SessionHandle session = create(*model, window_options());
    feed(session, prompt);
    EXPECT_OK(thimble_session_flush(session.get(), &e), e);
    results.push_back(logits(session));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(OpenedModel, IsTheSameFromAPartOfAFile) {
  const FileBytes bytes = small_model().bytes();
  const std::string path = testing::TempDir() + "thimble-capi-package";
  ModelHandle whole;
  Error e;
  EXPECT_OK(try_open(bytes, whole, e), e);
  const auto answer = [](const ModelHandle& model) {
    const SessionHandle session = create(model, window_options());
    feed(session, any_tokens(40));
    Error error;
    EXPECT_OK(thimble_session_flush(session.get(), &error), error);
    return logits(session);
  };
  const std::vector<float> expected = answer(whole);
  for (const uint64_t offset : {0u, 32u, 4096u, 4128u, 65536u + 4064u}) {
    SCOPED_TRACE(offset);
    std::ofstream file(path, std::ios::binary);
    file << std::string(offset, 'x');
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    file << "what follows in the package";
    file.close();
    const int descriptor = open(path.c_str(), O_RDONLY);
    ASSERT_GE(descriptor, 0);
    const auto open_part = [&](uint64_t from, uint64_t size, thimble_model** model) {
      return thimble_model_open_fd_range(descriptor, from, size, nullptr, model, &e);
    };
    thimble_model* raw = nullptr;
    EXPECT_EQ(open_part(offset + 8, bytes.size(), &raw), THIMBLE_FORMAT);  // not the offset where it begins
    EXPECT_EQ(open_part(offset, bytes.size() - 1, &raw), THIMBLE_FORMAT);
    EXPECT_EQ(open_part(offset, bytes.size() + 28, &raw), THIMBLE_IO);
    expect_sentence(e);
    EXPECT_EQ(open_part(UINT64_MAX, 2, &raw), THIMBLE_IO);
    ASSERT_EQ(raw, nullptr);
    EXPECT_OK(open_part(offset, bytes.size(), &raw), e);
    close(descriptor);
    EXPECT_EQ(answer(ModelHandle(raw)), expected);
  }
  // Tensors would not be aligned.
  std::ofstream(path, std::ios::binary)
      << "askew" << std::string(3, 0)
      << std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const int descriptor = open(path.c_str(), O_RDONLY);
  thimble_model* raw = nullptr;
  EXPECT_EQ(thimble_model_open_fd_range(descriptor, 8, bytes.size(), nullptr, &raw, &e),
            THIMBLE_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(e.message, "from byte 8"), nullptr) << e.message;
  EXPECT_NE(std::strstr(e.message, "multiple of 32 bytes"), nullptr) << e.message;
  expect_sentence(e);
  close(descriptor);
  std::filesystem::remove(path);
}

TEST(OpenedModel, IsTheSameInPartsFromAPathAndDescriptors) {
  const std::string prefix = testing::TempDir() + "thimble-capi-parts-0000";
  const std::vector<GgufWriter> parts = small_model().parts(3);
  std::vector<int32_t> descriptors;
  std::vector<std::string> paths;
  for (size_t i : {2, 0, 1}) {
    paths.push_back(prefix + std::to_string(i + 1) + "-of-00003.gguf");
    parts[i].write(paths.back());
    descriptors.push_back(open(paths.back().c_str(), O_RDONLY));
    ASSERT_GE(descriptors.back(), 0);
  }
  Error e;
  thimble_model* raw = nullptr;
  EXPECT_OK(thimble_model_open_fds(descriptors.data(), 3, nullptr, &raw, &e), e);
  const ModelHandle from_descriptors(raw);
  const ModelHandle from_path = open_model(paths[0]);  // of the third part
  EXPECT_EQ(thimble_model_open_fds(descriptors.data(), 2, nullptr, &raw, &e), THIMBLE_FORMAT);
  EXPECT_EQ(thimble_model_open_fds(descriptors.data(), 0, nullptr, &raw, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_model_open_fds(nullptr, 3, nullptr, &raw, &e), THIMBLE_INVALID_ARGUMENT);
  for (const int32_t descriptor : descriptors) close(descriptor);
  for (const std::string& path : paths) std::filesystem::remove(path);
  const FileBytes bytes = small_model().bytes();
  ModelHandle whole;
  EXPECT_OK(try_open(bytes, whole, e), e);

  const Tokens prompt = any_tokens(40);
  std::vector<std::vector<float>> results;
  for (const ModelHandle* model :
       std::initializer_list<const ModelHandle*>{&whole, &from_descriptors, &from_path}) {
    thimble_model_info info = {};
    info.struct_size = sizeof info;
    EXPECT_OK(thimble_model_get_info(model->get(), &info, &e), e);
    EXPECT_EQ(info.files, model == &whole ? 1u : 3u);
    const SessionHandle session = create(*model, window_options());
    feed(session, prompt);
    EXPECT_OK(thimble_session_flush(session.get(), &e), e);
    results.push_back(logits(session));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(OpenedModel, TellsItsCallerWhatItWarnsAbout) {
  std::vector<std::string> warnings;
  thimble_model_options options;
  thimble_model_options_init(&options, sizeof options);
  options.log = [](void* user, const char* message) {
    static_cast<std::vector<std::string>*>(user)->push_back(message);
  };
  options.log_user = &warnings;
  const FileBytes bytes = small_model().bytes(),
                  heads_bytes = tiny_heads("llama").bytes();  // without a fingerprint
  Error e;
  thimble_model* raw = nullptr;
  EXPECT_OK(thimble_model_open_buffer(bytes.data(), bytes.size(), &options, &raw, &e), e);
  const ModelHandle model(raw);
  EXPECT_TRUE(warnings.empty());
  thimble_heads* heads = nullptr;
  EXPECT_OK(thimble_heads_open_buffer(model.get(), heads_bytes.data(), heads_bytes.size(), &heads, &e), e);
  thimble_heads_free(heads);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("fingerprint"), std::string::npos) << warnings[0];
}

TEST(OpenedModel, WithAnUnknownPreTokenizerWarnsAndTokenizes) {
  std::vector<std::string> warnings;
  thimble_model_options options;
  thimble_model_options_init(&options, sizeof options);
  options.log = [](void* user, const char* message) {
    static_cast<std::vector<std::string>*>(user)->push_back(message);
  };
  options.log_user = &warnings;
  GgufWriter w;
  w.set("general.architecture", std::string("llama")).set("tokenizer.ggml.model", std::string("gpt2"));
  w.set("tokenizer.ggml.pre", std::string("unheard-of"));
  w.set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "ab"});
  const FileBytes bytes = w.set("tokenizer.ggml.merges", std::vector<std::string>{"a b"}).bytes();
  Error e;
  thimble_model* raw = nullptr;
  EXPECT_OK(thimble_model_open_buffer(bytes.data(), bytes.size(), &options, &raw, &e), e);
  const ModelHandle model(raw);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("'unheard-of'"), std::string::npos) << warnings[0];
  EXPECT_EQ(tokenize(model, "aba"), (Tokens{2, 0}));
}

// ---- text ----

TEST(Text, TurnsIntoTokensAndBack) {
  const ModelHandle model = open_model(demo_path());
  const std::string text =
      "Chapter 1.\n\nThe caf\xc3\xa9 opens at 7 \xe6\x9d\xb1\xe4\xba\xac \xf0\x9f\x98\x80";
  const Tokens ids = tokenize(model, text);
  EXPECT_GT(ids.size(), 10u);
  EXPECT_LT(ids.size(), text.size());
  EXPECT_EQ(detokenize(model, ids), text);

  const Tokens with_bos = tokenize(model, text, THIMBLE_TOKENIZE_ADD_BOS);
  ASSERT_EQ(with_bos.size(), ids.size() + 1);
  EXPECT_EQ(with_bos[0], 0);
  EXPECT_EQ(tokenize(model, "<|end|>", THIMBLE_TOKENIZE_PARSE_SPECIAL), Tokens{3});
  EXPECT_GT(tokenize(model, "<|end|>").size(), 1u);
  EXPECT_EQ(detokenize(model, {3}), "");
  EXPECT_EQ(detokenize(model, {3}, THIMBLE_DETOKENIZE_SPECIAL), "<|end|>");
  EXPECT_EQ(thimble_token_ends(model.get(), 3), 1);
  EXPECT_EQ(thimble_token_ends(model.get(), ids[0]), 0);
  EXPECT_EQ(thimble_token_ends(model.get(), -1), 0);
}

TEST(Text, TellsWhereEachTokenStarts) {
  const ModelHandle model = open_model(demo_path());
  const std::string text = "The door code of the Lisbon warehouse is 40917.";
  Error e;
  int32_t ids[64];
  uint64_t offsets[64], count = 0;
  EXPECT_OK(thimble_tokenize(model.get(), text.data(), text.size(), 0, ids, offsets, 64, &count, &e), e);
  std::string joined;
  for (uint64_t i = 0; i < count; ++i) {
    EXPECT_EQ(offsets[i], joined.size());
    char bytes[64];
    uint64_t length = 0;
    EXPECT_OK(thimble_token_bytes(model.get(), ids[i], bytes, sizeof bytes, &length, &e), e);
    joined.append(bytes, length);
  }
  EXPECT_EQ(joined, text);
}

TEST(Text, MayHoldNulBytesAndBytesThatAreNotUtf8) {
  const ModelHandle model = open_model(demo_path());
  const std::string with_nul("a\0b\0", 4);
  EXPECT_EQ(detokenize(model, tokenize(model, with_nul)), with_nul);
  const Tokens ids = tokenize(model, "ok\xff\xc3(\xf0\x9f");
  EXPECT_EQ(detokenize(model, ids), "ok\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd");
  EXPECT_TRUE(tokenize(model, "").empty());
}

TEST(Text, IsWrittenWholeOrNotAtAll) {
  const ModelHandle model = open_model(demo_path());
  Error e;
  const std::string text = "four words are enough";
  const Tokens ids = tokenize(model, text);
  Tokens few(ids.size() - 1, -7);
  uint64_t count = 0;
  EXPECT_EQ(
      thimble_tokenize(model.get(), text.data(), text.size(), 0, few.data(), nullptr, few.size(), &count, &e),
      THIMBLE_INVALID_ARGUMENT);
  expect_sentence(e);
  EXPECT_EQ(count, ids.size());
  EXPECT_EQ(few, Tokens(ids.size() - 1, -7));
}

TEST(Text, BecomesTheSameIdsInPieces) {
  const ModelHandle model = open_model(demo_path());
  Error e;
  const std::string text = "The door code of the Lisbon warehouse is 40917.\nWho asked for it?";
  const uint64_t cut = thimble_tokenize_cut(model.get(), text.data(), 40);
  EXPECT_EQ(text.substr(0, cut), "The door code of the Lisbon warehouse");
  int32_t ids[64];
  uint64_t first = 0, second = 0;
  EXPECT_OK(thimble_tokenize(model.get(), text.data(), cut, 0, ids, nullptr, 64, &first, &e), e);
  EXPECT_OK(thimble_tokenize(model.get(), text.data() + cut, text.size() - cut, THIMBLE_TOKENIZE_CONTINUE,
                             ids + first, nullptr, 64 - first, &second, &e),
            e);
  EXPECT_EQ(Tokens(ids, ids + first + second), tokenize(model, text));
  EXPECT_EQ(thimble_tokenize_cut(model.get(), "12 34 ", 6), 0u);
  EXPECT_EQ(thimble_tokenize_cut(nullptr, "a b", 3), 0u);
  EXPECT_EQ(thimble_tokenize_cut(model.get(), nullptr, 0), 0u);
}

TEST(Text, BecomesAChat) {
  const ModelHandle model = open_model(demo_path());
  const thimble_message messages[] = {{"user", "Where is it?", 12}};
  Error e;
  char text[256];
  uint64_t length = 0;
  EXPECT_OK(thimble_chat_text(model.get(), nullptr, messages, 1, THIMBLE_CHAT_ADD_ASSISTANT, text,
                              sizeof text, &length, &e),
            e);
  EXPECT_EQ(std::string(text, length), "<|user|>\nWhere is it?<|end|>\n<|assistant|>\n");
  EXPECT_OK(thimble_chat_text(model.get(), "chatml", messages, 1, 0, text, sizeof text, &length, &e), e);
  EXPECT_EQ(std::string(text, length), "<|im_start|>user\nWhere is it?<|im_end|>\n");
  EXPECT_NE(thimble_chat_text(model.get(), "morse", messages, 1, 0, text, sizeof text, &length, &e),
            THIMBLE_OK);
  expect_sentence(e);
  const SmallModel small;  // this model has no template
  EXPECT_EQ(thimble_chat_text(small.model.get(), nullptr, messages, 1, 0, text, sizeof text, &length, &e),
            THIMBLE_UNSUPPORTED);
  expect_sentence(e);
}

TEST(Text, BecomesAChatByATemplateThatIsGiven) {
  const ModelHandle model = open_model(demo_path());
  Error e;
  char text[256];
  uint64_t length = 0;
  const std::string source =
      "{% for m in messages %}{{ m.content|default('-', true) }};{% endfor %}{{ tools|length }}";
  const std::string messages = R"([{"role": "user", "content": "Hi"}, {"role": "tool", "content": null}])";
  const std::string variables = R"({"tools": [1, 2]})";
  thimble_chat_options o;
  thimble_chat_options_init(&o, sizeof o);
  o.source = source.data();
  o.source_length = source.size();
  o.messages_json = messages.data();
  o.messages_json_length = messages.size();
  o.variables = variables.data();
  o.variables_length = variables.size();
  EXPECT_OK(thimble_chat_render(model.get(), &o, text, sizeof text, &length, &e), e);
  EXPECT_EQ(std::string(text, length), "Hi;-;2");

  const std::string refuses = "{{ raise_exception('Roles must alternate') }}";
  o.source = refuses.data();
  o.source_length = refuses.size();
  EXPECT_EQ(thimble_chat_render(model.get(), &o, text, sizeof text, &length, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(e.message).find("Roles must alternate"), std::string::npos);

  const std::string date = "{{ strftime_now('%Y-%m-%d %H:%M') }}";
  o.source = date.data();
  o.source_length = date.size();
  o.time = 1741338302;
  EXPECT_OK(thimble_chat_render(model.get(), &o, text, sizeof text, &length, &e), e);
  EXPECT_EQ(std::string(text, length), "2025-03-07 09:05");

  o.format = "chatml";  // both are set
  EXPECT_EQ(thimble_chat_render(model.get(), &o, text, sizeof text, &length, &e), THIMBLE_INVALID_ARGUMENT);
  expect_sentence(e);
}

// ---- sessions ----

TEST(Session, AnswersAQuestionAboutWhatItRead) {
  const ModelHandle model = open_model(demo_path());
  const std::string text =
      "<|user|>\nThe ship sailed in the morning. The door code of the Lisbon warehouse is 40917. Nobody was "
      "there to "
      "see it leave, and the harbour was quiet.\n\nWhat is the door code of the Lisbon "
      "warehouse?<|end|>\n<|assistant|>\n";
  thimble_session_options options = default_options();
  options.threads = 2;
  options.pool = 256;
  options.chunk = 64;
  const SessionHandle session = create(model, options);
  feed(session, tokenize(model, text, THIMBLE_TOKENIZE_ADD_BOS | THIMBLE_TOKENIZE_PARSE_SPECIAL));
  Tokens answer;
  std::string shown;
  for (int i = 0; i < 16; ++i) {
    const int32_t token = step(session);
    if (thimble_token_ends(model.get(), token)) break;
    answer.push_back(token);
    Error e;
    char piece[64];
    uint64_t length = 0;
    EXPECT_OK(thimble_session_text(session.get(), token, piece, sizeof piece, &length, &e), e);
    shown.append(piece, length);
  }
  EXPECT_NE(shown.find("40917"), std::string::npos) << shown;
  EXPECT_EQ(shown, detokenize(model, answer));
}

TEST(Session, TakesTheLikeliestTokenAndSoDoesAccept) {
  const SmallModel small;
  const SessionHandle stepping = create(small.model, window_options()),
                      accepting = create(small.model, window_options());
  const Tokens prompt = any_tokens(100);
  feed(stepping, prompt);
  feed(accepting, prompt);
  Error e;
  EXPECT_OK(thimble_session_flush(accepting.get(), &e), e);
  for (int i = 0; i < 40; ++i) {  // more than max_new: the pool is evicted once
    const std::vector<float> scores = logits(accepting);
    ASSERT_EQ(scores.size(), kSmallVocab);
    const int32_t best =
        static_cast<int32_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
    ASSERT_EQ(step(stepping), best);
    EXPECT_OK(thimble_session_accept(accepting.get(), best, &e), e);
    EXPECT_EQ(logits(stepping), logits(accepting));
  }
  EXPECT_EQ(stats(stepping).generated, 40u);
  EXPECT_GT(stats(stepping).evictions, 1u);
}

TEST(Session, ReadsTheSameHoweverCallsCutTheText) {
  const SmallModel small;
  const Tokens prompt = any_tokens(300);
  std::vector<std::vector<float>> results;
  for (const size_t piece : {300u, 1u, 7u, 100u}) {
    const SessionHandle session = create(small.model, window_options());
    for (size_t at = 0; at < prompt.size(); at += piece)
      feed(session, Tokens(prompt.begin() + at, prompt.begin() + std::min(prompt.size(), at + piece)));
    Error e;
    EXPECT_OK(thimble_session_flush(session.get(), &e), e);
    results.push_back(logits(session));
  }
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

TEST(Session, ScoresTokensWithTheirLogProbability) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options()),
                      check = create(small.model, window_options());
  const Tokens prompt = any_tokens(20), more = any_tokens(5);
  Error e;
  for (const SessionHandle* s : {&session, &check}) {
    feed(*s, prompt);
    EXPECT_OK(thimble_session_flush(s->get(), &e), e);
  }
  float scored[5];
  EXPECT_OK(thimble_session_score(session.get(), more.data(), more.size(), scored, &e), e);
  for (size_t i = 0; i < more.size(); ++i) {
    const std::vector<float> row = logits(check);
    double sum = 0;
    for (const float x : row) sum += std::exp(double(x));
    // Rows of a chunk and single rows round differently: 8 f32 roundings of logits below 32.
    EXPECT_NEAR(scored[i], row[static_cast<size_t>(more[i])] - std::log(sum), 8 * 32 * 6e-8 + 1e-4);
    EXPECT_OK(thimble_session_accept(check.get(), more[i], &e), e);
  }
  EXPECT_EQ(stats(session).position, 25u);
}

TEST(Session, ScoresAsItStepsUnderEverySelection) {
  const SmallModel small;
  const Tokens prompt = any_tokens(200), more = any_tokens(40);
  thimble_session_options options = default_options();
  options.threads = 2;
  options.pool = 300;
  options.select_init = 4;
  options.select_local = 16;
  options.dense_layers = 1;
  for (int32_t selection = 0; thimble_selection_name(selection); ++selection) {
    options.selection = selection;
    options.select_k = selection == THIMBLE_SELECTION_QUEST ? 48 : 24;
    const SessionHandle scoring = create(small.model, options), stepping = create(small.model, options);
    Error e;
    for (const SessionHandle* s : {&scoring, &stepping}) {
      feed(*s, prompt);
      EXPECT_OK(thimble_session_flush(s->get(), &e), e);
    }
    std::vector<float> scored(more.size());
    EXPECT_OK(thimble_session_score(scoring.get(), more.data(), more.size(), scored.data(), &e), e);
    for (size_t i = 0; i < more.size(); ++i) {
      const std::vector<float> row = logits(stepping);
      double sum = 0;
      for (const float x : row) sum += std::exp(double(x));
      // If tokens are scored one by one, the logits are the same bits. The sum of 258 exponentials and its
      // logarithm round by 2^-24 of themselves each, which is less than 1e-5 in all. With dense attention,
      // rows of a chunk and single rows round differently: 8 f32 roundings of logits below 32.
      const double tolerance = selection == THIMBLE_SELECTION_DENSE ? 8 * 32 * 6e-8 + 1e-4 : 1e-5;
      EXPECT_NEAR(scored[i], row[static_cast<size_t>(more[i])] - std::log(sum), tolerance)
          << thimble_selection_name(selection) << ", token " << i;
      EXPECT_OK(thimble_session_accept(stepping.get(), more[i], &e), e);
    }
    if (selection != THIMBLE_SELECTION_DENSE) {
      EXPECT_EQ(logits(scoring), logits(stepping)) << thimble_selection_name(selection);
      EXPECT_LT(stats(stepping).selected, 240u) << "else this compares dense with dense";
    }
  }
}

TEST(Session, RefusesToGoOnFromLogitsThatAreNotFinite) {
  for (const float factor :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const FileBytes bytes = scaled(small_model(), "output.weight", factor).bytes();
    ModelHandle model;
    Error e;
    ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
    for (const int32_t selection : {THIMBLE_SELECTION_DENSE, THIMBLE_SELECTION_TOKENSELECT}) {
      thimble_session_options options = window_options();
      options.selection = selection;
      const SessionHandle session = create(model, options);
      feed(session, any_tokens(20));
      EXPECT_OK(thimble_session_flush(session.get(), &e), e);
      int32_t token = -7;
      EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_NOT_FINITE);
      expect_sentence(e);
      EXPECT_EQ(token, -7);
      const float* values = nullptr;
      uint32_t count = 0;
      EXPECT_EQ(thimble_session_logits(session.get(), &values, &count, &e), THIMBLE_NOT_FINITE);
      float scored[3] = {};
      const int32_t tokens[] = {1, 2, 3};
      EXPECT_EQ(thimble_session_score(session.get(), tokens, 3, scored, &e), THIMBLE_NOT_FINITE);
      EXPECT_EQ(stats(session).position, 20u);
      EXPECT_OK(thimble_session_rewind(session.get(), 5, &e), e);
      EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_INVALID_ARGUMENT)
          << "there are no logits to continue from";
    }
  }
}

TEST(Session, CountsTheNumbersThatItsPoolCannotHold) {
  // The values of the first layer have 4 channels per token, most of which are far above 65504.
  const FileBytes bytes = scaled(small_model(), "blk.0.attn_v.weight", 1e8f).bytes();
  ModelHandle model;
  Error e;
  ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
  const SessionHandle session = create(model, window_options());
  feed(session, any_tokens(20));
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  const uint64_t read = stats(session).saturated;
  EXPECT_GT(read, 20u);
  EXPECT_LE(read, 20u * 4);
  step(session);
  EXPECT_GT(stats(session).saturated, read);
  EXPECT_LE(stats(session).saturated, read + 4);
  EXPECT_OK(thimble_session_reset(session.get(), &e), e);
  EXPECT_EQ(stats(session).saturated, 0u);
  const SmallModel small;
  const SessionHandle sound = create(small.model, window_options());
  feed(sound, any_tokens(20));
  steps(sound, 3);
  EXPECT_EQ(stats(sound).saturated, 0u);
}

TEST(Session, GivesHeadsTheSharesOfTheirFile) {
  const SmallModel small;
  const FileBytes bytes = uneven_heads().bytes();
  const HeadsHandle heads = open_heads(small.model, bytes);
  thimble_session_options options = window_options();
  options.heads = heads.get();
  options.retention = THIMBLE_RETENTION_LOCRET;
  options.pool = 256;
  options.chunk = 64;
  const SessionHandle session = create(small.model, options);
  feed(session, any_tokens(900));
  Error e;
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  // The shares are 1/4 and 7/4 of a pool of 256; the local tokens are added.
  EXPECT_EQ(kept(session, 0, 0).size(), 64u + 8);
  EXPECT_EQ(kept(session, 1, 0).size(), 448u + 8);
  EXPECT_EQ(stats(session).entries, 448u + 8);
  EXPECT_EQ(stats(session).evicted, (900u - 72 + 900 - 456) / 2);
  EXPECT_GT(plan(small.model, options).capacity, 448u);
  uint32_t keeps[2] = {};
  uint64_t count = 0;
  EXPECT_EQ(thimble_session_plan_heads(small.model.get(), &options, keeps, 1, &count, &e),
            THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(count, 2u);
  EXPECT_OK(thimble_session_plan_heads(small.model.get(), &options, keeps, 2, &count, &e), e);
  EXPECT_EQ(keeps[0], 64u);
  EXPECT_EQ(keeps[1], 448u);
  EXPECT_EQ(steps(session, 40).size(), 40u);
}

TEST(Session, RewindsToWhatItStillHolds) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  feed(session, any_tokens(40));
  Error e;
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  const uint64_t here = stats(session).position;
  const Tokens question = {5, 6, 7};
  feed(session, question);
  const Tokens first = steps(session, 5);
  EXPECT_OK(thimble_session_rewind(session.get(), here, &e), e);
  EXPECT_EQ(stats(session).position, 40u);
  int32_t token = -7;
  EXPECT_EQ(thimble_session_step(session.get(), &token, &e),
            THIMBLE_INVALID_ARGUMENT);  // there is no token to continue from
  EXPECT_EQ(token, -7);
  feed(session, question);
  EXPECT_EQ(steps(session, 5), first);

  feed(session, any_tokens(100));
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  const thimble_stats before = stats(session);
  EXPECT_EQ(thimble_session_rewind(session.get(), here, &e), THIMBLE_CANNOT_REWIND);
  expect_sentence(e);
  EXPECT_EQ(stats(session).position, before.position);
  EXPECT_EQ(thimble_session_rewind(session.get(), before.position + 1, &e), THIMBLE_INVALID_ARGUMENT);
}

TEST(Session, CloneGoesOnFromTheSameState) {
  const SmallModel small;
  SessionHandle session = create(small.model, window_options());
  feed(session, any_tokens(150));
  EXPECT_GE(step(session), 0);
  Error e;
  thimble_session* raw = nullptr;
  EXPECT_OK(thimble_session_clone(session.get(), &raw, &e), e);
  const SessionHandle clone(raw);
  EXPECT_EQ(logits(clone), logits(session));
  const Tokens expected = steps(session, 30);
  EXPECT_EQ(memory(session).allocated, memory(clone).allocated);
  EXPECT_GT(memory(session).allocated, memory(session).total);
  session.reset();
  // The device's own memory is still counted, although the session that it was created with is gone.
  EXPECT_LE(memory(clone).allocated, memory(clone).total);
  EXPECT_GE(memory(clone).allocated, memory(clone).total - kProgramRoom);
  EXPECT_EQ(steps(clone, 30), expected);
}

TEST(Session, CloneCountsTowardsTheSameBudget) {
  const SmallModel small;
  thimble_session_options options = window_options();
  const thimble_memory needed = plan(small.model, options);
  options.budget_bytes = needed.total + needed.total - needed.fixed;
  const SessionHandle session = create(small.model, options);
  feed(session, any_tokens(150));
  const Tokens expected = kept(session, 1, 0);
  Error e;
  thimble_session *first = nullptr, *second = nullptr;
  EXPECT_OK(thimble_session_clone(session.get(), &first, &e), e);
  EXPECT_LE(memory(session).allocated, options.budget_bytes);
  EXPECT_EQ(thimble_session_clone(session.get(), &second, &e), THIMBLE_BUDGET);
  expect_sentence(e);
  EXPECT_EQ(e.bytes_missing, needed.total - needed.fixed);
  EXPECT_EQ(second, nullptr);
  thimble_session_free(first);
  EXPECT_OK(thimble_session_clone(session.get(), &second, &e), e);
  EXPECT_EQ(kept(SessionHandle(second), 1, 0), expected);
}

TEST(Session, ResetIsLikeNew) {
  const SmallModel small;
  const SessionHandle used = create(small.model, window_options()),
                      fresh = create(small.model, window_options());
  feed(used, any_tokens(200));
  steps(used, 10);
  Error e;
  EXPECT_OK(thimble_session_reset(used.get(), &e), e);
  EXPECT_EQ(stats(used).position, 0u);
  const Tokens prompt = {9, 8, 7, 6};
  feed(used, prompt);
  feed(fresh, prompt);
  EXPECT_EQ(steps(used, 10), steps(fresh, 10));
}

TEST(Session, TellsWhichPositionsItStillHolds) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  feed(session, any_tokens(200));
  Error e;
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  const thimble_stats now = stats(session);
  EXPECT_EQ(now.position, 200u);
  EXPECT_EQ(now.waiting, 0u);
  EXPECT_EQ(now.entries + now.evicted, 200u);
  EXPECT_EQ(now.entries, 64u + 8);  // the pool and the local tokens
  Tokens expected = {0, 1, 2, 3};   // the sinks, then the most recent
  for (int32_t position = 200 - 68; position < 200; ++position) expected.push_back(position);
  EXPECT_EQ(kept(session, 0, 0), expected);
  EXPECT_EQ(kept(session, 1, 0), expected);
  uint64_t count = 0;
  int32_t positions[128];
  EXPECT_EQ(thimble_session_kept(session.get(), 2, 0, positions, 128, &count, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(thimble_session_kept(session.get(), 0, 1, positions, 128, &count, &e), THIMBLE_INVALID_ARGUMENT);
}

TEST(Session, TellsWhatItHoldsAndAttendedToByPosition) {
  const SmallModel small;
  thimble_session_options options = window_options();
  options.watch = 1;
  const SessionHandle session = create(small.model, options);
  Error e;
  uint64_t count = 7;
  EXPECT_OK(thimble_session_kept_by_position(session.get(), nullptr, nullptr, 0, &count, &e), e);
  EXPECT_EQ(count, 0u);
  feed(session, any_tokens(200));
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  EXPECT_EQ(thimble_session_kept_by_position(session.get(), nullptr, nullptr, 0, &count, &e),
            THIMBLE_INVALID_ARGUMENT);
  ASSERT_EQ(count, 200u);
  std::vector<float> shares(count), attention(count);
  EXPECT_EQ(thimble_session_kept_by_position(session.get(), shares.data(), attention.data(), 199, &count, &e),
            THIMBLE_INVALID_ARGUMENT);
  EXPECT_OK(thimble_session_kept_by_position(session.get(), shares.data(), attention.data(), 200, &count, &e),
            e);
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const bool held = i < 4 || i >= 200 - 68;  // the same in all heads
    EXPECT_EQ(shares[i], held ? 1.0f : 0.0f) << i;
    EXPECT_EQ(attention[i] > 0, held) << i;
    sum += attention[i];
  }
  EXPECT_NEAR(sum, 1, 1e-5);  // 200 roundings of 2^-24
  std::fill(shares.begin(), shares.end(), 9.0f);
  EXPECT_OK(thimble_session_kept_by_position(session.get(), nullptr, attention.data(), 200, &count, &e), e);
  EXPECT_EQ(shares[0], 9.0f);

  const SessionHandle plain = create(small.model, window_options());
  feed(plain, {1, 2, 3});
  EXPECT_OK(thimble_session_flush(plain.get(), &e), e);
  EXPECT_OK(thimble_session_kept_by_position(plain.get(), shares.data(), nullptr, 200, &count, &e), e);
  EXPECT_EQ(count, 3u);
  EXPECT_EQ(shares[0], 1.0f);
  EXPECT_EQ(thimble_session_kept_by_position(plain.get(), nullptr, attention.data(), 200, &count, &e),
            THIMBLE_INVALID_ARGUMENT);
  expect_sentence(e);
}

TEST(Session, TellsWhatIsInTheStoreByPosition) {
  const SmallModel small;
  Error e;
  for (const bool stores : {true, false}) {
    thimble_session_options options = window_options();
    if (stores) options.recall_mem_bytes = 1 << 20, options.recall = 16;
    const SessionHandle session = create(small.model, options);
    feed(session, any_tokens(200));
    EXPECT_OK(thimble_session_flush(session.get(), &e), e);
    uint64_t count = 0;
    EXPECT_EQ(thimble_session_stored_by_position(session.get(), nullptr, 0, &count, &e),
              THIMBLE_INVALID_ARGUMENT);
    ASSERT_EQ(count, 200u);
    std::vector<float> held(count), stored(count, 9.0f);
    EXPECT_OK(thimble_session_kept_by_position(session.get(), held.data(), nullptr, 200, &count, &e), e);
    EXPECT_OK(thimble_session_stored_by_position(session.get(), stored.data(), 200, &count, &e), e);
    float most = 0;
    for (uint64_t i = 0; i < count; ++i) {
      EXPECT_NEAR(held[i] + stored[i], stores || held[i] ? 1 : 0, 1e-6) << i;  // two roundings of 2^-24
      most = std::max(most, stored[i]);
    }
    EXPECT_EQ(most, stores ? 1.0f : 0.0f);
  }
}

TEST(Session, HoldsBackTheBytesOfAnUnfinishedCodePoint) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  Error e;
  const auto text = [&](int32_t token, uint64_t capacity = 16) -> std::string {
    char bytes[16];
    uint64_t length = 0;
    const thimble_status status = thimble_session_text(session.get(), token, bytes, capacity, &length, &e);
    return status == THIMBLE_OK ? std::string(bytes, length) : "needs " + std::to_string(length);
  };
  EXPECT_EQ(text('a'), "a");
  EXPECT_EQ(text(0xe6), "");
  EXPECT_EQ(text(0x9d), "");
  EXPECT_EQ(text(0xb1, 2), "needs 3");  // and the call has no effect
  EXPECT_EQ(text(0xb1), "\xe6\x9d\xb1");
  EXPECT_EQ(text(256), "th");
  EXPECT_EQ(text(kSmallEnd), "");
  EXPECT_EQ(text(0xe6), "");
  feed(session, {1});  // another turn begins
  EXPECT_EQ(text('b'), "b");
  EXPECT_EQ(text(-1), "needs 0");
}

TEST(Session, SamplesTheSameFromTheSameSeed) {
  const SmallModel small;
  thimble_sampler_options sampler;
  thimble_sampler_options_init(&sampler, sizeof sampler);
  sampler.temperature = 1.5f;
  sampler.top_k = 0;
  sampler.top_p = 1;
  sampler.min_p = 0;
  std::vector<Tokens> answers;
  for (const uint64_t seed : {1u, 1u, 2u}) {
    const SessionHandle session = create(small.model, window_options());
    sampler.seed = seed;
    Error e;
    EXPECT_OK(thimble_session_set_sampler(session.get(), &sampler, &e), e);
    feed(session, any_tokens(10));
    answers.push_back(steps(session, 20));
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_NE(answers[0], answers[2]);
}

#ifdef __linux__  // Linux lists a process's threads
TEST(Session, SharesTheThreadsOfItsDevice) {
  const auto threads = [] {
    const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const SmallModel small;
  thimble_session_options options = window_options();
  options.threads = 3;
  const auto before = threads();
  const SessionHandle first = create(small.model, options);
  const auto with_one = threads();
  EXPECT_GT(with_one, before);
  const SessionHandle second = create(small.model, options);
  plan(small.model, options);
  EXPECT_EQ(threads(), with_one);
  options.threads = 2;
  const SessionHandle other = create(small.model, options);
  EXPECT_GT(threads(), with_one);
}
#endif

TEST(Session, HoldsWhatItsPlanSays) {
  const SmallModel small;
  thimble_session_options options = window_options();
  options.heads = small.heads.get();
  options.retention = THIMBLE_RETENTION_LOCRET;
  const thimble_memory planned = plan(small.model, options);
  EXPECT_EQ(planned.pool, 64u);
  EXPECT_EQ(planned.chunk, 16u);
  EXPECT_EQ(planned.capacity, 64u + 64);  // local and max_new are 32, raised to 64
  EXPECT_EQ(planned.allocated, 0u);
  EXPECT_EQ(planned.budget, 0u);
  EXPECT_EQ(planned.dense_bytes_per_token, 2u * 1 * 4 * 2 * 2);
  EXPECT_EQ(planned.mapped, small.bytes.size() + small.heads_bytes.size());
  EXPECT_GT(planned.host_tables, 0u);
  EXPECT_EQ(planned.weights - planned.shared + planned.pool_bytes + planned.view + planned.workspace +
                planned.io + planned.fixed,
            planned.total);
  const SessionHandle session = create(small.model, options);
  const thimble_memory held = memory(session);
  EXPECT_LE(held.allocated, planned.total);
  EXPECT_GE(held.allocated, planned.total - kProgramRoom);
  EXPECT_EQ(held.total, planned.total);
  EXPECT_EQ(held.pool_bytes, planned.pool_bytes);
}

TEST(Session, TakesItsPoolFromTheBudget) {
  const SmallModel small;
  thimble_session_options options = window_options();
  const thimble_memory needed = plan(small.model, options);
  options.budget_bytes = needed.total;
  options.pool = 0;
  Error e;
  uint32_t largest = 0;
  EXPECT_OK(thimble_session_largest_pool(small.model.get(), &options, &largest, &e), e);
  EXPECT_GE(largest, 64u);
  const thimble_memory planned = plan(small.model, options);
  EXPECT_EQ(planned.pool, largest);
  EXPECT_LE(planned.total, options.budget_bytes);
  options.pool = largest + 1;
  thimble_memory none = {};
  none.struct_size = sizeof none;
  EXPECT_EQ(thimble_session_plan(small.model.get(), &options, &none, &e), THIMBLE_BUDGET);
  expect_sentence(e);
  EXPECT_GT(e.bytes_missing, 0u);
}

}  // namespace
}  // namespace thimble
