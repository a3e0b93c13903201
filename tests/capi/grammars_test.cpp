// Tests grammars through the C API: what a session generates, and where its text stands after every call that
// moves a session.
#include <string>

#include "tests/capi/handles.h"

namespace thimble {
namespace {

struct FreeGrammar {
  void operator()(thimble_grammar* grammar) const { thimble_grammar_free(grammar); }
};
using GrammarHandle = std::unique_ptr<thimble_grammar, FreeGrammar>;

GrammarHandle regex(const ModelHandle& model, const std::string& pattern) {
  Error e;
  thimble_grammar* grammar = nullptr;
  EXPECT_OK(thimble_grammar_create_regex(model.get(), pattern.data(), pattern.size(), &grammar, &e), e);
  return GrammarHandle(grammar);
}

void set(const SessionHandle& session, const GrammarHandle& grammar) {
  Error e;
  EXPECT_OK(thimble_session_set_grammar(session.get(), grammar.get(), &e), e);
}

void sample(const SessionHandle& session, float temperature) {
  Error e;
  thimble_sampler_options options;
  thimble_sampler_options_init(&options, sizeof options);
  options.temperature = temperature;
  options.seed = 7;
  EXPECT_OK(thimble_session_set_sampler(session.get(), &options, &e), e);
}

thimble_status accept(const SessionHandle& session, int32_t token) {
  Error e;
  const thimble_status status = thimble_session_accept(session.get(), token, &e);
  if (status != THIMBLE_OK) expect_sentence(e);
  return status;
}

// Generates up to `most` tokens; the token that ends the text is written as ".".
std::string generate(const ModelHandle& model, const SessionHandle& session, size_t most = 100) {
  std::string text;
  for (size_t n = 0; n < most; ++n) {
    const int32_t token = step(session);
    if (thimble_token_ends(model.get(), token)) return text + ".";
    char bytes[16];
    uint64_t length = 0;
    Error e;
    EXPECT_OK(thimble_token_bytes(model.get(), token, bytes, sizeof bytes, &length, &e), e);
    text.append(bytes, length);
  }
  return text;
}

struct Grammars : testing::Test {
  SmallModel small;
  SessionHandle session = create(small.model, window_options());
  const Tokens prompt = any_tokens(40);

