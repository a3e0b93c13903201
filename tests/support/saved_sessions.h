// Sessions that tests save and restore, with every policy.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "tests/support/seeded_model.h"
#include "tests/support/session_bytes.h"
#include "tests/support/sessions.h"

namespace thimble::test {

inline SessionBytes save(Session& session, const std::string& note = "", const std::string& held_text = "") {
  SessionBytes bytes;
  must(session.save(
      [&](const void* data, size_t size) {
        const std::byte* from = static_cast<const std::byte*>(data);
        bytes.insert(bytes.end(), from, from + size);
        return Status();
      },
      std::as_bytes(std::span(note)), held_text));
  return bytes;
}

inline void restore(Session& session, const SessionBytes& bytes) {
  must(session.restore(lend(bytes), "saved"));
}

// How a session continues: its sampled tokens, what it then holds, and the probability that it gives to a
// text.
struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<float> logits, log_probs;
  Kept kept_then;
  uint64_t position = 0, evicted = 0, generated = 0, hits = 0;
  bool operator==(const Outcome&) const = default;
};
inline Outcome go_on(Session& session) {
  Outcome o;
  for (int i = 0; i < 20; ++i) o.tokens.push_back(must(session.step()));
  must(session.feed(seeded_tokens(30, 64, 9)));
  o.log_probs.resize(12);
  must(session.score(seeded_tokens(12, 64, 10), o.log_probs));
  o.logits = flush(session);
  o.kept_then = kept(session);
  const SessionStats stats = must(session.stats());
  o.position = stats.position, o.evicted = stats.evicted, o.generated = stats.generated;
  o.hits = stats.cache_hits;
  return o;
}

inline const SamplerOptions kWarm{
    .temperature = 0.9f, .top_p = 1, .min_p = 0, .repeat_penalty = 1.2f, .seed = 11};

inline SessionOptions retaining(const SeededModel& m, Retention retention) {
  if (retention == Retention::kNone) return {.pool = 500, .chunk = 32, .max_new = 32};
  if (retention == Retention::kAdore)
    return {.retainer = m.controller, .retention = retention, .pool = 70, .chunk = 32, .rebuild = 3};
  return {.retainer = m.retainer,
          .retention = retention,
          .pool = 70,
          .chunk = 32,
          .stabilizers = 8,
          .local = 12,
          .max_new = 60,
          .seed = 3};
}

inline SessionOptions selecting(SessionOptions o, Selection selection, bool while_reading) {
  o.selection = selection;
  if (selection == Selection::kDense) return o;
  o.select_k = 24;
  if (selection == Selection::kQuest) {
    o.select_page = 8;
    o.dense_layers = 1;
    return o;
  }
  o.select_init = 4;
  o.select_local = 32;
  o.select_theta = 0.5f;
  o.select_prefill = while_reading;
  return o;
}

// Every retention with every selection, except that adore allows no selection and no layers with a window.
inline void for_policies(const SeededModel& m, const std::function<void(const SessionOptions&)>& body) {
  for (int32_t retention = 0; policy_name(Retention{retention}); ++retention)
    for (const auto& [selection, while_reading] :
         {std::pair(Selection::kDense, false), std::pair(Selection::kTokenSelect, false),
          std::pair(Selection::kTokenSelect, true), std::pair(Selection::kQuest, false)}) {
      if (Retention{retention} == Retention::kAdore &&
          (selection != Selection::kDense || m.model->layers[0].attention()->window))
        continue;
      SCOPED_TRACE(std::string(policy_name(Retention{retention})) + " and " + policy_name(selection));
      body(selecting(retaining(m, Retention{retention}), selection, while_reading));
    }
}

}  // namespace thimble::test
