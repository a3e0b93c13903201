// Which ops of a step are launched together, for lists of ops as runtime/decoder.cpp records them.
#include "backends/fusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>

namespace thimble {
namespace {

constexpr uint32_t kCols = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kFf = 128, kCapacity = 100;
constexpr uint32_t kQkvCols = (kHeads + 2 * kKvHeads) * kHeadDim;

// The operands of a step, each in its own buffer.
class Operands {
 public:
  View operator[](const std::string& name) {
    auto [at, added] = buffers_.try_emplace(name);
    if (added) at->second.size = kBytes;
    return {&at->second, 0, kBytes};
  }

 private:
  static constexpr uint64_t kBytes = 1 << 20;
  std::map<std::string, Buffer> buffers_;
};

struct Features {
  bool select = false, gate = false, ring = false, cis = false, head_norms = false, biases = false;
};

class Step {
 public:
  explicit Step(const Features& features) : has_(features) {}

  RmsNorm norm(const std::string& from, const std::string& to, uint32_t rows = kStepRows) {
    return {.x = at[from],
            .weight = at["weights"],
            .y = at[to],
            .p = {.cols = kCols, .groups = 1, .row_stride = kCols, .eps = 0, .rows = rows}};
  }
  Linear linear(View x, uint32_t in_cols, View y, uint32_t cols, uint32_t y_stride, bool add,
                uint32_t rows = kStepRows) {
    Linear l{.x = x, .w = {}, .bias = {}, .y = y, .p = {}};
    l.p = {.in_cols = in_cols,
           .out_cols = cols,
           .x_stride = in_cols,
           .y_stride = y_stride,
           .add = add,
           .rows = rows};
    return l;
  }
  // A product that computes columns of the qkv rows.
  Linear projection(uint32_t column, uint32_t cols) {
    const uint64_t offset = column * sizeof(float);
    const View qkv = at["qkv"];
    Linear l = linear(at["norm"], kCols, qkv.slice(offset, qkv.bytes - offset), cols, kQkvCols, false);
    if (has_.biases) l.bias = at["bias"];
    return l;
  }
  void project() {
    ops.push_back(norm("x", "norm"));
    ops.push_back(projection(0, kHeads * kHeadDim));
    ops.push_back(projection(kHeads * kHeadDim, kKvHeads * kHeadDim));
    ops.push_back(projection((kHeads + kKvHeads) * kHeadDim, kKvHeads * kHeadDim));
    if (!has_.head_norms) return;
    RmsNorm of_heads{
        .x = at["qkv"],
        .weight = at["weights"],
        .y = at["qkv"],
        .p = {.cols = kHeadDim, .groups = kHeads, .row_stride = kQkvCols, .eps = 0, .rows = kStepRows}};
    ops.push_back(of_heads);
    of_heads.p.groups = kKvHeads;
    ops.push_back(of_heads);
  }
  // Norms of the heads' queries and keys, and their append.
  std::vector<Op> normed_append() {
    RmsNorm of_heads{
        .x = at["qkv"],
        .weight = at["weights"],
        .y = at["qkv"],
        .p = {.cols = kHeadDim, .groups = kHeads, .row_stride = kQkvCols, .eps = 0, .rows = kStepRows}};
    KvAppend taken = append("pool");
    taken.p = {.heads = kKvHeads,
               .head_dim = kHeadDim,
               .row_stride = kQkvCols,
               .k_column = kHeads * kHeadDim,
               .into = kIntoPool};
    RmsNorm of_keys = of_heads;
    of_keys.p.groups = kKvHeads;
    of_keys.x.offset += kHeads * kHeadDim * sizeof(float);
    of_keys.y.offset = of_keys.x.offset;
    return {of_heads, of_keys, taken};
  }
  KvAppend append(const std::string& into) {
    return {.qkv = at["qkv"],
            .rope = at["rope"],
            .k = {.values = at[into + " k"]},
            .v = {.values = at[into + " v"]},
            .pos = at[into + " pos"],
            .saturated = at["saturated"],
            .p = {}};
  }
  Copy ring() { return {.src = at["qkv"], .dst = at["ring"], .p = {}}; }
  QueryGate gate() { return {.q = at["qkv"], .cached = at["cached"], .gate = at["gate"], .p = {}}; }
  In gate_view() { return has_.gate ? at["gate"] : View{}; }
  TokenScore score() {
    return {.q = at["qkv"],
            .k = {.values = at["pool k"]},
            .rope = at["rope"],
            .gate = gate_view(),
            .scores = at["scores"],
            .lse = at["lse"],
            .p = {.first_head = 0,
                  .heads = kKvHeads,
                  .group = kHeads / kKvHeads,
                  .head_dim = kHeadDim,
                  .row_stride = kQkvCols,
                  .head_state = 6,
                  .score_capacity = kCapacity,
                  .scale = 1,
                  .rope = {}}};
  }
  Vote vote() {
    return {.scores = at["scores"],
            .lse = at["lse"],
            .pos = {},
            .gate = gate_view(),
            .votes = at["votes"],
            .p = {.heads = kKvHeads,
                  .group = kHeads / kKvHeads,
                  .head_state = 6,
                  .scope = kVoteGroup,
                  .page = 1,
                  .score_capacity = kCapacity,
                  .vote_capacity = kCapacity,
                  .window = 0}};
  }
  TopK top_k() {
    return {.scores = at["votes"],
            .chunk_scores = {},
            .pos = {},
            .gate = gate_view(),
            .list = at["list"],
            .p = {.heads = kKvHeads,
                  .head_state = 6,
                  .keep = kKeepOfStep,
                  .page = 1,
                  .by_position = 0,
                  .in_runs = 0,
                  .score_capacity = kCapacity,
                  .chunk_capacity = 0,
                  .list_capacity = 50}};
  }
  Linear output() { return linear(at["attention"], kHeads * kHeadDim, at["x"], kCols, kCols, true); }
  Glu glu() {
    return {.x = at["norm"],
            .gate = {},
            .up = {},
            .h = at["ffn"],
            .p = {.in_cols = kCols, .out_cols = kFf, .act = 0}};
  }
  void feed_forward() {
    ops.push_back(norm("x", "norm"));
    ops.push_back(glu());
    ops.push_back(linear(at["ffn"], kFf, at["x"], kCols, kCols, true));
  }
  void tail() {
    ops.push_back(Copy{.src = at["x"], .dst = at["logit_x"], .p = {}});
    ops.push_back(norm("logit_x", "logit_x", kLogitRows));
    ops.push_back(linear(at["logit_x"], kCols, at["logits"], 1000, 1000, false, kLogitRows));
    ops.push_back(ArgMax{.x = at["logits"], .index = at["index"], .p = {}});
  }

