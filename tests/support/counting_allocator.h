// Replaces the allocator of a test program and of the libraries that it loads. It counts allocations, and
// fails on request.
//
// One source file of an executable includes this. With glibc it replaces malloc, which operator new calls,
// and anonymous mmap. On other systems, and with a sanitizer, which brings its own malloc, it replaces only
// operator new.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__has_feature)
#define THIMBLE_HAS_FEATURE(x) __has_feature(x)
#else
#define THIMBLE_HAS_FEATURE(x) 0
#endif
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !THIMBLE_HAS_FEATURE(address_sanitizer)
#define THIMBLE_COUNTS_MALLOC 1
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define THIMBLE_COUNTS_MALLOC 0
#endif

namespace thimble {

// Allocations of all threads of the process. Plain atomics, because the allocator may be called before any
// constructor runs.
struct Allocations {
  std::atomic<uint64_t> calls;  // number of allocations
  // Including what malloc adds by rounding up; 0 if only operator new is counted
  std::atomic<int64_t> live_bytes;
  std::atomic<int64_t> peak_bytes;     // the maximum of live_bytes since the caller set this; only by malloc
  std::atomic<int64_t> until_failure;  // calls until one fails, the next one being 1; 0: none fails
};
inline constinit Allocations g_allocations{};

// Makes the n-th call from now fail, counted from 1, and only that one.
inline void fail_allocation(int64_t n) { g_allocations.until_failure = n; }
// Makes calls succeed again. Returns whether one failed.
inline bool allocation_failed(int64_t n) { return g_allocations.until_failure.exchange(0) <= 0 && n > 0; }

// Counts a call. Returns whether it must fail.
inline bool count_allocation() {
  ++g_allocations.calls;
  for (int64_t n = g_allocations.until_failure; n > 0;)
    if (g_allocations.until_failure.compare_exchange_weak(n, n - 1)) return n == 1;
  return false;
}

}  // namespace thimble

#if THIMBLE_COUNTS_MALLOC

extern "C" {
// glibc's own allocator, under the names that glibc provides for programs that replace malloc.
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace thimble {

inline void* count_block(void* block) {
  if (!block) return block;
  const int64_t live = g_allocations.live_bytes += static_cast<int64_t>(malloc_usable_size(block));
  for (int64_t peak = g_allocations.peak_bytes; peak < live;)
    if (g_allocations.peak_bytes.compare_exchange_weak(peak, live)) break;
  return block;
}
inline void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

// Anonymous mappings, recorded so that munmap can distinguish them from files.
struct Mapping {
  std::atomic<void*> address;
  size_t bytes;
};
inline constinit Mapping g_mappings[256]{};

}  // namespace thimble

#define THIMBLE_REPLACES extern "C" __attribute__((visibility("default")))

THIMBLE_REPLACES void* malloc(size_t bytes) {
  return thimble::count_allocation() ? thimble::no_memory() : thimble::count_block(__libc_malloc(bytes));
}
THIMBLE_REPLACES void* calloc(size_t count, size_t bytes) {
  return thimble::count_allocation() ? thimble::no_memory()
                                     : thimble::count_block(__libc_calloc(count, bytes));
}
THIMBLE_REPLACES void* realloc(void* old, size_t bytes) {
  if (thimble::count_allocation()) return thimble::no_memory();
  const int64_t before = old ? static_cast<int64_t>(malloc_usable_size(old)) : 0;
  void* block = __libc_realloc(old, bytes);
  if (block || bytes == 0) thimble::g_allocations.live_bytes -= before;
  return thimble::count_block(block);
}
THIMBLE_REPLACES void* memalign(size_t alignment, size_t bytes) {
  return thimble::count_allocation() ? thimble::no_memory()
                                     : thimble::count_block(__libc_memalign(alignment, bytes));
}
THIMBLE_REPLACES void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
THIMBLE_REPLACES int posix_memalign(void** out, size_t alignment, size_t bytes) {
  void* block = memalign(alignment, bytes);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}
THIMBLE_REPLACES void free(void* block) {
  if (block) thimble::g_allocations.live_bytes -= static_cast<int64_t>(malloc_usable_size(block));
  __libc_free(block);
}
THIMBLE_REPLACES void* mmap(void* hint, size_t bytes, int protection, int flags, int file, off_t offset) {
  const bool anonymous = flags & MAP_ANONYMOUS;
  if (anonymous && thimble::count_allocation()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void* address = reinterpret_cast<void*>(syscall(SYS_mmap, hint, bytes, protection, flags, file, offset));
  if (!anonymous || address == MAP_FAILED) return address;
  for (thimble::Mapping& mapping : thimble::g_mappings) {
    void* none = nullptr;
    if (!mapping.address.compare_exchange_strong(none, address)) continue;
    mapping.bytes = bytes;
    thimble::g_allocations.live_bytes += static_cast<int64_t>(bytes);
    return address;
  }
  std::abort();  // more mappings than any test creates
}
THIMBLE_REPLACES int munmap(void* address, size_t bytes) {
  for (thimble::Mapping& mapping : thimble::g_mappings)
    if (mapping.address == address) {
      thimble::g_allocations.live_bytes -= static_cast<int64_t>(mapping.bytes);
      mapping.address = nullptr;
    }
  return static_cast<int>(syscall(SYS_munmap, address, bytes));
}

#else

namespace thimble {

inline void* counted_new(size_t bytes, size_t alignment = 0) {
  if (bytes == 0) bytes = 1;
  void* block = nullptr;
  if (!count_allocation())
    block = alignment ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                      : std::malloc(bytes);
  if (!block) throw std::bad_alloc();
  return block;
}

}  // namespace thimble

void* operator new(size_t bytes) { return thimble::counted_new(bytes); }
void* operator new[](size_t bytes) { return thimble::counted_new(bytes); }
void* operator new(size_t bytes, std::align_val_t a) {
  return thimble::counted_new(bytes, static_cast<size_t>(a));
}
void* operator new[](size_t bytes, std::align_val_t a) {
  return thimble::counted_new(bytes, static_cast<size_t>(a));
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete[](void* block, size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete[](void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { std::free(block); }
void operator delete[](void* block, size_t, std::align_val_t) noexcept { std::free(block); }

#endif
