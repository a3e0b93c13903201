// Any bytes as a saved session, unchanged and with correct checksums: they are refused, or the session
// continues without leaving its memory.
#include <cstdlib>

#include "tests/support/saved_sessions.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace thimble;
  using namespace thimble::test;
  static const SeededModel model = seeded_model({.layers = 3, .covers_windows = false, .window = 20});
  const auto bytes = std::as_bytes(std::span(data, size));
  for (const auto& [retention, selection] : {std::pair(Retention::kLocret, Selection::kTokenSelect),
                                             std::pair(Retention::kReread, Selection::kQuest)}) {
    SessionOptions options = selecting(retaining(model, retention), selection, false);
    // The options that the corpus was saved with
    options.protect_init = retention == Retention::kReread ? 4 : 0;
    const auto session = open_session(model.model, options);
    for (const SessionBytes& input :
         {SessionBytes(bytes.begin(), bytes.end()), sign(SessionBytes(bytes.begin(), bytes.end()))}) {
      if (!session->restore(lend(input), "fuzz").ok()) continue;
      if (const auto file = SessionFile::open(lend(input), "fuzz"); !file.ok() || file->info().empty())
        std::abort();
      // Wrong keys, values and scores are only noticed, if at all, through wrong logits.
      for (int i = 0; i < 4; ++i) static_cast<void>(session->step().ok());
      static_cast<void>(session->rewind(must(session->stats()).position / 2).ok());
      static_cast<void>(session->feed(seeded_tokens(100)).ok());
      static_cast<void>(session->flush().ok());
      kept(*session);
    }
  }
  return 0;
}