  Step& decode(uint32_t layers) {
    ops.push_back(Embed{});
    for (uint32_t layer = 0; layer < layers; ++layer) {
      project();
      ops.push_back(append("pool"));
      if (has_.ring) ops.push_back(ring());
      if (has_.cis) ops.push_back(CisStore{});
      if (has_.gate) ops.push_back(gate());
      if (has_.select) {
        ops.push_back(score());
        ops.push_back(vote());
        ops.push_back(top_k());
      }
      ops.push_back(Attention{});
      ops.push_back(output());
      feed_forward();
    }
    tail();
    return *this;
  }
  // One segment of a chunk with locret.
  Step& chunk_layer() {
    project();
    ops.push_back(append("chunk"));
    ops.push_back(linear(at["qkv"], kQkvCols, at["hidden"], 32, 32, false));
    ops.push_back(Activation{});
    ops.push_back(linear(at["hidden"], 32, at["score"], kKvHeads, kKvHeads, false));
    ops.push_back(CisStore{});
    ops.push_back(KvView{});
    ops.push_back(Attention{});
    ops.push_back(TopK{});
    ops.push_back(KvCompact{});
    ops.push_back(output());
    feed_forward();
    return *this;
  }

  Operands at;
  std::vector<Op> ops;

 private:
  Features has_;
};

// The joins that the CUDA backend supports, and those of the Vulkan backend.
Joins cuda(uint32_t max_rows) {
  return {.norm = max_rows == 1 ? Joins::Norm::kOfProducts : Joins::Norm::kAlone,
          .sibling =
              [](const RmsNorm*, std::span<const Linear> siblings, const Linear& next) {
                return siblings.size() < 4 &&
                       std::all_of(siblings.begin(), siblings.end(),
                                   [&](const Linear& s) { return share_rows(s, next); });
              },
          .routed_glu = max_rows == 1,
          .routed_linear = max_rows == 1,
          .shared_expert = max_rows == 1,
          .append = max_rows == 1,
          .convolved_delta = max_rows == 1,
          .normed_delta = max_rows == 1,
          .vote = [](const Vote& vote, const TopK&) { return vote.p.scope == kVoteGroup; }};
}
Joins vulkan(uint32_t max_rows) {
  return {.norm = max_rows == 1 ? Joins::Norm::kBetweenProducts : Joins::Norm::kAlone,
          .sibling = [](const RmsNorm* norm, std::span<const Linear> siblings,
                        const Linear& next) { return norm || side_by_side(siblings.back(), next); },
          .routed_glu = max_rows == 1,
          .append = false,
          .normed_append = max_rows == 1,
          .vote = [](const Vote&, const TopK&) { return true; }};
}

// The groups in order, such as "embed rms_norm+linear attention". Every op is in one group, in its place.
std::string groups(const std::vector<Op>& ops, const Joins& joins) {
  std::string text;
  size_t next = 0;
  for (const Group& group : group_ops(ops, joins)) {
    std::string names;
    const auto add = [&]<typename T>(const T* op) {
      if (!op) return;
      const Op& listed = ops.at(next++);
      EXPECT_EQ(std::get_if<T>(&listed), op);
      names += (names.empty() ? "" : "+") + std::string(op_name(listed));
    };
    if (const auto* alone = std::get_if<const Op*>(&group)) {
      EXPECT_EQ(&ops.at(next++), *alone);
      names = op_name(**alone);
    } else if (const auto* products = std::get_if<Products>(&group)) {
      add(products->before);
      add(products->experts);
      add(products->norm);
      for (const Linear& sibling : products->siblings) {
        const Linear& listed = std::get<Linear>(ops.at(next));
        EXPECT_TRUE(same(listed.x, sibling.x) && same(listed.y, sibling.y));
        add(&listed);
      }
    } else if (const auto* glu = std::get_if<GluOfNorm>(&group)) {
      add(glu->before);
      add(glu->norm);
      add(glu->glu);
    } else if (const auto* routed = std::get_if<RoutedExperts>(&group)) {
      add(routed->route);
      add(routed->glu);
      add(routed->linear);
      add(routed->shared.glu);
      add(routed->shared.gate);
      add(routed->shared.linear);
    } else if (const auto* append = std::get_if<AppendToken>(&group)) {
      add(append->q_norm);
      add(append->k_norm);
      add(append->append);
      add(append->copy);
      add(append->gate);
    } else if (const auto* delta = std::get_if<ConvolvedDelta>(&group)) {
      add(delta->conv);
      add(delta->net);
      add(delta->norm);
    } else if (const auto* select = std::get_if<Select>(&group)) {
      add(select->score);
      add(select->vote);
      add(select->top_k);
    }
    text += (text.empty() ? "" : " ") + names;
  }
  EXPECT_EQ(next, ops.size());
  return text;
}

TEST(Fusion, OfNoOpsIsEmpty) { EXPECT_EQ(groups({}, cuda(1)), ""); }

TEST(Fusion, ATokenWithoutSelection) {
  const auto ops = Step({}).decode(2).ops;
  EXPECT_EQ(groups(ops, cuda(1)),
            "embed "
            "rms_norm+linear+linear+linear kv_append attention linear rms_norm+glu linear "
            "rms_norm+linear+linear+linear kv_append attention linear rms_norm+glu linear "
            "copy rms_norm linear arg_max");
  EXPECT_EQ(groups(ops, vulkan(1)),
            "embed "
            "rms_norm linear+linear+linear kv_append attention linear+rms_norm+glu "
            "linear+rms_norm+linear+linear+linear kv_append attention linear+rms_norm+glu "
            "linear copy rms_norm linear arg_max");
}

TEST(Fusion, ATokenWithSelection) {
  const auto ops = Step({.select = true, .gate = true, .ring = true}).decode(1).ops;
  EXPECT_EQ(groups(ops, cuda(1)),
            "embed rms_norm+linear+linear+linear kv_append+copy+query_gate token_score+vote+top_k "
            "attention linear rms_norm+glu linear copy rms_norm linear arg_max");
  EXPECT_EQ(groups(ops, vulkan(1)),
            "embed rms_norm linear+linear+linear kv_append copy query_gate token_score+vote+top_k "
            "attention linear+rms_norm+glu linear copy rms_norm linear arg_max");
}

TEST(Fusion, ATokensScoresMayBeInBetween) {
  EXPECT_EQ(groups(Step({.select = true, .gate = true, .cis = true}).decode(1).ops, cuda(1)),
            "embed rms_norm+linear+linear+linear kv_append cis_store query_gate token_score+vote+top_k "
            "attention linear rms_norm+glu linear copy rms_norm linear arg_max");
  EXPECT_EQ(groups(Step({.gate = true}).decode(1).ops, cuda(1)),
            "embed rms_norm+linear+linear+linear kv_append+query_gate "
            "attention linear rms_norm+glu linear copy rms_norm linear arg_max");
}

TEST(Fusion, NormsOfHeadsAreNotJoined) {
  const auto ops = Step({.head_norms = true}).decode(1).ops;
  EXPECT_EQ(groups(ops, cuda(1)),
            "embed rms_norm+linear+linear+linear rms_norm rms_norm kv_append attention linear "
            "rms_norm+glu linear copy rms_norm linear arg_max");
  EXPECT_EQ(groups(ops, vulkan(1)),
            "embed rms_norm linear+linear+linear rms_norm rms_norm kv_append attention "
            "linear+rms_norm+glu linear copy rms_norm linear arg_max");
}

TEST(Fusion, NormsOfHeadsMayBeMadeAsTheyAreAppended) {
  Step s({});
  const std::vector<Op> ops = s.normed_append();
  EXPECT_EQ(groups(ops, vulkan(1)), "rms_norm+rms_norm+kv_append");
  EXPECT_EQ(groups(ops, vulkan(32)), "rms_norm rms_norm kv_append");
  EXPECT_EQ(groups(ops, cuda(1)), "rms_norm rms_norm kv_append");
  const auto apart = [&](size_t norm, const std::function<void(RmsNorm&)>& change) {
    std::vector<Op> changed = ops;
    change(std::get<RmsNorm>(changed[norm]));
    return groups(changed, vulkan(1)) == "rms_norm rms_norm kv_append";
  };
  for (const size_t norm : {0u, 1u}) {
    EXPECT_TRUE(apart(norm, [](RmsNorm& n) { n.p.eps = 1e-3f; })) << "they differ";
    EXPECT_TRUE(apart(norm, [](RmsNorm& n) { n.y.offset += 4; })) << "not in place";
    EXPECT_TRUE(apart(norm, [](RmsNorm& n) { n.p.cols *= 2; })) << "not of a head";
    EXPECT_TRUE(apart(norm, [](RmsNorm& n) { n.x.offset = n.y.offset += 4; })) << "of other columns";
  }
  EXPECT_TRUE(apart(1, [](RmsNorm& n) { n.p.groups -= 1; })) << "not all keys";
}

// A row with an explicit position, as in a second reading, is not a generated token.
TEST(Fusion, ARowWithAPositionIsAppendedByItself) {
  Step s({});
  std::vector<Op> ops = s.normed_append();
  ops.push_back(s.ring());
  EXPECT_EQ(groups(ops, vulkan(1)), "rms_norm+rms_norm+kv_append copy");
  EXPECT_EQ(groups(ops, cuda(1)), "rms_norm rms_norm kv_append+copy");
  std::get<KvAppend>(ops[2]).positions = s.at["positions"];
  EXPECT_EQ(groups(ops, vulkan(1)), "rms_norm rms_norm kv_append copy");
  EXPECT_EQ(groups(ops, cuda(1)), "rms_norm rms_norm kv_append copy");
}

// Products with a bias are not joined side by side, but may follow the same norm.
TEST(Fusion, ProductsWithBiases) {
  const auto ops = Step({.biases = true}).decode(2).ops;
  EXPECT_EQ(groups(ops, cuda(1)),
            "embed "
            "rms_norm+linear+linear+linear kv_append attention linear rms_norm+glu linear "
            "rms_norm+linear+linear+linear kv_append attention linear rms_norm+glu linear "
            "copy rms_norm linear arg_max");
  EXPECT_EQ(groups(ops, vulkan(1)),
            "embed "
            "rms_norm linear linear linear kv_append attention linear+rms_norm+glu "
            "linear+rms_norm+linear+linear+linear kv_append attention linear+rms_norm+glu "
            "linear copy rms_norm linear arg_max");
}

// Experts are chosen by the product that needs them first, and by the next one, if both need what this route
// makes.
TEST(Fusion, ExpertsMayBeChosenByTheirProducts) {
  Operands at;
  Route route{.logits = at["logits"],
              .bias = {},
              .first = at["first"],
              .row = at["row"],
              .weight = at["weight"],
              .p = {}};
  route.p.experts = 8, route.p.chosen = 2;
  ExpertGlu glu{};
  glu.x = at["norm"], glu.first = at["first"], glu.row = at["row"], glu.h = at["h"];
  glu.p.experts = 8, glu.p.chosen = 2;
  EXPECT_EQ(groups({route, glu}, cuda(1)), "route+expert_glu");
  EXPECT_EQ(groups({route, glu}, cuda(32)), "route expert_glu");
  EXPECT_EQ(groups({route, glu}, vulkan(1)), "route+expert_glu");
  EXPECT_EQ(groups({glu, route}, cuda(1)), "expert_glu route");
  const auto apart = [&](const std::function<void(ExpertGlu&)>& change) {
    ExpertGlu changed = glu;
    change(changed);
    return groups({route, changed}, cuda(1)) == "route expert_glu";
  };
  EXPECT_TRUE(apart([&](ExpertGlu& g) { g.first = at["other"]; })) << "another route's";
  EXPECT_TRUE(apart([&](ExpertGlu& g) { g.row = at["other"]; })) << "another route's";
  EXPECT_TRUE(apart([](ExpertGlu& g) { g.p.chosen = 3; })) << "another choice";
  EXPECT_TRUE(apart([&](ExpertGlu& g) { g.h = at["logits"]; })) << "it writes what the router reads";
  EXPECT_TRUE(apart([&](ExpertGlu& g) { g.x = at["weight"]; })) << "it reads what the router writes";

  ExpertLinear linear{};
  linear.h = at["h"], linear.first = at["first"], linear.weight = at["weight"], linear.y = at["x"];
  linear.p.experts = 8, linear.p.chosen = 2;
  EXPECT_EQ(groups({route, glu, linear}, cuda(1)), "route+expert_glu+expert_linear");
  EXPECT_EQ(groups({route, glu, linear}, cuda(32)), "route expert_glu expert_linear");
  EXPECT_EQ(groups({route, glu, linear}, vulkan(1)), "route+expert_glu expert_linear");
  const auto linear_apart = [&](const std::function<void(ExpertLinear&)>& change) {
    ExpertLinear changed = linear;
    change(changed);
    return groups({route, glu, changed}, cuda(1)) == "route+expert_glu expert_linear";
  };
  EXPECT_TRUE(linear_apart([&](ExpertLinear& l) { l.first = at["other"]; })) << "another route's";
  EXPECT_TRUE(linear_apart([&](ExpertLinear& l) { l.weight = at["other"]; })) << "another route's";
  EXPECT_TRUE(linear_apart([](ExpertLinear& l) { l.p.chosen = 3; })) << "another choice";
  EXPECT_TRUE(linear_apart([&](ExpertLinear& l) { l.y = at["logits"]; }))
      << "it writes what the router reads";
}

// The expert that every token takes is one more slot of the chosen ones, if it is like these.
TEST(Fusion, ASharedExpertMayBeOneMoreSlot) {
  Operands at;
  const uint32_t cols = 64, inner = 32;
  const auto weight = [&](const char* name) {
    Weight w;
    static_cast<View&>(w) = at[name];
    w.type = DType::kQ8_0;
    return w;
  };
  Route route{
      .logits = at["logits"], .bias = {}, .first = at["first"], .row = at["row"], .weight = at["weight"]};
  route.p.experts = 8, route.p.chosen = 2;
  ExpertGlu glu{};
  glu.x = at["norm"], glu.first = at["first"], glu.row = at["row"], glu.h = at["h"];
  glu.gate = weight("gates"), glu.up = weight("ups");
  glu.p = {.in_cols = cols, .out_cols = inner, .act = kActSilu, .experts = 8, .chosen = 2};
  ExpertLinear linear{};
  linear.h = at["h"], linear.first = at["first"], linear.weight = at["weight"], linear.y = at["x"];
  linear.w = weight("downs");
  linear.p = {.in_cols = inner, .out_cols = cols, .experts = 8, .chosen = 2};
  Glu shared{.x = at["norm"],
             .gate = weight("gate"),
             .up = weight("up"),
             .h = at["h"],
             .p = {.in_cols = cols, .out_cols = inner, .act = kActSilu}};
  Gate factor{.g = at["factor"], .x = at["h"]};
  factor.p = {.cols = inner, .groups = 1, .x_stride = inner, .g_stride = 1, .g_cols = 1};
  Linear down{.x = at["h"], .w = weight("down"), .bias = {}, .y = at["x"], .p = {}};
  down.p = {.in_cols = inner, .out_cols = cols, .x_stride = inner, .y_stride = cols, .add = 1};

  const std::string together = "route+expert_glu+expert_linear+glu+gate+linear";
  EXPECT_EQ(groups({route, glu, linear, shared, factor, down}, cuda(1)), together);
  EXPECT_EQ(groups({route, glu, linear, shared, down}, cuda(1)), "route+expert_glu+expert_linear+glu+linear");
  EXPECT_EQ(groups({route, glu, linear, shared, factor, down}, vulkan(1)),
            "route+expert_glu expert_linear glu gate linear");
  EXPECT_EQ(groups({route, glu, linear, shared, factor, down}, cuda(32)),
            "route expert_glu expert_linear glu gate linear");
  const auto apart = [&](const auto& change) {
    ExpertGlu g = glu;
    ExpertLinear l = linear;
    Glu s = shared;
    Gate f = factor;
    Linear d = down;
    change(g, l, s, f, d);
    return groups({route, g, l, s, f, d}, cuda(1)) == "route+expert_glu+expert_linear glu gate linear";
  };
  const auto of_glu = [&](const std::function<void(ExpertGlu&, Glu&)>& change) {
    return apart([&](ExpertGlu& g, ExpertLinear&, Glu& s, Gate&, Linear&) { change(g, s); });
  };
  EXPECT_TRUE(of_glu([&](ExpertGlu&, Glu& s) { s.x = at["other"]; })) << "another x";
  EXPECT_TRUE(of_glu([](ExpertGlu&, Glu& s) { s.p.out_cols *= 2; })) << "another shape";
  EXPECT_TRUE(of_glu([](ExpertGlu&, Glu& s) { s.p.act = kActGelu; })) << "another activation";
  EXPECT_TRUE(of_glu([&](ExpertGlu& g, Glu&) { g.up_bias = at["bias"]; })) << "experts with biases";
  EXPECT_TRUE(of_glu([](ExpertGlu& g, Glu&) { g.h.bytes = 2 * 32 * 4; })) << "no room";
  EXPECT_TRUE(of_glu([](ExpertGlu& g, Glu&) { g.gate = {}; })) << "experts without a gate";
  const auto of_linear = [&](const std::function<void(ExpertLinear&, Linear&)>& change) {
    return apart([&](ExpertGlu&, ExpertLinear& l, Glu&, Gate&, Linear& d) { change(l, d); });
  };
  EXPECT_TRUE(of_linear([](ExpertLinear&, Linear& d) { d.p.add = 0; })) << "it does not add";
  EXPECT_TRUE(of_linear([&](ExpertLinear&, Linear& d) { d.y = at["other"]; })) << "another y";
  EXPECT_TRUE(of_linear([&](ExpertLinear& l, Linear&) { l.scale = at["scale"]; })) << "experts with scales";
  EXPECT_TRUE(apart([](ExpertGlu&, ExpertLinear&, Glu&, Gate& f, Linear&) { f.p.groups = 2; }))
      << "a gate of other channels";
}

TEST(Fusion, AChunkJoinsOnlyProducts) {
  const auto ops = Step({}).chunk_layer().ops;
  const char* const expected =
      "rms_norm linear+linear+linear kv_append linear activation linear cis_store kv_view attention top_k "
      "kv_compact linear rms_norm glu linear";
  EXPECT_EQ(groups(ops, cuda(32)), expected);
  EXPECT_EQ(groups(ops, vulkan(32)), expected);
}

TEST(Fusion, ANormIsLeftOnlyToProductsOfItsRows) {
  Step s({});
  const auto norm_and = [&](Op product) {
    return groups({s.norm("x", "norm"), std::move(product)}, cuda(1));
  };
  const auto of = [&](const char* x, const char* y) {
    return s.linear(s.at[x], kCols, s.at[y], kCols, kCols, false);
  };
  EXPECT_EQ(norm_and(of("norm", "y")), "rms_norm+linear");
  EXPECT_EQ(norm_and(of("x", "y")), "rms_norm linear");
  EXPECT_EQ(norm_and(of("norm", "x")), "rms_norm linear") << "it writes what the norm reads";
  EXPECT_EQ(norm_and(of("norm", "norm")), "rms_norm linear") << "it writes what the norm makes";
  Linear rows = of("norm", "y");
  rows.p.rows = kLogitRows;
  EXPECT_EQ(norm_and(rows), "rms_norm linear");
  Linear part = of("norm", "y");
  part.p.in_cols = kCols / 2;
  EXPECT_EQ(norm_and(part), "rms_norm linear");
  Glu glu = s.glu();
  EXPECT_EQ(norm_and(glu), "rms_norm+glu");
  glu.h = s.at["x"];
  EXPECT_EQ(norm_and(glu), "rms_norm glu");
  EXPECT_EQ(groups({s.norm("x", "x"), of("x", "y")}, cuda(1)), "rms_norm linear") << "in place";
  // The linear before a norm without products is not joined either.
  EXPECT_EQ(groups({s.output(), s.norm("x", "norm"), of("x", "y")}, vulkan(1)), "linear rms_norm linear");
  EXPECT_EQ(groups({of("norm", "y"), s.norm("x", "norm"), of("norm", "y")}, vulkan(1)),
            "linear rms_norm linear")
      << "it makes another vector";
  // A sum of experts may precede a norm like a linear, but not the norm of a glu.
  ExpertLinear experts{};
  experts.y = s.at["x"];
  experts.p.out_cols = kCols;
  EXPECT_EQ(groups({experts, s.norm("x", "norm"), of("norm", "y")}, vulkan(1)),
            "expert_linear+rms_norm+linear");
  EXPECT_EQ(groups({experts, s.norm("x", "norm"), s.glu()}, vulkan(1)), "expert_linear rms_norm glu");
  experts.y = s.at["y"];
  EXPECT_EQ(groups({experts, s.norm("x", "norm"), of("norm", "y")}, vulkan(1)),
            "expert_linear rms_norm linear");
}

TEST(Fusion, SiblingsDoNotOverlap) {
  Step s({});
  const auto of = [&](const char* x, const char* y) {
    return Op(s.linear(s.at[x], kCols, s.at[y], kCols, kCols, false));
  };
  EXPECT_EQ(groups({of("x", "a"), of("x", "b"), of("x", "c"), of("x", "d"), of("x", "e")}, cuda(1)),
            "linear+linear+linear+linear linear");
  EXPECT_EQ(groups({of("x", "a"), of("x", "a")}, cuda(1)), "linear linear");
  EXPECT_EQ(groups({of("x", "a"), of("a", "b")}, cuda(1)), "linear linear");
  EXPECT_EQ(groups({of("x", "a"), of("x", "x")}, cuda(1)), "linear linear");
  EXPECT_EQ(groups({of("x", "a"), of("x", "b"), of("y", "c")}, cuda(1)), "linear+linear linear");
  EXPECT_EQ(groups({of("x", "a"), of("x", "b")}, vulkan(1)), "linear linear") << "not side by side";
}

TEST(Fusion, AnOpThatOverwritesAnAppendComesLater) {
  Step s({});
  const auto after_append = [&](Op op) { return groups({s.append("pool"), std::move(op)}, cuda(1)); };
  Copy copy = s.ring();
  EXPECT_EQ(after_append(copy), "kv_append+copy");
  EXPECT_EQ(groups({s.append("pool"), copy}, cuda(2)), "kv_append copy");
  copy.dst = s.at["pool k"].slice(100, 100);
  EXPECT_EQ(after_append(copy), "kv_append copy");
  copy = s.ring();
  copy.src = s.at["pool v"];
  EXPECT_EQ(after_append(copy), "kv_append copy");
  copy = s.ring();
  copy.dst = s.at["qkv"];
  EXPECT_EQ(after_append(copy), "kv_append copy");
  copy.dst = s.at["saturated"];
  EXPECT_EQ(after_append(copy), "kv_append copy");
  QueryGate gate = s.gate();
  EXPECT_EQ(after_append(gate), "kv_append+query_gate");
  EXPECT_EQ(groups({s.append("pool"), gate, s.ring()}, cuda(1)), "kv_append+query_gate copy");
  gate.cached = s.at["ring"];
  EXPECT_EQ(groups({s.append("pool"), s.ring(), gate}, cuda(1)), "kv_append+copy query_gate");
}

TEST(Fusion, AListJoinsOnlyItsOwnVotes) {
  Step s({});
  const auto with = [&](auto change) {
    TokenScore score = s.score();
    Vote vote = s.vote();
    TopK top_k = s.top_k();
    change(score, vote, top_k);
    return groups({score, vote, top_k}, cuda(1));
  };
  EXPECT_EQ(with([](auto&, auto&, auto&) {}), "token_score+vote+top_k");
  EXPECT_EQ(groups({s.vote(), s.top_k()}, cuda(1)), "vote+top_k");
  EXPECT_EQ(groups({s.score(), s.vote(), Attention{}, s.top_k()}, cuda(1)),
            "token_score vote attention top_k");
  EXPECT_EQ(with([&](auto& score, auto&, auto&) { score.scores = s.at["others"]; }),
            "token_score vote+top_k");
  EXPECT_EQ(with([&](auto& score, auto&, auto&) { score.p.head_state = 8; }), "token_score vote+top_k");
  EXPECT_EQ(with([&](auto& score, auto&, auto&) { score.p.heads = 1; }), "token_score vote+top_k");
  EXPECT_EQ(with([&](auto&, auto& vote, auto&) { vote.gate = s.at["gate"]; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto& vote, auto&) { vote.p.scope = kVoteLayer; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto&, auto& top_k) { top_k.scores = s.at["others"]; }),
            "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto&, auto& top_k) { top_k.p.keep = kKeepOfHead; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto&, auto& top_k) { top_k.p.in_runs = 1; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto&, auto& top_k) { top_k.p.by_position = 1; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto&, auto& top_k) { top_k.p.head_state = 0; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto&, auto& top_k) { top_k.p.page = 16; }), "token_score vote top_k");
  EXPECT_EQ(with([&](auto&, auto& vote, auto& top_k) { vote.p.page = top_k.p.page = 16; }),
            "token_score vote+top_k");
}

TEST(Fusion, ADeltaNetBetweenAConvolutionAndANorm) {
  constexpr uint32_t kKeyHeads = 2, kValueHeads = 4, kWidth = 32;
  constexpr uint32_t kChannels = (2 * kKeyHeads + kValueHeads) * kWidth;
  Operands at;
  const ShortConv conv{.x = at["qkv"],
                       .w = at["weights"],
                       .bias = {},
                       .tail = {at["tails"], 1 << 20, 2},
                       .y = at["middle"],
                       .p = {.channels = kChannels,
                             .taps = 4,
                             .x_column = 0,
                             .times_column = kNoColumn,
                             .gate_column = kNoColumn,
                             .x_stride = kChannels,
                             .y_stride = kChannels,
                             .act = kActSilu}};
  const DeltaNet net{.qkv = at["middle"],
                     .gates = at["qkv"],
                     .a = at["weights"],
                     .dt = at["weights"],
                     .m = {at["matrices"], 1 << 20, 2},
                     .y = at["y"],
                     .p = {.key_heads = kKeyHeads,
                           .value_heads = kValueHeads,
                           .width = kWidth,
                           .q_column = 0,
                           .k_column = kKeyHeads * kWidth,
                           .v_column = 2 * kKeyHeads * kWidth,
                           .qkv_stride = kChannels}};
  EXPECT_EQ(groups({conv, net}, cuda(1)), "short_conv+delta_net");
  EXPECT_EQ(groups({conv, net}, cuda(2)), "short_conv delta_net");
  EXPECT_EQ(groups({conv, net}, vulkan(1)), "short_conv delta_net");
  const auto apart = [&](const std::function<void(ShortConv&, DeltaNet&)>& change) {
    ShortConv c = conv;
    DeltaNet n = net;
    change(c, n);
    EXPECT_EQ(groups({c, n}, cuda(1)), "short_conv delta_net");
  };
  apart([&](ShortConv& c, DeltaNet&) { c.y = at["other"]; });
  apart([](ShortConv& c, DeltaNet&) { c.tail.slots = 1; });
  apart([](ShortConv& c, DeltaNet&) { c.p.act = kActNone; });
  apart([&](ShortConv& c, DeltaNet&) { c.bias = at["bias"]; });
  apart([](ShortConv& c, DeltaNet&) { c.p.gate_column = 0; });
  apart([](ShortConv& c, DeltaNet&) { ++c.p.channels; });
  apart([](ShortConv&, DeltaNet& n) { std::swap(n.p.q_column, n.p.k_column); });
  apart([&](ShortConv&, DeltaNet& n) { n.y = at["qkv"]; });

  GatedNorm norm{.x = at["y"],
                 .z = at["qkv"],
                 .weight = at["weights"],
                 .y = at["y"],
                 .p = {.cols = kWidth, .groups = kValueHeads, .order = kNormThenGate, .act = kActSilu}};
  EXPECT_EQ(groups({conv, net, norm}, cuda(1)), "short_conv+delta_net+gated_norm");
  EXPECT_EQ(groups({net, norm}, cuda(1)), "delta_net gated_norm");
  norm.z = at["y"];
  EXPECT_EQ(groups({conv, net, norm}, cuda(1)), "short_conv+delta_net gated_norm");
  norm.z = at["qkv"];
  norm.p.order = kGateThenNorm;
  EXPECT_EQ(groups({conv, net, norm}, cuda(1)), "short_conv+delta_net gated_norm");
}

}  // namespace
}  // namespace thimble
