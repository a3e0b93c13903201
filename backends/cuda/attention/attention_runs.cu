// attention of a single row to whole runs of a pool of blocks, on Hopper: up to 4 query heads of 128 channels
// share a KV head. attention_blocks.cu explains how matrix units decode; this kernel takes about half as many
// instructions for an entry:
// - A warpgroup copies rows to shared memory in bulk, as they are stored, and rotates queries for the others.
// - Each of the other warps takes the same rows of every part of kPart rows, so the angles of its keys are in
//   registers. It takes 8 rows of two parts at once, to whose queries it multiplies them separately.
// - Queries and weights are halves of sums (Split), which together with 4 heads fill the 8 columns of a
// matrix.
#include "backends/cuda/attention/block_codes.cuh"
#include "backends/cuda/shared_memory.cuh"
#include "backends/cuda/soft_cap.cuh"
#include "backends/cuda/wgmma.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kDim = 128, kHeads = 4, kWarps = 12, kRowsAtOnce = 8, kPart = kWarps * kRowsAtOnce;
constexpr uint32_t kThreads = kWarpgroup + kWarps * kWarp;
constexpr uint32_t kQueries = kDim * kHeads * 4;           // bytes for each part: {high, low} of each number
constexpr uint32_t kOuts = kHeads * kDim * sizeof(float);  // bytes of a warp's sums of values
constexpr uint32_t kSharedBytes = 226 << 10;

// Rows of a format: codes, then a scale for each block.
template <typename Format>
struct Rows {
  static constexpr uint32_t kBits = kBitsOf<Format>, kCodes = kDim * kBits / 8, kRow = kCodes + kDim / 32 * 2,
                            kBytes = kPart * kRow + 16;  // of a part, which may begin 8 bytes later
  static_assert(kRow % 8 == 0 && kBytes % 16 == 0);
};

// A stage of shared memory: two parts of keys, of values, and of queries.
template <typename Keys, typename Values>
struct Stage {
  static constexpr uint32_t kKeys = Rows<Keys>::kBytes, kValues = Rows<Values>::kBytes;
  static constexpr uint32_t kFirstValue = 2 * kKeys, kFirstQuery = kFirstValue + 2 * kValues,
                            kBytes = kFirstQuery + 2 * kQueries, kCount = kSharedBytes / kBytes;
  static_assert(kCount >= 2 && kCount * kBytes >= kWarps * kOuts);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// 2^x, or 0 where that is below the normal numbers.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The transposed matrix of 8 x 8 halves.
__device__ inline uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
__device__ inline float2 product(float2 a, float2 b) {
  return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}
// The float whose f16 is half i of a word.
__device__ inline float half_of(uint32_t word, uint32_t i) {
  const float2 both = __half22float2(as_pair(word));
  return i ? both.y : both.x;
}

// What all warps know of the block's work.
struct Run {
  const std::byte *keys, *values;  // of the block's first entry
  uint32_t first, end, entries;    // the block's entries; all entries of the KV head, without hidden ones
  uint32_t position;               // the row's
  bool by_list;                    // rotates keys by their index

  __device__ uint32_t stages() const { return (end - first + 2 * kPart - 1) / (2 * kPart); }
};

// Where stages are, and the barriers at which they become full and empty. Pass i uses stage i % kCount.
template <uint32_t kCount, uint32_t kBytes>
struct Ring {
  std::byte* stages;
  uint64_t *full, *empty;

  __device__ std::byte* stage(uint32_t i) const { return stages + i % kCount * kBytes; }
  __device__ void wait_full(uint32_t i) const { wait(full + i % kCount, i / kCount & 1); }
  __device__ void wait_empty(uint32_t i) const { wait(empty + i % kCount, (i / kCount & 1) ^ 1); }
};

// ---- the warpgroup that fills stages ----

// A copy of rows. It begins and ends at multiples of 16 bytes, so it may have 8 bytes of the row before, and
// 8 of the row after if there is one; otherwise the last 8 bytes are copied by the thread.
struct RowCopy {
  const std::byte* from;
  uint32_t bytes, rest;

