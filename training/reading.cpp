#include "training/reading.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/size_text.h"
#include "base/system.h"
#include "training/product.h"

namespace thimble {

constexpr uint32_t kChunk = 512;
constexpr float kLeastLabel = -30;

// A retention that drops nothing and copies the retainers' inputs. Only a Reader creates it, so it is not in
// the table of names.
class Observer : public RetentionPolicy {
 public:
  Observer(Retainer::Input input, uint32_t positions, bool weighed)
      : input_(input), positions_(positions), weighed_(weighed) {}

  Status resolve(const Model&, SessionOptions&) const override { return {}; }

  // The copies are read between segments, so they must outlive the layer's own buffers.
  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    const ModelShape& shape = s.model.shape;
    const uint64_t f32 = 4, rows = s.options.chunk, labels = uint64_t(shape.kv_heads) * positions_;
    states = pool.place(rows * cols(s) * f32);
    marked = pool.place(rows * sizeof(uint32_t));
    range = pool.place(4 * sizeof(uint32_t));
    if (weighed_) values = pool.place(rows * shape.kv_heads * shape.head_dim * f32);
    lse_ = workspace.place(rows * shape.heads * f32);
    max_logit.clear();
    log_prob.clear();
    worth.clear();
    for (const Layer& layer : s.model.layers) {
      const bool trains = layer.attends_to_all();
      for (auto* views : {&max_logit, &log_prob})
        views->push_back(trains ? pool.place(labels * f32) : View{});
      worth.push_back(trains && weighed_ ? pool.place(uint64_t(shape.heads) * positions_ * f32) : View{});
    }
  }

  void record(const LayerStep& l) const override {
    if (!l.chunk) return;
    const uint32_t width = cols(l.setting), qkv = l.setting.dimensions.qkv_cols;
    copy(l.recorder, input_ == Retainer::Input::kQkv ? l.at.qkv : l.input(), width, states, width);
    if (weighed_) {
      const uint32_t of_values = l.attention().kv_cols();
      const uint64_t before = uint64_t(qkv - of_values) * sizeof(float);
      copy(l.recorder, l.at.qkv.slice(before, l.at.qkv.bytes - before), qkv, values, of_values);
    }
  }

  void record_queries(const LayerStep& l) const override {
    if (!l.chunk) return;
    l.recorder.record(Label{.q = l.at.qkv,
                            .marked = marked,
                            .k = l.pool().k,
                            .chunk_k = l.chunk_rows().k,
                            .rope = l.rope_table(),
                            .range = range,
                            .x = weighed_ ? l.input() : View{},
                            .worth = worth[l.layer],
                            .sinks = l.weights.of(l.attention().sinks),
                            .lse = lse_,
                            .max_logit = max_logit[l.layer],
                            .log_prob = log_prob[l.layer],
                            .p = {.heads = l.attention().kv_heads,
                                  .group = l.attention().group(),
                                  .head_dim = l.attention().head_dim,
                                  .row_stride = l.setting.dimensions.qkv_cols,
                                  .chunk_capacity = l.setting.options.chunk,
                                  .head_state = l.head_state(),
                                  .label_capacity = positions_,
                                  .x_cols = l.setting.model.shape.d_model,
                                  .cap = l.setting.model.attention_cap,
                                  .scale = l.setting.model.attention_scale,
                                  .least = kLeastLabel,
                                  .rope = l.rope()}});
  }

  uint32_t cols(const Setting& s) const {
    return input_ == Retainer::Input::kQkv ? s.dimensions.qkv_cols : s.model.shape.d_model;
  }

  View states, marked, range;             // f32 [chunk][cols], uint [chunk], uint [4] as in `label`
  View values;                            // f32 [chunk][kv head][dh], before conversion to f16
  std::vector<View> max_logit, log_prob;  // for each layer without a window: f32 [kv head][positions]
  std::vector<View> worth;                // for each layer without a window: f32 [head][positions]

