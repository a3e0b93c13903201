// A drafter guesses the next tokens of a stream. A session reads a guess in one step with the token before it
// and keeps the tokens that it would have generated anyway, so a wrong guess costs only time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backends/backend.h"
#include "base/status.h"

namespace thimble {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Gets tokens of the stream in the order in which they are read. A call replaces the tokens that earlier
  // calls gave for its first position and later ones.
  virtual Status note(uint64_t position, std::span<const int32_t> tokens) = 0;
  // Gets the model's last rows for the latest tokens of the stream, normed for the output: f32
  // [rows][d_model]. `position`: that of the first row.
  virtual void follow(uint64_t /*position*/, const View& /*rows*/) {}
  // Reads long texts that were noted. It takes time that does not belong to the next guess.
  virtual void read() {}
  // Guesses at most draft.size() tokens after those that were noted. Returns their number.
  virtual Result<uint32_t> guess(std::span<int32_t> draft) = 0;
  // May be called from any thread. A call that runs stops soon.
  virtual void interrupt() {}
  // Forgets every token.
  virtual Status reset() = 0;
  // A drafter for a copy of the stream.
  virtual Result<std::unique_ptr<Drafter>> clone() const = 0;
  // The bytes that it allocated.
  virtual uint64_t bytes() const = 0;
};

}  // namespace thimble