  __device__ RowCopy(const std::byte* rows, uint32_t row_bytes, uint32_t count, bool last) {
    const uint32_t before = reinterpret_cast<uintptr_t>(rows) % 16, all = before + count * row_bytes;
    from = rows - before;
    bytes = count == 0 ? 0 : last ? all / 16 * 16 : (all + 15) / 16 * 16;
    rest = count > 0 && bytes < all;
  }
  __device__ void start(std::byte* to, uint64_t* barrier) const {
    if (bytes) copy_bytes(to, from, bytes, barrier);
    if (rest) *reinterpret_cast<uint2*>(to + bytes) = *reinterpret_cast<const uint2*>(from + bytes);
  }
};

template <typename Keys, typename Values, typename R>
__device__ inline void copy_stage(const Run& run, const R& ring, uint32_t i) {
  using S = Stage<Keys, Values>;
  std::byte* const to = ring.stage(i);
  uint64_t* const full = ring.full + i % S::kCount;
  const auto copy = [&](uint32_t part, auto format, const std::byte* rows) {
    constexpr uint32_t kRow = Rows<decltype(format)>::kRow;
    const uint32_t at = (2 * i + part) * kPart, first = min(run.first + at, run.end),
                   count = min(run.end - first, kPart);
    return RowCopy(rows + uint64_t(at) * kRow, kRow, count, first + count == run.entries);
  };
  const RowCopy copies[4] = {copy(0, Keys{}, run.keys), copy(1, Keys{}, run.keys),
                             copy(0, Values{}, run.values), copy(1, Values{}, run.values)};
  arrive_and_expect(full, copies[0].bytes + copies[1].bytes + copies[2].bytes + copies[3].bytes);
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c)
    copies[c].start(to + (c < 2 ? c * S::kKeys : S::kFirstValue + (c - 2) * S::kValues), full);
}

// Stores the two halves of channel c of a query as columns 2 head and 2 head + 1 of a second operand.
__device__ inline void store_query(std::byte* queries, uint32_t head, uint32_t c, float x) {
  const __half high = __float2half_rn(x), low = __float2half_rn(x - __half2float(high));
  const uint32_t lane = 8 * head + c % 8 / 2;
  std::byte* const to = queries + (c / 32 * kWarp + lane) * 16 + c / 8 % 4 * 4 + c % 2 * 2;
  *reinterpret_cast<__half*>(to) = high;
  *reinterpret_cast<__half*>(to + 4 * 16) = low;
}

// Fills the stages. A thread rotates a pair of channels for one of the parts.
template <typename Keys, typename Values, Pairs kPairs, typename R>
__device__ inline void fill_stages(const Run& run, const R& ring, const float* q, uint32_t heads, float scale,
                                   const Rope& rope) {
  using S = Stage<Keys, Values>;
  const uint32_t part = threadIdx.x / 64, pair = threadIdx.x % 64;
  const uint32_t first = kPairs == Pairs::kAdjacent ? 2 * pair : pair,
                 second = kPairs == Pairs::kAdjacent ? first + 1 : first + kDim / 2;
  const bool rotates = pair < rope.pairs;
  const float factor = run.by_list ? rope.factor() : 1;  // for keys, whose half of the table lacks it
  float2 x[kHeads];
#pragma unroll
  for (uint32_t h = 0; h < kHeads; ++h)
    x[h] = h < heads ? float2{q[h * kDim + first] * scale, q[h * kDim + second] * scale} : float2{0, 0};
  // The factors of an angle are loaded a stage ahead.
  float2 high{1, 0}, low{1, 0};
  const auto ask = [&](uint32_t i) {
    const uint32_t at = run.first + (2 * i + part) * kPart, position = !run.by_list ? run.position
                                                                       : at < run.entries
                                                                           ? run.entries - 1 - at
                                                                           : 0;
    if (!rotates) return;
    high = rope.table[(64 + position / 64) * rope.pairs + pair];
    low = rope.table[position % 64 * rope.pairs + pair];
  };
  ask(0);
  if (threadIdx.x == 0) order_before_copies();
#pragma unroll 1
  for (uint32_t i = 0; i < run.stages(); ++i) {
    float2 angle = product(high, low);
    if (rotates) angle = {angle.x * factor, angle.y * factor};
    ask(i + 1);
    ring.wait_empty(i);
    if (threadIdx.x == 0) copy_stage<Keys, Values>(run, ring, i);
    std::byte* const queries = ring.stage(i) + S::kFirstQuery + part * kQueries;
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h) {
      const float2 turned = product(x[h], angle);
      store_query(queries, h, first, turned.x);
      store_query(queries, h, second, turned.y);
    }
    // The barrier orders all lanes' queries before those who wait. (ptxas needs no instruction for this
    // __syncwarp, so racecheck reports the other 31 lanes' stores as hazards.)
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(ring.full + i % S::kCount);
  }
}