  Grammars() { feed(session, prompt); }
};

TEST_F(Grammars, GiveTheOnlyTextThatTheyAllow) {
  for (const float temperature : {0.0f, 1.0f}) {
    sample(session, temperature);
    set(session, regex(small.model, "the th\u00e9"));  // the grammar is freed at once
    EXPECT_EQ(generate(small.model, session), "the th\u00e9.");
    EXPECT_EQ(step(session), kSmallEnd) << "only an end may follow an end";
  }
  set(session, nullptr);
  sample(session, 0);
  const Tokens free = steps(session, 3);
  EXPECT_NE(free, Tokens(3, kSmallEnd));
}

TEST_F(Grammars, ComeInThreeLanguages) {
  Error e;
  thimble_grammar* raw = nullptr;
  const std::string schema = R"({"const": {"th": [1]}})", gbnf = "root ::= [x] y\ny ::= \"th\"";
  EXPECT_OK(thimble_grammar_create_json_schema(small.model.get(), schema.data(), schema.size(), &raw, &e), e);
  set(session, GrammarHandle(raw));
  sample(session, 1);
  std::string text = generate(small.model, session);
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n'; });
  EXPECT_EQ(text, "{\"th\":[1]}.");
  EXPECT_OK(thimble_grammar_create_gbnf(small.model.get(), gbnf.data(), gbnf.size(), &raw, &e), e);
  set(session, GrammarHandle(raw));
  EXPECT_EQ(generate(small.model, session), "xth.");
}

TEST_F(Grammars, RefuseTextsOfTheirLanguageWithOneSentence) {
  const auto refused = [&](auto create, const std::string& text, thimble_status expected, const char* says) {
    Error e;
    thimble_grammar* raw = nullptr;
    EXPECT_EQ(create(small.model.get(), text.data(), text.size(), &raw, &e), expected) << text;
    EXPECT_EQ(raw, nullptr);
    expect_sentence(e);
    EXPECT_NE(std::string(e.message).find(says), std::string::npos) << e.message;
  };
  refused(thimble_grammar_create_json_schema, R"({"properties":{"a":{"enum":[]}}})", THIMBLE_INVALID_ARGUMENT,
          "#/properties/a/enum");
  refused(thimble_grammar_create_json_schema, R"({"items":{"uniqueItems":true}})", THIMBLE_UNSUPPORTED,
          "#/items/uniqueItems");
  refused(thimble_grammar_create_json_schema, "{", THIMBLE_FORMAT, "JSON");
  refused(thimble_grammar_create_regex, "(", THIMBLE_INVALID_ARGUMENT, "lacks a )");
  refused(thimble_grammar_create_gbnf, "", THIMBLE_INVALID_ARGUMENT, "root");
  for (const char* token : {"<[999999]>", "<[100]>", "<[2]>"})  // none, a text, one that ends answers
    refused(thimble_grammar_create_gbnf, ("root ::= " + std::string(token)).c_str(), THIMBLE_INVALID_ARGUMENT,
            "is not a control token");
}

TEST_F(Grammars, DecideWhatAcceptTakes) {
  set(session, regex(small.model, "ab?"));
  EXPECT_EQ(accept(session, 'b'), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(accept(session, kSmallEnd), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(accept(session, 'a'), THIMBLE_OK);
  EXPECT_EQ(accept(session, 'a'), THIMBLE_INVALID_ARGUMENT);
  EXPECT_EQ(accept(session, kSmallEnd), THIMBLE_OK);
  EXPECT_EQ(accept(session, 'b'), THIMBLE_INVALID_ARGUMENT) << "the text has ended";
}

TEST_F(Grammars, AreFollowedByClonesFromTheSamePlace) {
  set(session, regex(small.model, "ab(c|d)e"));
  EXPECT_EQ(generate(small.model, session, 2), "ab");
  Error e;
  thimble_session* raw = nullptr;
  EXPECT_OK(thimble_session_clone(session.get(), &raw, &e), e);
  const SessionHandle twin(raw);
  EXPECT_EQ(accept(session, 'c'), THIMBLE_OK);
  EXPECT_EQ(accept(twin, 'd'), THIMBLE_OK);
  EXPECT_EQ(generate(small.model, session), "e.");
  EXPECT_EQ(generate(small.model, twin), "e.");
}

TEST_F(Grammars, GoBackWithRewindAndBeginAgainWithReset) {
  set(session, regex(small.model, "abcde"));
  EXPECT_EQ(generate(small.model, session, 3), "abc");
  Error e;
  EXPECT_OK(thimble_session_rewind(session.get(), prompt.size() + 1, &e), e);
  feed(session, {5});  // does not count
  EXPECT_EQ(generate(small.model, session), "bcde.");
  EXPECT_OK(thimble_session_rewind(session.get(), prompt.size() - 1, &e), e);
  feed(session, {5});
  EXPECT_EQ(generate(small.model, session, 2), "ab");
  EXPECT_OK(thimble_session_reset(session.get(), &e), e);
  feed(session, prompt);
  EXPECT_EQ(generate(small.model, session), "abcde.");
}

TEST_F(Grammars, ReplaceATokenThatAnInterruptedStepSampled) {
  sample(session, 1);
  Error e;
  EXPECT_OK(thimble_session_flush(session.get(), &e), e);
  thimble_session_interrupt(session.get());
  int32_t token = -1;
  EXPECT_EQ(thimble_session_step(session.get(), &token, &e), THIMBLE_INTERRUPTED);
  set(session, regex(small.model, "th"));
  step(session);  // the interrupted token was already part of the stream
  EXPECT_EQ(generate(small.model, session), "th.");
}

TEST_F(Grammars, HoldForDraftedTokens) {
  thimble_session_options options = window_options();
  options.draft = THIMBLE_DRAFT_LOOKUP;
  options.max_new = 200;
  const std::string letters = "abcabcabcabcabcabcabcabc";
  for (const float temperature : {0.0f, 1.0f}) {
    const SessionHandle drafts = create(small.model, options);
    feed(drafts, prompt);
    sample(drafts, temperature);
    set(drafts, regex(small.model, letters + "(x|y)" + letters));
    std::string text = generate(small.model, drafts);
    ASSERT_EQ(text.size(), 2 * letters.size() + 2) << text;
    EXPECT_TRUE(text[letters.size()] == 'x' || text[letters.size()] == 'y');
    text.erase(letters.size(), 1);
    EXPECT_EQ(text, letters + letters + ".");
  }
}

// The model that drafts knows nothing of the grammar, and its handle is not needed any more.
TEST_F(Grammars, HoldForTokensThatAModelDrafted) {
  for (const float temperature : {0.0f, 1.0f}) {
    SmallModel drafter;
    thimble_session_options options = window_options();
    options.max_new = 200;
    const SessionHandle plain = create(small.model, options);
    options.draft = THIMBLE_DRAFT_MODEL;
    options.draft_model = drafter.model.get();
    options.draft_tokens = 3;  // 4 rows have the bits of one each
    const SessionHandle drafts = create(small.model, options);
    drafter.heads.reset();
    drafter.model.reset();
    std::string texts[2];
    for (const SessionHandle* each : {&plain, &drafts}) {
      feed(*each, prompt);
      sample(*each, temperature);
      set(*each, regex(small.model, "[^aeiou]{60}"));
      texts[each == &drafts] = generate(small.model, *each);
    }
    EXPECT_EQ(texts[1], texts[0]);
    EXPECT_EQ(texts[0].find_first_of("aeiou"), std::string::npos);
  }
}

TEST_F(Grammars, BelongToTheirModel) {
  const SmallModel other;
  const GrammarHandle grammar = regex(other.model, "a");
  Error e;
  EXPECT_EQ(thimble_session_set_grammar(session.get(), grammar.get(), &e), THIMBLE_MISMATCH);
  expect_sentence(e);
}

TEST_F(Grammars, OutliveTheirModel) {
  auto other = std::make_unique<SmallModel>();
  const GrammarHandle grammar = regex(other->model, "a");
  other->heads.reset();
  other->model.reset();
}

}  // namespace
}  // namespace thimble
