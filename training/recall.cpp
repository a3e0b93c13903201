#include "training/recall.h"

#include <algorithm>

namespace thimble {

Result<Recall> ask_about(const TrainingText& text, std::shared_ptr<const Model> model,
                         std::shared_ptr<Device> device, Retention retention,
                         std::shared_ptr<const Retainer> retainer, uint32_t pool, uint32_t most) {
  size_t longest = 0;
  for (const Question& q : text.questions) longest = std::max(longest, q.prompt.size() + q.answer.size());
  SessionOptions o;
  o.retention = retention;
  o.retainer = std::move(retainer);
  o.chunk = 512;
  o.max_new = static_cast<uint32_t>(longest) + 1;
  o.pool = pool ? pool : static_cast<uint32_t>(text.tokens.size());
  THIMBLE_LET(session, Session::create(std::move(model), std::move(device), o));
  THIMBLE_TRY(session->feed(text.tokens));
  THIMBLE_TRY(session->flush());
  Recall recall;
  for (const Question& q : text.questions) {
    if (q.quotes) continue;
    if (recall.asked == most) break;
    THIMBLE_TRY(session->feed(q.prompt));
    bool right = true;
    for (size_t i = 0; right && i < q.answer.size(); ++i) {
      THIMBLE_LET(token, session->step());
      right = token == q.answer[i];
    }
    ++recall.asked;
    recall.answered += right;
    THIMBLE_TRY(session->rewind(text.tokens.size()));
  }
  return recall;
}

}  // namespace thimble
