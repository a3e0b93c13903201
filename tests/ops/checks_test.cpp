// Every op refuses operands that are smaller than its parameters say, either when it is recorded or with the
// step that would access memory past them.
#include "backends/checks.h"

#include <set>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

constexpr uint32_t kRows = 4, kHeads = 2, kGroup = 2, kQueries = kHeads * kGroup, kDim = 64, kPage = 4;
constexpr uint32_t kColumns = (kQueries + 2 * kHeads) * kDim, kEntries = 64, kChunk = 5, kViewEntries = 16;
constexpr uint32_t kCopies = 40, kListed = 12, kPositions = 100, kSlots = 3;
constexpr uint32_t kPages = 16;  // of a store, in each head
constexpr RopeParams kRope{.mode = kRopeList, .pairing = kRopeHalves, .n_rot = kDim};
constexpr RopeParams kOriginal{.mode = kRopeOriginal, .pairing = kRopeHalves, .n_rot = kDim};
constexpr RopeParams kHalf{.mode = kRopeOriginal, .pairing = kRopeHalves, .n_rot = kDim / 2};

// Two heads that fill the layer's arrays; with the step's rows, one of them fills its run.
std::vector<HeadState> filled(uint32_t rows) {
  return {{.first = 0, .capacity = 40, .n_entries = 40 - rows, .keep = kListed},
          {.first = 40, .capacity = 24, .n_entries = 20, .keep = kListed}};
}
std::vector<HeadState> equal(uint32_t rows) { return equal_heads(2, 32, 32 - rows, kListed); }
StepParams step_of(uint32_t rows) {
  return {.n_rows = rows,
          .position = static_cast<int>(kPositions - rows),
          .n_init = 2,
          .n_local = kRows,
          .select_k = kListed - 2 - kRows,
          .n_logit_rows = rows,
          .state_from = 0,
          .state_to = kSlots - 1};
}

// Hands out operands of the requested size, one of which is one element too small.
class Operands {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  Operands(Buffer* buffer, const DeviceInfo& device, uint32_t small)
      : buffer_(buffer), device_(device), small_(small) {}

  View operator()(uint64_t elements, uint64_t bytes = 4) {
    if (count_++ == small_) --elements;
    const View v{buffer_, offset_, elements * bytes};
    offset_ = round_up(offset_ + v.bytes, device_.alignment);
    EXPECT_LE(offset_, buffer_->size);
    return v;
  }
  KvArray keys(uint64_t entries) { return {(*this)(entries * kDim, 2)}; }
  StateArray state(uint64_t elements) {
    const View all = (*this)(kSlots * elements);
    return {all.slice(0, all.bytes - (kSlots - 1) * elements * 4), elements * 4, kSlots};
  }
  View view() { return view_of(kHeads * kViewEntries * kDim); }
  View view_of(uint64_t elements) { return (*this)(elements, device_.view_element_bytes); }
  // The table for 64 positions, of which lists use a few, or for 128, of which the text uses 100.
  View rope(const RopeParams& p) { return (*this)((p.mode == kRopeList ? 65 : 66) * kDim); }
  View gate() { return (*this)(sizeof(GateState) / 4); }
  Weight matrix(uint32_t rows, uint32_t cols) {
    Weight w;
    static_cast<View&>(w) = (*this)(rows * cols);
    w.rows = rows;
    w.cols = cols;
    return w;
  }
  uint32_t count() const { return count_; }

 private:
  Buffer* buffer_;
  const DeviceInfo& device_;
  uint32_t small_, count_ = 0;
  uint64_t offset_ = 0;
};

struct Case {
  const char* name;
  uint32_t rows;
  Op (*make)(Operands&);
  std::vector<HeadState> heads = filled(rows);
};

