// The kernel of attend_view if values are channels of the keys.
#include "backends/cuda/attention/latent_tiles.cuh"
#include "backends/cuda/kv_format.cuh"

namespace thimble::cuda {
namespace {

// `o` has the width of a value as head_dim; rows have `key_dim` channels.
template <typename Shape, bool kIndexed>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attend_view_latent_kernel(const StepParams* step, ViewAttention o, uint32_t key_dim) {
  extern __shared__ uint4 shared[];
  constexpr uint32_t kKeys = Shape::kKeys;
  const LatentMemory<Shape> memory(shared);
  begin_kernel();
  const ViewBlock b = view_block<Shape::kVectors, kKeys, kIndexed>(o, *step);
  if (b.empty) return;
  const ViewPass<kIndexed> pass(*step, o, b.head);
  const __half* const keys = o.k + uint64_t(b.head) * o.p.view_capacity * key_dim;
  const auto load = [&](uint32_t tile) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnRows<Shape>; ++i) {
      const uint32_t row = own_row<Shape>(i), index = tile * kKeys + row;
      const bool there = index < pass.keys;
      copy_row<Shape, HalfRows>(memory.tile(tile), row, keys + uint64_t(there ? index : 0) * key_dim, there,
                                key_dim);
    }
  };
  if (b.first_tile < b.end_tile) load(b.first_tile);
  commit_copies();
  const uint32_t width = o.p.head_dim, group = o.p.group;
  const auto row_of = [&](uint32_t vector) { return (b.first_vector + vector) / group; };
  const auto query_head_of = [&](uint32_t vector) {
    return b.head * group + (b.first_vector + vector) % group;
  };
  const uint32_t first_position =
      o.p.rope.mode == kRopeList ? pass.first_index : static_cast<uint32_t>(step->position);
  AttentionParams of_keys = o.p;
  of_keys.head_dim = key_dim;
  load_latent_queries(memory, of_keys, o.rope, [&](uint32_t vector) {
    const uint32_t row = row_of(vector);
    if (row >= pass.n_rows) return LatentQuery{nullptr, 0};
    return LatentQuery{o.q + uint64_t(row) * o.p.row_stride + query_head_of(vector) * key_dim,
                       kIndexed ? pass.index_of(row) : first_position + row};
  });

  const auto ml_of = [&](uint32_t vector) {
    return o.ml + uint64_t(row_of(vector)) * (o.p.first_head + o.p.heads) * group + query_head_of(vector);
  };
  const auto y_of = [&](uint32_t vector) {
    return o.y + uint64_t(row_of(vector)) * o.p.y_stride + query_head_of(vector) * width;
  };
  // Whether a vector continues from the result of the previous pass.
  const auto continues = [&](uint32_t vector) {
    return !pass.first && b.part.index == 0 && row_of(vector) < pass.n_rows;
  };
  LatentTiles<Shape> rows(
      memory, key_dim - width,
      [&](uint32_t vector) {
        if (continues(vector)) return *ml_of(vector);
        if (!pass.first || b.part.index > 0 || !o.sinks) return float2{-kInfinity, 0};
        return float2{o.sinks[query_head_of(vector)] * kLog2E, 1};
      },
      [&](uint32_t vector, uint32_t channel) {
        if (!continues(vector) || channel >= width) return float2{0, 0};
        return float2{y_of(vector)[channel], y_of(vector)[channel + 1]};
      });
#pragma unroll 1
  for (uint32_t tile = b.first_tile; tile < b.end_tile; ++tile) {
    if (tile != b.first_tile) __syncthreads();  // the previous tile is no longer needed
    if (tile + 1 < b.end_tile) load(tile + 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();  // the tile, and before the first one the queries, are visible
    rows.add(memory.tile(tile), o.p.cap * kLog2E, needs_mask<kKeys>(b, tile), [&](uint32_t vector) {
      const uint32_t row = row_of(vector), first = tile * kKeys, from = pass.hidden(row),
                     to = pass.visible(row);
      return uint2{from - min(from, first), to - min(to, first)};
    });
  }
  rows.end();
  const bool divides = pass.last && b.part.count == 1;
  struct To {
    float* y;
    float factor;
  };
  rows.each_output(
      [&](uint32_t vector, float2 ml, bool writes) -> To {
        if (row_of(vector) >= pass.n_rows) return {nullptr, 0};
        float* y = y_of(vector);
        float2* to = ml_of(vector);
        if (b.part.index > 0) {
          const uint64_t at = uint64_t(b.part.place) * o.max_vectors + b.first_vector + vector;
          y = o.part_out + at * width;
          to = o.part_ml + at;
        }
        if (writes && !divides) *to = ml;
        return {y, divides ? 1 / ml.y : 1};
      },
      [&](const To& to, uint32_t channel, float2 x) {
        if (!to.y || channel >= width) return;
        to.y[channel] = x.x * to.factor;
        to.y[channel + 1] = x.y * to.factor;
      });
}

using Large = LatentShape<64, 64, true>;
using Small = LatentShape<16, 32, true>;
using Narrow = LatentShape<16, 32, false>;
static_assert(Small::kShared <= 99 << 10 && Narrow::kShared <= 99 << 10);

// Calls call(shape) with the shape of a launch.
template <typename Call>
void with_shape(const Launch& l, const AttentionParams& p, const Call& call) {
  if (is_narrow(p)) return call(Narrow());
  l.card.shared_bytes < Large::kShared ? call(Small()) : call(Large());
}

}  // namespace

LatentTiling latent_tiling(const Launch& l, const AttentionParams& p) {
  LatentTiling t{};
  with_shape(l, p, [&]<typename Shape>(Shape) { t = {Shape::kVectors, Shape::kKeys}; });
  return t;
}

void attend_latent(const Launch& l, const ViewAttention& o, const AttentionParams& p, uint32_t blocks) {
  with_shape(l, p, [&]<typename Shape>(Shape) {
    launch(l, o.row_index ? attend_view_latent_kernel<Shape, true> : attend_view_latent_kernel<Shape, false>,
           blocks, Shape::kThreads, Shape::kShared, l.step, o, p.head_dim);
  });
}

}  // namespace thimble::cuda
