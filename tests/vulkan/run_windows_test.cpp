// Layers whose runs do not all fit an operand: ops process them window by window, without changing a bit.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "backends/vulkan/heads.h"
#include "backends/vulkan/host/memory.h"
#include "backends/vulkan/host/vulkan_device.h"
#include "tests/support/random.h"
#include "tests/support/sessions.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

constexpr uint32_t kHeads = 8, kPage = 4, kViewCapacity = 96, kChunk = 2, kList = 1300, kSums = 5,
                   kSpilled = 1210, kRecalled = 3;

// How a layer stores its keys and values.
struct Rows {
  uint32_t head_dim;
  DType k = DType::kF16, v = DType::kF16;
};

std::vector<HeadState> unequal_runs() {
  std::vector<HeadState> heads;
  uint32_t first = 3;
  for (const uint32_t n : {700u, 3u, 0u, 300u, 1200u, 64u, 1100u, 900u}) {
    heads.push_back({.first = first, .capacity = n + 8, .n_entries = n});
    first += n + 9;
  }
  return heads;
}

// The results of one step with every op that reads or writes runs, array by array.
std::vector<std::vector<std::byte>> results_of_a_step(Device& device, const Rows& stored) {
  const uint32_t head_dim = stored.head_dim;
  const RopeParams rope_params{.mode = kRopeList, .pairing = kRopeHalves, .n_rot = head_dim};
  const std::vector<HeadState> heads = unequal_runs();
  const uint32_t entries = heads.back().first + heads.back().capacity;
  Random random;
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto place = [&](const auto& values) {
    const uint64_t bytes = values.size() * sizeof(values[0]);
    buffers.push_back(must(device.alloc(MemKind::kWorkspace, bytes)));
    const View view{buffers.back().get(), 0, bytes};
    must(device.write(view, values.data()));
    return view;
  };
  const auto floats = [&](size_t n) { return place(random.floats(n)); };
  // Rows of f16, or of any codes and scales that are as small as f16's numbers or smaller.
  const auto rows = [&](DType type, uint64_t n) {
    std::vector<uint16_t> values(n * kv_bytes(type, head_dim) / sizeof(uint16_t));
    const uint32_t least = type == DType::kF16 ? 0x3000 : 0x1000;
    for (uint16_t& v : values)
      v = static_cast<uint16_t>(least + random.below(0x0c00) + random.below(2) * 0x8000);
    return KvArray{place(values), type};
  };
  const auto zeros = [&](size_t n) { return place(std::vector<uint32_t>(n)); };
  const KvArray k = rows(stored.k, entries), v = rows(stored.v, entries),
                chunk_k = rows(stored.k, kHeads * kChunk), chunk_v = rows(stored.v, kHeads * kChunk);
  const View pos = zeros(entries), qkv = floats(3 * kHeads * head_dim), rope = floats((64 + 21) * head_dim),
             y = zeros(kHeads * head_dim), saturated = zeros(1), scores = zeros(kHeads * kList),
             lse = zeros(kHeads), bounds = zeros((entries / kPage + kHeads) * head_dim),
             view_k = zeros(kHeads * kViewCapacity * head_dim),
             view_v = zeros(kHeads * kViewCapacity * head_dim), chunk_pos = zeros(kHeads * kChunk),
             sums = zeros(kHeads * kSums * head_dim), cis = zeros(entries),
             chunk_cis = zeros(kHeads * kChunk), query_sums = zeros(kHeads * kQueryScoreSums),
             query_cis = zeros(entries), query_chunk_cis = zeros(kHeads * kChunk),
             keys = zeros(kHeads * kSpilled * head_dim), spilled_pos = zeros(kHeads * kSpilled),
             spilled_cis = zeros(kHeads * kSpilled), spilled = zeros(1 + kHeads);
  const KvArray to_k = rows(stored.k, kHeads * kSpilled), to_v = rows(stored.v, kHeads * kSpilled),
                row_k = rows(stored.k, kHeads * kRecalled), row_v = rows(stored.v, kHeads * kRecalled);
  std::vector<uint32_t> lists(kHeads * kList);  // every third entry, and the chunk's row
  for (uint32_t head = 0; head < kHeads; ++head) {
    uint32_t* list = &lists[head * kList];
    for (uint32_t entry = 0; entry < heads[head].n_entries; entry += 3) list[1 + list[0]++] = entry;
    list[1 + list[0]++] = heads[head].n_entries;
  }
  const View list = place(lists);

  const Needs needs = must(device.needs(
      {.layers = 1, .d_model = 128, .heads = kHeads, .kv_heads = kHeads, .head_dim = head_dim, .d_ff = 64},
      {.chunk = kChunk,
       .run_capacity = 1208,
       .layer_entries = entries,
       .reach = kList - 1,
       .view_capacity = kViewCapacity,
       .positions = kList,
       .heads = kHeads,
       .recalls = true}));
  const auto scratch = must(device.alloc(MemKind::kWorkspace, needs.workspace));
  const auto stream = must(device.open_stream({scratch.get(), 0, needs.workspace}, kHeads));
  auto recorder = stream->record(1);
  recorder->record(KvAppend{qkv,
                            rope,
                            k,
                            v,
                            pos,
                            saturated,
                            {.heads = kHeads,
                             .head_dim = head_dim,
                             .row_stride = 3 * kHeads * head_dim,
                             .k_column = kHeads * head_dim,
                             .v_column = 2 * kHeads * head_dim,
                             .into = kIntoPool,
                             .rope = rope_params}});
  recorder->record(Attention{qkv,
                             k,
                             v,
                             {},
                             rope,
                             {},
                             y,
                             {},
                             {.heads = kHeads,
                              .group = 1,
                              .head_dim = head_dim,
                              .row_stride = 3 * kHeads * head_dim,
                              .y_stride = kHeads * head_dim,
                              .source = kFromPool,
                              .scale = 0.25f,
                              .rope = rope_params}});
  recorder->record(TokenScore{qkv,
                              k,
                              rope,
                              {},
                              scores,
                              lse,
                              {.heads = kHeads,
                               .group = 1,
                               .head_dim = head_dim,
                               .row_stride = 3 * kHeads * head_dim,
                               .score_capacity = kList,
                               .scale = 1,
                               .rope = rope_params}});
  recorder->record(KvView{k,
                          v,
                          chunk_k,
                          chunk_v,
                          list,
                          rope,
                          view_k,
                          view_v,
                          {.heads = kHeads,
                           .head_dim = head_dim,
                           .chunk_capacity = kChunk,
                           .view_capacity = kViewCapacity,
                           .list_capacity = kList,
                           .rope = rope_params}});
  recorder->record(KvSpill{list,
                           k,
                           v,
                           chunk_k,
                           chunk_v,
                           pos,
                           cis,
                           chunk_pos,
                           chunk_cis,
                           to_k,
                           to_v,
                           keys,
                           spilled_pos,
                           spilled_cis,
                           spilled,
                           {.heads = kHeads,
                            .head_dim = head_dim,
                            .chunk_capacity = kChunk,
                            .list_capacity = kList,
                            .spill_capacity = kSpilled}});
  recorder->record(
      KvCompact{list,
                chunk_k,
                chunk_v,
                chunk_pos,
                {},
                k,
                v,
                pos,
                {},
                {.heads = kHeads, .head_dim = head_dim, .chunk_capacity = kChunk, .list_capacity = kList}});
  auto of_pages = stream->record(1);  // the step above selects entries
  of_pages->record(PageBounds{k, bounds, {.heads = kHeads, .head_dim = head_dim, .page = kPage}});
  of_pages->record(
      KeyDiff{k,
              chunk_k,
              sums,
              cis,
              chunk_cis,
              {.heads = kHeads, .head_dim = head_dim, .chunk_capacity = kChunk, .blocks = kSums}});
  for (std::unique_ptr<Recorder>* r : {&of_pages, &recorder}) {
    const auto program = must(stream->finish(std::move(*r)));
    must(stream->submit(*program, 0, 1, {.n_rows = 1, .n_init = 2, .n_local = 4, .select_k = 8}, heads));
    must(stream->wait());
  }
  // The step's row after the compaction; it moves to the front, because its position is 0.
  auto of_merge = stream->record(1);
  of_merge->record(KvMerge{k, v, pos, cis, {.heads = kHeads, .head_dim = head_dim}});
  std::vector<HeadState> compacted = heads;
  for (HeadState& head : compacted) head.keep = head.n_entries;
  const auto merging = must(stream->finish(std::move(of_merge)));
  std::vector<int32_t> positions(entries);
  for (const HeadState& head : compacted)
    for (uint32_t i = 0; i + 1 < head.n_entries; ++i) positions[head.first + i] = static_cast<int32_t>(5 + i);
  must(device.write(pos, positions.data()));
  must(stream->submit(*merging, 0, 1, {.n_rows = 1}, compacted));
  must(stream->wait());
  // Every third entry stays, and three rows come between them.
  std::vector<int32_t> row_pos;
  for (HeadState& head : compacted) {
    row_pos.insert(row_pos.end(), {4, 304, 2504});
    uint32_t* const stay = &lists[static_cast<size_t>(&head - compacted.data()) * kList];
    --stay[0];  // the chunk's row
    head.n_entries = stay[0] + kRecalled;
  }
  auto of_recall = stream->record(1);
  of_recall->record(
      KvRecall{place(lists),
               row_k,
               row_v,
               place(row_pos),
               place(std::vector<uint32_t>(kHeads, kRecalled)),
               k,
               v,
               pos,
               cis,
               {.heads = kHeads, .head_dim = head_dim, .list_capacity = kList, .row_capacity = kRecalled}});
  const auto recalling = must(stream->finish(std::move(of_recall)));
  for (const HeadState& head : heads)
    for (uint32_t i = 0; i < head.n_entries; ++i) positions[head.first + i] = static_cast<int32_t>(2 * i + 1);
  must(device.write(pos, positions.data()));
  must(stream->submit(*recalling, 0, 1, {}, compacted));
  must(stream->wait());
  // The mean over all heads needs the same number of entries in each.
  auto of_heads = stream->record(1);
  of_heads->record(QueryScore{qkv,
                              k,
                              chunk_k,
                              {},
                              rope,
                              {},
                              query_sums,
                              query_cis,
                              query_chunk_cis,
                              {.heads = kHeads,
                               .group = 1,
                               .head_dim = head_dim,
                               .row_stride = 3 * kHeads * head_dim,
                               .chunk_capacity = kChunk,
                               .kind = kQueryLast,
                               .rows = 1,
                               .scale = 0.25f,
                               .rope = rope_params}});
  std::vector<HeadState> equal = heads;
  for (HeadState& head : equal) head.n_entries = 7;
  const auto mean = must(stream->finish(std::move(of_heads)));
  must(stream->submit(*mean, 0, 1, {.n_rows = 1}, equal));
  must(stream->wait());
  std::vector<std::vector<std::byte>> results;
  for (const View& view :
       {k.values, v.values, pos, y, scores, lse, bounds, view_k, view_v, cis, chunk_cis, query_cis,
        query_chunk_cis, to_k.values, to_v.values, keys, spilled_pos, spilled_cis, spilled}) {
    results.emplace_back(view.bytes);
    must(device.read(results.back().data(), view));
  }
  return results;
}