const Case kCases[] = {
    {"embed", kRows,
     [](Operands& o) -> Op {
       return Embed{o(kRows), o.matrix(9, 32), o(kRows * 32), {.cols = 32}};
     }},
    {"rms_norm", kRows,
     [](Operands& o) -> Op {
       const uint32_t elements = (kRows - 1) * 200 + 3 * 32;
       return RmsNorm{
           o(elements), o(32), o(elements), {.cols = 32, .groups = 3, .row_stride = 200, .rows = kStepRows}};
     }},
    {"rms_norm of every other vector", kRows,
     [](Operands& o) -> Op {
       return RmsNorm{o((kRows - 1) * 300 + 2 * 70 + 32),
                      o(32),
                      o((kRows - 1) * 200 + 3 * 32),
                      {.cols = 32,
                       .groups = 3,
                       .row_stride = 200,
                       .rows = kStepRows,
                       .x_row_stride = 300,
                       .x_group_stride = 70}};
     }},
    {"linear", kRows,
     [](Operands& o) -> Op {
       return Linear{o((kRows - 1) * 40 + 32),
                     o.matrix(16, 32),
                     o(16),
                     o((kRows - 1) * 20 + 16),
                     {.in_cols = 32, .out_cols = 16, .x_stride = 40, .y_stride = 20, .rows = kStepRows}};
     }},
    {"glu", kRows,
     [](Operands& o) -> Op {
       return Glu{
           o(kRows * 32), o.matrix(16, 32), o.matrix(16, 32), o(kRows * 16), {.in_cols = 32, .out_cols = 16}};
     }},
    {"scale", kRows,
     [](Operands& o) -> Op {
       return Scale{o((kRows - 1) * 40 + 32),
                    o((kRows - 1) * 40 + 32),
                    {.cols = 32, .row_stride = 40, .scale = 1, .growth = 1, .period = 2, .rows = kStepRows},
                    o(kRows)};
     }},
    {"route", kRows,
     [](Operands& o) -> Op {
       return Route{o(kRows * 8), o(8),         o(9),
                    o(kRows * 2), o(kRows * 2), {.experts = 8, .chosen = 2, .scale = 1}};
     }},
    {"expert_glu", kRows,
     [](Operands& o) -> Op {
       return ExpertGlu{o(kRows * 32),
                        o.matrix(8 * 16, 32),
                        o.matrix(8 * 16, 32),
                        o(8 * 16),
                        o(8 * 16),
                        o(9),
                        o(kRows * 2),
                        o(kRows * 2 * 16),
                        {.in_cols = 32, .out_cols = 16, .experts = 8, .chosen = 2}};
     }},
    {"expert_linear", kRows,
     [](Operands& o) -> Op {
       return ExpertLinear{o(kRows * 2 * 32), o.matrix(8 * 16, 32),
                           o(8 * 16),         o(9),
                           o(kRows * 2),      o(kRows * 2),
                           o(kRows * 16),     {.in_cols = 32, .out_cols = 16, .experts = 8, .chosen = 2}};
     }},
    {"activation", kRows,
     [](Operands& o) -> Op {
       return Activation{o(kRows * 32), {.cols = 32}};
     }},
    {"kv_append to the pool", 1,
     [](Operands& o) -> Op {
       return KvAppend{o(kColumns),
                       o.rope(kOriginal),
                       o.keys(kEntries),
                       o.keys(kEntries),
                       o(kEntries),
                       o(1),
                       {.heads = kHeads,
                        .head_dim = kDim,
                        .row_stride = kColumns,
                        .k_column = kQueries * kDim,
                        .v_column = (kQueries + kHeads) * kDim,
                        .into = kIntoPool,
                        .rope = kOriginal}};
     }},
    {"kv_append to the chunk", kRows,
     [](Operands& o) -> Op {
       return KvAppend{o(kRows * kColumns),
                       {},
                       o.keys(kHeads * kChunk),
                       o.keys(kHeads * kChunk),
                       o(kHeads * kChunk),
                       o(1),
                       {.heads = kHeads,
                        .head_dim = kDim,
                        .row_stride = kColumns,
                        .k_column = kQueries * kDim,
                        .v_column = (kQueries + kHeads) * kDim,
                        .chunk_capacity = kChunk,
                        .into = kIntoChunk,
                        .rope = kRope}};
     }},
    {"kv_append of rows with positions", kRows,
     [](Operands& o) -> Op {
       return KvAppend{o(kRows * kColumns),
                       {},
                       o.keys(kEntries),
                       o.keys(kEntries),
                       o(kEntries),
                       o(1),
                       {.heads = kHeads,
                        .head_dim = kDim,
                        .row_stride = kColumns,
                        .k_column = kQueries * kDim,
                        .v_column = (kQueries + kHeads) * kDim,
                        .into = kIntoPool,
                        .rope = kRope},
                       o(kRows)};
     }},
    {"sink_score", kRows,
     [](Operands& o) -> Op {
       return SinkScore{o(kRows * kQueries * 16),
                        o(kRows * kHeads * 16),
                        o(16),
                        o(16),
                        o(kHeads * 9 * 16),
                        o(kQueries),
                        o(kRows * kHeads),
                        {.heads = kHeads, .group = kGroup, .width = 16, .sinks = 9}};
     }},
    {"cis_store to the pool", 1,
     [](Operands& o) -> Op {
       return CisStore{o(kHeads), o(kEntries), {.heads = kHeads, .kind = kCisHead, .into = kIntoPool}};
     }},
    {"cis_store to the chunk", kRows,
     [](Operands& o) -> Op {
       return CisStore{o(kRows * kHeads),
                       o(kHeads * kChunk),
                       {.heads = kHeads, .kind = kCisHead, .chunk_capacity = kChunk, .into = kIntoChunk}};
     }},
    {"given_score of a run", kRows,
     [](Operands& o) -> Op {
       return GivenScore{o(40), o(kEntries), {}, {.heads = kHeads}};
     }},
    {"given_score of a run and a chunk", kRows,
     [](Operands& o) -> Op {
       return GivenScore{o(40), o(kEntries), o(kHeads * kChunk), {.heads = kHeads, .chunk_capacity = kChunk}};
     }},
    {"kv_view", kRows,
     [](Operands& o) -> Op {
       return KvView{o.keys(kEntries),
                     o.keys(kEntries),
                     o.keys(kHeads * kChunk),
                     o.keys(kHeads * kChunk),
                     o(kHeads * (1 + kListed)),
                     o.rope(kRope),
                     o.view(),
                     o.view(),
                     {.heads = kHeads,
                      .head_dim = kDim,
                      .chunk_capacity = kChunk,
                      .view_capacity = kViewEntries,
                      .list_capacity = 1 + kListed,
                      .rope = kRope}};
     }},
    {"attention to the view", kRows,
     [](Operands& o) -> Op {
       return Attention{o((kRows - 1) * kColumns + kQueries * kDim),
                        {o.view()},
                        {o.view()},
                        o(kHeads * (1 + kListed)),
                        o.rope(kRope),
                        o(kQueries),
                        o(kRows * kQueries * kDim),
                        o(kRows * kQueries * 2),
                        {.heads = kHeads,
                         .group = kGroup,
                         .head_dim = kDim,
                         .row_stride = kColumns,
                         .y_stride = kQueries * kDim,
                         .source = kFromView,
                         .view_capacity = kViewEntries,
                         .list_capacity = 1 + kListed,
                         .rope = kRope}};
     }},
    {"attention to the view of rows with indices", kRows,
     [](Operands& o) -> Op {
       return Attention{o((kRows - 1) * kColumns + kQueries * kDim),
                        {o.view()},
                        {o.view()},
                        o(kHeads * (1 + kListed)),
                        o.rope(kRope),
                        {},
                        o(kRows * kQueries * kDim),
                        o(kRows * kQueries * 2),
                        {.heads = kHeads,
                         .group = kGroup,
                         .head_dim = kDim,
                         .row_stride = kColumns,
                         .y_stride = kQueries * kDim,
                         .source = kFromView,
                         .view_capacity = kViewEntries,
                         .list_capacity = 1 + kListed,
                         .rope = kRope},
                        o(kRows)};
     }},
    {"attention to the pool", 1,
     [](Operands& o) -> Op {
       return Attention{o(kQueries * kDim),
                        o.keys(kEntries),
                        o.keys(kEntries),
                        o(kHeads * (1 + kListed)),
                        o.rope(kOriginal),
                        o(kQueries),
                        o(kQueries * kDim),
                        {},
                        {.heads = kHeads,
                         .group = kGroup,
                         .head_dim = kDim,
                         .row_stride = kColumns,
                         .y_stride = kQueries * kDim,
                         .source = kFromPool,
                         .list_capacity = 1 + kListed,
                         .rope = kOriginal}};
     }},
    {"attention to values in keys of the pool", 1,
     [](Operands& o) -> Op {
       return Attention{o(kQueries * kDim),
                        o.keys(kEntries),
                        {},
                        {},
                        o(66 * kDim / 2),
                        {},
                        o(kQueries * kDim / 2),
                        {},
                        {.heads = kHeads,
                         .group = kGroup,
                         .head_dim = kDim,
                         .row_stride = kColumns,
                         .y_stride = kQueries * kDim / 2,
                         .source = kFromPool,
                         .rope = kHalf}};
     }},
    {"kv_compact of keys", kRows,
     [](Operands& o) -> Op {
       return KvCompact{
           o(kHeads * (1 + kListed)),
           o.keys(kHeads * kChunk),
           {},
           o(kHeads * kChunk),
           o(kHeads * kChunk),
           o.keys(kEntries),
           {},
           o(kEntries),
           o(kEntries),
           {.heads = kHeads, .head_dim = kDim, .chunk_capacity = kChunk, .list_capacity = 1 + kListed}};
     }},
    {"attend_all", kRows,
     [](Operands& o) -> Op {
       constexpr uint32_t kBlocks = kPages * kStoredPage * kDim * 4 / 64;
       const auto stored = [&](uint64_t last) { return o(16 * kBlocks + last); };
       return AttendAll{o((kRows - 1) * kColumns + kQueries * kDim),
                        o.keys(kEntries),
                        o.keys(kEntries),
                        o(kEntries),
                        o.keys(kHeads * kChunk),
                        o.keys(kHeads * kChunk),
                        stored(4 * kPages),
                        stored(kPages),
                        {stored((kPages - 1) * kStoredPage * kDim + kStoredPage * kDim / 2)},
                        {stored((kPages - 1) * kStoredPage * kDim + kStoredPage * kDim / 2)},
                        o(kHeads),
                        // ranks up to those of all pages and 64 entries
                        o((64 + 1 + kPages * kStoredPage / 64) * kDim),
                        o(kQueries),
                        o((kRows - 1) * kColumns + kQueries * kDim),
                        {.heads = kHeads,
                         .group = kGroup,
                         .head_dim = kDim,
                         .row_stride = kColumns,
                         .y_stride = kColumns,
                         .chunk_capacity = kChunk,
                         .page_capacity = kPages,
                         .stored_stride = kBlocks,
                         .rows_stride = kBlocks,
                         .scale = 1,
                         .rope = kRope}};
     }},
    {"kv_compact", kRows,
     [](Operands& o) -> Op {
       return KvCompact{
           o(kHeads * (1 + kListed)),
           o.keys(kHeads * kChunk),
           o.keys(kHeads * kChunk),
           o(kHeads * kChunk),
           o(kHeads * kChunk),
           o.keys(kEntries),
           o.keys(kEntries),
           o(kEntries),
           o(kEntries),
           {.heads = kHeads, .head_dim = kDim, .chunk_capacity = kChunk, .list_capacity = 1 + kListed}};
     }},
    {"kv_merge", kRows,
     [](Operands& o) -> Op {
       return KvMerge{
           o.keys(kEntries), o.keys(kEntries), o(kEntries), o(kEntries), {.heads = kHeads, .head_dim = kDim}};
     }},
    {"kv_spill", kRows,
     [](Operands& o) -> Op {
       const uint32_t copies = kHeads * kCopies;
       return KvSpill{o(kHeads * (1 + kListed)),
                      o.keys(kEntries),
                      o.keys(kEntries),
                      o.keys(kHeads * kChunk),
                      o.keys(kHeads * kChunk),
                      o(kEntries),
                      o(kEntries),
                      o(kHeads * kChunk),
                      o(kHeads * kChunk),
                      o.keys(copies),
                      o.keys(copies),
                      o(copies * kDim),
                      o(copies),
                      o(copies),
                      o(1 + kHeads),
                      {.heads = kHeads,
                       .head_dim = kDim,
                       .chunk_capacity = kChunk,
                       .list_capacity = 1 + kListed,
                       .spill_capacity = kCopies}};
     }},
    {"kv_recall", kRows,
     [](Operands& o) -> Op {
       return KvRecall{o(kHeads * (1 + kListed)),
                       o.keys(kHeads * 5),
                       o.keys(kHeads * 5),
                       o(kHeads * 5),
                       o(kHeads),
                       o.keys(kEntries),
                       o.keys(kEntries),
                       o(kEntries),
                       o(kEntries),
                       {.heads = kHeads, .head_dim = kDim, .list_capacity = 1 + kListed, .row_capacity = 5}};
     }},
    {"query_keep", kRows,
     [](Operands& o) -> Op {
       return QueryKeep{o((kRows - 1) * 40 + 24), o(3 * 24), {.cols = 24, .row_stride = 40, .ring = 3}};
     }},
    {"page_vote", 1,
     [](Operands& o) -> Op {
       constexpr uint32_t kPageBytes = kStoredPage * kDim * 4, kBlocks = kPages * kPageBytes / 64;
       const auto stored = [&](uint64_t last) { return o(16 * kBlocks + last); };
       return PageVote{o(3 * kQueries * kDim),
                       o(3),
                       o(kHeads * (1 + kListed)),
                       o(kEntries),
                       stored(4 * kPages),
                       stored(kPages),
                       {stored((kPages - 1) * kStoredPage * kDim + kStoredPage * kDim / 2)},
                       o(kHeads),
                       o((64 + 1) * kDim),
                       o(kHeads * kPages),
                       {.heads = kHeads,
                        .group = kGroup,
                        .head_dim = kDim,
                        .cols = kQueries * kDim,
                        .ring = 3,
                        .list_capacity = 1 + kListed,
                        .page_capacity = kPages,
                        .stored_stride = kBlocks,
                        .rows_stride = kBlocks,
                        .page_bytes = kPageBytes,
                        .scale = 1,
                        .rope = kRope}};
     }},
    {"query_gate", 1,
     [](Operands& o) -> Op {
       return QueryGate{
           o(kQueries * kDim), o(kQueries * kDim), o.gate(), {.cols = kQueries * kDim, .heads = kHeads}};
     }},
    {"token_score", kRows,
     [](Operands& o) -> Op {
       return TokenScore{o((kRows - 1) * kColumns + kQueries * kDim),
                         o.keys(kEntries),
                         o.rope(kRope),
                         o.gate(),
                         o(kQueries * 36),
                         o(kQueries),
                         {.heads = kHeads,
                          .group = kGroup,
                          .head_dim = kDim,
                          .row_stride = kColumns,
                          .score_capacity = 36,
                          .scale = 1,
                          .rope = kRope}};
     }},
    {"page_bounds", 1,
     [](Operands& o) -> Op {
       return PageBounds{o.keys(kEntries),
                         o((kEntries / kPage + 1) * 2 * kDim, 2),
                         {.heads = kHeads, .head_dim = kDim, .page = kPage}};
     }},
    {"key_diff of a run", 0,
     [](Operands& o) -> Op {
       return KeyDiff{o.keys(kEntries), {}, o(kHeads * kDim),
                      o(kEntries),      {}, {.heads = kHeads, .head_dim = kDim, .blocks = 1}};
     }},
    {"key_diff of a run and a chunk", kRows,
     [](Operands& o) -> Op {
       return KeyDiff{
           o.keys(kEntries),   o.keys(kHeads * kChunk),
           o(kHeads * kDim),   o(kEntries),
           o(kHeads * kChunk), {.heads = kHeads, .head_dim = kDim, .chunk_capacity = kChunk, .blocks = 1}};
     }},
    {"short_conv", kRows,
     [](Operands& o) -> Op {
       return ShortConv{o(kRows * 3 * 32),
                        o(32 * 3),
                        {},
                        o.state(2 * 32),
                        o(kRows * 32),
                        {.channels = 32,
                         .taps = 3,
                         .x_column = 32,
                         .times_column = 0,
                         .gate_column = 64,
                         .x_stride = 96,
                         .y_stride = 32,
                         .act = kActNone}};
     }},
    {"short_conv without gates", kRows,
     [](Operands& o) -> Op {
       return ShortConv{o((kRows - 1) * 40 + 35),
                        o(32 * 3),
                        o(32),
                        o.state(2 * 32),
                        o(kRows * 32),
                        {.channels = 32,
                         .taps = 3,
                         .x_column = 3,
                         .times_column = kNoColumn,
                         .gate_column = kNoColumn,
                         .x_stride = 40,
                         .y_stride = 32,
                         .act = kActSilu}};
     }},
    {"delta_net", kRows,
     [](Operands& o) -> Op {
       return DeltaNet{o(kRows * 8 * 32),
                       o(kRows * 10),
                       o(4),
                       o(4),
                       o.state(4 * 32 * 32),
                       o(kRows * 4 * 32),
                       {.key_heads = 2,
                        .value_heads = 4,
                        .width = 32,
                        .q_column = 0,
                        .k_column = 64,
                        .v_column = 128,
                        .qkv_stride = 256,
                        .alpha_column = 0,
                        .beta_column = 6,
                        .gates_stride = 10,
                        .y_stride = 128}};
     }},
    {"ssm", kRows,
     [](Operands& o) -> Op {
       return Ssm{o(kRows * (128 + 2 * 64)),
                  o((kRows - 1) * 9 + 3 + 4),
                  o(4),
                  o(4),
                  o(4),
                  o.state(4 * 32 * 32),
                  o(kRows * 4 * 32),
                  {.heads = 4,
                   .groups = 2,
                   .width = 32,
                   .state = 32,
                   .x_column = 0,
                   .b_column = 128,
                   .c_column = 192,
                   .xbc_stride = 256,
                   .dt_column = 3,
                   .dt_stride = 9,
                   .y_stride = 128}};
     }},
    {"gated_norm", kRows,
     [](Operands& o) -> Op {
       const uint32_t elements = (kRows - 1) * 200 + 3 * 32;
       return GatedNorm{o(elements),
                        o((kRows - 1) * 150 + 5 + 3 * 32),
                        o(32),
                        o(elements),
                        {.cols = 32,
                         .groups = 3,
                         .row_stride = 200,
                         .z_stride = 150,
                         .z_column = 5,
                         .order = kNormThenGate,
                         .act = kActSilu}};
     }},
    {"gated_norm of groups with weights", kRows,
     [](Operands& o) -> Op {
       return GatedNorm{o(kRows * 96),
                        o(kRows * 96),
                        o(3 * 32),
                        o(kRows * 96),
                        {.cols = 32,
                         .groups = 3,
                         .row_stride = 96,
                         .z_stride = 96,
                         .order = kGateThenNorm,
                         .act = kActSigmoid,
                         .weight_per_group = 1}};
     }},
    {"gate", kRows,
     [](Operands& o) -> Op {
       return Gate{o((kRows - 1) * 210 + 7 + 2 * 64 + 32),
                   o((kRows - 1) * 100 + 96),
                   {.cols = 32,
                    .groups = 3,
                    .x_stride = 100,
                    .g_stride = 210,
                    .g_column = 7,
                    .g_group_stride = 64,
                    .g_cols = 32}};
     }},
    {"head_linear", kRows,
     [](Operands& o) -> Op {
       return HeadLinear{o((kRows - 1) * 150 + 40 + 32 + 5),
                         o.matrix(3 + 20 + 16, 32),
                         o((kRows - 1) * 60 + 25 + 5 + 16),
                         {.heads = 2,
                          .in_cols = 32,
                          .out_cols = 16,
                          .copied = 5,
                          .x_stride = 150,
                          .x_head_stride = 40,
                          .y_stride = 60,
                          .y_head_stride = 25,
                          .w_first = 3,
                          .w_head_rows = 20}};
     }},
    {"lift_view", kRows,
     [](Operands& o) -> Op {
       return LiftView{o.view_of(kViewEntries * (8 + 64)),
                       {},
                       o.matrix(2 * 20 + 4, 64),
                       o.matrix(3 + 2 * 24, 64),
                       o.view_of(2 * kViewEntries * (8 + 16)),
                       o.view_of(2 * kViewEntries * (8 + 16)),
                       {.heads = 2,
                        .rotated = 8,
                        .latent = 64,
                        .key_cols = 16,
                        .value_cols = 24,
                        .k_first = 8,
                        .k_head_rows = 20,
                        .v_first = 3,
                        .v_head_rows = 24,
                        .view_capacity = kViewEntries}};
     }},
    {"gate of one number", kRows,
     [](Operands& o) -> Op {
       return Gate{
           o(kRows), o(kRows * 32), {.cols = 32, .groups = 1, .x_stride = 32, .g_stride = 1, .g_cols = 1}};
     }},
    {"score_mix of a run", 0,
     [](Operands& o) -> Op {
       return ScoreMix{o(kEntries), {}, o(kEntries), {}, {.heads = kHeads}};
     }},
    {"score_mix of a run and a chunk", kRows,
     [](Operands& o) -> Op {
       return ScoreMix{o(kEntries),
                       o(kHeads * kChunk),
                       o(kEntries),
                       o(kHeads * kChunk),
                       {.heads = kHeads, .chunk_capacity = kChunk}};
     }},
    {"query_score of the last query", 0,
     [](Operands& o) -> Op {
       return QueryScore{o(kQueries * kDim),
                         o.keys(kEntries),
                         {},
                         {},
                         o.rope(kRope),
                         o(kQueries),
                         o(kQueries * kQueryScoreSums),
                         o(kEntries),
                         {},
                         {.heads = kHeads, .group = kGroup, .head_dim = kDim, .rows = 1, .rope = kRope}};
     },
     equal(0)},
    {"query_score of the last query after a chunk", kRows,
     [](Operands& o) -> Op {
       return QueryScore{o(kQueries * kDim),
                         o.keys(kEntries),
                         o.keys(kHeads * kChunk),
                         {},
                         o.rope(kOriginal),
                         {},
                         o(kQueries * kQueryScoreSums),
                         o(kEntries),
                         o(kHeads * kChunk),
                         {.heads = kHeads,
                          .group = kGroup,
                          .head_dim = kDim,
                          .chunk_capacity = kChunk,
                          .rows = 1,
                          .rope = kOriginal}};
     },
     equal(kRows)},
    {"query_score of heads with lists", 0,
     [](Operands& o) -> Op {
       return QueryScore{o(kQueries * kDim),
                         o.keys(kEntries),
                         {},
                         o(kHeads * (1 + kListed)),
                         o.rope(kRope),
                         {},
                         o(kQueries * kQueryScoreSums),
                         o(kEntries),
                         {},
                         {.heads = kHeads,
                          .group = kGroup,
                          .head_dim = kDim,
                          .kind = kQueryHeads,
                          .rows = 1,
                          .list_capacity = 1 + kListed,
                          .rope = kRope}};
     }},
    {"query_score of rows", kRows,
     [](Operands& o) -> Op {
       return QueryScore{o((kRows - 1) * kColumns + kQueries * kDim),
                         o.keys(kEntries),
                         o.keys(kHeads * kChunk),
                         {},
                         o.rope(kRope),
                         {},
                         o(kQueries * kRows * kQueryScoreSums),
                         o(kEntries),
                         {},
                         {.heads = kHeads,
                          .group = kGroup,
                          .head_dim = kDim,
                          .row_stride = kColumns,
                          .chunk_capacity = kChunk,
                          .kind = kQueryRows,
                          .rows = kRows,
                          .sinks = 2,
                          .rope = kRope}};
     }},
    {"scatter_add of entries", 0,
     [](Operands& o) -> Op {
       return ScatterAdd{o(kEntries), {}, {}, o(kPositions), {.heads = kHeads, .slots = kPositions}};
     }},
    {"scatter_add of weights and lists", 0,
     [](Operands& o) -> Op {
       return ScatterAdd{o(kEntries),
                         o(kEntries),
                         o(kHeads * (1 + kListed)),
                         o(kPositions),
                         {.heads = kHeads, .slots = kPositions, .list_capacity = 1 + kListed}};
     }},
    {"label", kRows,
     [](Operands& o) -> Op {
       return Label{o((kRows - 1) * kColumns + kQueries * kDim),
                    o(kRows),
                    o.keys(kEntries),
                    o.keys(kHeads * kChunk),
                    o.rope(kOriginal),
                    o(4),
                    o(kRows * 7),
                    o(kQueries * 36),
                    o(kQueries),
                    o(kRows * kQueries),
                    o(kHeads * 36),
                    o(kHeads * 36),
                    {.heads = kHeads,
                     .group = kGroup,
                     .head_dim = kDim,
                     .row_stride = kColumns,
                     .chunk_capacity = kChunk,
                     .label_capacity = 36,
                     .x_cols = 7,
                     .scale = 1,
                     .least = -30,
                     .rope = kOriginal}};
     }},
    {"page_score", 1,
     [](Operands& o) -> Op {
       return PageScore{o(kQueries * kDim),
                        o((kEntries / kPage + 1) * 2 * kDim, 2),
                        o.rope(kOriginal),
                        o(kQueries * 10),
                        o(kQueries),
                        {.heads = kHeads,
                         .group = kGroup,
                         .head_dim = kDim,
                         .row_stride = kColumns,
                         .page = kPage,
                         .score_capacity = 10,
                         .scale = 1,
                         .rope = kOriginal}};
     }},
    {"vote of a group", kRows,
     [](Operands& o) -> Op {
       return Vote{o(kQueries * 36),
                   o(kQueries),
                   {},
                   o.gate(),
                   o(kHeads * 40),
                   {.heads = kHeads,
                    .group = kGroup,
                    .scope = kVoteGroup,
                    .page = 1,
                    .score_capacity = 36,
                    .vote_capacity = 40}};
     }},
    {"vote of a layer", kRows,
     [](Operands& o) -> Op {
       return Vote{o(kQueries * 28),
                   o(kQueries),
                   o(kEntries),
                   o.gate(),
                   o(kPositions),
                   {.heads = kHeads,
                    .group = kGroup,
                    .scope = kVoteLayer,
                    .page = 1,
                    .score_capacity = 28,
                    .vote_capacity = kPositions}};
     },
     equal(kRows)},
    {"top_k of a step", kRows,
     [](Operands& o) -> Op {
       return TopK{o(kHeads * 36),
                   {},
                   {},
                   o.gate(),
                   o(kHeads * (1 + kListed)),
                   {.heads = kHeads,
                    .keep = kKeepOfStep,
                    .page = 1,
                    .score_capacity = 36,
                    .list_capacity = 1 + kListed}};
     }},
    {"top_k by position", kRows,
     [](Operands& o) -> Op {
       return TopK{o(kPositions),
                   {},
                   o(kEntries),
                   {},
                   o(kHeads * (1 + kListed)),
                   {.heads = kHeads,
                    .keep = kKeepOfStep,
                    .page = 1,
                    .by_position = 1,
                    .score_capacity = kPositions,
                    .list_capacity = 1 + kListed}};
     },
     equal(kRows)},
    {"top_k of a head", kRows,
     [](Operands& o) -> Op {
       return TopK{o(kEntries),
                   o(kHeads * kChunk),
                   {},
                   {},
                   o(kHeads * (1 + kListed)),
                   {.heads = kHeads,
                    .keep = kKeepOfHead,
                    .page = 1,
                    .in_runs = 1,
                    .chunk_capacity = kChunk,
                    .list_capacity = 1 + kListed}};
     }},
    {"arg_max", kRows,
     [](Operands& o) -> Op {
       return ArgMax{o(kRows * 32), o(kRows), {.cols = 32}};
     }},
    {"log_prob", kRows,
     [](Operands& o) -> Op {
       return LogProb{o(kRows * 32), o(kRows), o(kRows), {.cols = 32}};
     }},
    {"copy", kRows,
     [](Operands& o) -> Op {
       return Copy{o((kRows - 1) * 40 + 32),
                   o((kRows - 1) * 50 + 32),
                   {.cols = 32, .src_stride = 40, .dst_stride = 50, .from_logit_row = 1, .to_ring_row = 1}};
     }},
    {"stage", kRows,
     [](Operands& o) -> Op {
       return Stage{o(32), o(32)};
     }},
};

