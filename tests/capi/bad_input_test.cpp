// Tests invalid input: files, texts, tokens and pointers. Each gives its code and one sentence, and changes
// nothing.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include "tests/capi/handles.h"

namespace thimble {
namespace {

// ---- files ----

struct BadFile {
  const char* what;
  FileBytes bytes;
  thimble_status status;
  const char* names;
};

FileBytes cut(FileBytes bytes, size_t size) {
  bytes.resize(size);
  return bytes;
}

FileBytes with_byte(FileBytes bytes, size_t at, uint8_t value) {
  bytes[at] = std::byte{value};
  return bytes;
}

TEST(BadModel, IsRefusedWithTheReason) {
  const FileBytes good = small_model().bytes();
  const BadFile files[] = {
      {"half of a file", cut(good, good.size() / 2), THIMBLE_FORMAT, "damaged or incomplete"},
      {"all but the last byte", cut(good, good.size() - 1), THIMBLE_FORMAT, "damaged or incomplete"},
      {"the first 6 bytes", cut(good, 6), THIMBLE_FORMAT, ""},
      {"another magic", with_byte(good, 0, 'g'), THIMBLE_FORMAT, "GGUF"},
      {"version 1", with_byte(good, 4, 1), THIMBLE_UNSUPPORTED, "version 1"},
      {"another architecture", small_model().set("general.architecture", "mamba").bytes(),
       THIMBLE_UNSUPPORTED, "mamba"},
      {"a tensor short", small_model().erase_tensor("blk.1.ffn_up.weight").bytes(), THIMBLE_FORMAT, "ffn_up"},
      {"a key short", small_model().erase("llama.context_length").bytes(), THIMBLE_FORMAT, "context_length"},
      {"a retainer", tiny_heads("llama").bytes(), THIMBLE_FORMAT, ""},
  };
  for (const BadFile& file : files) {
    ModelHandle model;
    Error e;
    EXPECT_EQ(try_open(file.bytes, model, e), file.status) << file.what << ": " << e.message;
    EXPECT_NE(std::strstr(e.message, file.names), nullptr) << file.what << ": " << e.message;
    expect_sentence(e);
    EXPECT_EQ(model, nullptr) << file.what;
  }
}

TEST(BadModel, HasAPathThatCannotBeRead) {
  const std::string folder = testing::TempDir();
  const std::string empty = folder + "thimble-empty.gguf", locked = folder + "thimble-locked.gguf";
  std::ofstream(empty).close();
  std::ofstream(locked) << "GGUF";
  std::filesystem::permissions(locked, std::filesystem::perms::none);
  std::vector<std::pair<std::string, thimble_status>> paths = {
      {folder + "no such file", THIMBLE_IO}, {folder, THIMBLE_IO}, {"", THIMBLE_IO}, {empty, THIMBLE_FORMAT}};
  if (geteuid() != 0) paths.push_back({locked, THIMBLE_IO});  // root may read everything
  for (const auto& [path, status] : paths) {
    Error e;
    thimble_model* model = nullptr;
    EXPECT_EQ(thimble_model_open(path.c_str(), nullptr, &model, &e), status) << path;
    expect_sentence(e);
    EXPECT_EQ(model, nullptr);
  }
  Error e;
  thimble_model* model = nullptr;
  EXPECT_EQ(thimble_model_open_fd(-1, nullptr, &model, &e), THIMBLE_IO);
  EXPECT_EQ(thimble_model_open_fd_range(-1, 0, 8, nullptr, &model, &e), THIMBLE_IO);
  expect_sentence(e);
  std::filesystem::remove(empty);
  std::filesystem::remove(locked);
}

TEST(BadModel, IsRefusedInMemoryThatIsNotAligned) {
  FileBytes bytes = small_model().bytes();
  bytes.insert(bytes.begin(), std::byte{0});
  Error e;
  thimble_model* model = nullptr;
  EXPECT_EQ(thimble_model_open_buffer(bytes.data() + 1, bytes.size() - 1, nullptr, &model, &e),
            THIMBLE_INVALID_ARGUMENT);
  expect_sentence(e);
  EXPECT_NE(thimble_model_open_buffer(bytes.data(), 0, nullptr, &model, &e), THIMBLE_OK);
  EXPECT_NE(thimble_model_open_buffer(bytes.data(), UINT64_MAX, nullptr, &model, &e), THIMBLE_OK);
  EXPECT_EQ(model, nullptr);
}

TEST(ModelWithoutATokenizer, StillRuns) {
  GgufWriter w = small_model();
  std::erase_if(w.keys, [](const GgufWriter::Key& key) { return key.name.starts_with("tokenizer."); });
  const FileBytes bytes = w.bytes();
  ModelHandle model;
  Error e;
  ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
  uint64_t count = 0;
  EXPECT_EQ(thimble_tokenize(model.get(), "a", 1, 0, nullptr, nullptr, 0, &count, &e), THIMBLE_UNSUPPORTED);
  expect_sentence(e);
  EXPECT_NE(std::strstr(e.message, "token"), nullptr) << e.message;
  const int32_t id = 1;
  EXPECT_EQ(thimble_detokenize(model.get(), &id, 1, 0, nullptr, 0, &count, &e), THIMBLE_UNSUPPORTED);
  EXPECT_EQ(thimble_token_bytes(model.get(), id, nullptr, 0, &count, &e), THIMBLE_UNSUPPORTED);
  EXPECT_EQ(thimble_token_ends(model.get(), id), 0);
  thimble_model_info info = {};
  info.struct_size = sizeof info;
  EXPECT_OK(thimble_model_get_info(model.get(), &info, &e), e);
  EXPECT_EQ(info.has_tokenizer, 0u);
  EXPECT_EQ(info.bos, -1);
  EXPECT_EQ(info.eos, -1);
  const SessionHandle session = create(model, window_options());
  feed(session, {1, 2, 3});
  EXPECT_GE(step(session), 0);
  EXPECT_EQ(thimble_session_text(session.get(), id, nullptr, 0, &count, &e), THIMBLE_UNSUPPORTED);
}

TEST(ModelWithADefectiveTokenizer, SaysWhichKeyIsToBlameAndWhy) {
  struct Defect {
    const char* what;
    GgufWriter file;
    const char *key, *why;
  };
  const std::vector<std::string> none;
  const Defect defects[] = {
      {"a number", small_model().set("tokenizer.ggml.model", 1u), "tokenizer.ggml.model", "string"},
      {"a kind", small_model().set("tokenizer.ggml.model", "bert"), "bert", "not supported"},
      {"no texts", small_model().erase("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens", "missing"},
      {"empty texts", small_model().set("tokenizer.ggml.tokens", none), "tokenizer.ggml.tokens", "empty"},
      {"no merges", small_model().erase("tokenizer.ggml.merges"), "tokenizer.ggml.merges", "missing"},
      {"a type short", small_model().set("tokenizer.ggml.token_type", std::vector<int32_t>(257, 1)),
       "tokenizer.ggml.token_type", "257 entries"},
      {"no scores", small_model().set("tokenizer.ggml.model", "llama"), "tokenizer.ggml.scores", "missing"},
      {"an end's text", small_model().set("tokenizer.ggml.eos_token_id", "x"), "tokenizer.ggml.eos_token_id",
       "integer"},
      {"ends' texts", small_model().set("tokenizer.ggml.eos_token_ids", std::vector<std::string>{"x"}),
       "tokenizer.ggml.eos_token_ids", "integers"},
  };
  for (const Defect& defect : defects) {
    SCOPED_TRACE(defect.what);
    const FileBytes bytes = defect.file.bytes();
    std::string log;
    thimble_model_options options;
    thimble_model_options_init(&options, sizeof options);
    options.log_user = &log;
    options.log = [](void* user, const char* message) { *static_cast<std::string*>(user) += message; };
    Error e;
    thimble_model* raw = nullptr;
    EXPECT_OK(thimble_model_open_buffer(bytes.data(), bytes.size(), &options, &raw, &e), e);
    const ModelHandle model(raw);
    uint64_t count = 0;
    EXPECT_EQ(thimble_tokenize(raw, "a", 1, 0, nullptr, nullptr, 0, &count, &e), THIMBLE_UNSUPPORTED);
    expect_sentence(e);
    for (const std::string& said : {std::string(e.message), log}) {
      EXPECT_NE(said.find(defect.key), said.npos) << said;
      EXPECT_NE(said.find(defect.why), said.npos) << said;
    }
  }
}

TEST(ModelWithoutWeights, TokenisesButMakesNoSession) {
  GgufWriter w = small_model();
  w.tensors.clear();
  const FileBytes bytes = w.bytes();
  ModelHandle model;
  Error e;
  ASSERT_EQ(try_open(bytes, model, e), THIMBLE_OK) << e.message;
  EXPECT_EQ(tokenize(model, "the"), (Tokens{256, 'e'}));
  thimble_session* session = nullptr;
  EXPECT_EQ(thimble_session_create(model.get(), nullptr, &session, &e), THIMBLE_UNSUPPORTED);
  expect_sentence(e);
  EXPECT_EQ(session, nullptr);
}

// Another program truncates a mapped file. Reading the missing part would end the process.
TEST(CutFile, IsRefusedByEveryCallThatReadsIt) {
  const std::string path = testing::TempDir() + "thimble-bad-cut.gguf",
                    saved = testing::TempDir() + "thimble-bad-cut.session";
  small_model().write(path);
  const ModelHandle model = open_model(path);
  const SessionHandle session = create(model, window_options()), waiting = create(model, window_options());
  feed(session, any_tokens(100));
  step(session);
  feed(waiting, {1, 2, 3});
  Error e;
  EXPECT_OK(thimble_session_save(session.get(), saved.c_str(), nullptr, 0, &e), e);
  // The step of one token is interrupted in this session.
  thimble_session_interrupt(session.get());
  EXPECT_EQ(thimble_session_accept(session.get(), 7, &e), THIMBLE_INTERRUPTED);

  std::error_code refused;
  std::filesystem::resize_file(path, 100, refused);
  if (refused) GTEST_SKIP() << "the system does not cut a mapped file: " << refused.message();
  thimble_session* s = session.get();
  const Tokens tokens = any_tokens(100);
  std::vector<float> log_probs(tokens.size());
  const float* values = nullptr;
  uint32_t size = 0;
  uint64_t count = 0, other = 0;
  int32_t token = 0;
  thimble_session* made = nullptr;
  thimble_heads* heads = nullptr;
  thimble_tensor_info tensor = {};
  tensor.struct_size = sizeof tensor;
  const thimble_session_options options = window_options();
  const FileBytes sidecar = tiny_heads("llama").bytes();
  char text[64];
  using Call = std::function<thimble_status(thimble_error*)>;
  for (const auto& [name, call] : std::initializer_list<std::pair<const char*, Call>>{
           {"feed", [&](auto* to) { return thimble_session_feed(s, tokens.data(), tokens.size(), to); }},
           {"flush", [&](auto* to) { return thimble_session_flush(waiting.get(), to); }},
           {"step", [&](auto* to) { return thimble_session_step(s, &token, to); }},
           {"accept", [&](auto* to) { return thimble_session_accept(s, 7, to); }},
           {"score",
            [&](auto* to) {
              return thimble_session_score(s, tokens.data(), tokens.size(), log_probs.data(), to);
            }},
           {"logits", [&](auto* to) { return thimble_session_logits(s, &values, &size, to); }},
           {"clone", [&](auto* to) { return thimble_session_clone(s, &made, to); }},
           {"restore", [&](auto* to) { return thimble_session_restore(s, saved.c_str(), to); }},
           {"create", [&](auto* to) { return thimble_session_create(model.get(), &options, &made, to); }},
           {"tokenize",
            [&](auto* to) {
              return thimble_tokenize(model.get(), "a", 1, 0, &token, nullptr, 1, &count, to);
            }},
           {"text", [&](auto* to) { return thimble_session_text(s, 65, text, sizeof text, &count, to); }},
           {"metadata",
            [&](auto* to) {
              return thimble_model_metadata_get(model.get(), 0, text, sizeof text, &count, text, sizeof text,
                                                &other, to);
            }},
           {"tensor", [&](auto* to) { return thimble_model_tensor_get(model.get(), 0, &tensor, to); }},
           {"heads",
            [&](auto* to) {
              return thimble_heads_open_buffer(model.get(), sidecar.data(), sidecar.size(), &heads, to);
            }},
       }) {
    SCOPED_TRACE(name);
    EXPECT_EQ(call(&e), THIMBLE_IO);
    expect_sentence(e);
  }
  EXPECT_EQ(std::string(e.message).find(path + " became shorter"), 0u) << e.message;

  small_model().write(path);  // restores the bytes in the same file
  EXPECT_OK(thimble_session_accept(s, 7, &e), e);
  EXPECT_EQ(stats(session).position, 102u);
  std::filesystem::remove(path);
  std::filesystem::remove(saved);
}

TEST(BadHeads, AreRefusedWithTheReason) {
  const SmallModel small;
  const FileBytes good = tiny_heads("llama").bytes();
  const BadFile files[] = {
      {"half of a file", cut(good, good.size() / 2), THIMBLE_FORMAT, "damaged or incomplete"},
      {"heads of another model", tiny_heads("llama").set("locret.base.fingerprint", uint64_t{1}).bytes(),
       THIMBLE_MISMATCH, "another model"},
      {"heads of another shape", tiny_heads("llama").set("locret.base.block_count", 3u).bytes(),
       THIMBLE_MISMATCH, "block_count"},
      {"heads of another architecture", tiny_heads("qwen2").bytes(), THIMBLE_MISMATCH, "qwen2"},
      {"a model", small_model().bytes(), THIMBLE_FORMAT, "retainer"},
  };
  for (const BadFile& file : files) {
    Error e;
    thimble_heads* heads = nullptr;
    EXPECT_EQ(thimble_heads_open_buffer(small.model.get(), file.bytes.data(), file.bytes.size(), &heads, &e),
              file.status)
        << file.what << ": " << e.message;
    EXPECT_NE(std::strstr(e.message, file.names), nullptr) << file.what << ": " << e.message;
    expect_sentence(e);
    EXPECT_EQ(heads, nullptr);
  }
}

TEST(BadHeads, WereOpenedForAnotherModel) {
  const SmallModel small;
  GgufWriter w = small_model();
  w.tensor("blk.0.attn_norm.weight", {8}, std::vector<float>(8, 2.0f));
  const FileBytes bytes = w.bytes();
  ModelHandle other;
  Error e;
  ASSERT_EQ(try_open(bytes, other, e), THIMBLE_OK) << e.message;
  thimble_session_options options = window_options();
  options.heads = small.heads.get();
  options.retention = THIMBLE_RETENTION_DEFAULT;
  thimble_session* session = nullptr;
  EXPECT_EQ(thimble_session_create(other.get(), &options, &session, &e), THIMBLE_MISMATCH);
  expect_sentence(e);
  EXPECT_EQ(session, nullptr);
  // Another handle of the same model works.
  ModelHandle again;
  ASSERT_EQ(try_open(small.bytes, again, e), THIMBLE_OK) << e.message;
  EXPECT_NE(create(again, options), nullptr);
}

// ---- budgets ----

TEST(Budget, IsHeldToTheByte) {
  const SmallModel small;
  for (const int32_t retention :
       {THIMBLE_RETENTION_NONE, THIMBLE_RETENTION_WINDOW, THIMBLE_RETENTION_LOCRET, THIMBLE_RETENTION_KEYDIFF,
        THIMBLE_RETENTION_TOVA, THIMBLE_RETENTION_REREAD, THIMBLE_RETENTION_MIX}) {
    thimble_session_options options = window_options();
    options.retention = retention;
    options.heads = small.heads.get();
    const uint64_t total = plan(small.model, options).total;
    options.budget_bytes = total;
    EXPECT_LE(memory(create(small.model, options)).allocated, total);
    options.budget_bytes = total - 1;
    Error e;
    thimble_session* session = nullptr;
    EXPECT_EQ(thimble_session_create(small.model.get(), &options, &session, &e), THIMBLE_BUDGET);
    expect_sentence(e);
    EXPECT_EQ(e.bytes_missing, 1u) << e.message;
    EXPECT_EQ(session, nullptr);
    // The pool that the message says would fit equals largest_pool's, and it does fit.
    uint32_t pool = 0;
    EXPECT_OK(thimble_session_largest_pool(small.model.get(), &options, &pool, &e), e);
    EXPECT_LT(pool, options.pool);
    thimble_session_create(small.model.get(), &options, &session, &e);
    EXPECT_NE(std::string(e.message).find("pool of " + std::to_string(pool) + " would fit"),
              std::string::npos)
        << e.message;
    options.pool = pool;
    EXPECT_LE(memory(create(small.model, options)).allocated, options.budget_bytes);
  }
}

// ---- texts and tokens ----

TEST(Prompt, MayBeOneToken) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  feed(session, {'x'});
  EXPECT_EQ(steps(session, 3).size(), 3u);
  EXPECT_EQ(stats(session).position, 4u);
}

TEST(Prompt, ThatIsEmptyHasNoNextToken) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  Error e;
  int32_t token = -7;
  const auto refuses = [&] {
    EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_INVALID_ARGUMENT);
    expect_sentence(e);
    EXPECT_NE(std::strstr(e.message, "feed"), nullptr) << e.message;
    EXPECT_EQ(token, -7);
    const float* values = nullptr;
    uint32_t count = 0;
    EXPECT_EQ(thimble_session_logits(session.get(), &values, &count, &e), THIMBLE_INVALID_ARGUMENT);
    float logprob = 0;
    const int32_t scored = 1;
    EXPECT_EQ(thimble_session_score(session.get(), &scored, 1, &logprob, &e), THIMBLE_INVALID_ARGUMENT);
  };
  refuses();
  feed(session, {});
  EXPECT_OK(thimble_session_feed(session.get(), nullptr, 0, &e), e);
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  refuses();
  feed(session, {1});
  step(session);
  EXPECT_OK(thimble_session_rewind(session.get(), 0, &e), e);
  refuses();
  EXPECT_OK(thimble_session_reset(session.get(), &e), e);
  refuses();
}