// ---- the warps that empty them ----

__device__ inline uint32_t lane_g() { return threadIdx.x % kWarp / 4; }
__device__ inline uint32_t lane_t() { return threadIdx.x % 4; }

// The products of 16 keys with their queries. Row g of a matrix is a warp's row of_row(g), of the first part;
// row g + 8 is that of the second. (In this order, lanes of two g read different banks.)
template <typename Format, Pairs kPairs>
class KeyScores {
  using T = Rows<Format>;

 public:
  __device__ static uint32_t of_row(uint32_t g) { return g / 2 + g % 2 * 4; }

  // `row`: the lane's row of a part.
  __device__ KeyScores(const Run& run, const Rope& rope, uint32_t row) {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t pair = kPairs == Pairs::kHalves ? i / 2 * 8 + 2 * lane_t() + i % 2 : 4 * i + lane_t();
      turns_[i] = {1, 0};
      if (!run.by_list || pair >= rope.pairs || row >= run.entries) continue;
      if (row < kTile) {
        turns_[i] = rope.table[row * rope.pairs + pair];
      } else {
        const float2 angle = rope.angle(row, pair);
        turns_[i] = {angle.x / rope.factor(), angle.y / rope.factor()};
      }
    }
  }

  // `keys`: the addresses of the lane's two rows. scores[i]: of row g and row g + 8, for head t.
  __device__ void multiply(const uint32_t (&keys)[2], uint32_t queries, float (&scores)[2]) const {
    float sums[2][4] = {};  // for the queries of the two parts
    const uint2 scales[2] = {load_two_words(keys[0] + T::kCodes), load_two_words(keys[1] + T::kCodes)};
    const uint32_t codes[2] = {keys[0] + codes_, keys[1] + codes_}, own_queries = queries + queries_;
#pragma unroll
    for (uint32_t b = 0; b < 2; ++b) {
      // Blocks that rotate together, or two neighbours.
      const uint32_t blocks[2] = {kPairs == Pairs::kHalves ? b : 2 * b,
                                  kPairs == Pairs::kHalves ? b + 2 : 2 * b + 1};
      uint32_t a[2][2][4];  // of each block: two first operands
      turn(codes, scales, blocks, a);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
        for (uint32_t part = 0; part < 2; ++part) {
          const uint4 query = load_words(own_queries + part * kQueries + blocks[i] * kWarp * 16);
          multiply_f16(sums[part], a[i][0], query.x, query.y);
          multiply_f16(sums[part], a[i][1], query.z, query.w);
        }
    }
    scores[0] = sums[0][0] + sums[0][1];
    scores[1] = sums[1][2] + sums[1][3];
  }

 private:
  // Decodes and rotates two blocks of 16 keys. `at`: the addresses of the lane's codes in the first block.
  __device__ void turn(const uint32_t (&at)[2], const uint2 (&scales)[2], const uint32_t (&blocks)[2],
                       uint32_t (&a)[2][2][4]) const {
    uint32_t codes[2][4];
    float scale[2][2], zero[2][2];  // of each block and key
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      load_codes(at, blocks[i], codes[i]);
#pragma unroll
      for (uint32_t key = 0; key < 2; ++key) {
        scale[i][key] = half_of(blocks[i] / 2 ? scales[key].y : scales[key].x, blocks[i] % 2);
        zero[i][key] = -kMagic * scale[i][key];
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      float x[2][4];  // of each block: two channels of either key
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        int32_t sums[4];
        multiply_codes<T::kBits>(sums, codes[i], columns_.of[j], first_sum<T::kBits>(j),
                                 __float_as_int(kMagic));
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c)
          x[i][c] = fmaf(__int_as_float(sums[c]), scale[i][c / 2], zero[i][c / 2]);
      }
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        if constexpr (kPairs == Pairs::kHalves)
          rotate(x[0][c], x[1][c], turns_[8 * blocks[0] + 2 * j + c % 2]);
        else
          rotate(x[c / 2][c % 2 * 2], x[c / 2][c % 2 * 2 + 1], turns_[4 * blocks[c / 2] + j]);
      }
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        a[i][j / 2][j % 2 * 2] = pair_of(x[i][0], x[i][1]);
        a[i][j / 2][j % 2 * 2 + 1] = pair_of(x[i][2], x[i][3]);
      }
    }
  }
  __device__ static void rotate(float& x, float& y, float2 angle) {
    const float2 turned = product({x, y}, angle);
    x = turned.x;
    y = turned.y;
  }
  __device__ static void load_codes(const uint32_t (&at)[2], uint32_t block, uint32_t (&codes)[4]) {
#pragma unroll
    for (uint32_t key = 0; key < 2; ++key) {
      const uint32_t from = at[key] + block * 4 * T::kBits;
      const uint32_t word = load_word(from);
      if constexpr (T::kBits == 8) {
        codes[key] = word;
        codes[2 + key] = load_word(from + 16);
      } else {
        codes[key] = word & 0x0f0f0f0f;
        codes[2 + key] = word >> 4 & 0x0f0f0f0f;
      }
    }
  }

  const uint32_t codes_ = kept(lane_t() * 4), queries_ = kept(threadIdx.x % kWarp * 16);  // of addresses
  HadamardColumns<T::kBits> columns_;
  float2 turns_[16];  // pairs of channels in the order in which the lane gets them
};

