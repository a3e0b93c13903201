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

#include "apps/serve/prefix_cache.h"
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

  // The places to which a session with this history can return, as find() knows them, and places before them
  // that cannot be reached any more. `settings` are a part of the hashes.
  std::vector<StateKey> keys(uint64_t settings) const;
  // The last place that can be reached, in tokens.
  uint64_t reach() const;
  // The hashes of all places from which this prompt could continue.
  std::vector<uint64_t> hashes(const Prompt& prompt, uint64_t settings) const;
  // Everything but the options of the session, to be stored with it. read() returns false if the bytes are
  // damaged.
  std::string write() const;
  bool read(std::string_view bytes);

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

  // How many tokens of a prompt a session must get to read the last chunk that ends at or before `position`.
  uint64_t enough_for(uint64_t position) const { return position / chunk_ * chunk_ + local_ + 1; }
  // The last end of a chunk in a prompt of `prompt` tokens that does not depend on where the prompt ends.
  uint64_t last_border(uint64_t prompt) const;
  // Nothing was read after the first prompt.
  bool in_first_prompt() const { return ids_.size() == first_prompt_; }
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
  void add_borders(const std::vector<int32_t>& ids, uint64_t last, uint64_t settings,
                   std::vector<StateKey>& keys) const;

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
