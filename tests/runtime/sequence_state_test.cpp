// Tests the state of a sequence: it is emptied, taken back, copied and compared as a whole.
#include "runtime/sequence_state.h"

#include <gtest/gtest.h>

#include "tests/support/grammar_vocabulary.h"
#include "tests/support/saved_sessions.h"
#include "text/grammar/languages.h"

namespace thimble::test {
namespace {

// A grammar of the text "ab".
Constraint::Grammar a_grammar() {
  static const GrammarVocabulary vocabulary;
  return std::make_shared<const grammar::TokenGrammar>(
      vocabulary.trie, must(grammar::Automaton::make(must(grammar::read_regex("ab")))));
}

// A sequence of 9 tokens in two heads, of which 6 tokens are read.
SequenceState some_state() {
  SequenceState s(2, Sampler(16, 8));
  must(s.sampler.set({.temperature = 0.5f, .seed = 7}));
  for (uint64_t position = 4; position < 6; ++position) s.sampler.accept(3, position);
  s.read = 6;
  s.waiting = {1, 2, 3};
  s.entries = {6, 5};
  s.recalled = {1, 0};
  s.asking = 3;
  s.ahead = 2;
  s.last_eviction = 3;
  s.evicted = s.evictions = 1;
  s.unscored = 2;
  s.unscored_tokens = {4, 5};
  s.generation = 4;
  s.has_logits = 1;
  s.arg_max = 9;
  s.attended = Attended::kList;
  s.division = s.placed = 1;
  return s;
}

TEST(SequenceState, ResetLeavesWhatANewOneHas) {
  SequenceState fresh(2, Sampler(16, 8));
  must(fresh.sampler.set({.temperature = 0.5f, .seed = 7}));
  SequenceState s = some_state();
  EXPECT_NE(s, fresh);
  const int32_t* const list = s.waiting.data();
  s.reset();
  EXPECT_EQ(s, fresh);
  s.waiting.assign(3, 1);
  EXPECT_EQ(s.waiting.data(), list);  // the list kept its memory
}

TEST(SequenceState, RewindForgetsTheTokensFromAPositionOn) {
  SequenceState s = some_state();
  s.rewind(5);
  EXPECT_EQ(s.read, 5u);
  EXPECT_EQ(s.position(), 5u);
  EXPECT_EQ(s.entries, (std::vector<uint32_t>{5, 4}));
  EXPECT_EQ(s.recalled, (std::vector<uint32_t>{1, 0}));
  EXPECT_EQ(s.asking, 2u);
  EXPECT_EQ(s.ahead, 0u);
  EXPECT_EQ(s.unscored, 1u);
  EXPECT_EQ(s.unscored_tokens, (std::vector<int32_t>{4}));
  EXPECT_EQ(s.generation, 5u);
  EXPECT_EQ(s.has_logits, 0u);
  EXPECT_EQ(s.arg_max, -1);
  EXPECT_EQ(s.attended, Attended::kUnknown);
  ASSERT_EQ(s.sampler.saved().accepted.size(), 1u);
  EXPECT_EQ(s.sampler.saved().accepted[0].position, 4u);
}

// Copies are equal until any field of one of them changes.
TEST(SequenceState, ComparesEveryField) {
  const std::function<void(SequenceState&)> changes[] = {
      [](SequenceState& s) { ++s.read; },
      [](SequenceState& s) { ++s.saturated; },
      [](SequenceState& s) { s.selecting.flop = 1; },
      [](SequenceState& s) { s.waiting.back() = 7; },
      [](SequenceState& s) { s.unscored_tokens.clear(); },
      [](SequenceState& s) { ++s.entries[1]; },
      [](SequenceState& s) { ++s.recalled[1]; },
      [](SequenceState& s) { ++s.asking; },
      [](SequenceState& s) { ++s.ahead; },
      [](SequenceState& s) { s.placed = 0; },
      [](SequenceState& s) { s.attended = Attended::kUnknown; },
      [](SequenceState& s) { s.sampler.accept(3, 6); },
      [](SequenceState& s) { s.sampler.set_random(8); },
      [](SequenceState& s) { s.constraint.set(a_grammar()); },
  };
  const SequenceState s = some_state();
  for (const auto& change : changes) {
    SequenceState copy = s;
    EXPECT_EQ(copy, s);
    change(copy);
    EXPECT_NE(copy, s);
  }
}

// A clone's state equals its original's, and a restored session's state equals the saved one's.
TEST(SequenceState, ClonesAndRestoredSessionsHaveIt) {
  const SeededModel m = seeded_model();
  for_policies(m, [&](const SessionOptions& o) {
    const auto session = open_session(m.model, o), restored = open_session(m.model, o);
    must(session->set_sampler(kWarm));
    read(*session, seeded_tokens(150));
    for (int i = 0; i < 7; ++i) must(session->step());
    must(session->feed(seeded_tokens(9, 64, 12)));
    EXPECT_EQ(must(session->clone())->state(), session->state());
    restore(*restored, save(*session));
    SequenceState expected = session->state();
    expected.attended = Attended::kUnknown;  // a file does not store it
    EXPECT_EQ(restored->state(), expected);
  });
}

}  // namespace
}  // namespace thimble::test
