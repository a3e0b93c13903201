// Counts the bytes that the server holds for its clients: requests that are being received, were read or
// wait, and answers that are being made or that the client has not taken yet. One limit applies to the sum.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

namespace app::serve {

// The counter. Any thread may change it.
class Room {
 public:
  explicit Room(size_t bound) : bound_(bound) {}
  size_t bound() const { return bound_; }
  size_t taken() const { return taken_; }

 private:
  friend class Share;
  const size_t bound_;
  std::atomic<size_t> taken_ = 0;
};

// The bytes that one owner has taken of a room, which must outlive it. The destructor gives them back.
class Share {
 public:
  explicit Share(Room& room) : room_(&room) {}
  Share(Share&& other) noexcept : room_(other.room_), bytes_(std::exchange(other.bytes_, 0)) {}
  Share& operator=(Share&& other) noexcept {
    std::swap(room_, other.room_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Share() { force(0); }

  size_t bytes() const { return bytes_; }
  size_t bound() const { return room_->bound(); }
  // Returns false and changes nothing if the total would exceed the limit. Shrinking always succeeds.
  bool resize(size_t bytes) {
    const size_t before = std::exchange(bytes_, bytes);
    const size_t taken = room_->taken_ += bytes - before;
    if (bytes <= before || taken <= room_->bound_) return true;
    force(before);
    return false;
  }
  // Resizes without checking the limit.
  void force(size_t bytes) { room_->taken_ += bytes - std::exchange(bytes_, bytes); }

 private:
  Room* room_;
  size_t bytes_ = 0;
};

}  // namespace app::serve