// The numbers in a word of each of two keys, times their scales: a pair for each channel.
template <uint32_t kBits>
__device__ inline void expand(uint32_t one, uint32_t other, __half2 scale, uint32_t (&x)[32 / kBits]) {
  constexpr uint32_t kExponent = 0x64646464;  // a byte after it is that much more than 1024
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    uint32_t* const to = x + half * 16 / kBits;
    if constexpr (kBits == 8) {
      // Codes of two channels, 128 more than they are.
      const uint32_t codes = __byte_perm(one, other, half ? 0x7362 : 0x5140) ^ 0x80808080;
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        const __half2 biased = as_pair(__byte_perm(codes, kExponent, c ? 0x4342 : 0x4140));
        to[c] = bits_of(__hmul2(__hsub2(biased, __float2half2_rn(1024 + 128)), scale));
      }
    } else {
      const uint32_t codes = __byte_perm(one, other, half ? 0x7632 : 0x5410);  // of four channels, 8 more
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t word = codes >> (c / 2 * 8);
        __half2 code;
        if (c % 2 == 0)
          code = __hsub2(as_pair((word & 0x000f000f) | 0x64006400), __float2half2_rn(1024 + 8));
        else  // 1024 + 16 * (8 + code)
          code = __hfma2(as_pair((word & 0x00f000f0) | 0x64006400), __float2half2_rn(1.0f / 16),
                         __float2half2_rn(-64 - 8));
        to[c] = bits_of(__hmul2(code, scale));
      }
    }
  }
}

