// page_vote: the attention of the latest queries to the keys of a store, one head after the other. The store
// may be in host memory: each key crosses the bus once. A warp multiplies the 16 keys of a page with all
// queries of a head on tensor cores.
#include <algorithm>

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/positions.cuh"
#include "backends/cuda/rope.cuh"

namespace thimble::cuda {
namespace {

static_assert(kStoredPage == 16);  // the rows of a matrix on tensor cores
constexpr uint32_t kTile = 8;      // queries that a warp multiplies at once
constexpr uint32_t kStep = 16;     // channels of one product
constexpr uint32_t kThreads = 256;
constexpr uint32_t kMostWarps = 4;  // of a block that computes scores
constexpr float kLog2e = 1.44269504f;

// In scratch: of each head, its queries in f16 as the lanes of a warp need them, the positions of the listed
// entries, and for each page its slot, which entries it has, and where they rotate to; and of one head, the
// base 2 logarithms of the attention of each query to each page, and to all pages.
struct Scratch {
  uint32_t tiles, steps;  // of a head's queries: of kTile queries, and of kStep channels
  uint32_t* queries;      // [heads][tiles][steps][lane][2]: two channels each
  float *scores, *sums;   // [queries of a head][page_capacity], [queries of a head]
  int32_t* own;           // [heads][list_capacity]
  uint4* pages;           // [heads][page_capacity]
  uint64_t bytes = 0;

