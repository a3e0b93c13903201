#include "backends/checks.h"

#include <algorithm>

#include "backends/regions.h"

namespace thimble {
namespace {

// Checks one op, and keeps the first error.
class Checker {
 public:
  Checker(const char* name, const DeviceInfo& device, ProgramBounds& bounds)
      : name_(name), device_(device), bounds_(bounds) {}

  const Status& status() const { return status_; }

  void operator()(const Embed& o) {
    if (o.tokens)
      need("tokens", o.tokens, rows() * kWord);
    else if (o.table.rows < rows())
      refuse("was recorded with fewer rows of its table than rows");
    matrix(o.table, o.table.rows, o.table.cols);
    const uint32_t block = dtype_info(o.table.type).block;
    if (o.p.column % block != 0 || o.p.column % 8 != 0 || o.p.cols % block != 0 ||
        uint64_t(o.p.column) + o.p.cols > o.table.cols)
      refuse("was recorded with columns that are not whole blocks of a row");
    need("x", o.x, rows() * o.p.cols * kWord);
  }

  void operator()(const RmsNorm& o) {
    const RmsNormParams& p = o.p;
    const uint64_t cols = uint64_t(p.groups) * p.cols, last_group = std::max(p.groups, 1u) - 1;
    const uint64_t x_cols = p.x_group_stride ? last_group * p.x_group_stride + p.cols : cols;
    need("x", o.x, strided(rows(p.rows), p.x_row_stride ? p.x_row_stride : p.row_stride, x_cols));
    if (o.weight) need("weight", o.weight, p.cols * kWord);
    need("y", o.y, strided(rows(p.rows), p.row_stride, cols));
  }

  void operator()(const Linear& o) {
    need("x", o.x, strided(rows(o.p.rows), o.p.x_stride, o.p.in_cols));
    matrix(o.w, o.p.out_cols, o.p.in_cols);
    if (o.bias) need("bias", o.bias, o.p.out_cols * kWord);
    need("y", o.y, strided(rows(o.p.rows), o.p.y_stride, o.p.out_cols));
  }

  void operator()(const Glu& o) {
    need("x", o.x, rows() * o.p.in_cols * kWord);
    matrix(o.gate, o.p.out_cols, o.p.in_cols);
    matrix(o.up, o.p.out_cols, o.p.in_cols);
    if (o.p.act != kActSilu && o.p.act != kActGelu)
      refuse("was recorded with an activation that it does not support");
    need("h", o.h, rows() * o.p.out_cols * kWord);
  }

  void operator()(const Scale& o) {
    const uint64_t bytes = strided(rows(o.p.rows), o.p.row_stride, o.p.cols);
    need("x", o.x, bytes);
    need("y", o.y, bytes);
    if (o.p.growth == 0) return;
    if (o.p.rows != kStepRows || o.p.period == 0) refuse("was recorded to grow without positions");
    if (o.positions) need("positions", o.positions, rows() * kWord);
  }

  void operator()(const Route& o) {
    const RouteParams& p = o.p;
    if (p.chosen == 0 || p.chosen > p.experts)
      refuse("was recorded with more experts to choose than there are");
    need("logits", o.logits, rows() * p.experts * kWord);
    if (p.groups && (p.groups > kMostGroups || p.experts % p.groups != 0 || p.groups_used > p.groups ||
                     p.chosen > p.groups_used * (p.experts / p.groups)))
      refuse("was recorded with groups that do not contain the experts to choose");
    if (o.bias) need("bias", o.bias, p.experts * kWord);
    if (o.each) need("each", o.each, p.experts * kWord);
    need("first", o.first, (uint64_t(p.experts) + 1) * kWord);
    need("row", o.row, rows() * p.chosen * kWord);
    need("weight", o.weight, rows() * p.chosen * kWord);
  }

  void operator()(const ExpertGlu& o) {
    const ExpertGluParams& p = o.p;
    need("x", o.x, rows() * p.in_cols * kWord);
    if (o.gate) expert_matrix(o.gate, p, p.rows_between);
    expert_matrix(o.up, p, p.rows_between);
    if (o.gate_bias) need("gate_bias", o.gate_bias, uint64_t(p.experts) * p.out_cols * kWord);
    if (o.up_bias) need("up_bias", o.up_bias, uint64_t(p.experts) * p.out_cols * kWord);
    if (o.gate_scale) need("gate_scale", o.gate_scale, p.experts * kWord);
    if (o.up_scale) need("up_scale", o.up_scale, p.experts * kWord);
    const bool known =
        o.gate ? p.act == kActSilu || p.act == kActGelu || p.act == kActClamped : p.act == kActReluSqr;
    if (!known) refuse("was recorded with an activation that it does not support");
    need("first", o.first, (uint64_t(p.experts) + 1) * kWord);
    need("row", o.row, rows() * p.chosen * kWord);
    need("h", o.h, rows() * p.chosen * p.out_cols * kWord);
  }

  void operator()(const ExpertLinear& o) {
    const ExpertLinearParams& p = o.p;
    need("h", o.h, rows() * p.chosen * p.in_cols * kWord);
    expert_matrix(o.w, p);
    if (o.bias) need("bias", o.bias, uint64_t(p.experts) * p.out_cols * kWord);
    if (o.scale) need("scale", o.scale, p.experts * kWord);
    need("first", o.first, (uint64_t(p.experts) + 1) * kWord);
    need("row", o.row, rows() * p.chosen * kWord);
    need("weight", o.weight, rows() * p.chosen * kWord);
    need("y", o.y, rows() * p.out_cols * kWord);
  }

  void operator()(const Activation& o) {
    if (o.p.act == kActClamped) refuse("was recorded with an activation that it does not support");
    need("x", o.x, rows() * o.p.cols * kWord);
    if (o.times) need("times", o.times, rows() * o.p.cols * kWord);
  }