TEST(Prompt, WithTokensOutOfRangeIsRefusedWhole) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  feed(session, {1, 2});
  Error e;
  char text[8];
  uint64_t bytes = 7;
  // The first byte of a two-byte letter is held back until the second comes, even if calls are refused in
  // between.
  EXPECT_OK(thimble_session_text(session.get(), 0xc3, text, sizeof text, &bytes, &e), e);
  EXPECT_EQ(bytes, 0u);
  for (const int32_t bad : {-1, INT32_MIN, int32_t(kSmallVocab), INT32_MAX}) {
    const Tokens tokens = {3, bad, 4};
    float logprobs[3];
    EXPECT_EQ(thimble_session_feed(session.get(), tokens.data(), tokens.size(), &e),
              THIMBLE_INVALID_ARGUMENT);
    expect_sentence(e);
    EXPECT_NE(std::strstr(e.message, std::to_string(bad).c_str()), nullptr) << e.message;
    EXPECT_EQ(thimble_session_accept(session.get(), bad, &e), THIMBLE_INVALID_ARGUMENT);
    EXPECT_EQ(thimble_session_score(session.get(), tokens.data(), tokens.size(), logprobs, &e),
              THIMBLE_INVALID_ARGUMENT);
    uint64_t length = 0;
    EXPECT_EQ(thimble_session_text(session.get(), bad, nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
    EXPECT_EQ(thimble_detokenize(small.model.get(), &bad, 1, 0, nullptr, 0, &length, &e),
              THIMBLE_INVALID_ARGUMENT);
    EXPECT_EQ(thimble_token_bytes(small.model.get(), bad, nullptr, 0, &length, &e), THIMBLE_INVALID_ARGUMENT);
    EXPECT_EQ(thimble_token_ends(small.model.get(), bad), 0);
  }
  EXPECT_OK(thimble_session_text(session.get(), 0xa9, text, sizeof text, &bytes, &e), e);
  EXPECT_EQ(std::string(text, bytes), "\u00e9");
  EXPECT_EQ(stats(session).position, 2u);
}

TEST(Prompt, ThatDoesNotFitLeavesTheSessionAsItWas) {
  const SmallModel small;
  thimble_session_options options = window_options();
  options.retention = THIMBLE_RETENTION_NONE;  // room for 64 + 24
  const SessionHandle session = create(small.model, options);
  feed(session, any_tokens(80));
  const Tokens more = any_tokens(20);
  Error e;
  EXPECT_EQ(thimble_session_feed(session.get(), more.data(), more.size(), &e), THIMBLE_CONTEXT_FULL);
  expect_sentence(e);
  EXPECT_NE(std::strstr(e.message, "context_length_exceeded"), nullptr) << e.message;
  EXPECT_EQ(stats(session).position, 80u);
  EXPECT_EQ(steps(session, 8).size(), 8u);
  int32_t token = -7;
  EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_CONTEXT_FULL);
  EXPECT_EQ(thimble_session_accept(session.get(), 1, &e), THIMBLE_CONTEXT_FULL);
  EXPECT_EQ(token, -7);
}

