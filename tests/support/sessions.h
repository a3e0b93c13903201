// Shorthands for tests that run whole sessions. Errors are thrown, which ends the test with the message.
#pragma once

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/registry.h"
#include "runtime/session.h"

namespace thimble::test {

inline void must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(code_name(status.code())) + ": " + status.message());
}
template <typename T>
T must(Result<T> result) {
  must(result.status());
  return std::move(*result);
}

// Repeats a call as long as it is interrupted. Returns the number of interrupts.
template <typename Call>
int insist(const Call& call) {
  int interrupts = 0;
  Status status;
  while ((status = call()).code() == Code::kInterrupted) ++interrupts;
  must(status);
  return interrupts;
}

inline std::shared_ptr<Device> cpu() {
  static const std::shared_ptr<Device> device = must(open_device("cpu", {.threads = 2}));
  return device;
}

inline std::unique_ptr<Session> open_session(const std::shared_ptr<const Model>& model,
                                             const SessionOptions& options,
                                             const std::shared_ptr<Device>& device = cpu()) {
  std::unique_ptr<Session> session = must(Session::create(model, device, options));
  if (session->allocated() > session->plan().total)
    throw std::runtime_error(std::to_string(session->allocated()) + " bytes were allocated, but " +
                             std::to_string(session->plan().total) + " planned");
  return session;
}

// The logits after the prompt so far.
inline std::vector<float> flush(Session& session) {
  must(session.flush());
  const std::span<const float> logits = must(session.logits());
  return {logits.begin(), logits.end()};
}
inline std::vector<float> read(Session& session, std::span<const int32_t> tokens) {
  must(session.feed(tokens));
  return flush(session);
}
// The logits after appending a token.
inline std::vector<float> accept(Session& session, int32_t token) {
  must(session.accept(token));
  const std::span<const float> logits = must(session.logits());
  return {logits.begin(), logits.end()};
}

// Positions that each head of each layer holds: [layer][kv head][entries].
using Kept = std::vector<std::vector<std::vector<int32_t>>>;
inline Kept kept(const Session& session) {
  const ModelShape& shape = session.model().shape;
  Kept all(shape.layers);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const AttentionMixer* attention = session.model().layers[layer].attention();
    all[layer].resize(attention && attention->has_keys() ? attention->kv_heads : 0);
    for (uint32_t head = 0; head < all[layer].size(); ++head) {
      all[layer][head].resize(must(session.kept_count(layer, head)));
      must(session.kept(layer, head, all[layer][head]));
    }
  }
  return all;
}

}  // namespace thimble::test