  Scratch(std::byte* base, uint32_t heads, uint32_t queries_of_head, uint32_t head_dim,
          uint32_t page_capacity, uint32_t list_capacity)
      : tiles(static_cast<uint32_t>(ceil_div(queries_of_head, kTile))),
        steps(static_cast<uint32_t>(ceil_div(head_dim, kStep))) {
    const auto place = [&]<typename T>(T*& array, uint64_t count) {
      array = reinterpret_cast<T*>(base + bytes);
      bytes += round_up(count * sizeof(T), 256);
    };
    place(scores, uint64_t(queries_of_head) * page_capacity);
    place(sums, queries_of_head);
    place(queries, uint64_t(heads) * head_words());
    place(own, uint64_t(heads) * list_capacity);
    place(pages, uint64_t(heads) * page_capacity);
  }
  __host__ __device__ uint64_t head_words() const { return uint64_t(tiles) * steps * kWarp * 2; }
};

// What the queries ask, from the host.
struct Asked {
  uint32_t tokens, position, ahead;
  __device__ explicit Asked(const uint32_t* words) : tokens(words[0]), position(words[1]), ahead(words[2]) {}
};

// A thread rotates two channels of a query and rounds them to f16. Query v of a head has age v % tokens.
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(PageVoteParams p, const float* ring, const uint32_t* words, const uint32_t* lists,
                   Rope rope, Scratch scratch) {
  begin_kernel();
  const uint32_t head = p.first_head + blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x,
                 pairs = scratch.steps * kStep / 2, v = i / pairs, c = i % pairs * 2;
  if (v >= scratch.tiles * kTile) return;
  const Asked asked(words);
  float x = 0, y = 0;
  if (v < p.group * asked.tokens && c < p.head_dim) {
    const uint32_t age = v % asked.tokens, position = asked.position - age,
                   listed = lists[uint64_t(head) * p.list_capacity] + asked.ahead,
                   place = p.rope.mode == kRopeList ? listed - min(listed, 1 + age) : position;
    const float* const q =
        ring + uint64_t(position % p.ring) * p.cols + (head * p.group + v / asked.tokens) * p.head_dim;
    x = p.scale * kLog2e * rotated_channel(q, c, place, rope, p.rope.pairing);
    y = p.scale * kLog2e * rotated_channel(q, c + 1, place, rope, p.rope.pairing);
  }
  const uint32_t step = c / kStep, lane = v % kTile * 4 + c / 2 % 4, word = c % kStep / 8;
  const __half2 halves = __floats2half2_rn(x, y);
  scratch.queries[head * scratch.head_words() +
                  ((uint64_t(v / kTile) * scratch.steps + step) * kWarp + lane) * 2 + word] =
      *reinterpret_cast<const uint32_t*>(&halves);
}

// Copies the positions of the listed entries. The lists are in host memory, which is slow to search.
__global__ void __launch_bounds__(kThreads)
    list_own_kernel(const HeadState* heads, PageVoteParams p, const uint32_t* lists, const int32_t* pos,
                    Scratch scratch) {
  begin_kernel();
  const uint32_t head = p.first_head + blockIdx.y;
  const uint64_t at = uint64_t(head) * p.list_capacity;
  const uint32_t count = lists[at];
  const int32_t* const in_run = pos + heads[head].first;
#pragma unroll 4
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
    scratch.own[at + i] = in_run[lists[at + 1 + i]];
}

// The pages of a store, of all heads.
struct Store {
  const std::byte *pages, *order;
  const uint32_t* count;
};

// A page rotates to where its middle would be among the listed entries.
__global__ void __launch_bounds__(kThreads)
    list_pages_kernel(PageVoteParams p, const uint32_t* lists, Store store, Scratch scratch) {
  begin_kernel();
  const uint32_t head = p.first_head + blockIdx.y, count = store.count[head];
  const uint64_t before = uint64_t(head) * p.stored_stride * 64, at = uint64_t(head) * p.list_capacity;
  const auto* const order = reinterpret_cast<const uint32_t*>(store.order + before);
  const auto* const pages = reinterpret_cast<const uint4*>(store.pages + before);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const uint32_t slot = order[i];
    const uint4 page = pages[slot];
    const auto middle = static_cast<int32_t>(page.x * kStoredPage + kStoredPage / 2);
    scratch.pages[uint64_t(head) * p.page_capacity + i] = {
        slot, page.y & 0xffff, lower_bound(scratch.own + at, lists[at], middle), 0};
  }
}

// Shared memory of a warp: the keys of a page as they are stored, and rotated in f16, with 16 bytes between
// the ends of two rows so that a matrix comes from all banks.
__host__ __device__ constexpr uint32_t key_halves(uint32_t steps) { return steps * kStep + 8; }
__host__ __device__ constexpr uint32_t warp_bytes(uint32_t row_bytes, uint32_t steps) {
  return kStoredPage * (row_bytes + key_halves(steps) * static_cast<uint32_t>(sizeof(__half)));
}

// The warp decodes the keys of a page and rotates them to `place`.
template <typename Format>
__device__ void decode_keys(const typename Format::Unit* rows, uint32_t head_dim, uint32_t steps,
                            const Rope& rope, uint32_t pairing, uint32_t place, __half* keys) {
  const uint32_t lane = threadIdx.x % kWarp, units = Format::row_units(head_dim), width = key_halves(steps);
  for (uint32_t pair = lane; pair < steps * kStep / 2; pair += kWarp) {
    const bool rotates = pair < rope.pairs, is_channel = pair < head_dim / 2;
    const uint32_t c0 = rotates ? first_of_pair(pair, pairing) : 2 * pair,
                   c1 = rotates ? second_of_pair(pair, pairing, rope.pairs) : 2 * pair + 1;
    const float2 angle = rotates ? rope.angle(place, pair) : float2{1, 0};
#pragma unroll 4
    for (uint32_t key = 0; key < kStoredPage; ++key) {
      const float x = is_channel ? Format::load(rows + key * units, head_dim, c0) : 0,
                  y = is_channel ? Format::load(rows + key * units, head_dim, c1) : 0;
      keys[key * width + c0] = __float2half_rn(x * angle.x - y * angle.y);
      keys[key * width + c1] = __float2half_rn(x * angle.y + y * angle.x);
    }
  }
}

// The logarithm of a query's attention to the page, in all lanes that have some of its products: `low` and
// `high` with keys lane / 4 and lane / 4 + 8. A NaN counts as -inf.
__device__ inline float attention_to_page(float low, float high, uint32_t held) {
  const uint32_t key = threadIdx.x % kWarp / 4;
  low = held >> key & 1 ? fmaxf(low, -kInfinity) : -kInfinity;
  high = held >> (key + 8) & 1 ? fmaxf(high, -kInfinity) : -kInfinity;
  float most = fmaxf(low, high);
#pragma unroll
  for (uint32_t apart = 4; apart < kWarp; apart *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
  const float shift = fabsf(most) == kInfinity ? 0 : most;
  float sum = exp2f(low - shift) + exp2f(high - shift);
#pragma unroll
  for (uint32_t apart = 4; apart < kWarp; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return shift + log2f(sum);
}

// A warp computes the scores of all queries of the head for one page after the other.
template <typename Format>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    score_kernel(PageVoteParams p, uint32_t head, const uint32_t* words, const uint32_t* counted,
                 const std::byte* stored, Rope rope, Scratch scratch) {
  extern __shared__ uint4 memory[];
  begin_kernel();
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp,
                 units = Format::row_units(p.head_dim),
                 row_bytes = units * static_cast<uint32_t>(sizeof(typename Format::Unit)), count = *counted,
                 queries = p.group * words[0], width = key_halves(scratch.steps);
  auto* const rows = reinterpret_cast<std::byte*>(memory) + warp * warp_bytes(row_bytes, scratch.steps);
  auto* const keys = reinterpret_cast<__half*>(rows + kStoredPage * row_bytes);
  const uint4* const pages = scratch.pages + uint64_t(head) * p.page_capacity;
  for (uint32_t i = blockIdx.x * warps + warp; i < count; i += gridDim.x * warps) {
    const uint4 page = pages[i];
    const uint32_t slot = page.x, held = page.y, place = page.z;
    const auto* const from = reinterpret_cast<const uint4*>(stored + uint64_t(slot) * p.page_bytes);
    __syncwarp();  // the last page was multiplied
#pragma unroll 8
    for (uint32_t b = lane; b < row_bytes; b += kWarp) reinterpret_cast<uint4*>(rows)[b] = from[b];
    __syncwarp();
    decode_keys<Format>(reinterpret_cast<const typename Format::Unit*>(rows), p.head_dim, scratch.steps, rope,
                        p.rope.pairing, place, keys);
    __syncwarp();
    const auto* query = reinterpret_cast<const uint2*>(scratch.queries + head * scratch.head_words()) + lane;
    for (uint32_t first = 0; first < queries; first += kTile) {
      float c[4] = {};
      for (uint32_t step = 0; step < scratch.steps; ++step, query += kWarp) {
        uint32_t a[4];
        load_matrices(a, keys + lane % 16 * width + step * kStep + lane / 16 * 8);
        const uint2 b = *query;
        multiply_f16(c, a, b.x, b.y);
      }
      const float even = attention_to_page(c[0], c[2], held), odd = attention_to_page(c[1], c[3], held);
      const uint32_t v = first + lane * 2;
      if (lane < kTile / 2 && v < queries) scratch.scores[uint64_t(v) * p.page_capacity + i] = even;
      if (lane < kTile / 2 && v + 1 < queries) scratch.scores[uint64_t(v + 1) * p.page_capacity + i] = odd;
    }
  }
}

// A block sums the attention of a query to all pages.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(PageVoteParams p, const uint32_t* words, const uint32_t* counted, Scratch scratch) {
  __shared__ float parts[kThreads / kWarp];
  begin_kernel();
  const uint32_t count = *counted;
  if (blockIdx.x >= p.group * words[0]) return;
  const float* const scores = scratch.scores + uint64_t(blockIdx.x) * p.page_capacity;
  const auto of_block = [&](float x, const auto& reduce_warp) {
    x = reduce_warp(x);
    __syncthreads();  // the last parts were read
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
    __syncthreads();
    return reduce_warp(parts[threadIdx.x % (kThreads / kWarp)]);
  };
  float most = -kInfinity;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) most = fmaxf(most, scores[i]);
  most = of_block(most, [](float x) { return warp_max(x); });
  float sum = 0;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) sum += exp2f(scores[i] - most);
  sum = of_block(sum, [](float x) { return warp_sum(x); });
  constexpr float kCopies = kWarp / (kThreads / kWarp);  // of each part in the last sum
  if (threadIdx.x == 0) scratch.sums[blockIdx.x] = most + log2f(sum / kCopies);
}

