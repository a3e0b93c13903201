// attend_view on Hopper: wgmma products fed by bulk tensor copies, for heads of 64, 128 and 256
// channels.
#include <cstddef>

#include "backends/cuda/attention/attention_view.cuh"
#include "backends/cuda/host/tensor_map.h"
#include "backends/cuda/wgmma.cuh"

namespace thimble::cuda {
namespace {

// A block has two warpgroups that multiply, with 64 query vectors each, and a third in which one thread
// copies keys and values.
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup, kShare = 64;
static_assert(kConsumers * kShare == kWgmmaVectors);
constexpr int kStages = 2;  // tiles of keys, and of values, in shared memory

// Layout of shared memory in bytes. Matrices are stored in boxes of 64 channels, with rows of 128 bytes,
// swizzled.
template <int kDim>
struct Shared {
  static constexpr int kBoxes = kDim / 64, kRow = 128, kKeys = wgmma_keys(kDim);
  static constexpr uint32_t kQueries = kShare * kBoxes * kRow;  // per warpgroup
  static constexpr uint32_t kTile = kKeys * kBoxes * kRow;
  // Offset of the barriers
  static constexpr uint32_t kBarriers = kConsumers * kQueries + 2 * kStages * kTile;
  // Includes padding to align the start to the 1024 bytes of a swizzle.
  static constexpr uint32_t kBytes = 1024 + kBarriers + 4 * kStages * sizeof(uint64_t);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The ring through which tiles of keys or values pass in shared memory. Tile i uses stage i % kStages.
struct Ring {
  std::byte* tiles;
  uint64_t *full, *empty;  // [kStages]