class Checks : public OpTest {
 protected:
  void SetUp() override {
    OpTest::SetUp();
    info_ = device().info();
    const SessionShape shape{.chunk = kRows,
                             .run_capacity = 40,
                             .layer_entries = kEntries,
                             .reach = 40 + kRows,
                             .view_capacity = kViewEntries,
                             .positions = kPositions,
                             .heads = kHeads,
                             .stored_pages = kPages,
                             .recalls = true,
                             .voted_pages = kPages,
                             .voters = 3};
    size_for(kHeads, kGroup, kDim, shape);
    auto needs = device().needs(model, session);
    ASSERT_TRUE(needs.ok()) << needs.status().message();
    auto workspace = device().alloc(MemKind::kWorkspace, std::max<uint64_t>(needs->workspace, 64));
    auto buffer = device().alloc(MemKind::kWorkspace, 1 << 20);
    ASSERT_TRUE(workspace.ok() && buffer.ok());
    workspace_ = std::move(*workspace);
    buffer_ = std::move(*buffer);
    auto stream = device().open_stream({workspace_.get(), 0, needs->workspace}, kHeads);
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    stream_ = std::move(*stream);
  }
  void TearDown() override {
    stream_.reset();
    buffer_.reset();
    workspace_.reset();
  }

  Operands operands(uint32_t small = Operands::kNone) { return {buffer_.get(), info_, small}; }