TEST(Prompt, StaysInsideTheBoundOnPositions) {
  const SmallModel small;
  thimble_session_options options = window_options();
  options.positions = THIMBLE_POSITIONS_ORIGINAL;  // the model was trained for 512
  const SessionHandle session = create(small.model, options);
  feed(session, any_tokens(500));
  const Tokens more = any_tokens(13);
  Error e;
  EXPECT_EQ(thimble_session_feed(session.get(), more.data(), more.size(), &e), THIMBLE_CONTEXT_FULL);
  expect_sentence(e);
  feed(session, any_tokens(12));
  int32_t token = 0;
  EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_CONTEXT_FULL);
}

TEST(Prompt, MayHave200KTokensInAPoolOf256) {
  const SmallModel small;
  thimble_session_options options = window_options();
  options.pool = 256;
  options.chunk = 256;
  const SessionHandle session = create(small.model, options);
  const uint64_t before = memory(session).allocated;
  const Tokens prompt = any_tokens(200000);
  feed(session, prompt);
  EXPECT_EQ(steps(session, 5).size(), 5u);
  const thimble_stats now = stats(session);
  EXPECT_EQ(now.position, prompt.size() + 5);
  EXPECT_EQ(now.entries + now.evicted, prompt.size() + 5);
  EXPECT_EQ(memory(session).allocated, before);
  const Tokens positions = kept(session, 1, 0);
  EXPECT_EQ(positions.size(), now.entries);
  EXPECT_EQ(positions.front(), 0);
  EXPECT_EQ(positions.back(), static_cast<int32_t>(prompt.size()) + 4);
  EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
}