  void operator()(const ShortConv& o) {
    const ShortConvParams& p = o.p;
    if (p.taps < 2 || p.taps > kMostTaps)
      refuse("was recorded with a number of taps that it does not support");
    if (p.act != kActNone && p.act != kActSilu)
      refuse("was recorded with an activation that it does not support");
    uint64_t columns = 0;
    for (const uint32_t column : {p.x_column, p.times_column, p.gate_column})
      if (column != kNoColumn) columns = std::max(columns, uint64_t(column) + p.channels);
    need("x", o.x, strided(rows(), p.x_stride, columns));
    need("w", o.w, uint64_t(p.channels) * p.taps * kWord);
    if (o.bias) need("bias", o.bias, p.channels * kWord);
    state("tail", o.tail, uint64_t(p.taps - 1) * p.channels * kWord);
    need("y", o.y, strided(rows(), p.y_stride, p.channels));
  }

  void operator()(const DeltaNet& o) {
    const DeltaNetParams& p = o.p;
    if (p.key_heads == 0 || p.value_heads % p.key_heads != 0)
      refuse("was recorded with key heads that do not divide its value heads");
    if (p.width == 0 || p.width % 32 != 0 || p.width > kMostDeltaWidth)
      refuse("was recorded with a width that it does not support");
    const uint64_t keys = uint64_t(p.key_heads) * p.width, values = uint64_t(p.value_heads) * p.width;
    const uint64_t columns = std::max({p.q_column + keys, p.k_column + keys, p.v_column + values});
    need("qkv", o.qkv, strided(rows(), p.qkv_stride, columns));
    need("gates", o.gates,
         strided(rows(), p.gates_stride, uint64_t(std::max(p.alpha_column, p.beta_column)) + p.value_heads));
    need("a", o.a, p.value_heads * kWord);
    need("dt", o.dt, p.value_heads * kWord);
    state("m", o.m, values * p.width * kWord);
    need("y", o.y, strided(rows(), p.y_stride, values));
  }

  void operator()(const Ssm& o) {
    const SsmParams& p = o.p;
    if (p.groups == 0 || p.heads % p.groups != 0)
      refuse("was recorded with groups that do not divide its heads");
    if (p.width == 0 || p.width % 16 != 0 || p.width > kMostSsmWidth)
      refuse("was recorded with a width that it does not support");
    if (p.state == 0 || p.state % 16 != 0 || p.state > kMostSsmState)
      refuse("was recorded with a state that it does not support");
    const uint64_t values = uint64_t(p.heads) * p.width, keys = uint64_t(p.groups) * p.state;
    const uint64_t columns = std::max({p.x_column + values, p.b_column + keys, p.c_column + keys});
    need("xbc", o.xbc, strided(rows(), p.xbc_stride, columns));
    need("dt", o.dt, strided(rows(), p.dt_stride, uint64_t(p.dt_column) + p.heads));
    need("dt_bias", o.dt_bias, p.heads * kWord);
    need("a", o.a, p.heads * kWord);
    need("d", o.d, p.heads * kWord);
    state("s", o.s, values * p.state * kWord);
    need("y", o.y, strided(rows(), p.y_stride, values));
  }

  void operator()(const GatedNorm& o) {
    const GatedNormParams& p = o.p;
    const uint64_t cols = uint64_t(p.groups) * p.cols;
    if (p.order > kGateOnly) refuse("was recorded with an order that it does not support");
    if (p.act != kActSilu && p.act != kActSigmoid)
      refuse("was recorded with an activation that it does not support");
    if (p.order == kGateOnly && o.weight)
      refuse("was recorded with the weight of a norm, which it does not compute");
    need("x", o.x, strided(rows(), p.row_stride, cols));
    need("z", o.z, strided(rows(), p.z_stride, p.z_column + cols));
    if (o.weight) need("weight", o.weight, (p.weight_per_group ? cols : p.cols) * kWord);
    need("y", o.y, strided(rows(), p.row_stride, cols));
  }

  void operator()(const Gate& o) {
    const GateParams& p = o.p;
    if (p.g_cols != 1 && p.g_cols != p.cols) refuse("was recorded with gates for some channels alone");
    const uint64_t last_group = uint64_t(std::max(p.groups, 1u) - 1) * p.g_group_stride;
    need("g", o.g, strided(rows(), p.g_stride, p.g_column + last_group + p.g_cols));
    need("x", o.x, strided(rows(), p.x_stride, uint64_t(p.groups) * p.cols));
  }

  void operator()(const HeadLinear& o) {
    const HeadLinearParams& p = o.p;
    const uint64_t last_head = std::max(p.heads, 1u) - 1;
    if (p.out_cols > kMostHeadColumns) refuse("was recorded with more outputs of a head than it supports");
    need("x", o.x, strided(rows(), p.x_stride, last_head * p.x_head_stride + p.in_cols + p.copied));
    need("y", o.y, strided(rows(), p.y_stride, last_head * p.y_head_stride + p.copied + p.out_cols));
    const uint32_t w_rows = p.transposed ? p.in_cols : p.out_cols;
    if (p.w_first + last_head * p.w_head_rows + w_rows > o.w.rows)
      refuse("was recorded with a matrix that lacks rows of its heads");
    matrix(o.w, o.w.rows, p.transposed ? p.out_cols : p.in_cols);
  }

  void operator()(const KvAppend& o) {
    const KvAppendParams& p = o.p;
    const uint64_t columns = (o.v ? std::max(p.k_column, p.v_column) : p.k_column) + last(p) * p.head_dim;
    need("qkv", o.qkv, strided(rows(), p.row_stride, columns));
    need("saturated", o.saturated, kWord);
    if (p.into == kIntoChunk) {
      chunk("k", o.k, p);
      if (o.v) chunk("v", o.v, p);
      chunk("pos", o.pos, last(p), p.chunk_capacity);
    } else {
      HeadBounds& h = heads(p);
      run("k", o.k, p.head_dim, h);
      if (o.v) run("v", o.v, p.head_dim, h);
      run("pos", o.pos, h);
      h.grows = name_;
    }
    if (p.rope.mode == kRopeOriginal) bounds_.positions.narrow(rope_positions(o.rope, p), name_);
    if (!o.positions) return;
    need("positions", o.positions, rows() * kWord);
    if (p.rope.mode == kRopeOriginal) refuse("was recorded to rotate rows that do not follow each other");
  }

