#include "training/recall.h"

#include <algorithm>

namespace thimble {

static SessionOptions options_for(const TrainingText& text, Retention retention,
                                  std::shared_ptr<const Retainer> retainer, uint32_t pool) {
  size_t longest = 0;
  for (const Question& q : text.questions) longest = std::max(longest, q.prompt.size() + q.answer.size());
  SessionOptions o;
  o.retention = retention;
  o.retainer = std::move(retainer);
  o.chunk = 512;
  o.max_new = static_cast<uint32_t>(longest) + 1;
  o.pool = pool ? pool : static_cast<uint32_t>(text.tokens.size());
  return o;
}

Result<uint64_t> bytes_to_ask(const TrainingText& text, const Model& model, const Device& device,
                              Retention retention, std::shared_ptr<const Retainer> retainer, uint32_t pool) {
  THIMBLE_LET(plan, make_plan(model, device, options_for(text, retention, std::move(retainer), pool)));
  return plan.weights + 2 * (plan.pool + plan.view + plan.workspace + plan.io + plan.programs);
}

Result<Recall> ask_about(const TrainingText& text, std::shared_ptr<const Model> model,
                         std::shared_ptr<Device> device, Retention retention,
                         std::shared_ptr<const Retainer> retainer, uint32_t pool, uint32_t most) {
  const SessionOptions options = options_for(text, retention, std::move(retainer), pool);
  THIMBLE_LET(session, Session::create(std::move(model), std::move(device), options));
  THIMBLE_TRY(session->feed(text.tokens));
  THIMBLE_TRY(session->flush());
  Recall recall;
  for (const Question& q : text.questions) {
    if (q.quotes) continue;
    if (recall.asked == most) break;
    // A long question evicts, and so does any in layers with a window: what it finds is copied for it.
    THIMBLE_LET(copy, session->clone());
    THIMBLE_TRY(copy->feed(q.prompt));
    bool right = true;
    for (size_t i = 0; right && i < q.answer.size(); ++i) {
      THIMBLE_LET(token, copy->step());
      right = token == q.answer[i];
    }
    ++recall.asked;
    recall.answered += right;
  }
  return recall;
}

}  // namespace thimble
