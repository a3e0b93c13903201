// ADORE (methods 5): one small recurrent controller scores every token for all layers and heads. The score
// falls with a token's age. A step may read evicted tokens with high scores again.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "runtime/policy/policy.h"

namespace thimble {
namespace {

constexpr uint32_t kRecent = 16;   // last entries that always stay (methods 5.3)
constexpr uint32_t kRefresh = 16;  // tokens after which the ages in the scores are updated

class Adore : public RetentionPolicy, public HostControl {
 public:
  Status resolve(const Model& model, SessionOptions& o) const override {
    if (model.has_states())
      return error(
          Code::kUnsupported,
          "adore reads evicted tokens again out of order, which layers with a recurrent state cannot; "
          "choose another retention");
    if (std::any_of(model.layers.begin(), model.layers.end(), [](const Layer& l) { return l.has_window(); }))
      return error(
          Code::kUnsupported,
          "adore keeps the same tokens in every layer, and this model has layers with a sliding window; "
          "choose another retention");
    if (o.positions == Positions::kOriginal || !o.keeps.empty())
      return error(
          Code::kInvalidArgument,
          "adore keeps the same tokens in every head and rotates them by their index in the list; leave "
          "out positions and pools of single heads, or choose another retention");
    if (o.rebuild >= kMostMergedRows)
      return error(Code::kInvalidArgument, "a step cannot rebuild %u tokens; it rebuilds at most %u",
                   o.rebuild, kMostMergedRows - 1);
    if (!o.rebuild_every) o.rebuild_every = 1;
    if (o.local == kDefault) o.local = 0;
    if (o.stabilizers == kDefault) o.stabilizers = kRecent;
    if (!o.context) o.context = std::max(model.info.context_length, 1u);
    if (o.chunk) o.chunk = std::max(o.chunk, o.rebuild + 1);
    if (!o.pool && !o.budget) o.pool = o.retainer->budget;
    if (o.protect_init == kDefault) o.protect_init = kSinks;
    const uint64_t least = uint64_t(std::max(o.rebuild, 1u)) + o.protect_init + o.stabilizers;
    if (o.pool && o.pool < least)
      return error(Code::kInvalidArgument,
                   "a pool of %u is too small for adore: the first %u and last %u tokens stay, and with %u "
                   "rebuilt ones it takes at least %u",
                   o.pool, o.protect_init, o.stabilizers, o.rebuild, static_cast<uint32_t>(least));
    THIMBLE_TRY(resolve_eviction(o));
    o.max_new = 1;  // each generated token evicts one entry
    return {};
  }

  HostControl* host() override { return this; }

  bool takes_drafts() const override { return false; }

  void place(const Setting& s, Arena& pool, Arena&) override {
    const uint64_t word = 4, heads = s.model.shape.kv_heads;
    controller_ = &s.options.retainer->controller;
    kv_heads_ = s.model.shape.kv_heads;
    vocab_ = s.model.shape.vocab;
    rebuild_ = s.options.rebuild;
    every_ = s.options.rebuild_every;
    first_stay_ = s.options.protect_init;
    last_stay_ = s.options.stabilizers;
    reach_ = s.dimensions.reach;  // shrinking a session does not change it
    ring_ = reach_ + 1;
    row_words_ = rebuild_ + 1;
    list_capacity_ = 1 + s.dimensions.reach;
    scores_ = pool.place(reach_ * word);
    if (rebuild_) rows_ = pool.place((2 * row_words_ + heads * list_capacity_) * word);
  }

  // The host also keeps data of evicted tokens here.
  void place_on_host(const Setting& s, Arena& io) override {
    const uint64_t context = s.options.context, width = controller_->width;
    tokens_ = io.place(context * sizeof(int32_t));
    settled_ = io.place(context * width * sizeof(int16_t));
    scored_ = io.place(context * sizeof(Scored));
    states_ = io.place(ring_ * width * sizeof(float));
    host_scores_ = io.place(scores_.bytes);
    host_rows_ = io.place(rows_.bytes);
  }

