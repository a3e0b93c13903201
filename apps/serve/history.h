// What a slot's session has read, and from where another request can go on.
//
// A request goes on only where its answer is the same as if nobody had asked before it:
//  - after an answer of the same conversation, as `thimble chat` goes on after its answers;
//  - in the first prompt, at the end of a chunk that a fresh reading would have read alike. Where chunks end
//    depends on the tokens alone, but for the last ones, which the end of the prompt cuts (thimble.h,
//    thimble_session_feed).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/serve/task.h"

namespace app::serve {

// Bytes of memory that a value takes: many times those of its text, where it has many small parts.
size_t bytes_of(const Json& value);

// What a request asks to be read.
struct Prompt {
  Json messages;          // of a conversation, with a system message where the command gives one; else null
  std::string variables;  // of the chat template, as JSON
  std::vector<int32_t> ids;  // all of it, read afresh
};

// Where a request goes on.
struct Reuse {
  uint64_t position = 0;  // of the stream; what lies behind it is forgotten
  size_t messages = 0;    // of the conversation that are held; 0: the first `position` ids are
  bool cut = false;       // the last of them lacks its end-of-turn token
};

class History {
 public:
  // `chunk` and `local` of the session's options, as they were settled.
  History(uint32_t chunk, uint32_t local) : chunk_(chunk), local_(local) {}

  Reuse find(const Prompt& prompt) const;

  // The stream was taken back to where a request goes on.
  void rewind(const Reuse& reuse);
  // Tokens that the session took: of a prompt, of an answer.
  void add_prompt(const int32_t* ids, size_t count);
  void add_generated(int32_t id) { ids_.push_back(id); }
  // What is generated from now on answers.
  void begin_answer() { answer_ = ids_.size(); }
  // The stream now ends with the answer to these messages.
  void add_turn(const Prompt& prompt, Json answer, bool cut);
  // Entries were evicted at this position or before it: nothing before it can be gone back to.
  void evicted_at(uint64_t position) { floor_ = position; }

  // Reading stopped in the middle, and going on may evict, at the last chunk's end, where it can still be
  // gone back to.
  void stopped_reading() {
    floor_ = ids_.size() == first_prompt_ ? std::max(floor_, last_border(first_prompt_)) : ids_.size();
  }

  const std::vector<int32_t>& ids() const { return ids_; }
  // The answers that the stream holds: where each begins and ends.
  std::vector<std::pair<uint64_t, uint64_t>> answers() const;
  bool empty() const { return ids_.empty(); }
  // Of memory that it takes.
  size_t bytes() const;

 private:
  struct Turn {
    size_t messages;            // so many of conversation_, the last of them the answer
    uint64_t answer, position;  // where in the stream the answer begins and ends
    bool cut;
  };
  uint64_t last_border(uint64_t prompt) const;

  uint32_t chunk_, local_;
  std::vector<int32_t> ids_;
  uint64_t first_prompt_ = 0;  // tokens of the stream that are the first prompt's
  uint64_t floor_ = 0;
  uint64_t answer_ = SIZE_MAX;  // where the last answer begins; SIZE_MAX: there is none to the last prompt
  Json conversation_ = Json::array();
  std::string variables_;
  std::vector<Turn> turns_;
};

}  // namespace app::serve