// Sums of values. A lane has channels 16 g to 16 g + 15 of two rows of each part, which are neighbours in the
// matrix of weights. Row g of matrix i is channel 16 g + 2 i; row g + 8 is the next.
template <typename Format>
class ValueSums {
  using T = Rows<Format>;

 public:
  // Adds the values of 16 entries, times their weights. `values`: the addresses of the lane's first rows; the
  // others are 4 rows later. `left`: how many rows there are from the warp's first row on.
  __device__ void add(const uint32_t (&weights)[2], const uint32_t (&values)[2], uint32_t left) {
    __half2 scale[2];
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
      const uint32_t at = values[part] + scales_;
      uint32_t bits[2] = {load_half_bits(at), load_half_bits(at + kOthers)};
      // What is after the end may be NaN, which a weight of 0 does not hide.
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
        if (part * kPart + t_ + 4 * i >= left) bits[i] = 0;
      scale[part] = as_pair(__byte_perm(bits[0], bits[1], 0x5410));
    }
    const uint32_t codes[2] = {values[0] + codes_, values[1] + codes_};
#pragma unroll
    for (uint32_t eight = 0; eight < T::kBits / 4; ++eight) {  // bytes of a lane's 16 channels
      uint2 words[2][2];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        words[i / 2][i % 2] = load_two_words(codes[i / 2] + i % 2 * kOthers + 8 * eight);
#pragma unroll
      for (uint32_t word = 0; word < 2; ++word) {
        uint32_t x[2][kPerWord];
#pragma unroll
        for (uint32_t part = 0; part < 2; ++part)
          expand<T::kBits>(word ? words[part][0].y : words[part][0].x,
                           word ? words[part][1].y : words[part][1].x, scale[part], x[part]);
#pragma unroll
        for (uint32_t i = 0; i < kPerWord / 2; ++i) {
          const uint32_t a[4] = {x[0][2 * i], x[0][2 * i + 1], x[1][2 * i], x[1][2 * i + 1]};
          multiply_f16(sums_[(2 * eight + word) * (kPerWord / 2) + i], a, weights[0], weights[1]);
        }
      }
    }
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (uint32_t i = 0; i < kDim / 16; ++i)
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) sums_[i][j] *= factor;
  }
  // Stores the sums of head t in a warp's [kHeads][kDim], times a factor.
  __device__ void store(std::byte* outs, float factor) const {
    float4* const to = reinterpret_cast<float4*>(outs) + (lane_t() * kDim + lane_g() * 16) / 4;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) {
      const float(&one)[4] = sums_[2 * i], (&next)[4] = sums_[2 * i + 1];
      to[i] = {(one[0] + one[1]) * factor, (one[2] + one[3]) * factor, (next[0] + next[1]) * factor,
               (next[2] + next[3]) * factor};
    }
  }

 private:
  static constexpr uint32_t kPerWord = 32 / T::kBits, kOthers = 4 * T::kRow;

  const uint32_t t_ = kept(lane_t()), codes_ = kept(lane_g() * 2 * T::kBits),
                 scales_ = kept(T::kCodes + lane_g() / 2 * 2);
  float sums_[kDim / 16][4] = {};  // of the high and the low halves of weights
};