  void operator()(const SinkScore& o) {
    const SinkScoreParams& p = o.p;
    const uint64_t queries = uint64_t(p.heads) * p.group;
    need("q", o.q, rows() * queries * p.width * kWord);
    need("k", o.k, rows() * p.heads * p.width * kWord);
    need("q_norm", o.q_norm, p.width * kWord);
    need("k_norm", o.k_norm, p.width * kWord);
    need("sinks", o.sinks, uint64_t(p.heads) * p.sinks * p.width * kWord);
    need("bias", o.bias, queries * kWord);
    need("score", o.score, rows() * p.heads * kWord);
  }

  void operator()(const CisStore& o) {
    const CisStoreParams& p = o.p;
    if (p.kind == kCisHead) need("score", o.score, rows() * last(p) * kWord);
    if (p.into == kIntoChunk) {
      chunk("cis", o.cis, last(p), p.chunk_capacity);
    } else {
      HeadBounds& h = heads(p);
      run("cis", o.cis, h);
      (p.into == kIntoPool ? h.grows : h.batch) = name_;
    }
  }

  void operator()(const GivenScore& o) {
    const GivenScoreParams& p = o.p;
    HeadBounds& h = heads(p);
    need("score", o.score, 0);
    h.entries.narrow(o.score.bytes / kWord, name_);
    run("cis", o.cis, h);
    if (o.chunk_cis)
      chunk("chunk_cis", o.chunk_cis, last(p), p.chunk_capacity);
    else
      h.grows = name_;
  }

  void operator()(const KvView& o) {
    const KvViewParams& p = o.p;
    HeadBounds& h = heads(p);
    run("pool_k", o.pool_k, p.head_dim, h);
    if (o.pool_v) run("pool_v", o.pool_v, p.head_dim, h);
    if (o.chunk_k) {
      chunk("chunk_k", o.chunk_k, p);
      if (o.pool_v) chunk("chunk_v", o.chunk_v, p);
    } else {
      bounds_.rows.narrow(0, name_);
    }
    list(o.list, p);
    const uint64_t bytes = last(p) * p.view_capacity * p.head_dim * device_.view_element_bytes;
    need("k", o.k, bytes);
    if (o.pool_v) need("v", o.v, bytes);
    if (p.rope.mode != kRopeList) return;
    const uint64_t positions = rope_positions(o.rope, p);
    if (positions < uint64_t(p.first_entry) + p.view_capacity) attended(o.list, h).narrow(positions, name_);
  }

  void operator()(const Attention& o) {
    const AttentionParams& p = o.p;
    const bool lifted = o.lifted.value_dim != 0;
    HeadBounds& h = lifted ? heads(0, 1, p.head_state) : heads(p);
    const uint64_t queries = last(p) * p.group;
    if (lifted && (p.source != kFromView || !o.v || o.lifted.value_dim > p.head_dim || p.rope.query_weight ||
                   uint64_t(o.lifted.rope_first) + p.rope.n_rot > p.head_dim))
      refuse("was recorded with a lifted view that does not have its channels");
    if (p.equal_heads) h.equal = name_;
    if (p.source == kFromPool) {
      run("k", o.k, p.head_dim, h);
      if (o.v) run("v", o.v, p.head_dim, h);
      h.grows = name_;
      bounds_.rows.narrow(o.list ? 1 : device_.pool_rows, name_);
    } else {
      const uint64_t bytes = last(p) * p.view_capacity * p.head_dim * device_.view_element_bytes;
      need("k", o.k.values, bytes);
      if (o.v) need("v", o.v.values, bytes);
      need("ml", o.ml, rows() * queries * 2 * kWord);
    }
    if (o.sinks) need("sinks", o.sinks, queries * kWord);
    const uint64_t n = p.source == kFromPool ? std::min<uint64_t>(rows(), device_.pool_rows) : rows();
    need("q", o.q, strided(n, p.row_stride, queries * p.head_dim));
    need("y", o.y, strided(n, p.y_stride, queries * o.value_cols()));
    if (o.list) need("list", o.list, (lifted ? 1 : last(p)) * p.list_capacity * kWord);
    Bound& rotated = p.rope.mode == kRopeList ? attended(o.list, h) : bounds_.positions;
    rotated.narrow(rope_positions(o.rope, p), name_);
    if (!o.row_index) return;
    need("row_index", o.row_index, rows() * kWord);
    if (p.source != kFromView || p.rope.mode != kRopeList || p.window)
      refuse("was recorded with indices of its rows where they are the last");
  }

  void operator()(const LiftView& o) {
    const LiftViewParams& p = o.p;
    if (p.key_cols > kMostHeadColumns || p.value_cols > p.rotated + p.key_cols)
      return refuse("was recorded with more channels of a head than it supports");
    const uint64_t last_head = std::max(p.heads, 1u) - 1, rows = p.view_capacity,
                   bytes = rows * (p.rotated + p.key_cols) * device_.view_element_bytes;
    need("view", o.view, rows * (p.rotated + p.latent) * device_.view_element_bytes);
    if (o.list) need("list", o.list, p.list_capacity * kWord);
    need("k", o.k, p.heads * bytes);
    need("v", o.v, p.heads * bytes);
    if (p.k_first + last_head * p.k_head_rows + (p.k_transposed ? p.latent : p.key_cols) > o.k_up.rows ||
        p.v_first + last_head * p.v_head_rows + p.value_cols > o.v_up.rows)
      return refuse("was recorded with a matrix that lacks rows of its heads");
    matrix(o.k_up, o.k_up.rows, p.k_transposed ? p.key_cols : p.latent);
    matrix(o.v_up, o.v_up.rows, p.latent);
  }