  // The device's answer to an op and a step.
  Status run_op(const Op& op, uint32_t rows, const StepParams& step, const std::vector<HeadState>& heads) {
    auto recorder = stream_->record(rows);
    recorder->segment();
    recorder->record(op);
    THIMBLE_LET(program, stream_->finish(std::move(recorder)));
    THIMBLE_TRY(stream_->submit(*program, 0, 1, step, heads));
    return stream_->wait();
  }
  // The answer of the checks alone; nothing runs.
  Status check(const Op& op, uint32_t rows, const StepParams& step, const std::vector<HeadState>& heads) {
    ProgramBounds bounds;
    bounds.max_rows = rows;
    THIMBLE_TRY(check_op(op, info_, bounds));
    struct OneSegment : Program {
      OneSegment() { segments = 1; }
    };
    return check_submit(OneSegment(), bounds, 0, 1, step, heads);
  }
  void expect_refused(const Op& op, uint32_t rows, const StepParams& step,
                      const std::vector<HeadState>& heads, Code code = Code::kInternal) {
    const Status status = run_op(op, rows, step, heads);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(op_name(op)), std::string::npos) << status.message();
  }

 private:
  DeviceInfo info_;
  std::unique_ptr<Buffer> workspace_, buffer_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(Checks, OperandsAreAsLargeAsTheirParametersSay) {
  std::set<size_t> ops;
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    Operands whole = operands();
    const Op op = c.make(whole);
    ops.insert(op.index());
    if (!device().supports(op)) continue;
    const Status accepted = check(op, c.rows, step_of(c.rows), c.heads);
    EXPECT_TRUE(accepted.ok()) << accepted.message();
    for (uint32_t small = 0; small < whole.count(); ++small) {
      SCOPED_TRACE(small);
      Operands one_less = operands(small);
      expect_refused(c.make(one_less), c.rows, step_of(c.rows), c.heads);
    }
  }
  EXPECT_EQ(ops.size(), std::variant_size_v<Op>);
}

