// kv_view: copies a list's entries of pool and chunk into rows of halves, with keys rotated by list index. If
// values are channels of the keys, their arrays and their view are null.
#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/ops.h"
#include "backends/cuda/rope.cuh"

namespace thimble::cuda {
namespace {

template <typename Format>
struct Source {
  const typename Format::Unit *pool, *chunk;
};

// The address of a listed entry, in pool or chunk.
template <typename Format>
__device__ const typename Format::Unit* entry_at(const Source<Format>& s, const KvViewParams& p,
                                                 const HeadState& state, uint32_t head, uint32_t entry) {
  const uint32_t n = state.n_entries, row_units = Format::row_units(p.head_dim);
  return entry < n ? s.pool + (uint64_t(state.first) + entry) * row_units
                   : s.chunk + (uint64_t(head) * p.chunk_capacity + entry - n) * row_units;
}

union ViewUnit {  // 8 channels of the view
  uint4 bits;
  __half2 pairs[4];
};

// A thread makes 8 channels of a view row for kHeads heads, which share its cosines. If channels i and i +
// n_rot / 2 rotate together, it reads both units and writes its own. The units of a warp belong to the same
// rows, so nothing is read twice from memory. `states`: from KV head 0 of the layer on.
template <int kHeads, typename Keys, typename Values>
__global__ void __launch_bounds__(256)
    view_units_kernel(const StepParams* step, const HeadState* states, KvViewParams p, Source<Keys> k,
                      Source<Values> v, const uint32_t* __restrict__ lists, Rope rope,
                      uint4* __restrict__ view_k, uint4* __restrict__ view_v) {
  begin_kernel();
  const uint32_t units = p.head_dim / 8, i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t row = i / units, unit = i % units, index = p.first_entry + row;
  if (row >= p.view_capacity) return;
  const bool rotates = p.rope.mode == kRopeList && unit < p.rope.n_rot / 8,
             halves = p.rope.pairing == kRopeHalves;
  const uint32_t half_units = rope.pairs / 8, upper = halves && unit >= half_units;
  const uint32_t partner = !rotates || !halves ? unit : upper ? unit - half_units : unit + half_units;

  const uint32_t head0 = p.first_head + blockIdx.y * kHeads;
  const uint32_t heads = min(uint32_t{kHeads}, p.first_head + p.heads - head0);
  ViewUnit own[kHeads], other[kHeads], value[kHeads];
  bool there[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    there[h] = false;
    if (h >= heads) continue;
    const HeadState state = states[head0 + h];
    const EntryList list = entry_list(lists, head0 + h, p.list_capacity, step_entries(*step, state));
    there[h] = index < list.count;
    if (!there[h]) continue;
    const uint32_t entry = list[index];
    const auto* from = entry_at(k, p, state, head0 + h, entry);
    own[h].bits = Keys::load_halves(from, p.head_dim, unit);
    if (rotates && halves) other[h].bits = Keys::load_halves(from, p.head_dim, partner);
    if (view_v)
      value[h].bits = Values::load_halves(entry_at(v, p, state, head0 + h, entry), p.head_dim, unit);
  }
  bool any = false;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) any |= there[h];
  if (!any) return;

  float2 angle[8];  // 4 pairs if pairs are adjacent channels
  if (rotates) {
    const uint32_t first_pair = halves ? (upper ? partner : unit) * 8 : unit * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (halves || j < 4) angle[j] = rope.angle(index, first_pair + j);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (!there[h]) continue;
    if (rotates) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __half22float2(own[h].pairs[j]);
        float2 turned;
        if (halves) {
          const float2 y = __half22float2(other[h].pairs[j]), a = angle[2 * j], b = angle[2 * j + 1];
          turned = upper ? float2{y.x * a.y + x.x * a.x, y.y * b.y + x.y * b.x}
                         : float2{x.x * a.x - y.x * a.y, x.y * b.x - y.y * b.y};
        } else {
          turned = {x.x * angle[j].x - x.y * angle[j].y, x.x * angle[j].y + x.y * angle[j].x};
        }
        own[h].pairs[j] = __float22half2_rn(turned);
      }
    }
    const uint64_t to = (uint64_t(head0 + h) * p.view_capacity + row) * units + unit;
    view_k[to] = own[h].bits;
    if (view_v) view_v[to] = value[h].bits;
  }
}