TEST(VulkanRunWindows, ChangeNoBit) {
  const auto instance = vulkan::Instance::get();
  if (!instance.ok() || vulkan::find_gpus(**instance).empty()) GTEST_SKIP() << "there is no Vulkan device";
  // With q4_0 and f16, values are wider than keys, and decide how many entries a window has.
  for (const Rows& stored : {Rows{16}, Rows{32, DType::kQ4_0, DType::kF16}}) {
    SCOPED_TRACE(stored.head_dim);
    vulkan::Gpu gpu = vulkan::find_gpus(**instance).front();
    std::vector<std::vector<std::byte>> results[2];
    for (const bool narrow : {false, true}) {
      // For rows of 32 bytes, 80 KiB for a layer of 137: windows of 40 KiB, while the longest run has 38.
      const uint64_t bytes = 80 * 32 * kv_bytes(stored.v, stored.head_dim);
      if (narrow) gpu.limits.max_range = bytes + gpu.limits.offset_alignment;
      const auto context = must(vulkan::Context::open(**instance, gpu, strictly().messages));
      const auto device = must(vulkan::make_device(context));
      results[narrow] = results_of_a_step(*device, stored);
    }
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_TRUE(results[0][i] == results[1][i]) << "array " << i;
  }
}

}  // namespace
}  // namespace thimble::test