// Steps that a program of one op refuses; each differs in one value from a step that it accepts.
TEST_P(Checks, StepsFitTheirProgram) {
  const auto find = [](const char* name) {
    return *std::find_if(std::begin(kCases), std::end(kCases),
                         [&](const Case& c) { return std::string(c.name) == name; });
  };
  const auto refuses = [&](const char* name, const auto& change) {
    SCOPED_TRACE(name);
    const Case c = find(name);
    Operands whole = operands();
    const Op op = c.make(whole);
    if (!device().supports(op)) return;
    StepParams step = step_of(c.rows);
    std::vector<HeadState> heads = c.heads;
    change(step, heads);
    expect_refused(op, c.rows, step, heads);
  };
  using Heads = std::vector<HeadState>;
  const auto one_entry_more = [](StepParams&, Heads& heads) { ++heads[0].n_entries; };
  const auto one_position_more = [](StepParams& s, Heads&) { ++s.position; };
  refuses("kv_append to the pool", one_entry_more);
  // 128 is the end of the table
  refuses("kv_append to the pool", [](StepParams& s, Heads&) { s.position = 128; });
  refuses("kv_append to the pool", [](StepParams&, Heads& heads) { heads[1].first = 41; });
  refuses("attention to the pool", one_entry_more);
  refuses("attention to the pool", [](StepParams& s, Heads&) { s.position = 128; });
  refuses("kv_compact", [](StepParams&, Heads& heads) { heads[1].keep = 100, heads[1].n_entries = 21; });
  refuses("page_bounds", one_entry_more);
  refuses("page_bounds", [](StepParams&, Heads& heads) { heads[1].first = 44, heads[1].capacity = 20; });
  refuses("token_score", [](StepParams& s, Heads&) { s.n_local = 3; });  // one more entry in the middle
  refuses("vote of a group", [](StepParams& s, Heads&) { s.n_local = 3; });
  refuses("vote of a layer", one_position_more);
  refuses("vote of a layer", [](StepParams&, Heads& heads) { --heads[1].n_entries; });
  refuses("query_score of the last query", [](StepParams&, Heads& heads) { --heads[1].n_entries; });
  refuses("query_score of rows",
          [](StepParams&, Heads& heads) { heads[1].n_entries = kRows - 1; });  // they are not read again
  refuses("top_k of a step", [](StepParams& s, Heads&) { ++s.select_k; });
  refuses("top_k by position", one_position_more);
  refuses("top_k of a head", [](StepParams&, Heads& heads) { ++heads[1].keep; });
  refuses("short_conv", [](StepParams& s, Heads&) { s.state_from = kSlots; });
  refuses("short_conv", [](StepParams& s, Heads&) { s.state_to = kSlots; });
  refuses("short_conv", [](StepParams& s, Heads&) { s.state_to = kNoState; });
  refuses("short_conv", [](StepParams& s, Heads&) { s.state_to = s.state_from; });  // it is in use
  refuses("delta_net", [](StepParams& s, Heads&) { s.state_from = kSlots; });
  refuses("delta_net", [](StepParams& s, Heads&) { s.state_to = kSlots; });
  refuses("ssm", [](StepParams& s, Heads&) { s.state_from = kSlots; });
  refuses("ssm", [](StepParams& s, Heads&) { s.state_to = kSlots; });
  refuses("copy", [](StepParams& s, Heads&) { s.first_logit_row = 1; });
  refuses("copy", [](StepParams& s, Heads&) { s.ring_row = 1; });
}