 private:
  // Copies the first `cols` elements of each row.
  static void copy(Recorder& r, const View& src, uint32_t src_stride, const View& dst, uint32_t cols) {
    r.record(Copy{.src = src,
                  .dst = dst,
                  .p = {.cols = cols,
                        .src_stride = src_stride,
                        .dst_stride = cols,
                        .from_logit_row = 0,
                        .to_ring_row = 0,
                        .rows = kStepRows}});
  }

  const Retainer::Input input_;
  const uint32_t positions_;  // positions of a text
  const bool weighed_;
  View lse_;
};

Reader::Reader(uint32_t threads)
    : threads_(threads ? threads : core_count()), state_(0, Sampler(1, 0)), text_state_(state_) {}

Reader::~Reader() = default;

static uint64_t gram_size(const ModelShape& s) { return uint64_t(s.heads) * s.head_dim * s.head_dim; }

Result<std::unique_ptr<Reader>> Reader::open(std::shared_ptr<const Model> model,
                                             std::shared_ptr<Device> device, Retainer::Input input,
                                             uint32_t text_tokens, uint32_t tail_tokens, uint64_t room,
                                             bool weighed, uint32_t threads) {
  std::unique_ptr<Reader> reader(new Reader(threads));
  THIMBLE_TRY(
      reader->allocate(std::move(model), std::move(device), input, text_tokens, tail_tokens, room, weighed));
  if (weighed) THIMBLE_TRY(reader->measure_outputs());
  return reader;
}

Status Reader::allocate(std::shared_ptr<const Model> model, std::shared_ptr<Device> device,
                        Retainer::Input input, uint32_t text_tokens, uint32_t tail_tokens, uint64_t room,
                        bool weighed) {
  const uint32_t positions = text_tokens + tail_tokens;
  SessionOptions asked;
  asked.pool = positions;
  asked.max_new = 1;
  asked.chunk = kChunk;
  asked.positions = Positions::kOriginal;
  asked.context = positions;
  THIMBLE_LET(options, resolve(*model, asked));
  Policies policies(options);
  auto observer = std::make_unique<Observer>(input, text_tokens, weighed);
  observer_ = observer.get();
  policies.retention = std::move(observer);
  THIMBLE_LET(plan, count_plan(*model, *device, options, policies, true));
  const ModelShape& shape = model->shape;
  bytes_ = plan.pool + plan.view + plan.workspace + plan.io - host_bytes(*model, plan) + plan.weights;
  if (weighed) bytes_ += shape.layers * gram_size(shape) * sizeof(float);
  if (room && bytes_ > room)
    return error(Code::kBudget,
                 "reading a text of %u tokens takes %s, %s more than is left; raise --mem-budget", positions,
                 size_text(bytes_).c_str(), size_text(bytes_ - room).c_str())
        .set_bytes_missing(bytes_ - room);
  device_ = device;
  THIMBLE_LET(engine, Engine::create(std::move(model), std::move(device), std::move(plan),
                                     std::move(policies), std::make_shared<Ledger>(), true));
  engine_ = std::move(engine);
  state_.entries.resize(engine_->dimensions().runs.size());
  cols_ = observer_->cols(engine_->setting());
  states_.resize(uint64_t(kChunk) * cols_);
  values_.resize(uint64_t(kChunk) * shape.kv_heads * shape.head_dim);
  return {};
}

// The columns of W_o are computed as its products with unit vectors, which works for any type.
Status Reader::measure_outputs() {
  const ModelShape& s = engine_->model().shape;
  const uint32_t dh = s.head_dim, inputs = s.heads * dh;
  for (const Layer& layer : engine_->model().layers) {
    std::vector<float>& gram = gram_.emplace_back();
    if (!layer.attends_to_all()) continue;
    THIMBLE_LET(product, Product::by(device_, dh, engine_->weights().of(layer.attention()->output)));
    for (uint32_t head = 0; head < s.heads; ++head) {
      std::fill_n(product->x(), uint64_t(dh) * inputs, 0.0f);
      for (uint32_t c = 0; c < dh; ++c) product->x()[uint64_t(c) * inputs + head * dh + c] = 1;
      THIMBLE_TRY(product->run());
      const auto column = [&](uint32_t c) { return product->y() + uint64_t(c) * s.d_model; };
      const uint64_t first = gram.size();
      gram.resize(first + uint64_t(dh) * dh);
      threads_.run(dh, [&](uint32_t a, uint32_t) {
        for (uint32_t b = 0; b < dh; ++b)
          gram[first + a * uint64_t(dh) + b] =
              static_cast<float>(std::inner_product(column(a), column(a) + s.d_model, column(b), 0.0));
      });
    }
  }
  return {};
}

