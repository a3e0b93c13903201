// What a slot's session has read, and from where another request can continue.
//
// A request continues only where its answer is the same as if no other request had come before it:
// - After an answer of the same conversation, as `thimble chat` continues after its answers.
// - In the first prompt, at the end of a chunk that a new reading would have read in the same way. The ends
// of chunks depend only on the tokens, except for the last chunks, which depend on the end of the prompt
// (thimble.h, thimble_session_feed).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/serve/task.h"

namespace app::serve {

// The bytes of memory that a value takes. If the value has many small parts, this is many times the length of
// its text.
size_t bytes_of(const Json& value);

// The prompt of a request.
struct Prompt {
  Json messages;             // of a conversation, with a system message if the command gives one; else null
  std::string variables;     // of the chat template, as JSON
  std::vector<int32_t> ids;  // the ids of the whole prompt
};

// The place from which a request continues.
struct Reuse {
  uint64_t position = 0;  // in the stream; everything after it is forgotten
  // The number of the conversation's messages that are held; 0: the first `position` ids are held.
  size_t messages = 0;
  bool cut = false;  // the last of these messages lacks its end-of-turn token
};

class History {
 public:
  // `chunk` and `local` are the resolved options of the session.
  History(uint32_t chunk, uint32_t local) : chunk_(chunk), local_(local) {}

  Reuse find(const Prompt& prompt) const;

  // Called when the stream was taken back to the place from which a request continues.
  void rewind(const Reuse& reuse);
  // Adds tokens that the session took, of a prompt or of an answer.
  void add_prompt(const int32_t* ids, size_t count);
  void add_generated(int32_t id) { ids_.push_back(id); }
  // Called when the following tokens belong to an answer.
  void begin_answer() { answer_ = ids_.size(); }
  // Called when the stream ends with the answer to these messages.
  void add_turn(const Prompt& prompt, Json answer, bool cut);
  // Called when entries were evicted at this position or before it: the session cannot return to an earlier
  // position.
  void evicted_at(uint64_t position) { floor_ = position; }

  // Called when reading stopped in the middle. Continuing may evict entries at the end of the last chunk, to
  // which the session can still return.
  void stopped_reading() {
    floor_ = ids_.size() == first_prompt_ ? std::max(floor_, last_border(first_prompt_)) : ids_.size();
  }

  const std::vector<int32_t>& ids() const { return ids_; }
  // The positions at which each answer in the stream begins and ends.
  std::vector<std::pair<uint64_t, uint64_t>> answers() const;
  bool empty() const { return ids_.empty(); }
  // The bytes of memory that the history takes.
  size_t bytes() const;

 private:
  struct Turn {
    size_t messages;            // number of messages of conversation_, the last of which is the answer
    uint64_t answer, position;  // positions in the stream at which the answer begins and ends
    bool cut;
  };
  uint64_t last_border(uint64_t prompt) const;

  uint32_t chunk_, local_;
  std::vector<int32_t> ids_;
  uint64_t first_prompt_ = 0;  // number of the stream's tokens that belong to the first prompt
  uint64_t floor_ = 0;
  uint64_t answer_ = SIZE_MAX;  // where the last answer begins; SIZE_MAX: the last prompt has no answer
  Json conversation_ = Json::array();
  std::string variables_;
  std::vector<Turn> turns_;
};

}  // namespace app::serve
