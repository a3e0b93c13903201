// Tests option structs: their defaults, other versions of them, and refused values.
#include <cmath>
#include <functional>
#include <limits>

#include "tests/capi/handles.h"

namespace thimble {
namespace {

TEST(Options, InitWritesTheDocumentedDefaults) {
  thimble_session_options o;
  std::memset(&o, 0xab, sizeof o);
  thimble_session_options_init(&o, sizeof o);
  EXPECT_EQ(o.struct_size, sizeof o);
  EXPECT_EQ(o.threads, 0u);
  EXPECT_EQ(o.device, nullptr);
  EXPECT_EQ(o.heads, nullptr);
  EXPECT_EQ(o.budget_bytes, 0u);
  EXPECT_EQ(o.retention, THIMBLE_RETENTION_DEFAULT);
  EXPECT_EQ(o.pool, 0u);
  EXPECT_EQ(o.stabilizers, THIMBLE_DEFAULT);
  EXPECT_EQ(o.local, THIMBLE_DEFAULT);
  EXPECT_EQ(o.protect_init, THIMBLE_DEFAULT);
  EXPECT_EQ(o.select_init, THIMBLE_DEFAULT);
  EXPECT_EQ(o.select_theta, 1.0f);
  EXPECT_EQ(o.select_prefill, THIMBLE_DEFAULT);
  EXPECT_EQ(o.select_page, 0u);
  EXPECT_EQ(o.dense_layers, THIMBLE_DEFAULT);
  EXPECT_EQ(o.watch, 0u);
  EXPECT_EQ(o.key_format, THIMBLE_KV_F16);
  EXPECT_EQ(o.value_format, THIMBLE_KV_F16);
  EXPECT_EQ(o.progress, nullptr);

  thimble_sampler_options s;
  std::memset(&s, 0xab, sizeof s);
  thimble_sampler_options_init(&s, sizeof s);
  EXPECT_EQ(s.struct_size, sizeof s);
  EXPECT_EQ(s.temperature, 0.0f);
  EXPECT_EQ(s.top_k, 40u);
  EXPECT_EQ(s.top_p, 0.95f);
  EXPECT_EQ(s.min_p, 0.05f);
  EXPECT_EQ(s.repeat_penalty, 1.0f);
  EXPECT_EQ(s.repeat_last, 64u);
  EXPECT_EQ(s.seed, 0u);
  EXPECT_EQ(s.presence_penalty, 0.0f);
  EXPECT_EQ(s.frequency_penalty, 0.0f);

  thimble_model_options m;
  std::memset(&m, 0xab, sizeof m);
  thimble_model_options_init(&m, sizeof m);
  EXPECT_EQ(m.struct_size, sizeof m);
  EXPECT_EQ(m.log, nullptr);
}

TEST(Options, InitStaysInsideTheSizeItIsGivenAndClearsWhatItDoesNotKnow) {
  struct {
    thimble_session_options known;
    uint64_t newer[2];
  } larger;
  std::memset(&larger, 0xab, sizeof larger);
  thimble_session_options_init(&larger.known, sizeof larger.known + sizeof larger.newer[0]);
  EXPECT_EQ(larger.known.struct_size, sizeof larger.known + sizeof larger.newer[0]);
  EXPECT_EQ(larger.known.select_theta, 1.0f);
  EXPECT_EQ(larger.newer[0], 0u);
  EXPECT_EQ(larger.newer[1], 0xababababababababu);

  std::memset(&larger, 0xab, sizeof larger);
  thimble_session_options_init(&larger.known, offsetof(thimble_session_options, chunk));
  EXPECT_EQ(larger.known.retention, THIMBLE_RETENTION_DEFAULT);
  EXPECT_EQ(larger.known.chunk, 0xababababu);

  thimble_session_options_init(nullptr, sizeof larger.known);
  thimble_sampler_options_init(nullptr, 40);
  thimble_model_options_init(nullptr, 24);
}

// The sizes of the structs in version 0.1.0, which programs compiled then pass.
constexpr uint32_t kFirstOptions = offsetof(thimble_session_options, select_page),
                   kFirstStats = offsetof(thimble_stats, saturated);

TEST(Options, OfAnOlderVersionAreReadAsFarAsTheyGo) {
  const SmallModel small;
  thimble_session_options options = window_options();
  options.selection = THIMBLE_SELECTION_QUEST;
  options.select_k = 32;
  options.select_page = 64;  // k would be less than two pages
  Error e;
  thimble_session* session = nullptr;
  EXPECT_EQ(thimble_session_create(small.model.get(), &options, &session, &e), THIMBLE_INVALID_ARGUMENT);
  options.struct_size = kFirstOptions;
  EXPECT_OK(thimble_session_create(small.model.get(), &options, &session, &e), e);
  thimble_session_free(session);
}

TEST(Outputs, OfAnOlderVersionAreWrittenAsFarAsTheyGo) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  feed(session, any_tokens(20));
  thimble_stats old = {};
  old.struct_size = kFirstStats;
  old.saturated = 77;
  Error e;
  EXPECT_OK(thimble_session_stats(session.get(), &old, &e), e);
  EXPECT_EQ(old.position, 20u);
  EXPECT_EQ(old.saturated, 77u);
  EXPECT_EQ(old.struct_size, kFirstStats);
}

TEST(Options, OfANewerVersionAreAccepted) {
  const SmallModel small;
  struct {
    thimble_session_options known = window_options();
    uint64_t newer = 0xabababab;
  } larger;
  larger.known.struct_size = sizeof larger;
  EXPECT_NE(create(small.model, larger.known), nullptr);
}

TEST(Options, AreRefusedWhenTheirSizeIsNone) {
  const SmallModel small;
  for (const uint32_t size : {0u, 4u, 8u, kFirstOptions - 1}) {
    thimble_session_options options = window_options();
    options.struct_size = size;
    Error e;
    thimble_session* session = nullptr;
    EXPECT_EQ(thimble_session_create(small.model.get(), &options, &session, &e), THIMBLE_INVALID_ARGUMENT)
        << size;
    expect_sentence(e);
    EXPECT_NE(std::strstr(e.message, "struct_size"), nullptr);
    EXPECT_EQ(session, nullptr);
  }
}

TEST(Outputs, KeepTheirSizeAndWhatTheLibraryDoesNotKnow) {
  const SmallModel small;
  struct {
    thimble_model_info known = {};
    uint64_t newer = 0xabababab;
  } larger;
  larger.known.struct_size = sizeof larger;
  Error e;
  EXPECT_OK(thimble_model_get_info(small.model.get(), &larger.known, &e), e);
  EXPECT_EQ(larger.known.struct_size, sizeof larger);
  EXPECT_EQ(larger.known.layers, 2u);
  EXPECT_EQ(larger.newer, 0xabababab);
  larger.known = {};
  EXPECT_EQ(thimble_model_get_info(small.model.get(), &larger.known, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(larger.known.layers, 0u);
}

TEST(Outputs, ErrorsAreCutToTheRoomTheyHave) {
  Error whole;
  EXPECT_EQ(thimble_device_count(nullptr, &whole), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(whole.code, THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(whole.bytes_missing, 0u);

  Error small;
  std::memset(small.message, '#', sizeof small.message);
  small.struct_size = offsetof(thimble_error, message) + 8;
  EXPECT_EQ(thimble_device_count(nullptr, &small), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(small.message), std::string(whole.message).substr(0, 7));
  EXPECT_EQ(small.message[8], '#');

  Error none;
  none.struct_size = 0;
  none.code = 77;
  EXPECT_EQ(thimble_device_count(nullptr, &none), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(none.code, 77);
  EXPECT_EQ(thimble_device_count(nullptr, nullptr), THIMBLE_INVALID_ARGUMENT);
}

TEST(Outputs, ErrorsAreUtf8WhateverAFileIsCalled) {
  Error e;
  thimble_model* model = nullptr;
  EXPECT_EQ(thimble_model_open("no\xff such file", nullptr, &model, &e), THIMBLE_IO);
  EXPECT_EQ(std::string(e.message).find('\xff'), std::string::npos);
#ifndef _WIN32  // Windows does not allow such a file name
  EXPECT_NE(std::strstr(e.message, "no? such file"), nullptr) << e.message;
#endif
  std::string long_name(470, 'a');  // so that the message's last byte would be inside a code point
  for (int shift = 0; shift < 3; ++shift) {
    std::string path = std::string(static_cast<size_t>(shift), 'b');
    while (path.size() < 600) path += "\xe6\x9d\xb1";
    EXPECT_EQ(thimble_model_open(path.c_str(), nullptr, &model, &e), THIMBLE_IO);
    const std::string message = e.message;
    EXPECT_GT(message.size(), sizeof e.message - 4);
    const std::string text = message.substr(static_cast<size_t>(shift));
    EXPECT_EQ(text.size() % 3, 0u) << text;
  }
}

TEST(Defaults, ComeFromTheHeads) {
  const ModelHandle model = open_model(demo_path());
  const HeadsHandle heads = open_heads(model, demo_heads_path());
  thimble_session_options options = default_options();
  options.threads = 2;
  options.heads = heads.get();
  const thimble_memory planned = plan(model, options);
  EXPECT_EQ(planned.pool, 2048u);
  EXPECT_EQ(planned.chunk, 1024u);
  EXPECT_EQ(planned.capacity, 2048u + 100 + 256);
  options.heads = nullptr;  // nothing is evicted, so there is room for all positions of the model
  EXPECT_EQ(plan(model, options).capacity, 16384u);
  Error e;
  thimble_memory memory = {};
  memory.struct_size = sizeof memory;
  EXPECT_OK(thimble_session_plan(model.get(), nullptr, &memory, &e), e);
  EXPECT_EQ(memory.capacity, 16384u);
}

TEST(Defaults, ThatWereDecidedCanBeReadBack) {
  const SmallModel small;
  thimble_session_options options = default_options();
  options.retention = THIMBLE_RETENTION_WINDOW;
  options.budget_bytes = 64 << 20;
  options.threads = 2;
  const SessionHandle session = create(small.model, options);
  const thimble_session_options decided = decided_options(session);
  EXPECT_EQ(decided.struct_size, sizeof decided);
  EXPECT_STREQ(decided.device, "cpu");
  EXPECT_EQ(decided.threads, 2u);
  EXPECT_EQ(decided.heads, nullptr);
  EXPECT_EQ(decided.budget_bytes, options.budget_bytes);
  EXPECT_EQ(decided.retention, THIMBLE_RETENTION_WINDOW);
  EXPECT_GT(decided.pool, 0u);
  EXPECT_EQ(decided.pool, memory(session).pool);
  EXPECT_EQ(decided.chunk, 1024u);
  EXPECT_EQ(decided.stabilizers, 0u);
  EXPECT_EQ(decided.local, 100u);
  EXPECT_EQ(decided.protect_init, 4u);
  EXPECT_EQ(decided.max_new, 256u);
  EXPECT_EQ(decided.select_prefill, 0u);

  options.retention = THIMBLE_RETENTION_DEFAULT;
  const thimble_session_options dense = decided_options(create(small.model, options));
  EXPECT_EQ(dense.retention, THIMBLE_RETENTION_NONE);
  EXPECT_EQ(dense.local, 0u);

  thimble_session_options old = {};
  old.struct_size = kFirstOptions;
  old.select_page = 77;
  Error e;
  EXPECT_OK(thimble_session_get_options(session.get(), &old, &e), e);
  EXPECT_EQ(old.local, 100u);
  EXPECT_EQ(old.select_page, 77u);
}

// The fields that sessions can differ in, as one string of bytes.
std::string fields_of(thimble_session_options options) {
  options.device = nullptr;  // each session has its own copy of the name
  return {reinterpret_cast<const char*>(&options), sizeof options};
}

TEST(Defaults, ThatWereDecidedMakeAnEqualSession) {
  const SmallModel small;
  const FileBytes bytes = uneven_heads().bytes();
  const HeadsHandle heads = open_heads(small.model, bytes);
  for (const int32_t retention : {THIMBLE_RETENTION_NONE, THIMBLE_RETENTION_WINDOW, THIMBLE_RETENTION_LOCRET})
    for (const int32_t selection :
         {THIMBLE_SELECTION_DENSE, THIMBLE_SELECTION_TOKENSELECT, THIMBLE_SELECTION_QUEST}) {
      thimble_session_options options = default_options();
      options.retention = retention;
      options.selection = selection;
      options.heads = heads.get();
      options.budget_bytes = 64 << 20;
      const SessionHandle first = create(small.model, options);
      thimble_session_options decided = decided_options(first);
      decided.heads = heads.get();
      const SessionHandle second = create(small.model, decided);
      decided.heads = nullptr;
      EXPECT_EQ(fields_of(decided), fields_of(decided_options(second))) << retention << " " << selection;
      EXPECT_EQ(memory(first).total, memory(second).total) << retention << " " << selection;
    }
}

// An invalid option, alone or with others, and a word that the message must contain.
struct Refusal {
  const char* what;
  std::function<void(thimble_session_options&)> change;
  thimble_status status;
  const char* names;
};

TEST(Options, ThatAreWrongAreNamed) {
  const SmallModel small;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  using O = thimble_session_options;
  const auto tokenselect = [](O& o) { o.selection = THIMBLE_SELECTION_TOKENSELECT; };
  const auto quest = [](O& o) { o.selection = THIMBLE_SELECTION_QUEST; };
  const Refusal refusals[] = {
      {"unknown retention", [](O& o) { o.retention = 7; }, THIMBLE_INVALID_ARGUMENT, "retention"},
      {"unknown retention", [](O& o) { o.retention = -2; }, THIMBLE_INVALID_ARGUMENT, "retention"},
      {"unknown scope", [](O& o) { o.retain_scope = 2; }, THIMBLE_INVALID_ARGUMENT, "retain_scope"},
      {"unknown selection", [](O& o) { o.selection = -1; }, THIMBLE_INVALID_ARGUMENT, "selection"},
      {"unknown selection", [](O& o) { o.selection = 3; }, THIMBLE_INVALID_ARGUMENT, "quest (2)"},
      {"unknown vote", [](O& o) { o.vote = 3; }, THIMBLE_INVALID_ARGUMENT, "vote"},
      {"unknown vote scale", [](O& o) { o.vote_scale = 2; }, THIMBLE_INVALID_ARGUMENT, "vote_scale"},
      {"unknown positions", [](O& o) { o.positions = 2; }, THIMBLE_INVALID_ARGUMENT, "positions"},
      {"unknown format of keys", [](O& o) { o.key_format = 3; }, THIMBLE_INVALID_ARGUMENT, "key_format"},
      {"unknown format of values", [](O& o) { o.value_format = -1; }, THIMBLE_INVALID_ARGUMENT, "Q4_0 (2)"},
      {"a flag that is neither", [](O& o) { o.select_prefill = 2; }, THIMBLE_INVALID_ARGUMENT,
       "select_prefill"},
      {"a flag that is neither", [](O& o) { o.watch = 2; }, THIMBLE_INVALID_ARGUMENT, "watch"},
      {"theta not a number", [nan](O& o) { o.select_theta = nan; }, THIMBLE_INVALID_ARGUMENT, "select_theta"},
      {"theta below every cosine", [](O& o) { o.select_theta = -1.5f; }, THIMBLE_INVALID_ARGUMENT,
       "select_theta"},
      {"too many threads", [](O& o) { o.threads = 1u << 20; }, THIMBLE_INVALID_ARGUMENT, "threads"},
      {"unknown device", [](O& o) { o.device = "abacus"; }, THIMBLE_UNSUPPORTED, "abacus"},
      {"keydiff for a whole layer",
       [](O& o) {
         o.retention = THIMBLE_RETENTION_KEYDIFF;
         o.retain_scope = THIMBLE_RETAIN_LAYER;
       },
       THIMBLE_INVALID_ARGUMENT, "retain_scope"},
      {"reread for a whole layer",
       [](O& o) {
         o.retention = THIMBLE_RETENTION_REREAD;
         o.retain_scope = THIMBLE_RETAIN_LAYER;
       },
       THIMBLE_INVALID_ARGUMENT, "retain_scope"},
      {"locret without heads", [](O& o) { o.retention = THIMBLE_RETENTION_LOCRET; }, THIMBLE_INVALID_ARGUMENT,
       "heads"},
      {"mix without heads", [](O& o) { o.retention = THIMBLE_RETENTION_MIX; }, THIMBLE_INVALID_ARGUMENT,
       "heads"},
      {"adore without heads", [](O& o) { o.retention = THIMBLE_RETENTION_ADORE; }, THIMBLE_INVALID_ARGUMENT,
       "controller"},
      {"rebuilding what nobody knows", [](O& o) { o.rebuild = 4; }, THIMBLE_INVALID_ARGUMENT, "adore"},
      {"stabilizers fill the pool", [](O& o) { o.stabilizers = 64; }, THIMBLE_INVALID_ARGUMENT,
       "stabilizers"},
      {"sinks overfill the pool", [](O& o) { o.protect_init = 65; }, THIMBLE_INVALID_ARGUMENT, "protected"},
      {"sinks and stabilizers", [](O& o) { o.protect_init = o.stabilizers = 32; }, THIMBLE_INVALID_ARGUMENT,
       "pool"},
      {"quest that reads by selection", [&](O& o) { quest(o), o.select_prefill = 1; },
       THIMBLE_INVALID_ARGUMENT, "select_prefill"},
      {"quest of one page", [&](O& o) { quest(o), o.select_k = 31; }, THIMBLE_INVALID_ARGUMENT, "two pages"},
      {"quest of one large page", [&](O& o) { quest(o), o.select_page = 1025; }, THIMBLE_INVALID_ARGUMENT,
       "two pages"},
      {"a page that overflows", [&](O& o) { quest(o), o.select_page = UINT32_MAX; }, THIMBLE_INVALID_ARGUMENT,
       "page"},
      {"a pool that overflows", [](O& o) { o.pool = UINT32_MAX; }, THIMBLE_INVALID_ARGUMENT, "pool"},
      {"a chunk that overflows", [](O& o) { o.chunk = UINT32_MAX; }, THIMBLE_INVALID_ARGUMENT, "chunk"},
      {"max_new that overflows", [](O& o) { o.max_new = UINT32_MAX; }, THIMBLE_INVALID_ARGUMENT, "max_new"},
      {"stabilizers that overflow", [](O& o) { o.stabilizers = UINT32_MAX - 1; }, THIMBLE_INVALID_ARGUMENT,
       "stabilizers"},
      {"sinks that overflow", [](O& o) { o.protect_init = UINT32_MAX - 1; }, THIMBLE_INVALID_ARGUMENT,
       "protected"},
      {"a selection that overflows", [&](O& o) { tokenselect(o), o.select_k = UINT32_MAX; },
       THIMBLE_INVALID_ARGUMENT, "select_k"},
      {"budget of one byte", [](O& o) { o.budget_bytes = 1; }, THIMBLE_BUDGET, "budget"},
  };
  for (const Refusal& refusal : refusals) {
    thimble_session_options options = window_options();
    refusal.change(options);
    Error e;
    thimble_session* session = nullptr;
    EXPECT_EQ(thimble_session_create(small.model.get(), &options, &session, &e), refusal.status)
        << refusal.what;
    EXPECT_EQ(e.code, refusal.status) << refusal.what;
    EXPECT_NE(std::strstr(e.message, refusal.names), nullptr) << refusal.what << ": " << e.message;
    expect_sentence(e);
    EXPECT_EQ(session, nullptr) << refusal.what;
    thimble_memory memory = {};
    memory.struct_size = sizeof memory;
    EXPECT_EQ(thimble_session_plan(small.model.get(), &options, &memory, &e), refusal.status) << refusal.what;
  }
}

TEST(Options, ThatReadBySelectionTakeTheirChunkFromTheLocalWindow) {
  const SmallModel small;
  thimble_session_options options = default_options();
  options.selection = THIMBLE_SELECTION_TOKENSELECT;
  options.select_local = 32;
  EXPECT_EQ(plan(small.model, options).chunk, 32u) << "the default without retention";
  options.chunk = 64;
  EXPECT_EQ(plan(small.model, options).chunk, 32u);
  options.chunk = 16;
  EXPECT_EQ(plan(small.model, options).chunk, 16u);
  options.chunk = 64;
  options.select_prefill = 0;
  EXPECT_EQ(plan(small.model, options).chunk, 64u);
  options = window_options();
  options.selection = THIMBLE_SELECTION_TOKENSELECT;
  options.select_local = 8;
  EXPECT_EQ(plan(small.model, options).chunk, 16u) << "a pool that evicts is read densely by default";
  options.select_prefill = 1;
  EXPECT_EQ(plan(small.model, options).chunk, 8u);
}

TEST(Options, OfAVoteOverTheLayerNeedEqualHeads) {
  const SmallModel small;
  const FileBytes bytes = uneven_heads().bytes();
  const HeadsHandle heads = open_heads(small.model, bytes);
  thimble_session_options options = window_options();
  options.heads = heads.get();
  options.retention = THIMBLE_RETENTION_LOCRET;
  options.selection = THIMBLE_SELECTION_TOKENSELECT;
  options.vote = THIMBLE_VOTE_LAYER;
  Error e;
  thimble_session* session = nullptr;
  EXPECT_EQ(thimble_session_create(small.model.get(), &options, &session, &e), THIMBLE_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(e.message, "group vote"), nullptr) << e.message;
  expect_sentence(e);
  options.vote = THIMBLE_VOTE_AUTO;
  EXPECT_OK(thimble_session_create(small.model.get(), &options, &session, &e), e);
  thimble_session_free(session);
}

TEST(SamplerOptions, ThatAreWrongAreNamed) {
  const SmallModel small;
  const SessionHandle session = create(small.model, window_options());
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  using O = thimble_sampler_options;
  const std::pair<const char*, std::function<void(O&)>> refusals[] = {
      {"temperature", [](O& o) { o.temperature = -1; }},
      {"temperature", [nan](O& o) { o.temperature = nan; }},
      {"temperature", [infinity](O& o) { o.temperature = infinity; }},
      {"top_p", [](O& o) { o.top_p = -0.1f; }},
      {"top_p", [nan](O& o) { o.top_p = nan; }},
      {"min_p", [](O& o) { o.min_p = 1.5f; }},
      {"min_p", [nan](O& o) { o.min_p = nan; }},
      {"repeat_penalty", [](O& o) { o.repeat_penalty = 0; }},
      {"repeat_penalty", [nan](O& o) { o.repeat_penalty = nan; }},
      {"repeat_last", [](O& o) { o.repeat_last = 4097; }},
      {"presence_penalty", [nan](O& o) { o.presence_penalty = nan; }},
      {"frequency_penalty", [infinity](O& o) { o.frequency_penalty = infinity; }},
      {"struct_size", [](O& o) { o.struct_size = 0; }},
  };
  for (const auto& [name, change] : refusals) {
    O options;
    thimble_sampler_options_init(&options, sizeof options);
    change(options);
    Error e;
    EXPECT_EQ(thimble_session_set_sampler(session.get(), &options, &e), THIMBLE_INVALID_ARGUMENT) << name;
    EXPECT_NE(std::strstr(e.message, name), nullptr) << e.message;
    expect_sentence(e);
  }
}

}  // namespace
}  // namespace thimble