  void operator()(const AttendAll& o) {
    const AttendAllParams& p = o.p;
    HeadBounds& h = heads(p);
    const uint64_t queries = last(p) * p.group;
    run("k", o.k, p.head_dim, h);
    run("v", o.v, p.head_dim, h);
    run("pos", o.pos, h);
    if (o.chunk_k) {
      chunk("chunk_k", o.chunk_k, p);
      chunk("chunk_v", o.chunk_v, p);
    } else {
      h.grows = name_;
      bounds_.rows.narrow(1, name_);
    }
    const uint64_t page_bytes =
        kStoredPage * (kv_bytes(o.stored_k.type, p.head_dim) + kv_bytes(o.stored_v.type, p.head_dim));
    stored(o, p);
    stored_rows("stored_k", o.stored_k, page_bytes, p);
    stored_rows("stored_v", o.stored_v, page_bytes, p);
    if (o.sinks) need("sinks", o.sinks, queries * kWord);
    need("q", o.q, strided(rows(), p.row_stride, queries * p.head_dim));
    need("y", o.y, strided(rows(), p.y_stride, queries * p.head_dim));
    const uint64_t turned = rope_positions(o.rope, p), most = uint64_t(p.page_capacity) * kStoredPage;
    if (p.rope.mode == kRopeOriginal)
      bounds_.positions.narrow(turned, name_);
    else
      h.entries.narrow(turned - std::min(turned, most), name_);
  }

  void operator()(const KvCompact& o) {
    const KvCompactParams& p = o.p;
    HeadBounds& h = heads(p);
    run("k", o.k, p.head_dim, h);
    if (o.v) run("v", o.v, p.head_dim, h);
    run("pos", o.pos, h);
    if (o.cis) run("cis", o.cis, h);
    list(o.list, p);
    if (o.chunk_k) {
      chunk("chunk_k", o.chunk_k, p);
      if (o.v) chunk("chunk_v", o.chunk_v, p);
      chunk("chunk_pos", o.chunk_pos, last(p), p.chunk_capacity);
      if (o.cis) chunk("chunk_cis", o.chunk_cis, last(p), p.chunk_capacity);
    } else {
      h.grows = name_;
    }
    (o.list ? h.compacts : h.grows) = name_;
  }

  void operator()(const KvMerge& o) {
    const KvMergeParams& p = o.p;
    HeadBounds& h = heads(p);
    run("k", o.k, p.head_dim, h);
    if (o.v) run("v", o.v, p.head_dim, h);
    run("pos", o.pos, h);
    run("cis", o.cis, h);
    bounds_.rows.narrow(kMostMergedRows, name_);
    h.compacts = name_;
  }

  void operator()(const KvSpill& o) {
    const KvSpillParams& p = o.p;
    HeadBounds& h = heads(p);
    run("pool_k", o.pool_k, p.head_dim, h);
    run("pool_v", o.pool_v, p.head_dim, h);
    run("pool_pos", o.pool_pos, h);
    run("pool_cis", o.pool_cis, h);
    need("list", o.list, last(p) * p.list_capacity * kWord);
    if (o.chunk_k) {
      chunk("chunk_k", o.chunk_k, p);
      chunk("chunk_v", o.chunk_v, p);
      chunk("chunk_pos", o.chunk_pos, last(p), p.chunk_capacity);
      chunk("chunk_cis", o.chunk_cis, last(p), p.chunk_capacity);
    } else {
      h.grows = name_;
    }
    const uint64_t copies = last(p) * p.spill_capacity;
    need("k", o.k.values, copies * kv_bytes(o.k.type, p.head_dim));
    need("v", o.v.values, copies * kv_bytes(o.v.type, p.head_dim));
    need("keys", o.keys, copies * p.head_dim * kWord);
    need("pos", o.pos, copies * kWord);
    need("cis", o.cis, copies * kWord);
    need("count", o.count, (1 + last(p)) * kWord);
    h.entries.narrow(p.spill_capacity, name_);
  }

  void operator()(const KvRecall& o) {
    const KvRecallParams& p = o.p;
    HeadBounds& h = heads(p);
    run("k", o.k, p.head_dim, h);
    run("v", o.v, p.head_dim, h);
    run("pos", o.pos, h);
    run("cis", o.cis, h);
    need("list", o.list, last(p) * p.list_capacity * kWord);
    const uint64_t rows = last(p) * p.row_capacity;
    need("row_k", o.row_k.values, rows * kv_bytes(o.row_k.type, p.head_dim));
    need("row_v", o.row_v.values, rows * kv_bytes(o.row_v.type, p.head_dim));
    need("row_pos", o.row_pos, rows * kWord);
    need("count", o.count, last(p) * kWord);
  }

  void operator()(const QueryKeep& o) {
    const QueryKeepParams& p = o.p;
    if (p.ring == 0) refuse("was recorded to keep no queries");
    need("q", o.q, strided(rows(), p.row_stride, p.cols));
    need("kept", o.kept, uint64_t(p.ring) * p.cols * kWord);
  }

  void operator()(const PageVote& o) {
    const PageVoteParams& p = o.p;
    HeadBounds& h = heads(p);
    run("pos", o.pos, h);
    if (p.ring == 0) refuse("was recorded without queries");
    need("queries", o.queries, uint64_t(p.ring) * p.cols * kWord);
    need("asked", o.asked, 3 * kWord);
    need("list", o.list, last(p) * p.list_capacity * kWord);
    stored(o, p);
    stored_rows("stored_k", o.stored_k, p.page_bytes, p);
    need("votes", o.votes, last(p) * p.page_capacity * kWord);
    (p.rope.mode == kRopeOriginal ? bounds_.positions : h.entries).narrow(rope_positions(o.rope, p), name_);
  }