// ---- pointers ----

TEST(Null, IsRefusedByEveryFunctionThatTakesAPointer) {
  const SmallModel small;
  const SessionHandle handle = create(small.model, window_options());
  feed(handle, {1, 2, 3});
  thimble_model* const m = small.model.get();
  thimble_session* const s = handle.get();
  const int32_t ids[] = {1};
  thimble_grammar* grammar = nullptr;
  float logprobs[1];
  const float* logits = nullptr;
  uint32_t u32 = 0;
  uint64_t u64 = 0, more = 0;
  int32_t token = 0;
  thimble_model* opened = nullptr;
  thimble_message message = {nullptr, "a", 1};
  thimble_message no_content = {"user", nullptr, 1};
  using Call = std::function<thimble_status(thimble_error*)>;
  const std::pair<const char*, Call> calls[] = {
      {"device_count", [&](auto* e) { return thimble_device_count(nullptr, e); }},
      {"device_get", [&](auto* e) { return thimble_device_get(0, nullptr, e); }},
      {"model_open path", [&](auto* e) { return thimble_model_open(nullptr, nullptr, &opened, e); }},
      {"model_open out",
       [&](auto* e) { return thimble_model_open(demo_path().c_str(), nullptr, nullptr, e); }},
      {"model_open_buffer",
       [&](auto* e) { return thimble_model_open_buffer(nullptr, 5, nullptr, nullptr, e); }},
      {"model_get_info", [&](auto* e) { return thimble_model_get_info(nullptr, nullptr, e); }},
      {"model_get_info out", [&](auto* e) { return thimble_model_get_info(m, nullptr, e); }},
      {"metadata_count", [&](auto* e) { return thimble_model_metadata_count(nullptr, &u64, e); }},
      {"metadata_count out", [&](auto* e) { return thimble_model_metadata_count(m, nullptr, e); }},
      {"metadata_get",
       [&](auto* e) {
         return thimble_model_metadata_get(nullptr, 0, nullptr, 0, &u64, nullptr, 0, &more, e);
       }},
      {"metadata_get key",
       [&](auto* e) { return thimble_model_metadata_get(m, 0, nullptr, 9, &u64, nullptr, 0, &more, e); }},
      {"metadata_get out",
       [&](auto* e) {
         return thimble_model_metadata_get(m, 0, nullptr, 0, nullptr, nullptr, 0, nullptr, e);
       }},
      {"tensor_count", [&](auto* e) { return thimble_model_tensor_count(nullptr, &u64, e); }},
      {"tensor_count out", [&](auto* e) { return thimble_model_tensor_count(m, nullptr, e); }},
      {"tensor_get", [&](auto* e) { return thimble_model_tensor_get(m, 0, nullptr, e); }},
      {"heads_open",
       [&](auto* e) { return thimble_heads_open(nullptr, demo_heads_path().c_str(), nullptr, e); }},
      {"heads_open path", [&](auto* e) { return thimble_heads_open(m, nullptr, nullptr, e); }},
      {"heads_open_buffer", [&](auto* e) { return thimble_heads_open_buffer(m, nullptr, 0, nullptr, e); }},
      {"heads_import", [&](auto* e) { return thimble_heads_import(nullptr, "a", nullptr, "b", e); }},
      {"heads_import input", [&](auto* e) { return thimble_heads_import(m, nullptr, nullptr, "b", e); }},
      {"heads_import output", [&](auto* e) { return thimble_heads_import(m, "a", nullptr, nullptr, e); }},
      {"heads_info", [&](auto* e) { return thimble_heads_info(nullptr, m, nullptr, 0, &u64, e); }},
      {"heads_info json", [&](auto* e) { return thimble_heads_info("a", m, nullptr, 1, &u64, e); }},
      {"heads_info length", [&](auto* e) { return thimble_heads_info("a", m, nullptr, 0, nullptr, e); }},
      {"tokenize",
       [&](auto* e) { return thimble_tokenize(nullptr, "a", 1, 0, nullptr, nullptr, 0, &u64, e); }},
      {"tokenize text",
       [&](auto* e) { return thimble_tokenize(m, nullptr, 1, 0, nullptr, nullptr, 0, &u64, e); }},
      {"tokenize ids", [&](auto* e) { return thimble_tokenize(m, "a", 1, 0, nullptr, nullptr, 1, &u64, e); }},
      {"tokenize count",
       [&](auto* e) { return thimble_tokenize(m, "a", 1, 0, nullptr, nullptr, 0, nullptr, e); }},
      {"tokenize flags",
       [&](auto* e) { return thimble_tokenize(m, "a", 1, 8, &token, nullptr, 1, &u64, e); }},
      {"detokenize", [&](auto* e) { return thimble_detokenize(m, nullptr, 1, 0, nullptr, 0, &u64, e); }},
      {"detokenize length",
       [&](auto* e) { return thimble_detokenize(m, ids, 1, 0, nullptr, 0, nullptr, e); }},
      {"token_bytes", [&](auto* e) { return thimble_token_bytes(nullptr, 1, nullptr, 0, &u64, e); }},
      {"chat_text",
       [&](auto* e) { return thimble_chat_text(m, "chatml", nullptr, 1, 0, nullptr, 0, &u64, e); }},
      {"chat_text role",
       [&](auto* e) { return thimble_chat_text(m, "chatml", &message, 1, 0, nullptr, 0, &u64, e); }},
      {"chat_render", [&](auto* e) { return thimble_chat_render(nullptr, nullptr, nullptr, 0, &u64, e); }},
      {"chat_render length",
       [&](auto* e) { return thimble_chat_render(m, nullptr, nullptr, 0, nullptr, e); }},
      {"chat_text content",
       [&](auto* e) { return thimble_chat_text(m, "chatml", &no_content, 1, 0, nullptr, 0, &u64, e); }},
      {"plan", [&](auto* e) { return thimble_session_plan(nullptr, nullptr, nullptr, e); }},
      {"plan out", [&](auto* e) { return thimble_session_plan(m, nullptr, nullptr, e); }},
      {"kv_heads", [&](auto* e) { return thimble_model_kv_heads(nullptr, nullptr, 0, &u64, e); }},
      {"kv_heads count", [&](auto* e) { return thimble_model_kv_heads(m, nullptr, 0, nullptr, e); }},
      {"plan_heads",
       [&](auto* e) { return thimble_session_plan_heads(nullptr, nullptr, nullptr, 0, &u64, e); }},
      {"plan_heads count",
       [&](auto* e) { return thimble_session_plan_heads(m, nullptr, nullptr, 0, nullptr, e); }},
      {"largest_pool", [&](auto* e) { return thimble_session_largest_pool(m, nullptr, nullptr, e); }},
      {"create", [&](auto* e) { return thimble_session_create(nullptr, nullptr, nullptr, e); }},
      {"create out", [&](auto* e) { return thimble_session_create(m, nullptr, nullptr, e); }},
      {"feed", [&](auto* e) { return thimble_session_feed(nullptr, ids, 1, e); }},
      {"feed tokens", [&](auto* e) { return thimble_session_feed(s, nullptr, 1, e); }},
      {"feed too many", [&](auto* e) { return thimble_session_feed(s, ids, UINT64_MAX, e); }},
      {"flush", [&](auto* e) { return thimble_session_flush(nullptr, e); }},
      {"step", [&](auto* e) { return thimble_session_step(s, nullptr, e); }},
      {"accept", [&](auto* e) { return thimble_session_accept(nullptr, 1, e); }},
      {"logits", [&](auto* e) { return thimble_session_logits(s, nullptr, &u32, e); }},
      {"logits count", [&](auto* e) { return thimble_session_logits(s, &logits, nullptr, e); }},
      {"score", [&](auto* e) { return thimble_session_score(s, ids, 1, nullptr, e); }},
      {"score tokens", [&](auto* e) { return thimble_session_score(s, nullptr, 1, logprobs, e); }},
      {"text", [&](auto* e) { return thimble_session_text(s, 1, nullptr, 4, &u64, e); }},
      {"text length", [&](auto* e) { return thimble_session_text(s, 1, nullptr, 0, nullptr, e); }},
      {"rewind", [&](auto* e) { return thimble_session_rewind(nullptr, 0, e); }},
      {"clone", [&](auto* e) { return thimble_session_clone(s, nullptr, e); }},
      {"reset", [&](auto* e) { return thimble_session_reset(nullptr, e); }},
      {"save", [&](auto* e) { return thimble_session_save(nullptr, "a", nullptr, 0, e); }},
      {"save path", [&](auto* e) { return thimble_session_save(s, nullptr, nullptr, 0, e); }},
      {"save note", [&](auto* e) { return thimble_session_save(s, "a", nullptr, 1, e); }},
      {"save_fd", [&](auto* e) { return thimble_session_save_fd(nullptr, 1, nullptr, 0, e); }},
      {"save_fd note", [&](auto* e) { return thimble_session_save_fd(s, 1, nullptr, 1, e); }},
      {"file_bytes", [&](auto* e) { return thimble_session_file_bytes(nullptr, 0, &u64, e); }},
      {"file_bytes bytes", [&](auto* e) { return thimble_session_file_bytes(s, 0, nullptr, e); }},
      {"restore", [&](auto* e) { return thimble_session_restore(nullptr, "a", e); }},
      {"restore path", [&](auto* e) { return thimble_session_restore(s, nullptr, e); }},
      {"restore_fd", [&](auto* e) { return thimble_session_restore_fd(nullptr, 0, e); }},
      {"file_info", [&](auto* e) { return thimble_session_file_info(nullptr, nullptr, 0, &u64, e); }},
      {"file_info json", [&](auto* e) { return thimble_session_file_info("a", nullptr, 1, &u64, e); }},
      {"file_info length", [&](auto* e) { return thimble_session_file_info("a", nullptr, 0, nullptr, e); }},
      {"file_note", [&](auto* e) { return thimble_session_file_note(nullptr, nullptr, 0, &u64, e); }},
      {"file_note note", [&](auto* e) { return thimble_session_file_note("a", nullptr, 1, &u64, e); }},
      {"file_note length", [&](auto* e) { return thimble_session_file_note("a", nullptr, 0, nullptr, e); }},
      {"shrink", [&](auto* e) { return thimble_session_shrink(nullptr, 1, &u64, e); }},
      {"shrink pool", [&](auto* e) { return thimble_session_shrink(s, 0, &u64, e); }},
      {"shrink freed", [&](auto* e) { return thimble_session_shrink(s, 1, nullptr, e); }},
      {"kept", [&](auto* e) { return thimble_session_kept(s, 0, 0, nullptr, 4, &u64, e); }},
      {"kept count", [&](auto* e) { return thimble_session_kept(s, 0, 0, nullptr, 0, nullptr, e); }},
      {"kept by position",
       [&](auto* e) { return thimble_session_kept_by_position(nullptr, nullptr, nullptr, 0, &u64, e); }},
      {"kept by position count",
       [&](auto* e) { return thimble_session_kept_by_position(s, nullptr, nullptr, 0, nullptr, e); }},
      {"stored by position",
       [&](auto* e) { return thimble_session_stored_by_position(nullptr, nullptr, 0, &u64, e); }},
      {"stored by position count",
       [&](auto* e) { return thimble_session_stored_by_position(s, nullptr, 0, nullptr, e); }},
      {"set_sampler", [&](auto* e) { return thimble_session_set_sampler(nullptr, nullptr, e); }},
      {"set_bias", [&](auto* e) { return thimble_session_set_bias(nullptr, nullptr, nullptr, 0, e); }},
      {"set_bias tokens", [&](auto* e) { return thimble_session_set_bias(s, nullptr, nullptr, 1, e); }},
      {"json_schema",
       [&](auto* e) { return thimble_grammar_create_json_schema(nullptr, "{}", 2, &grammar, e); }},
      {"json_schema text",
       [&](auto* e) { return thimble_grammar_create_json_schema(m, nullptr, 2, &grammar, e); }},
      {"regex", [&](auto* e) { return thimble_grammar_create_regex(m, "a", 1, nullptr, e); }},
      {"gbnf", [&](auto* e) { return thimble_grammar_create_gbnf(m, nullptr, 1, &grammar, e); }},
      {"set_grammar", [&](auto* e) { return thimble_session_set_grammar(nullptr, nullptr, e); }},
      {"memory", [&](auto* e) { return thimble_session_memory(s, nullptr, e); }},
      {"stats", [&](auto* e) { return thimble_session_stats(s, nullptr, e); }},
      {"get_options", [&](auto* e) { return thimble_session_get_options(nullptr, nullptr, e); }},
      {"get_options options", [&](auto* e) { return thimble_session_get_options(s, nullptr, e); }},
  };
  for (const auto& [name, call] : calls) {
    Error e;
    EXPECT_EQ(call(&e), THIMBLE_INVALID_ARGUMENT) << name;
    EXPECT_EQ(e.code, THIMBLE_INVALID_ARGUMENT) << name;
    expect_sentence(e);
    EXPECT_EQ(call(nullptr), THIMBLE_INVALID_ARGUMENT) << name << " without an error struct";
  }
  thimble_model_free(nullptr);
  thimble_heads_free(nullptr);
  thimble_session_free(nullptr);
  thimble_session_interrupt(nullptr);
  EXPECT_EQ(thimble_token_ends(nullptr, 1), 0);
  Error e;
  EXPECT_OK(thimble_session_set_sampler(s, nullptr, &e), e);  // NULL options are the defaults
  EXPECT_EQ(stats(handle).position, 3u);
}

}  // namespace
}  // namespace thimble
