// The definitions of the opaque handles of thimble.h.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "capi/guard.h"
#include "runtime/model/model.h"
#include "runtime/session.h"

struct thimble_model {
  std::shared_ptr<const thimble::Model> model;
  thimble_log_fn log = nullptr;
  void* log_user = nullptr;

  void warn(const std::string& sentence) const {
    if (!log || sentence.empty()) return;
    std::string shown(6 * sentence.size() + 1, '\0');  // a control character becomes six bytes
    thimble::capi::copy_text(shown.data(), shown.size(), sentence);
    log(log_user, shown.c_str());
  }

  // The vocabulary as grammars use it. It is made by the first call.
  std::shared_ptr<const thimble::grammar::TokenTrie> token_trie() const;
  // The device with this name. All sessions of the model that ask for the same device share it.
  thimble::Result<std::shared_ptr<thimble::Device>> device(const std::string& name, uint32_t threads) const;

 private:
  struct Opened {
    std::string name;
    uint32_t threads;
    std::weak_ptr<thimble::Device> device;
  };
  mutable std::mutex mutex_;
  mutable std::vector<Opened> opened_;
  mutable std::shared_ptr<const thimble::grammar::TokenTrie> token_trie_;
};

struct thimble_grammar {
  std::shared_ptr<const thimble::grammar::TokenGrammar> grammar;
  std::shared_ptr<const thimble::Model> model;  // for which it was made
};

struct thimble_heads {
  std::shared_ptr<const thimble::Retainer> retainer;
  std::shared_ptr<const thimble::Model> model;  // the model that they were checked against
};

namespace thimble::capi {

// The options of a session that the runtime's sessions do not have.
struct OutsideOptions {
  std::string device;  // its name
  uint32_t threads = 0;
  thimble_progress_fn progress = nullptr;
  void* progress_user = nullptr;
};

}  // namespace thimble::capi

struct thimble_session {
  std::unique_ptr<thimble::Session> session;
  std::atomic<bool> busy = false;
  thimble::capi::OutsideOptions outside;
  // thimble_session_text: the bytes held back, and buffers for the longest piece, so that it does not
  // allocate.
  thimble::Utf8Stream held;
  std::string piece, text;
};

namespace thimble::capi {

inline uint64_t kv_bytes_per_token(const Model& model) {
  uint64_t bytes = 0;
  for (const Layer& layer : model.layers)
    if (layer.retains()) bytes += static_cast<uint64_t>(entry_cost(*layer.attention()).bytes);
  return bytes;
}

inline Status need_tokenizer(const Model& model) {
  if (model.tokenizer.ok()) return model.check_files();  // token texts are in the mapped file
  return error(Code::kUnsupported, "the model cannot turn text into tokens: %s",
               model.description_of_tokenizer_error.c_str());
}

inline Status need_token(const Model& model, int32_t id) {
  if (id >= 0 && static_cast<uint32_t>(id) < model.tokenizer.size()) return {};
  return error(Code::kInvalidArgument, "token id %d is out of range; the vocabulary has 0 to %u", id,
               model.tokenizer.size() - 1);
}

// The options of a session, each checked by itself. The planner checks how they combine.
struct Request {
  SessionOptions options;
  std::shared_ptr<Device> device;
  OutsideOptions outside;
};
Result<Request> read_request(const thimble_model& model, const thimble_session_options* options);
// The opposite, without heads, which belong to the caller. The result refers to `outside`.
thimble_session_options write_options(const SessionOptions&, const OutsideOptions& outside);

}  // namespace thimble::capi