  void operator()(const QueryGate& o) {
    need("q", o.q, o.p.cols * kWord);
    need("cached", o.cached, o.p.cols * kWord);
    need("gate", o.gate, sizeof(GateState));
    bounds_.rows.narrow(1, name_);
    select_from(heads(0, o.p.heads, o.p.head_state), 1);
  }

  void operator()(const TokenScore& o) {
    const TokenScoreParams& p = o.p;
    const uint64_t queries = last(p) * p.group;
    HeadBounds& h = heads(p);
    need("q", o.q, strided(rows(), p.row_stride, queries * p.head_dim));
    run("k", o.k, p.head_dim, h);
    if (o.gate) need("gate", o.gate, sizeof(GateState));
    scores(o.scores, o.lse, queries, p.score_capacity, h);
    select_from(h, 1);
    h.scores = name_;
    if (p.equal_heads) h.equal = name_;
    Bound& rotated = p.rope.mode == kRopeList ? h.local : bounds_.positions;
    rotated.narrow(rope_positions(o.rope, p), name_);
  }

  void operator()(const PageBounds& o) {
    const PageBoundsParams& p = o.p;
    HeadBounds& h = heads(p);
    run("k", o.k, p.head_dim, h);
    pages(o.bounds, p.head_dim, h);
    select_from(h, p.page);
    (p.all ? h.compacts : h.grows) = name_;
  }

  void operator()(const PageScore& o) {
    const PageScoreParams& p = o.p;
    const uint64_t queries = last(p) * p.group;
    HeadBounds& h = heads(p);
    need("q", o.q, queries * p.head_dim * kWord);
    pages(o.bounds, p.head_dim, h);
    scores(o.scores, o.lse, queries, p.score_capacity, h);
    select_from(h, p.page);
    h.scores = name_;
    bounds_.rows.narrow(1, name_);
    if (p.rope.mode == kRopeOriginal) bounds_.positions.narrow(rope_positions(o.rope, p), name_);
  }

  void operator()(const Vote& o) {
    const VoteParams& p = o.p;
    HeadBounds& h = heads(0, p.heads, p.head_state);
    scores(o.scores, o.lse, uint64_t(p.heads) * p.group, p.score_capacity, h);
    if (o.gate) need("gate", o.gate, sizeof(GateState));
    select_from(h, p.page);
    if (p.scope == kVoteGroup) {
      need("votes", o.votes, uint64_t(p.heads) * p.vote_capacity * kWord);
      h.units.narrow(p.vote_capacity, name_);
      return;
    }
    if (p.page != 1) refuse("was recorded with pages for a vote over the layer");
    need("votes", o.votes, p.vote_capacity * kWord);
    by_position(o.pos, p.vote_capacity, h);
  }

  void operator()(const TopK& o) {
    const TopKParams& p = o.p;
    HeadBounds& h = heads(0, p.heads, p.head_state);
    need("list", o.list, uint64_t(p.heads) * p.list_capacity * kWord);
    const uint64_t room = std::max(p.list_capacity, 1u) - 1;  // after the count
    if (o.chunk_scores) chunk("chunk_scores", o.chunk_scores, p.heads, p.chunk_capacity);
    if (p.by_position) {
      need("scores", o.scores, p.score_capacity * kWord);
      by_position(o.pos, p.score_capacity, h);
    } else if (p.in_runs) {
      run("scores", o.scores, h);
    } else {
      need("scores", o.scores, uint64_t(p.heads) * p.score_capacity * kWord);
    }

    if (p.keep == kKeepOfHead) {
      if (p.page != 1 || p.by_position || o.gate)
        refuse("was recorded with pages, positions or a gate for an eviction");
      h.kept.narrow(room, name_);
      if (!p.in_runs)
        (o.chunk_scores ? h.held : h.entries).narrow(p.score_capacity, name_);
      else if (!o.chunk_scores)
        h.grows = name_;
      return;
    }
    select_from(h, p.page);
    h.selected.narrow(room, name_);
    if (p.page != 1 && (p.by_position || p.in_runs || o.chunk_scores || o.gate))
      refuse("was recorded with pages whose scores are not one array, or with a gate for them");
    if (o.gate) need("gate", o.gate, sizeof(GateState));
    if (p.in_runs && !o.chunk_scores) h.scores = name_;
    if (!p.in_runs && !p.by_position) h.middle.narrow(p.score_capacity, name_);
  }

  void operator()(const Label& o) {
    const LabelParams& p = o.p;
    const uint64_t queries = uint64_t(p.heads) * p.group;
    HeadBounds& h = heads(0, p.heads, p.head_state);
    need("q", o.q, strided(rows(), p.row_stride, queries * p.head_dim));
    need("marked", o.marked, rows() * kWord);
    run("k", o.k, p.head_dim, h);
    chunk("chunk_k", o.chunk_k.values, p.heads, p.chunk_capacity, kv_bytes(o.chunk_k.type, p.head_dim));
    need("range", o.range, 4 * kWord);
    if (o.x) need("x", o.x, rows() * p.x_cols * kWord);
    if (o.worth) need("worth", o.worth, queries * p.label_capacity * kWord);
    if (o.sinks) need("sinks", o.sinks, queries * kWord);
    need("lse", o.lse, rows() * queries * kWord);
    need("max_logit", o.max_logit, uint64_t(p.heads) * p.label_capacity * kWord);
    need("log_prob", o.log_prob, uint64_t(p.heads) * p.label_capacity * kWord);
    if (p.rope.mode != kRopeOriginal) refuse("was recorded for keys that are not rotated to their positions");
    bounds_.positions.narrow(rope_positions(o.rope, p), name_);
  }