  __device__ static uint32_t stage(uint32_t i) { return i % kStages; }
  __device__ void wait_full(uint32_t i) const { wait(full + stage(i), i / kStages & 1); }
  __device__ void wait_empty(uint32_t i) const { wait(empty + stage(i), (i / kStages & 1) ^ 1); }
  // Each warp releases for itself, because it only knows of its own products.
  __device__ void release(uint32_t i) const {
    if (threadIdx.x % kWarp == 0) arrive(empty + stage(i));
  }
};

#endif

template <int kDim, bool kCaps>
__global__ void __launch_bounds__(kThreads, 1)
    attend_wgmma_kernel(const StepParams* step, ViewAttention o, const __grid_constant__ CUtensorMap k_map,
                        const __grid_constant__ CUtensorMap v_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // 384 threads start with 168 of the 65536 registers each.
  constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  using S = Shared<kDim>;
  constexpr int kKeys = S::kKeys;
  extern __shared__ uint4 shared[];
  std::byte* const base =
      reinterpret_cast<std::byte*>(shared) + (1024 - shared_address(shared) % 1024) % 1024;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(base + S::kBarriers);
  const Ring keys{base + kConsumers * S::kQueries, barriers, barriers + kStages};
  const Ring values{keys.tiles + kStages * S::kTile, barriers + 2 * kStages, barriers + 3 * kStages};

  release_successor();
  if (threadIdx.x == 0) {
    prefetch(k_map);
    prefetch(v_map);
    for (int s = 0; s < kStages; ++s)
      for (const Ring& ring : {keys, values}) {
        init_barrier(ring.full + s, 1);
        init_barrier(ring.empty + s, kConsumers * kWarpgroup / kWarp);
      }
    publish_barriers();
  }
  __syncthreads();
  await_predecessor();

  const ViewBlock b = view_block<kWgmmaVectors, kKeys>(o, *step);
  if (b.empty) return;
  const uint32_t tiles = b.end_tile - b.first_tile, warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    shrink_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      order_before_copies();
      const auto load = [&](const Ring& ring, const CUtensorMap& map, uint32_t i) {
        const uint32_t stage = Ring::stage(i);
        ring.wait_empty(i);
        arrive_and_expect(ring.full + stage, S::kTile);
        for (int box = 0; box < S::kBoxes; ++box)
          copy_box(ring.tiles + stage * S::kTile + box * kKeys * S::kRow, map, 64 * box,
                   b.head * o.p.view_capacity + (b.first_tile + i) * kKeys, ring.full + stage);
      };
      for (uint32_t i = 0; i < tiles; ++i) {
        load(keys, k_map, i);
        if (i > 0) load(values, v_map, i - 1);
      }
      if (tiles > 0) load(values, v_map, tiles - 1);
    }
  } else {
    grow_registers<kConsumerRegisters>();
    const uint32_t consumer = warpgroup - 1, thread = threadIdx.x % kWarpgroup;
    const uint32_t own_barrier = 1 + consumer,
                   // turn + consumer is the barrier that lets that consumer start its products
        turn = 1 + kConsumers;
    const ViewPass<> pass(*step, o, b.head);
    const uint32_t first_vector = b.first_vector + kShare * consumer,
                   of_warp = first_vector + thread / kWarp * 16;

    std::byte* const q = base + consumer * S::kQueries;
    load_queries<kDim, kShare, kWarpgroup>(
        o, *step, pass, b.head, first_vector, thread, [&](uint32_t vector, uint32_t channel, __half x) {
          const uint32_t box = channel / 64, piece = channel % 64 / 8 ^ vector % 8;
          *reinterpret_cast<__half*>(q + (box * kShare + vector) * S::kRow + 16 * piece + channel % 8 * 2) =
              x;
        });
    publish_stores();
    meet(own_barrier, kWarpgroup);

    RunningSoftmax<kDim> softmax;
    softmax.begin(o, pass, b, of_warp);
    float scores[kKeys / 8][4];
    uint32_t weights[kKeys / 16][4];
    const auto start_scores = [&](uint32_t i) {
      keys.wait_full(i);
      const std::byte* const k = keys.tiles + Ring::stage(i) * S::kTile;
      begin_products();
#pragma unroll
      for (int box = 0; box < S::kBoxes; ++box)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          multiply_async_f16(scores, tile_descriptor(q + box * kShare * S::kRow) + c * kDescriptorStep,
                             tile_descriptor(k + box * kKeys * S::kRow) + c * kDescriptorStep, box + c > 0);
      commit_products();
    };
    const auto start_sums = [&](uint32_t i) {
      values.wait_full(i);
      const std::byte* const v = values.tiles + Ring::stage(i) * S::kTile;
      begin_products();
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
        multiply_async_f16(softmax.out, weights[n],
                           transposed_descriptor(v + 16 * n * S::kRow, kKeys * S::kRow));
      commit_products();
    };
    // Clears the rows after the end of the view: they may hold NaN, which a weight of 0 does not hide.
    const auto clear_behind_end = [&](uint32_t i) {
      constexpr uint32_t kPieces = S::kRow / 16;
      values.wait_full(i);
      std::byte* const v = values.tiles + Ring::stage(i) * S::kTile;
      const uint32_t end = min(pass.keys - (b.first_tile + i) * kKeys, uint32_t{kKeys});
      for (uint32_t j = end * S::kBoxes * kPieces + thread; j < kKeys * S::kBoxes * kPieces;
           j += kWarpgroup) {
        const uint32_t row = j / (S::kBoxes * kPieces), box = j / kPieces % S::kBoxes, piece = j % kPieces;
        *reinterpret_cast<uint4*>(v + (box * kKeys + row) * S::kRow + 16 * piece) = uint4{};
      }
      publish_stores();
      meet(own_barrier, kWarpgroup);
    };
    const auto soften = [&](uint32_t i) {
      const uint32_t tile = b.first_tile + i;
      if constexpr (kCaps) softmax.cap(o, scores);
      if (needs_mask<kKeys>(b, tile)) softmax.mask(o, pass, of_warp, tile * kKeys, scores);
      return softmax.soften(scores);
    };
    const auto pack_weights = [&] {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weights[n][i] = pack_halves(scores[2 * n + i / 2][i % 2 * 2], scores[2 * n + i / 2][i % 2 * 2 + 1]);
    };

    if (tiles > 0) {
      start_scores(0);
      wait_products<0>();
      pin(scores);
      keys.release(0);
      softmax.rescale(soften(0));
      pack_weights();
      // A tile's softmax overlaps with the products of the previous weights with their values. The warpgroups
      // start their products in turns, so that the softmax of one also overlaps with the products of the
      // other.
      if (consumer == 1 && tiles > 1) pass_by(turn, 2 * kWarpgroup);
      for (uint32_t i = 1; i < tiles; ++i) {
        meet(turn + consumer, 2 * kWarpgroup);
        start_scores(i);
        start_sums(i - 1);
        if (consumer == 0 || i + 1 < tiles) pass_by(turn + 1 - consumer, 2 * kWarpgroup);
        wait_products<1>();
        pin(scores);
        keys.release(i);
        const float2 scale = soften(i);
        wait_products<0>();
        pin(softmax.out);
        values.release(i - 1);
        softmax.rescale(scale);
        pack_weights();
      }
      clear_behind_end(tiles - 1);
      start_sums(tiles - 1);
      wait_products<0>();
      pin(softmax.out);
    }
    softmax.end(o, pass, b, of_warp);
  }
#endif
}

template <int kDim>
void attend(const Launch& l, const ViewAttention& o, uint32_t blocks) {
  CUtensorMap maps[2] = {};
  const __half* const matrices[] = {o.k, o.v};
  for (int i = 0; i < 2 && *l.error == cudaSuccess; ++i)
    *l.error = make_tensor_map(maps[i], matrices[i], uint64_t(o.p.first_head + o.p.heads) * o.p.view_capacity,
                               kDim, wgmma_keys(kDim));
  launch(l, o.p.cap != 0 ? attend_wgmma_kernel<kDim, true> : attend_wgmma_kernel<kDim, false>, blocks,
         kThreads, Shared<kDim>::kBytes, l.step, o, maps[0], maps[1]);
}

}  // namespace

bool wgmma_attends(const Launch& l, const ViewAttention& o) {
  // Steps with row indices have at most a few dozen rows, for which the other kernel is as fast.
  return !o.row_index && l.card.major == 9 && l.card.minor == 0 &&
         l.card.shared_bytes >= Shared<256>::kBytes &&
         (o.p.head_dim == 64 || o.p.head_dim == 128 || o.p.head_dim == 256) &&
         o.max_vectors >= kWgmmaVectors &&
         (reinterpret_cast<uintptr_t>(o.k) | reinterpret_cast<uintptr_t>(o.v)) % 16 == 0 && encode_tiled();
}

void attend_wgmma(const Launch& l, const ViewAttention& o, uint32_t blocks) {
  if (o.p.head_dim == 64)
    attend<64>(l, o, blocks);
  else if (o.p.head_dim == 128)
    attend<128>(l, o, blocks);
  else
    attend<256>(l, o, blocks);
}

}  // namespace thimble::cuda