  void note(uint64_t position, std::span<const int32_t> tokens, std::span<const float> embeddings) override {
    constexpr uint32_t kBlock = Controller::kBlock;
    const uint32_t width = controller_->width, cols = controller_->cols;
    std::array<float, Controller::kMostWidth> before{};
    std::array<float, kBlock * Controller::kMostWidth> states;
    if (position) std::copy_n(state(position - 1), width, before.data());
    for (size_t first = 0; first < tokens.size(); first += kBlock) {
      const size_t count = std::min<size_t>(kBlock, tokens.size() - first);
      controller_->read(embeddings.subspan(first * cols, count * cols), before.data(), states.data());
      for (size_t i = 0; i < count; ++i) {
        const uint64_t at = position + first + i;
        const float* own = &states[i * width];
        std::copy_n(own, width, state(at));
        controller_->settle(own, settled(at));
        on_host<int32_t>(tokens_)[at] = tokens[first + i];
        on_host<Scored>(scored_)[at].aged_at = kNever;
      }
      std::copy_n(&states[(count - 1) * width], width, before.data());
    }
  }

  std::span<const int32_t> prepare(const HostStep& s) override {
    const auto last = static_cast<uint32_t>(std::max<uint64_t>(s.position + s.tokens, 1) - 1);
    aged_at_ = last - last % kRefresh;
    float* const scores = on_host<float>(host_scores_);
    float* next = scores;
    for (const int32_t position : s.held) *next++ = score(static_cast<uint32_t>(position));
    const uint32_t again = s.generates && rebuild_ && s.position % every_ == 0 ? choose(s) : 0;
    for (uint32_t i = 0; i < again; ++i) *next++ = score(chosen_[i]);
    for (uint32_t i = 0; i < s.tokens; ++i) *next++ = score(static_cast<uint32_t>(s.position) + i);
    if (again) {
      chosen_[again] = static_cast<uint32_t>(s.position);
      describe_rows(s.held, again + 1);
    }
    // The first and the last entries stay whatever their scores.
    const auto entries = static_cast<uint32_t>(next - scores);
    const uint32_t* list = rebuild_ ? on_host<uint32_t>(host_rows_) + 2 * row_words_ + 1 : nullptr;
    for (uint32_t i = 0; i < entries; ++i)
      if (i < first_stay_ || i + last_stay_ >= entries)
        scores[again ? list[i] : i] = std::numeric_limits<float>::infinity();
    return {row_tokens_.data(), again ? again + 1 : 0};
  }

  void record_rows(Recorder& r) const override { copy(r, host_rows_, rows_); }
  Rebuilt rebuilt() const override {
    const uint64_t row_bytes = row_words_ * sizeof(uint32_t);
    return {.positions = rows_.slice(0, row_bytes),
            .index = rows_.slice(row_bytes, row_bytes),
            .list = rows_.slice(2 * row_bytes, rows_.bytes - 2 * row_bytes),
            .list_capacity = list_capacity_};
  }

  void record_eviction(const LayerStep& l) const override {
    if (l.layer == 0) copy(l.recorder, host_scores_, scores_);  // copied from the host once for all layers
    l.recorder.record(GivenScore{.score = scores_,
                                 .cis = l.pool().cis,
                                 .chunk_cis = l.chunk_rows().cis,
                                 .p = {.first_head = 0,
                                       .heads = kv_heads_,
                                       .chunk_capacity = l.setting.options.chunk,
                                       .head_state = l.head_state()}});
  }

  void carry(const Held& held, std::vector<View>& views) const override {
    const uint64_t n = held.position, width = controller_->width;
    if (!n) return;
    views.push_back(tokens_.slice(0, n * sizeof(int32_t)));
    views.push_back(settled_.slice(0, n * width * sizeof(int16_t)));
    // The states of as many tokens as a head holds entries, and of the token before them, in text order. A
    // rewind cannot reach other states. The ring buffer may hold them in two pieces.
    const uint64_t count = std::min<uint64_t>(n, uint64_t(held.entries.front()) + 1),
                   row = width * sizeof(float), first = (n - count) % ring_,
                   at_end = std::min(count, ring_ - first);
    views.push_back(states_.slice(first * row, at_end * row));
    if (at_end < count) views.push_back(states_.slice(0, (count - at_end) * row));
    // Scores are computed again when they are needed, because the stored ones may belong to the state before
    // a restore.
    for (uint64_t at = 0; at < n; ++at) on_host<Scored>(scored_)[at].aged_at = kNever;
  }
  bool can_carry(const Held& held, std::span<const Bytes> bytes) const override {
    if (std::any_of(held.entries.begin(), held.entries.end(),
                    [&](uint32_t entries) { return entries != held.entries.front(); }))
      return false;
    if (bytes.empty()) return true;
    std::vector<int32_t> tokens(bytes[0].size() / sizeof(int32_t));
    std::copy(bytes[0].begin(), bytes[0].end(), reinterpret_cast<std::byte*>(tokens.data()));
    return std::all_of(tokens.begin(), tokens.end(),
                       [&](int32_t t) { return t >= 0 && static_cast<uint32_t>(t) < vocab_; });
  }