// A bug of 0.2: votes were written past the end of their buffer once a pool had outgrown it.
TEST_P(Checks, VotesFitEveryEntryOfASelectingStep) {
  const auto vote = [&](uint32_t capacity) {
    Operands o = operands();
    return Vote{o(kQueries * 40),
                o(kQueries),
                {},
                {},
                o(kHeads * capacity),
                {.heads = kHeads,
                 .group = kGroup,
                 .scope = kVoteGroup,
                 .page = 1,
                 .score_capacity = 40,
                 .vote_capacity = capacity}};
  };
  const StepParams selects = step_of(1);
  StepParams attends_all = selects;
  attends_all.select_k = 40;
  EXPECT_TRUE(check(vote(40), 1, selects, filled(1)).ok());
  expect_refused(vote(39), 1, selects, filled(1));
  EXPECT_TRUE(check(vote(39), 1, attends_all, filled(1)).ok());  // no votes are made
}

// Rows may have explicit positions or indices if nothing else relies on them being consecutive.
TEST_P(Checks, RowsWithIndicesNeedAListAndAView) {
  const auto made = [&](const char* name) {
    const Case& c = *std::find_if(std::begin(kCases), std::end(kCases),
                                  [&](const Case& one) { return std::string(one.name) == name; });
    Operands whole = operands();
    return c.make(whole);
  };
  KvAppend append = std::get<KvAppend>(made("kv_append to the pool"));  // under kRopeOriginal
  append.positions = append.qkv;
  expect_refused(append, 1, step_of(1), filled(1));
  const auto refuses = [&](const char* name, const auto& change) {
    Attention op = std::get<Attention>(made(name));
    op.row_index = op.q;
    change(op.p);
    expect_refused(op, 1, step_of(1), filled(1));
  };
  refuses("attention to the pool", [](AttentionParams&) {});
  refuses("attention to the view", [](AttentionParams& p) { p.rope.mode = kRopeOriginal; });
  refuses("attention to the view", [](AttentionParams& p) { p.window = 5; });
}