// Empties the stages. A warp stores its sums of values after the last one.
template <typename Keys, typename Values, Pairs kPairs, typename R>
__device__ inline void empty_stages(const Run& run, const R& ring, const Rope& rope, float cap, uint32_t warp,
                                    float2 (&peaks_and_sums)[kWarps][kHeads]) {
  using S = Stage<Keys, Values>;
  using K = KeyScores<Keys, kPairs>;
  const uint32_t g = lane_g(), t = lane_t(), first_row = kept(warp * kRowsAtOnce),
                 row_of_warp = kept(K::of_row(g)), row = first_row + row_of_warp;
  const K keys(run, rope, row);
  // Offsets of the lane's rows in the first part of the first stage, in bytes.
  const uint32_t key_at = reinterpret_cast<uintptr_t>(run.keys) % 16 + row * Rows<Keys>::kRow,
                 value_at = S::kFirstValue + reinterpret_cast<uintptr_t>(run.values) % 16 +
                            (first_row + K::of_row(2 * t)) * Rows<Values>::kRow,
                 stages = kept(shared_address(ring.stages));
  // A lane has scores and weights of head t, and sums of them.
  float peak = -kInfinity, sum = 0;
  ValueSums<Values> out;
#pragma unroll 1
  for (uint32_t i = 0; i < run.stages(); ++i) {
    const uint32_t stage = stages + i % S::kCount * S::kBytes;
    const uint32_t first = run.first + i * 2 * kPart + first_row;  // the warp's first entry
    ring.wait_full(i);
    if (first < run.end) {
      const uint32_t left = run.end - first;
      float scores[2];
      keys.multiply({stage + key_at, stage + key_at + S::kKeys}, stage + S::kFirstQuery, scores);
#pragma unroll
      for (uint32_t part = 0; part < 2; ++part) {
        if (cap != 0) scores[part] = soft_cap(scores[part], cap * kLog2E);
        if (part * kPart + row_of_warp >= left) scores[part] = -kInfinity;
      }
      float top = fmaxf(scores[0], scores[1]);
      if (__any_sync(~0u, top > peak)) {
#pragma unroll
        for (uint32_t apart = 4; apart < kWarp; apart *= 2)
          top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
        const float shrink = top > peak ? power_of_two(peak - top) : 1;
        peak = fmaxf(peak, top);
        sum *= shrink;
        out.scale(shrink);
      }
      uint32_t weights[2];
#pragma unroll
      for (uint32_t part = 0; part < 2; ++part) {
        const float weight = power_of_two(scores[part] - (peak - kWeightBits));
        sum += weight;
        const float high = __half2float(__float2half_rn(weight));
        weights[part] = transposed(pair_of(weight, weight - high));
      }
      out.add(weights, {stage + value_at, stage + value_at + S::kValues}, left);
    }
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(ring.empty + i % S::kCount);
  }

  constexpr float kUnit = 1.0f / (1 << static_cast<int>(kWeightBits));
#pragma unroll
  for (uint32_t apart = 4; apart < kWarp; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  if (g == 0) peaks_and_sums[warp][t] = {peak, sum * kUnit};
  meet(1, kWarps * kWarp);  // no warp reads a stage any more
  out.store(ring.stages + warp * kOuts, kUnit);
  meet(1, kWarps * kWarp);
}

#endif

// Grid: blocks among those of a KV head.
template <typename Keys, typename Values, Pairs kPairs>
__global__ void __launch_bounds__(kThreads, 1)
    attend_runs_kernel(const StepParams* step, const HeadState* table, AttentionParams p, const float* q,
                       const typename Keys::Unit* k, const typename Values::Unit* v, Rope rope, Parts parts) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // 512 threads start with 128 of the 65536 registers each.
  constexpr int kFillerRegisters = 56, kOtherRegisters = 152;
  using S = Stage<Keys, Values>;
  extern __shared__ uint4 shared[];  // stages
  __shared__ uint64_t barriers[2 * S::kCount];
  __shared__ float2 peaks_and_sums[kWarps][kHeads];
  const Ring<S::kCount, S::kBytes> ring{reinterpret_cast<std::byte*>(shared), barriers, barriers + S::kCount};
  release_successor();
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < S::kCount; ++i) {
      init_barrier(ring.full + i, kWarpgroup / kWarp + 1);
      init_barrier(ring.empty + i, kWarps);
    }
    publish_barriers();
  }
  const StepParams s = *step;
  const HeadBlocks own_blocks = blocks_around(Attended(s, table, p, false));
  const HeadState state = table[p.first_head + min(own_blocks.head, p.heads - 1)];
  __syncthreads();
  await_predecessor();
  if (own_blocks.head == p.heads) return;  // a surplus block

  const uint32_t head = p.first_head + own_blocks.head, entries = step_entries(s, state);
  const uint32_t hidden = p.window && entries > p.window ? entries - p.window : 0, count = entries - hidden;
  const uint32_t share = rows_per_warp(count, own_blocks.count, 2 * kRowsAtOnce);
  const uint32_t place = block_of_heads() - own_blocks.first, first = min(place * share, count);
  const uint64_t first_entry = uint64_t(state.first) + hidden + first;
  const Run run{reinterpret_cast<const std::byte*>(k) + first_entry * Rows<Keys>::kRow,
                reinterpret_cast<const std::byte*>(v) + first_entry * Rows<Values>::kRow,
                first,
                min(first + share, count),
                count,
                static_cast<uint32_t>(s.position),
                p.rope.mode == kRopeList};
  if (threadIdx.x < kWarpgroup) {
    shrink_registers<kFillerRegisters>();
    fill_stages<Keys, Values, kPairs>(run, ring, q + head * p.group * kDim, p.group, p.scale * kLog2E, rope);
  } else {
    grow_registers<kOtherRegisters>();
    empty_stages<Keys, Values, kPairs>(run, ring, rope, p.cap, threadIdx.x / kWarp - kWarpgroup / kWarp,
                                       peaks_and_sums);
    combine_warps<true, kDim>(peaks_and_sums, kWarps, ring.stages, kOuts, p.group, threadIdx.x - kWarpgroup,
                              kWarps * kWarp, parts,
                              [&](uint32_t h) { return Parts::first(own_blocks, p.group, h) + place; });
  }