 private:
  struct Scored {
    uint32_t aged_at;  // the latest token when `score` was computed, rounded down to kRefresh
    float score;
  };
  static constexpr uint32_t kNever = UINT32_MAX;

  // The state after a token. It exists for the tokens to which a rewind may go back.
  float* state(uint64_t at) const { return on_host<float>(states_) + at % ring_ * controller_->width; }
  int16_t* settled(uint64_t at) const { return on_host<int16_t>(settled_) + at * controller_->width; }

  float score(uint32_t at) const {
    Scored& s = on_host<Scored>(scored_)[at];
    if (s.aged_at != aged_at_)
      s = {aged_at_, controller_->score(settled(at), aged_at_ - std::min(at, aged_at_))};
    return s.score;
  }

  // Stores the evicted tokens with the highest scores in chosen_, in position order, and returns their
  // number. Of tokens with equal scores, the later ones are chosen.
  uint32_t choose(const HostStep& s) {
    using Ranked = std::pair<float, uint32_t>;
    std::array<Ranked, kMostMergedRows> best;
    const auto begin = best.begin();
    auto end = begin;
    auto held = s.held.begin();
    for (uint32_t at = 0; at < s.position; ++at) {
      if (held != s.held.end() && static_cast<uint32_t>(*held) == at) {
        ++held;
        continue;
      }
      const Ranked own{score(at), at};
      if (end - begin == rebuild_) {
        if (!(own > *begin)) continue;
        std::pop_heap(begin, end--, std::greater<>());
      }
      *end++ = own;
      std::push_heap(begin, end, std::greater<>());
    }
    std::transform(begin, end, chosen_.begin(), [](const Ranked& r) { return r.second; });
    const auto count = static_cast<uint32_t>(end - begin);
    std::sort(chosen_.begin(), chosen_.begin() + count);
    return count;
  }

  // Writes the tokens and positions of the first `rows` tokens in chosen_, and their indices in the list of
  // all entries and rows.
  void describe_rows(std::span<const int32_t> held, uint32_t rows) {
    uint32_t* positions = on_host<uint32_t>(host_rows_);
    uint32_t* index = positions + row_words_;
    uint32_t* list = index + row_words_;
    uint32_t *to = list + 1, entry = 0;
    const auto entries = static_cast<uint32_t>(held.size());
    for (uint32_t row = 0; row < rows; ++row) {
      for (; entry < entries && static_cast<uint32_t>(held[entry]) < chosen_[row]; ++entry) *to++ = entry;
      index[row] = static_cast<uint32_t>(to - list) - 1;
      *to++ = entries + row;
      positions[row] = chosen_[row];
      row_tokens_[row] = on_host<int32_t>(tokens_)[chosen_[row]];
    }
    *list = entries + rows;  // the last row comes after all entries
    for (uint32_t head = 1; head < kv_heads_; ++head)
      std::copy_n(list, 1 + *list, list + uint64_t(head) * list_capacity_);
  }

  // Records a copy of a whole array that the host wrote.
  static void copy(Recorder& r, const View& from, const View& to) {
    r.record(Copy{.src = from,
                  .dst = to,
                  .p = {.cols = static_cast<uint32_t>(to.bytes / sizeof(uint32_t)),
                        .src_stride = 0,
                        .dst_stride = 0,  // one row
                        .from_logit_row = 0,
                        .to_ring_row = 0,
                        .rows = kLogitRows}});
  }

  const Controller* controller_ = nullptr;
  uint32_t kv_heads_ = 0, vocab_ = 0, rebuild_ = 0, every_ = 1, list_capacity_ = 0, row_words_ = 0;
  uint32_t first_stay_ = 0, last_stay_ = 0;
  uint64_t ring_ = 1, reach_ = 0;
  uint32_t aged_at_ = 0;
  // In io, for each token of the text: its id, the part of its score that settle() computes, and its score.
  // `states_` holds the states after the latest tokens.
  View tokens_, settled_, scored_, states_;
  View host_scores_, scores_;  // f32 [reach], written by the host and read by the device
  View host_rows_, rows_;      // 32-bit words: the arrays of rebuilt()
  // The positions and tokens of a step's rows.
  std::array<uint32_t, kMostMergedRows> chosen_{};
  std::array<int32_t, kMostMergedRows> row_tokens_{};
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_adore_retention() { return std::make_unique<Adore>(); }

}  // namespace thimble