// A thread adds up the votes for a page.
__global__ void __launch_bounds__(kThreads)
    share_kernel(PageVoteParams p, const uint32_t* words, const uint32_t* counted, Scratch scratch,
                 float* votes) {
  begin_kernel();
  const uint32_t count = *counted, tokens = words[0];
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    float vote = 0;
    for (uint32_t h = 0; h < p.group; ++h) {
      float most = -kInfinity;
      for (uint32_t v = h * tokens; v < (h + 1) * tokens; ++v)
        most = fmaxf(most, scratch.scores[uint64_t(v) * p.page_capacity + i] - scratch.sums[v]);
      vote += exp2f(most);
    }
    votes[i] = vote;
  }
}

}  // namespace

uint64_t page_vote_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  if (!s.voted_pages) return 0;
  const auto group = static_cast<uint32_t>(ceil_div(m.heads, std::max(m.kv_heads, 1u)));
  return Scratch(nullptr, m.kv_heads, group * s.voters, m.head_dim, s.voted_pages, 1 + s.reach).bytes;
}

void page_vote(const Launch& l, const PageVote& op) {
  constexpr uint32_t kMostShared = 48 << 10;
  const PageVoteParams& p = op.p;
  const Scratch scratch(l.scratch, p.first_head + p.heads, p.group * p.ring, p.head_dim, p.page_capacity,
                        p.list_capacity);
  const HeadState* const heads = l.heads + p.head_state;
  const Rope rope{data<float2>(op.rope), p.rope.n_rot / 2},
      of_keys{rope.table, p.rope.mode == kRopeList ? rope.pairs : 0};
  const auto* const words = data<uint32_t>(op.asked);
  const auto* const lists = data<uint32_t>(op.list);
  const uint32_t per_warp =
                     warp_bytes(static_cast<uint32_t>(kv_bytes(op.stored_k.type, p.head_dim)), scratch.steps),
                 warps = std::min(kMostWarps, kMostShared / per_warp);
  const auto blocks_of = [&](uint64_t work, uint32_t each) {
    return static_cast<uint32_t>(std::min<uint64_t>(ceil_div(work, each), 8 * l.card.multiprocessors));
  };
  launch(l, prepare_kernel,
         dim3(static_cast<uint32_t>(ceil_div(scratch.tiles * kTile * scratch.steps * kStep / 2, kThreads)),
              p.heads),
         kThreads, 0, p, data<float>(op.queries), words, lists, rope, scratch);
  const auto* const counts = data<uint32_t>(op.count);
  launch(l, list_own_kernel, dim3(blocks_of(p.list_capacity, kThreads), p.heads), kThreads, 0, heads, p,
         lists, data<int32_t>(op.pos), scratch);
  launch(l, list_pages_kernel, dim3(blocks_of(p.page_capacity, kThreads), p.heads), kThreads, 0, p, lists,
         Store{data<std::byte>(op.pages), data<std::byte>(op.order), counts}, scratch);
  for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head) {
    const std::byte* const stored = data<std::byte>(op.stored_k.values) + uint64_t(head) * p.rows_stride * 64;
    with_format(op.stored_k.type, [&]<typename Format>(Format) {
      launch(l, score_kernel<Format>, blocks_of(p.page_capacity, warps), warps * kWarp, warps * per_warp, p,
             head, words, counts + head, stored, of_keys, scratch);
    });
    launch(l, sum_kernel, p.group * p.ring, kThreads, 0, p, words, counts + head, scratch);
    launch(l, share_kernel, blocks_of(p.page_capacity, kThreads), kThreads, 0, p, words, counts + head,
           scratch, data<float>(op.votes) + uint64_t(head) * p.page_capacity);
  }
}

}  // namespace thimble::cuda