#endif
}

template <typename Keys, typename Values, Pairs kPairs>
void attend(const Launch& l, const Attention& op) {
  using S = Stage<Keys, Values>;
  const AttentionParams& p = op.p;
  const PoolGrid grid = pool_grid(l.card, p.heads, p.group, kHeads);
  attend_and_combine(l, op, grid, [&](const Parts& parts, const Rope& rope) {
    launch(l, attend_runs_kernel<Keys, Values, kPairs>, dim3(grid.each, p.heads), kThreads,
           S::kCount * S::kBytes, l.step, l.heads + p.head_state, p, data<float>(op.q),
           data<typename Keys::Unit>(op.k.values), data<typename Values::Unit>(op.v.values), rope, parts);
  });
}

}  // namespace

bool attend_runs(const Launch& l, const Attention& op) {
  const AttentionParams& p = op.p;
  const bool is_adjacent = p.rope.pairing == kRopeAdjacent;
  const auto is_aligned = [](const View& v) {
    return reinterpret_cast<uintptr_t>(data<std::byte>(v)) % 16 == 0;
  };
  if (op.list || l.card.major != 9 || l.card.minor != 0 || l.card.shared_bytes < kSharedBytes + (1 << 10) ||
      p.head_dim != kDim || p.group > kHeads || p.rope.n_rot == 0 || (!is_adjacent && p.rope.n_rot != kDim) ||
      !is_aligned(op.k.values) || !is_aligned(op.v.values))
    return false;
  bool done = false;
  with_formats(op.k.type, op.v.type, [&]<typename Keys, typename Values>(Keys, Values) {
    if constexpr (kBitsOf<Values> < 16 && kBitsOf<Values> <= kBitsOf<Keys> && kBitsOf<Keys> < 16) {
      is_adjacent ? attend<Keys, Values, Pairs::kAdjacent>(l, op)
                  : attend<Keys, Values, Pairs::kHalves>(l, op);
      done = true;
    }
  });
  return done;
}

}  // namespace thimble::cuda