TEST_P(Checks, AScaleGrowsOnlyWithPositions) {
  const auto scale = [&](uint32_t rows, uint32_t period) {
    const Case& c = *std::find_if(std::begin(kCases), std::end(kCases),
                                  [](const Case& one) { return std::string(one.name) == "scale"; });
    Operands whole = operands();
    Scale op = std::get<Scale>(c.make(whole));
    op.p.rows = rows;
    op.p.period = period;
    return op;
  };
  EXPECT_TRUE(check(scale(kStepRows, 1), kRows, step_of(kRows), filled(kRows)).ok());
  expect_refused(scale(kStepRows, 0), kRows, step_of(kRows), filled(kRows));
  // Rows of logits have no positions
  expect_refused(scale(kLogitRows, 1), kRows, step_of(kRows), filled(kRows));
}

TEST_P(Checks, TheNumberOfMergedRowsIsLimited) {
  const auto held = [](uint32_t rows) { return equal_heads(1, 100, 100 - rows, 50); };
  const auto merge = [&] {
    Operands o = operands();
    return KvMerge{o.keys(100), o.keys(100), o(100), o(100), {.heads = 1, .head_dim = kDim}};
  };
  const uint32_t most = kMostMergedRows;
  EXPECT_TRUE(check(merge(), most, {.n_rows = most}, held(most)).ok());
  const Status status = check(merge(), most + 1, {.n_rows = most + 1}, held(most + 1));
  EXPECT_NE(status.message().find("kv_merge"), std::string::npos) << status.message();
}

TEST_P(Checks, MatricesHaveWholeBlocks) {
  Operands o = operands();
  Weight w = o.matrix(16, 48);
  w.type = DType::kQ8_0;
  const Linear op{
      o(48), w, {}, o(16), {.in_cols = 48, .out_cols = 16, .x_stride = 48, .y_stride = 16, .rows = 0}};
  const Status status = run_op(op, 1, step_of(1), filled(1));
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(),
            "a matrix with 48 columns cannot be q8_0, whose blocks have 32; use another file");
}

THIMBLE_OP_TESTS(Checks);

}  // namespace
}  // namespace thimble::test