  void operator()(const KeyDiff& o) {
    const KeyDiffParams& p = o.p;
    HeadBounds& h = heads(p);
    run("k", o.k, p.head_dim, h);
    run("cis", o.cis, h);
    if (o.chunk_k) {
      chunk("chunk_k", o.chunk_k, p);
      chunk("chunk_cis", o.chunk_cis, last(p), p.chunk_capacity);
    } else {
      bounds_.rows.narrow(0, name_);
    }
    need("sums", o.sums, last(p) * p.blocks * p.head_dim * kWord);
    h.entries.narrow(uint64_t(p.blocks) * kKeyDiffBlock, name_);
  }

  void operator()(const ScoreMix& o) {
    const ScoreMixParams& p = o.p;
    HeadBounds& h = heads(p);
    run("scores", o.scores, h);
    run("mixed", o.mixed, h);
    if (o.chunk_scores) {
      chunk("chunk_scores", o.chunk_scores, last(p), p.chunk_capacity);
      chunk("chunk_mixed", o.chunk_mixed, last(p), p.chunk_capacity);
    } else {
      bounds_.rows.narrow(0, name_);
    }
  }

  void operator()(const QueryScore& o) {
    const QueryScoreParams& p = o.p;
    const uint64_t queries = last(p) * p.group;
    const bool by_rows = p.kind == kQueryRows;
    HeadBounds& h = heads(p);
    need("q", o.q, strided(p.rows, p.row_stride, queries * p.head_dim));
    run("k", o.k, p.head_dim, h);
    run("cis", o.cis, h);
    if (o.chunk_k) {
      chunk("chunk_k", o.chunk_k, p);
      if (!by_rows) chunk("chunk_cis", o.chunk_cis, last(p), p.chunk_capacity);
    } else {
      bounds_.rows.narrow(0, name_);
    }
    if (o.sinks) need("sinks", o.sinks, queries * kWord);
    need("sums", o.sums, queries * p.rows * kQueryScoreSums * kWord);
    if (by_rows) {
      bounds_.rows.narrow(p.rows, name_);
      h.batch = name_;
    } else {
      if (p.rows != 1) refuse("was recorded for other queries than the last one's");
      if (p.kind == kQueryLast) {
        if (p.first_head != 0) refuse("was recorded for some heads of a layer alone");
        h.equal = name_;
      }
    }
    if (p.kind != kQueryHeads && (o.list || p.window))
      refuse("was recorded with a list or a window for a kind that sees everything");
    list(o.list, p);
    const uint64_t turned = rope_positions(o.rope, p);
    if (p.rope.mode == kRopeOriginal)
      bounds_.positions.narrow(turned, name_);
    else
      h.entries.narrow(turned, name_);
  }

  void operator()(const ScatterAdd& o) {
    const ScatterAddParams& p = o.p;
    HeadBounds& h = heads(p);
    run("pos", o.pos, h);
    if (o.weights) run("weights", o.weights, h);
    list(o.list, p);
    need("sums", o.sums, p.slots * kWord);
    bounds_.rows.narrow(0, name_);
  }

  void operator()(const ArgMax& o) {
    need("x", o.x, rows(kLogitRows) * o.p.cols * kWord);
    need("index", o.index, rows(kLogitRows) * kWord);
  }

  void operator()(const LogProb& o) {
    need("x", o.x, rows(kLogitRows) * o.p.cols * kWord);
    need("target", o.target, rows(kLogitRows) * kWord);
    need("y", o.y, rows(kLogitRows) * kWord);
  }

  void operator()(const Copy& o) {
    const CopyParams& p = o.p;
    copied("src", o.src, p.src_stride, p, p.from_logit_row, bounds_.source_rows[p.rows]);
    copied("dst", o.dst, p.dst_stride, p, p.to_ring_row, bounds_.ring_rows[p.rows]);
  }

  void operator()(const Stage& o) {
    need("from", o.from, o.to.bytes);
    need("to", o.to, o.from.bytes);
  }

 private:
  static constexpr uint64_t kWord = 4;  // bytes of a float, an int32 or a uint

  // The largest number of rows of a step.
  uint64_t rows(uint32_t kind = kStepRows) const {
    return kind == kLogitRows ? std::min(bounds_.max_rows, kMostLogitRows) : bounds_.max_rows;
  }
  // Bytes of `n` rows of `cols` floats, with `stride` floats between rows.
  static uint64_t strided(uint64_t n, uint64_t stride, uint64_t cols) {
    return n ? ((n - 1) * stride + cols) * kWord : 0;
  }
  // One more than the last head that an op works on.
  template <typename Params>
  static uint64_t last(const Params& p) {
    return uint64_t(p.first_head) + p.heads;
  }

  void refuse(const char* why) {
    if (status_.ok()) status_ = error(Code::kInternal, "%s %s", name_, why);
  }

  void need(const char* operand, const View& v, uint64_t bytes) {
    if (!status_.ok()) return;
    if (!v) {
      status_ = error(Code::kInternal, "%s was recorded without its %s", name_, operand);
    } else if (const Status inside = check_view(v); !inside.ok()) {
      status_ =
          error(Code::kInternal, "%s was recorded with a %s of %s", name_, operand, inside.message().c_str());
    } else if (v.bytes < bytes) {
      status_ = error(Code::kInternal, "%s was recorded with %" PRIu64 " of the %" PRIu64 " bytes of its %s",
                      name_, v.bytes, bytes, operand);
    }
  }

  // Checks that the state has so many bytes in each slot.
  void state(const char* operand, const StateArray& s, uint64_t bytes) {
    need(operand, s.block0, bytes);
    need(operand, s.all(), 0);
    if (s.slots == 0 || s.slot_stride % kWord != 0 || (s.slots > 1 && s.slot_stride < bytes))
      refuse("was recorded with slots that do not hold its state");
    bounds_.slots.narrow(s.slots, name_);
  }