// Any head_dim, n_rot and alignment: a thread makes a pair of channels of a view row in one head.
template <typename Keys, typename Values>
__global__ void view_pairs_kernel(const StepParams* step, const HeadState* states, KvViewParams p,
                                  Source<Keys> k, Source<Values> v, const uint32_t* lists, Rope rope,
                                  __half* view_k, __half* view_v) {
  begin_kernel();
  const uint32_t pairs = (p.head_dim + 1) / 2, i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t row = i / pairs, pair = i % pairs, index = p.first_entry + row,
                 head = p.first_head + blockIdx.y;
  const HeadState state = states[head];
  const EntryList list = entry_list(lists, head, p.list_capacity, step_entries(*step, state));
  if (row >= p.view_capacity || index >= list.count) return;
  const bool rotates = p.rope.mode == kRopeList && pair < rope.pairs;
  const uint32_t c0 = rotates ? first_of_pair(pair, p.rope.pairing) : 2 * pair;
  const uint32_t c1 = rotates ? second_of_pair(pair, p.rope.pairing, rope.pairs) : 2 * pair + 1;
  const uint32_t entry = list[index];
  const typename Keys::Unit* const from_k = entry_at(k, p, state, head, entry);
  const typename Values::Unit* const from_v = entry_at(v, p, state, head, entry);
  const uint64_t to = (uint64_t(head) * p.view_capacity + row) * p.head_dim;
  if (rotates) {
    const float2 angle = rope.angle(index, pair);
    const float x = Keys::load(from_k, p.head_dim, c0), y = Keys::load(from_k, p.head_dim, c1);
    view_k[to + c0] = __float2half_rn(x * angle.x - y * angle.y);
    view_k[to + c1] = __float2half_rn(x * angle.y + y * angle.x);
  }
  for (const uint32_t c : {c0, c1}) {
    if (c >= p.head_dim) continue;
    if (!rotates) view_k[to + c] = Keys::load_half(from_k, p.head_dim, c);
    if (view_v) view_v[to + c] = Values::load_half(from_v, p.head_dim, c);
  }
}

template <typename Keys, typename Values>
void view(const Launch& l, const KvView& op) {
  using Key = typename Keys::Unit;
  using Value = typename Values::Unit;
  const KvViewParams& p = op.p;
  const Source<Keys> k{data<Key>(op.pool_k.values), data<Key>(op.chunk_k.values)};
  const Source<Values> v{data<Value>(op.pool_v.values), data<Value>(op.chunk_v.values)};
  __half *const view_k = data<__half>(op.k), *const view_v = data<__half>(op.v);
  const Rope rope{data<float2>(op.rope), p.rope.n_rot / 2};
  uintptr_t addresses = 0;
  for (const void* a : {static_cast<const void*>(k.pool), static_cast<const void*>(k.chunk),
                        static_cast<const void*>(v.pool), static_cast<const void*>(v.chunk),
                        static_cast<const void*>(view_k), static_cast<const void*>(view_v)})
    addresses |= reinterpret_cast<uintptr_t>(a);
  const bool whole_units =
      p.rope.mode != kRopeList || p.rope.n_rot % (p.rope.pairing == kRopeHalves ? 16 : 8) == 0;
  if (addresses % 16 == 0 && p.head_dim % 8 == 0 && whole_units) {
    constexpr int kHeads = 4;
    const dim3 blocks(static_cast<uint32_t>(ceil_div(uint64_t(p.view_capacity) * (p.head_dim / 8), 256)),
                      static_cast<uint32_t>(ceil_div(p.heads, kHeads)));
    launch(l, view_units_kernel<kHeads, Keys, Values>, blocks, 256, 0, l.step, l.heads + p.head_state, p, k,
           v, data<uint32_t>(op.list), rope, reinterpret_cast<uint4*>(view_k),
           reinterpret_cast<uint4*>(view_v));
  } else {
    const dim3 blocks(
        static_cast<uint32_t>(ceil_div(uint64_t(p.view_capacity) * ((p.head_dim + 1) / 2), 256)), p.heads);
    launch(l, view_pairs_kernel<Keys, Values>, blocks, 256, 0, l.step, l.heads + p.head_state, p, k, v,
           data<uint32_t>(op.list), rope, view_k, view_v);
  }
}

}  // namespace

void kv_view(const Launch& l, const KvView& op) {
  with_formats(op.pool_k.type, op.pool_v.type,
               [&]<typename Keys, typename Values>(Keys, Values) { view<Keys, Values>(l, op); });
}

}  // namespace thimble::cuda
