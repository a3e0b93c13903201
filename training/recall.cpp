#include "training/recall.h"

#include <algorithm>

namespace thimble {

// Tokens that an answer may have in addition to the right answer's, for a sentence around a name or a number.
constexpr size_t kTokensAround = 24;

const char* name_of(Measure measure) { return measure == Measure::kAnswers ? "answers" : "probability"; }

// The form of a text that comparisons use.
static std::string essence_of(std::string_view text) {
  const auto digit = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '9'; };
  std::string essence;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool separates = (c == ',' || c == '\'' || c == '_') && i > 0 && digit(i - 1) && digit(i + 1);
    if (separates || c == ' ' || (c >= '\t' && c <= '\r')) continue;
    essence += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return essence;
}

double share_said(std::string_view said, std::span<const std::string> expected) {
  if (expected.empty()) return 0;
  const std::string all = essence_of(said);
  const auto found = std::count_if(expected.begin(), expected.end(), [&](const std::string& one) {
    return all.find(essence_of(one)) != std::string::npos;
  });
  return static_cast<double>(found) / static_cast<double>(expected.size());
}

static SessionOptions options_for(const TrainingText& text, Retention retention,
                                  std::shared_ptr<const Retainer> retainer, uint32_t pool) {
  size_t longest = 0;
  for (const Question& q : text.questions) longest = std::max(longest, q.prompt.size() + q.answer.size());
  SessionOptions o;
  o.retention = retention;
  o.retainer = std::move(retainer);
  o.chunk = 512;
  o.max_new = static_cast<uint32_t>(longest + kTokensAround) + 1;
  o.pool = pool ? pool : static_cast<uint32_t>(text.tokens.size());
  return o;
}

Result<uint64_t> bytes_to_ask(const TrainingText& text, const Model& model, const Device& device,
                              Retention retention, std::shared_ptr<const Retainer> retainer, uint32_t pool) {
  THIMBLE_LET(plan, make_plan(model, device, options_for(text, retention, std::move(retainer), pool)));
  return plan.weights + 2 * (plan.pool + plan.view + plan.workspace + plan.io + plan.programs);
}

// Generates the session's answer to a question, until it contains all expected strings.
static Result<double> share_answered(Session& session, const Question& q) {
  const Tokenizer& tokenizer = session.model().tokenizer;
  std::string said;
  double share = 0;
  for (size_t i = 0; share < 1 && i < q.answer.size() + kTokensAround; ++i) {
    THIMBLE_LET(token, session.step());
    if (tokenizer.ends_generation(token)) break;
    tokenizer.append_piece(token, false, said);
    share = share_said(said, q.expected);
  }
  return share;
}

Result<Recall> ask_about(const TrainingText& text, std::shared_ptr<const Model> model,
                         std::shared_ptr<Device> device, Retention retention,
                         std::shared_ptr<const Retainer> retainer, const Asking& asking) {
  const SessionOptions options = options_for(text, retention, std::move(retainer), asking.pool);
  THIMBLE_LET(session, Session::create(std::move(model), std::move(device), options));
  THIMBLE_TRY(session->feed(text.tokens));
  THIMBLE_TRY(session->flush());
  Recall recall;
  // A long question evicts entries, and so does any question in layers with a window. So each question runs
  // in a copy of the session.
  const auto asked = [&](const Question& q) -> Result<std::unique_ptr<Session>> {
    THIMBLE_LET(copy, session->clone());
    THIMBLE_TRY(copy->feed(q.prompt));
    return std::move(copy);
  };
  for (const Question& q : text.questions) {
    if (q.expected.empty()) continue;
    if (recall.asked == asking.most) break;
    ++recall.asked;
    if (asking.probability) {
      THIMBLE_LET(copy, asked(q));
      std::vector<float> log_probs(q.answer.size());
      THIMBLE_TRY(copy->score(q.answer, log_probs));
      recall.tokens += log_probs.size();
      for (const float log_prob : log_probs) recall.log_prob += log_prob;
    }
    if (asking.answers) {
      THIMBLE_LET(copy, asked(q));
      THIMBLE_LET(share, share_answered(*copy, q));
      recall.answered += share;
    }
  }
  return recall;
}

}  // namespace thimble