  // Checks that a matrix is [rows][cols], that its type allows so many columns, and that all its bytes exist.
  void matrix(const Weight& w, uint32_t rows, uint32_t cols) {
    if (!status_.ok()) return;
    const DTypeInfo& type = dtype_info(w.type);
    if (w.rows != rows || w.cols != cols)
      status_ = error(Code::kInternal, "%s of [%u][%u] was recorded with a matrix of [%u][%u]", name_, rows,
                      cols, w.rows, w.cols);
    else if (cols % type.block != 0)
      status_ = error(Code::kUnsupported,
                      "a matrix with %u columns cannot be %s, whose blocks have %u; use another file", cols,
                      type.name, type.block);
    else
      need("matrix", w, dtype_bytes(w.type, uint64_t(rows) * cols));
  }

  // The same for the matrices of all experts, with some rows between two of them.
  template <typename Params>
  void expert_matrix(const Weight& w, const Params& p, uint32_t rows_between = 0) {
    const uint64_t rows = p.experts * (uint64_t(p.out_cols) + rows_between) - rows_between;
    if (rows > UINT32_MAX) return refuse("was recorded with too many experts");
    matrix(w, static_cast<uint32_t>(rows), p.in_cols);
  }

  // The bounds that the program sets for these KV heads so far.
  HeadBounds& heads(uint32_t first_head, uint32_t count, uint32_t head_state) {
    const uint32_t first = head_state + first_head;
    for (HeadBounds& h : bounds_.heads)
      if (h.head_state == first && h.heads == count && h.first_head == first_head) return h;
    return bounds_.heads.emplace_back(HeadBounds{first, count, first_head});
  }
  template <typename Params>
  HeadBounds& heads(const Params& p) {
    return heads(p.first_head, p.heads, p.head_state);
  }

  // Checks an array of a layer, in which each head has its run.
  void run(const char* operand, const View& v, HeadBounds& h, uint64_t entry_bytes = kWord) {
    need(operand, v, 0);
    h.array.narrow(v.bytes / entry_bytes, name_);
  }
  void run(const char* operand, const KvArray& a, uint32_t head_dim, HeadBounds& h) {
    run(operand, a.values, h, std::max<uint64_t>(kv_bytes(a.type, head_dim), 1));
  }

  // Checks an array of the chunk's rows: [heads][chunk_capacity]. If the array is optional and missing, the
  // op serves only steps without rows.
  void chunk(const char* operand, const View& v, uint64_t heads, uint32_t capacity,
             uint64_t row_bytes = kWord) {
    need(operand, v, heads * capacity * row_bytes);
    bounds_.rows.narrow(capacity, name_);
  }
  template <typename Params>
  void chunk(const char* operand, const KvArray& a, const Params& p) {
    chunk(operand, a.values, last(p), p.chunk_capacity, kv_bytes(a.type, p.head_dim));
  }

  template <typename Params>
  void list(const In& v, const Params& p) {
    if (v) need("list", v, last(p) * p.list_capacity * kWord);
  }
  // The bound on the entries that a row attends to: those of its list, or all.
  static Bound& attended(const In& list, HeadBounds& h) { return list ? h.selected : h.entries; }

  // The pages of a store.
  template <typename Params>
  void need_pages(const char* operand, const View& v, uint32_t stride, uint64_t page_bytes,
                  uint64_t last_page, const Params& p) {
    const uint64_t before = (last(p) - 1) * stride * 64;
    need(operand, v, before + (uint64_t(p.page_capacity) - 1) * page_bytes + last_page);
  }
  template <typename O, typename Params>
  void stored(const O& o, const Params& p) {
    if (p.heads == 0 || p.page_capacity == 0) return refuse("was recorded without heads or pages");
    need_pages("pages", o.pages, p.stored_stride, 4 * kWord, 4 * kWord, p);
    need_pages("order", o.order, p.stored_stride, kWord, kWord, p);
    need("count", o.count, last(p) * kWord);
  }
  template <typename Params>
  void stored_rows(const char* operand, const KvArray& a, uint64_t page_bytes, const Params& p) {
    if (p.heads == 0 || p.page_capacity == 0) return;
    need_pages(operand, a.values, p.rows_stride, page_bytes, kStoredPage * kv_bytes(a.type, p.head_dim), p);
  }

  // The number of positions that a rope table covers.
  template <typename Params>
  uint64_t rope_positions(const In& rope, const Params& p) {
    const uint32_t n_rot = p.rope.n_rot;
    if (n_rot == 0) return UINT64_MAX;
    if (n_rot % 2 != 0 || n_rot > p.head_dim) refuse("was recorded with more channels to rotate than it has");
    const uint64_t weights = p.rope.query_weight;
    need("rope", rope, weights ? (weights + p.head_dim) * kWord : 65 * n_rot * kWord);
    const uint64_t words = weights ? weights : rope.bytes / kWord;
    if (words < 65 * n_rot) refuse("was recorded with weights of queries inside the table");
    return status_.ok() ? (words / n_rot - 64) * 64 : 0;
  }

  // Checks the scores of the middle and their sums. The last n_local units have no scores.
  void scores(const View& scores, const View& lse, uint64_t queries, uint32_t capacity, HeadBounds& h) {
    need("scores", scores, queries * capacity * kWord);
    need("lse", lse, queries * kWord);
    h.middle.narrow(capacity, name_);
  }
  void select_from(HeadBounds& h, uint32_t page) {
    if (page == 0 || (h.page && h.page != page)) refuse("was recorded with a page unlike that of other ops");
    h.page = page;
  }
  void by_position(const In& pos, uint32_t positions, HeadBounds& h) {
    run("pos", pos, h);
    h.positions.narrow(positions, name_);
    h.scores = h.equal = name_;
  }
  void pages(const View& v, uint32_t head_dim, HeadBounds& h) {
    need("bounds", v, 0);
    h.pages.narrow(v.bytes / std::max<uint64_t>(2 * kv_bytes(DType::kF16, head_dim), 1), name_);
  }

  // Checks one side of a copy. `moves` says that the step determines its first row.
  void copied(const char* operand, const View& v, uint32_t stride, const CopyParams& p, bool moves,
              Bound& most) {
    need(operand, v, strided(rows(p.rows), stride, p.cols));
    const uint64_t elements = v.bytes / kWord;
    if (moves && elements >= p.cols) most.narrow((elements - p.cols) / std::max(stride, 1u) + 1, name_);
  }