// Stores the logarithm of |W_o v| for each head and each value of the text's next rows.
Status Reader::weigh_values(uint32_t layer, uint32_t rows) {
  const ModelShape& s = engine_->model().shape;
  const uint32_t dh = s.head_dim, group = s.heads / s.kv_heads, cols = s.kv_heads * dh;
  const View& worth = observer_->worth[layer];
  THIMBLE_TRY(
      device_->read(values_.data(), observer_->values.slice(0, uint64_t(rows) * cols * sizeof(float))));
  std::vector<float> lengths(uint64_t(s.heads) * rows);  // [head][rows]
  threads_.run(s.heads, [&](uint32_t head, uint32_t) {
    std::vector<float> product(dh);
    for (uint32_t row = 0; row < rows; ++row) {
      const float* v = &values_[uint64_t(row) * cols + head / group * dh];
      const float* gram = &gram_[layer][uint64_t(head) * dh * dh];
      std::fill(product.begin(), product.end(), 0.0f);
      for (uint32_t a = 0; a < dh; ++a)
        for (uint32_t b = 0; b < dh; ++b) product[b] += v[a] * gram[a * dh + b];
      const float squared = std::inner_product(v, v + dh, product.begin(), 0.0f);
      lengths[uint64_t(head) * rows + row] =
          0.5f * std::log(std::max(squared, 0.0f));  // rounding may make it negative
    }
  });
  for (uint32_t head = 0; head < s.heads; ++head) {
    const uint64_t at = head * (worth.bytes / s.heads) + read_ * sizeof(float);
    THIMBLE_TRY(device_->write(worth.slice(at, rows * sizeof(float)), &lengths[uint64_t(head) * rows]));
  }
  return {};
}

void Reader::begin(const TrainingText& text) {
  text_ = text;
  read_ = tail_ = of_tail_ = 0;
  state_.reset();
}

// The contents of layers with a window are saved before the first tail, and restored before the others. For
// the other layers it is enough to restore the counts.
Status Reader::begin_tail() {
  const Tail& tail = text_.tails[tail_];
  const uint32_t text_tokens = static_cast<uint32_t>(text_.tokens.size());
  const uint32_t range[] = {tail.sinks, tail.first, tail.end, text_tokens};
  THIMBLE_TRY(device_->write(observer_->range, range));
  if (tail_ == 0) {
    if (state_.state_slot != kNoState) state_.snapshots = {{state_.read, state_.state_slot, 1}};
    text_state_ = state_;  // the steps of a tail do not write to the slot of a snapshot
    text_runs_.clear();
  }
  state_ = text_state_;
  if (text_.tails.size() == 1) return {};
  size_t next = 0;
  for (uint32_t layer = 0; layer < engine_->model().shape.layers; ++layer) {
    if (!engine_->model().layers[layer].has_window()) continue;
    const LayerPool& pool = engine_->layout().layers[layer];
    for (const View& view : {pool.k.values, pool.v.values, pool.pos, pool.cis}) {
      if (tail_ > 0) {
        THIMBLE_TRY(device_->write(view, text_runs_[next++].data()));
        continue;
      }
      std::vector<std::byte>& kept = text_runs_.emplace_back(view.bytes);
      THIMBLE_TRY(device_->read(kept.data(), view));
    }
  }
  return {};
}

