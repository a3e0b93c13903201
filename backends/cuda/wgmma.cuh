// Hopper's matrix product in f16 (wgmma), bulk tensor copies (TMA) and their barriers. Device side, for
// sm_90a: calls must be inside #if __CUDA_ARCH_FEAT_SM90_ALL.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/mma.cuh"

namespace thimble::cuda {

inline constexpr uint32_t kWarpgroup =
    128;  // threads that issue a wgmma together: four warps, the first a multiple of 4

// ---- barriers ----
// An mbarrier completes a phase when `arrivals` threads and all announced bytes have arrived. Waiting for
// parity p returns once the latest completed phase has parity p. Phases count from 0; before any phase was
// completed, parity 1 counts as completed.

__device__ inline void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copy engine; the block synchronises afterwards.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and announces how many bytes of copies the phase waits for.
__device__ inline void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {  // try_wait returns after a while even if the phase is not complete
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Barriers 1 to 15 of a block. `threads` threads take part; those that call meet() wait for all of them.
__device__ inline void meet(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void pass_by(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- copies ----

// Orders the stores of other kernels that are visible to this thread before the copies that it starts.
__device__ inline void order_before_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies the box of the map whose first element is (column, row) to shared memory, aligned to 1024 bytes for
// a swizzle of 128 bytes, and counts its bytes at the barrier. Elements outside of the tensor become zeros
// and are counted too.
__device__ inline void copy_box(void* to, const CUtensorMap& map, uint32_t column, uint32_t row,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
// Copies bytes that follow each other to shared memory and counts them at the barrier. Addresses and the
// number of bytes are multiples of 16.
__device__ inline void copy_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// ---- registers ----
// The threads of a kernel compiled with __launch_bounds__(threads, 1) start with equal shares of the
// registers. All four warps of a warpgroup call these functions.

template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- product ----

// A tile of rows of 64 f16 (128 bytes), as copy_box writes it with a swizzle of 128 bytes: 16-byte piece p of
// row r is at 128 r + 16 (p ^ r % 8). `tile` is aligned to 1024 bytes.
//
// Descriptor: address / 16 in bits 0-13; stride between groups of 8 rows / 16 in bits 32-45; swizzle (1: 128
// bytes) in bits 62-63; the leading offset, bits 16-29, is not used here. The hardware swizzles address bits,
// so 16 elements further in k are 32 bytes more: kDescriptorStep.
__device__ inline uint64_t tile_descriptor(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}
inline constexpr uint64_t kDescriptorStep = 32 >> 4;

// A tile of 16 rows of k, in which 64 elements of n are contiguous (128 bytes). Values [key][channel] are
// stored this way in shared memory, transposed compared with tile_descriptor(). Bits 16-29: stride between
// groups of 64 elements of n / 16; bits 32-45: stride between groups of 8 rows / 16.
__device__ inline uint64_t transposed_descriptor(const void* tile, uint32_t columns_stride) {
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t(columns_stride >> 4) << 16 |
         uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Orders this thread's stores to shared memory before products that other threads start after a barrier.
__device__ inline void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders this thread's accesses to accumulators before the products that follow.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the committed groups are still in flight.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading accumulators before the wait above.
template <int kCount>
__device__ inline void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kBlocks>
__device__ inline void pin(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) pin(d[j]);
}

// The results for a warpgroup's 64 rows, in blocks of 8 columns: lane l of warp w % 4 holds in d[j][2 h + i]
// the element in row 16 (w % 4) + l / 4 + 8 h and column 8 j + 2 (l % 4) + i.
#define THIMBLE_BLOCK(d, j) "+f"((d)[j][0]), "+f"((d)[j][1]), "+f"((d)[j][2]), "+f"((d)[j][3])
#define THIMBLE_BLOCKS_4(d, j) \
  THIMBLE_BLOCK(d, j), THIMBLE_BLOCK(d, (j) + 1), THIMBLE_BLOCK(d, (j) + 2), THIMBLE_BLOCK(d, (j) + 3)
#define THIMBLE_BLOCKS_8(d, j) THIMBLE_BLOCKS_4(d, j), THIMBLE_BLOCKS_4(d, (j) + 4)

// d[64][8 kBlocks] (+)= a[64][16] b[8 kBlocks][16]^T in f16, both in shared memory. Runs asynchronously.
__device__ inline void multiply_async_f16(float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}"
      : THIMBLE_BLOCKS_8(d, 0)
      : "l"(a), "l"(b), "r"(uint32_t(accumulate)));
}
__device__ inline void multiply_async_f16(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n"
      "}"
      : THIMBLE_BLOCKS_8(d, 0), THIMBLE_BLOCKS_8(d, 8)
      : "l"(a), "l"(b), "r"(uint32_t(accumulate)));
}
__device__ inline void multiply_async_f16(float (&d)[32][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, 0;\n"
      "}"
      : THIMBLE_BLOCKS_8(d, 0), THIMBLE_BLOCKS_8(d, 8), THIMBLE_BLOCKS_8(d, 16), THIMBLE_BLOCKS_8(d, 24)
      : "l"(a), "l"(b), "r"(uint32_t(accumulate)));
}
// d[64][128] += a[64][16] b[16][128]. a is in registers in the layout of multiply_f16; each warp holds its 16
// rows.
__device__ inline void multiply_async_f16(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
      "}"
      : THIMBLE_BLOCKS_8(d, 0), THIMBLE_BLOCKS_8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same for b[16][64].
__device__ inline void multiply_async_f16(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
      "}"
      : THIMBLE_BLOCKS_8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same for b[16][256].
__device__ inline void multiply_async_f16(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n"
      "}"
      : THIMBLE_BLOCKS_8(d, 0), THIMBLE_BLOCKS_8(d, 8), THIMBLE_BLOCKS_8(d, 16), THIMBLE_BLOCKS_8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef THIMBLE_BLOCK
#undef THIMBLE_BLOCKS_4
#undef THIMBLE_BLOCKS_8

}  // namespace thimble::cuda