  const char* const name_;
  const DeviceInfo& device_;
  ProgramBounds& bounds_;
  Status status_;
};

// Finds the first value of a step that exceeds the program's bounds. It checks every head of every layer in
// every step, so it formats a message only after it has found one.
class Excess {
 public:
  void look(const Bound& b, uint64_t value, const char* what) {
    if (value > b.most && !what_) bound_ = b, value_ = value, what_ = what;
  }
  // Checks the value only if there is such an op.
  void look(const char* op, uint64_t most, uint64_t value, const char* what) {
    if (op) look({most, op}, value, what);
  }
  Status status() const {
    if (!what_) return {};
    return error(Code::kInternal, "%s serves %" PRIu64 " %s, and a step has %" PRIu64, bound_.op, bound_.most,
                 what_, value_);
  }

 private:
  Bound bound_;
  uint64_t value_ = 0;
  const char* what_ = nullptr;
};

uint64_t positions(const StepParams& step) {
  return static_cast<uint64_t>(int64_t(step.position) + step.n_rows);
}

void check_selection(const HeadBounds& b, const StepParams& step, const HeadState& head, Excess& excess) {
  const uint32_t n = step_entries(step, head), n_units = units(n, b.page);
  if (!selects(step, n_units)) return excess.look(b.selected, n, "listed entries");
  const uint32_t middle = middle_end(step, n_units);
  // All listed pages except the last are full.
  const uint64_t whole = (uint64_t(step.n_init) + step.select_k + step.n_local) * b.page;
  excess.look(b.selected, whole - (uint64_t(n_units) * b.page - n), "listed entries");
  excess.look(b.units, n_units, "entries or pages");
  excess.look(b.middle, middle, "scores");
  excess.look(b.local, uint64_t(step.n_local) + step.n_rows, "positions to look back");
  excess.look(b.positions, positions(step), "positions");
  excess.look(b.scores, units(head.capacity, b.page), middle, "entries or pages of a run");
}

// `number` is the index of the head in its layer.
void check_head(const HeadBounds& b, uint32_t number, const StepParams& step, const HeadState& head,
                Excess& excess) {
  const uint64_t n = uint64_t(head.n_entries) + step.n_rows, kept = std::min<uint64_t>(head.keep, n);
  excess.look("a run", head.capacity, head.n_entries, "entries");
  excess.look(b.array, uint64_t(head.first) + head.capacity, "entries of a layer");
  excess.look(b.entries, n, "entries");
  excess.look(b.held, head.n_entries, "entries before the step");
  excess.look(b.kept, kept, "kept entries");
  excess.look(b.grows, head.capacity, n, "entries of a run");
  excess.look(b.compacts, head.capacity, kept, "kept entries of a run");
  excess.look(b.batch, head.n_entries, step.n_rows, "rows that a run holds");
  if (b.page == 0) return;
  excess.look(b.pages, uint64_t(head.first) / b.page + number + units(head.capacity, b.page), "pages");
  check_selection(b, step, head, excess);
}

// Checks the slots of a step whose program has states. A step that fails leaves the slot that it read as it
// was, unless there is only one.
Status check_slots(const Bound& slots, const StepParams& step) {
  const bool reads = step.state_from < slots.most || step.state_from == kNoState;
  const bool in_place = step.state_from == step.state_to && slots.most > 1;
  if (reads && step.state_to < slots.most && !in_place) return {};
  return error(Code::kInternal, "%s has %" PRIu64 " slots, and a step reads slot %u and writes slot %u",
               slots.op, slots.most, step.state_from, step.state_to);
}

}  // namespace

Status check_op(const Op& op, const DeviceInfo& device, ProgramBounds& bounds) {
  Checker checker(op_name(op), device, bounds);
  std::visit(checker, op);
  return checker.status();
}

Status check_submit(const Program& program, const ProgramBounds& bounds, uint32_t first, uint32_t last,
                    const StepParams& step, std::span<const HeadState> heads) {
  if (first > last || last > program.segments)
    return error(Code::kInternal, "segments [%u, %u) of a program that has %u", first, last,
                 program.segments);
  if (step.n_rows > bounds.max_rows || step.n_logit_rows > std::min(bounds.max_rows, kMostLogitRows))
    return error(Code::kInternal, "a step of %u rows and %u rows of logits, in a program for %u", step.n_rows,
                 step.n_logit_rows, bounds.max_rows);
  if (bounds.slots.most != UINT64_MAX)
    if (Status status = check_slots(bounds.slots, step); !status.ok()) return status;
  Excess excess;
  excess.look(bounds.rows, step.n_rows, "rows");
  excess.look(bounds.positions, positions(step), "positions");
  for (const uint32_t kind : {kStepRows, kLogitRows}) {
    const uint64_t n = kind == kLogitRows ? step.n_logit_rows : step.n_rows;
    excess.look(bounds.source_rows[kind], step.first_logit_row + n, "rows to copy from");
    excess.look(bounds.ring_rows[kind], step.ring_row + n, "rows to copy to");
  }
  for (const HeadBounds& b : bounds.heads) {
    if (uint64_t(b.head_state) + b.heads > heads.size())
      return error(Code::kInternal, "heads [%u, %u) of a table of %zu", b.head_state, b.head_state + b.heads,
                   heads.size());
    for (uint32_t i = 0; i < b.heads; ++i) {
      const HeadState& head = heads[b.head_state + i];
      check_head(b, b.first_head + i, step, head, excess);
      if (b.equal && head.n_entries != heads[b.head_state].n_entries)
        return error(Code::kInternal, "%s over heads with %u and %u entries", b.equal,
                     heads[b.head_state].n_entries, head.n_entries);
    }
  }
  return excess.status();
}

}  // namespace thimble