// A chunk does not contain rows of both text and tail, because rows label the entries that existed before
// their chunk.
Reader::Rows Reader::next_rows() const {
  const auto text_tokens = static_cast<uint32_t>(text_.tokens.size());
  if (read_ < text_tokens) {
    const auto read = static_cast<uint32_t>(read_);
    return {text_.tokens.data() + read, read, std::min(text_tokens - read, kChunk)};
  }
  const std::vector<int32_t>& tail = text_.tails[tail_].tokens;
  const uint32_t left = static_cast<uint32_t>(tail.size()) - of_tail_;
  return {tail.data() + of_tail_, text_tokens + of_tail_, std::min(left, kChunk)};
}

Status Reader::run_layers(const Rows& rows, const States& states) {
  const bool in_text = read_ < text_.tokens.size();
  Step step{.program = &engine_->chunk_program(rows.count),
            .n_rows = rows.count,
            .position = state_.read,
            .evicts = true};  // in layers with a window
  const auto run = [&](uint32_t segment) -> Status {
    THIMBLE_TRY(engine_->check_files());
    step.first = segment;
    step.last = segment + 1;
    return engine_->submit(step, state_);
  };
  THIMBLE_TRY(run(Decoder::kHead));
  for (uint32_t layer = 0; layer < engine_->model().shape.layers; ++layer) {
    THIMBLE_TRY(run(1 + layer));
    if (!in_text || !engine_->model().layers[layer].attends_to_all()) continue;
    if (!states && !observer_->worth[layer]) continue;
    THIMBLE_TRY(engine_->wait());
    if (states) {
      const uint64_t bytes = uint64_t(rows.count) * cols_ * sizeof(float);
      THIMBLE_TRY(device_->read(states_.data(), observer_->states.slice(0, bytes)));
      states(layer, rows.position, rows.count, states_.data());
    }
    if (observer_->worth[layer]) THIMBLE_TRY(weigh_values(layer, rows.count));
  }
  return engine_->wait();
}

Result<bool> Reader::step(const States& states) {
  if (read_ == text_.all_tokens()) return false;
  if (read_ == 0)
    for (const auto* views : {&observer_->max_logit, &observer_->log_prob})
      for (const View& view : *views)
        if (view)
          THIMBLE_TRY(
              device_->write(view, std::vector<float>(view.bytes / sizeof(float), kLeastLabel).data()));
  const bool in_text = read_ < text_.tokens.size();
  if (!in_text && of_tail_ == 0) THIMBLE_TRY(begin_tail());
  const Rows rows = next_rows();
  engine_->set_tokens({rows.tokens, rows.count});
  std::vector<uint32_t> marked(rows.count);
  if (!in_text) std::copy_n(text_.tails[tail_].marked.begin() + of_tail_, rows.count, marked.begin());
  THIMBLE_TRY(device_->write(observer_->marked.slice(0, rows.count * sizeof(uint32_t)), marked.data()));
  THIMBLE_TRY(run_layers(rows, states));
  read_ += rows.count;
  state_.read += rows.count;
  engine_->count_entries(state_);
  if (in_text) return true;
  of_tail_ += rows.count;
  if (of_tail_ == text_.tails[tail_].tokens.size()) {
    ++tail_;
    of_tail_ = 0;
  }
  return true;
}

Result<Reader::Labels> Reader::labels(uint32_t layer) const {
  const auto read = [&](const View& view) -> Result<std::vector<float>> {
    const uint32_t kv_heads = engine_->model().shape.kv_heads;
    const uint64_t text_tokens = text_.tokens.size();
    std::vector<float> labels(kv_heads * text_tokens);
    for (uint32_t head = 0; head < kv_heads; ++head)
      THIMBLE_TRY(device_->read(labels.data() + head * text_tokens,
                                view.slice(head * (view.bytes / kv_heads), text_tokens * sizeof(float))));
    return labels;
  };
  THIMBLE_LET(max_logit, read(observer_->max_logit[layer]));
  THIMBLE_LET(log_prob, read(observer_->log_prob[layer]));
  return Labels{std::move(max_logit), std::move(log_prob)};
}

}  // namespace thimble
