#include "training/reading.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/size_text.h"

namespace thimble {

constexpr uint32_t kChunk = 512;
constexpr float kLeastLabel = -30;

// A retention that drops nothing and keeps a copy of what retainers read. It is made for a Reader, and in no
// table of names.
class Observer : public RetentionPolicy {
 public:
  Observer(Retainer::Input input, uint32_t positions) : input_(input), positions_(positions) {}

  Status resolve(const Model&, SessionOptions&) const override { return {}; }
  bool evicts() const override { return false; }

  // What is read between segments outlives the layer's own buffers.
  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    const ModelShape& shape = s.model.shape;
    const uint64_t f32 = 4, rows = s.options.chunk, labels = uint64_t(shape.kv_heads) * positions_;
    states = pool.place(rows * cols(s) * f32);
    marked = pool.place(rows * sizeof(uint32_t));
    lse_ = workspace.place(rows * shape.heads * f32);
    max_logit.clear();
    log_prob.clear();
    for (const LayerWeights& layer : s.model.layers)
      for (auto* views : {&max_logit, &log_prob})
        views->push_back(layer.window ? View{} : pool.place(labels * f32));
  }

  void record(const LayerStep& l) const override {
    if (!l.chunk) return;
    const uint32_t width = cols(l.setting);
    l.recorder.record(Copy{.src = input_ == Retainer::Input::kQkv ? l.at.qkv : l.input(),
                           .dst = states,
                           .p = {.cols = width,
                                 .src_stride = width,
                                 .dst_stride = width,
                                 .from_logit_row = 0,
                                 .to_ring_row = 0,
                                 .rows = kStepRows}});
    l.recorder.record(Label{.q = l.at.qkv,
                            .marked = marked,
                            .k = l.pool().k,
                            .chunk_k = l.at.chunk_k,
                            .rope = l.rope_table(),
                            .lse = lse_,
                            .max_logit = max_logit[l.layer],
                            .log_prob = log_prob[l.layer],
                            .p = {.heads = l.shape().kv_heads,
                                  .group = l.shape().heads / l.shape().kv_heads,
                                  .head_dim = l.shape().head_dim,
                                  .row_stride = l.setting.dimensions.qkv_cols,
                                  .chunk_capacity = l.setting.options.chunk,
                                  .head_state = l.head_state(),
                                  .label_capacity = positions_,
                                  .scale = 1.0f / std::sqrt(float(l.shape().head_dim)),
                                  .least = kLeastLabel,
                                  .rope = l.rope()}});
  }

  uint32_t cols(const Setting& s) const {
    return input_ == Retainer::Input::kQkv ? s.dimensions.qkv_cols : s.model.shape.d_model;
  }

  View states, marked;                    // f32 [chunk][cols], uint [chunk]
  std::vector<View> max_logit, log_prob;  // of each layer without a window: f32 [kv head][positions]

 private:
  const Retainer::Input input_;
  const uint32_t positions_;
  View lse_;
};

Reader::Reader(std::shared_ptr<const Model> model, std::shared_ptr<Device> device)
    : model_(std::move(model)), device_(std::move(device)), policies_(SessionOptions()) {}

Reader::~Reader() = default;

Result<std::unique_ptr<Reader>> Reader::open(std::shared_ptr<const Model> model,
                                             std::shared_ptr<Device> device, Retainer::Input input,
                                             uint32_t text_tokens, uint32_t tail_tokens, uint64_t room) {
  std::unique_ptr<Reader> reader(new Reader(std::move(model), std::move(device)));
  THIMBLE_TRY(reader->allocate(input, text_tokens + tail_tokens, room));
  return reader;
}

Status Reader::allocate(Retainer::Input input, uint32_t positions, uint64_t room) {
  SessionOptions asked;
  asked.pool = positions;
  asked.max_new = 1;
  asked.chunk = kChunk;
  asked.positions = Positions::kOriginal;
  asked.context = positions;
  THIMBLE_LET(resolved, resolve(*model_, asked));
  options_ = resolved;
  auto observer = std::make_unique<Observer>(input, positions);
  observer_ = observer.get();
  policies_.retention = std::move(observer);
  dimensions_ = dimensions(*model_, options_, policies_);
  const Dimensions& d = dimensions_;
  const Setting setting{*model_, options_, d};
  cols_ = observer_->cols(setting);

  const DeviceInfo device = device_->info();
  THIMBLE_LET(needs, device_->needs(model_->shape, {.chunk = options_.chunk,
                                                    .run_capacity = d.capacity,
                                                    .layer_entries = d.most_layer_entries,
                                                    .reach = d.reach,
                                                    .view_capacity = d.view_capacity,
                                                    .positions = 0,
                                                    .heads = static_cast<uint32_t>(d.runs.size())}));
  Arena pool(device.alignment), workspace(device.alignment), io(device.alignment);
  lay_out(setting, policies_, device, needs.workspace, pool, workspace, io);
  bytes_ = pool.size() + workspace.size() + io.size() + Placements::bytes(model_->tensors(), device);
  if (room && bytes_ > room)
    return error(Code::kBudget,
                 "reading a text of %u tokens takes %s, %s more than there are; raise --mem-budget",
                 positions, size_text(bytes_).c_str(), size_text(bytes_ - room).c_str())
        .set_bytes_missing(bytes_ - room);
  const auto allocate = [&](MemKind kind, uint64_t size, std::unique_ptr<Buffer>& into) -> Status {
    THIMBLE_LET(buffer, device_->alloc(kind, size));
    into = std::move(buffer);
    return {};
  };
  THIMBLE_LET(placed, model_->placements.place(model_->memory(), model_->tensors(), device_));
  weights_.model = placed;
  THIMBLE_TRY(allocate(MemKind::kPool, pool.size(), pool_));
  THIMBLE_TRY(allocate(MemKind::kWorkspace, workspace.size(), workspace_));
  THIMBLE_TRY(allocate(MemKind::kIo, io.size(), io_));
  Arena in_pool(device.alignment, pool_.get()), in_workspace(device.alignment, workspace_.get()),
      in_io(device.alignment, io_.get());
  layout_ = lay_out(setting, policies_, device, needs.workspace, in_pool, in_workspace, in_io);

  THIMBLE_TRY(write_rope_tables(*device_, setting, layout_, UINT32_MAX));
  THIMBLE_LET(stream, device_->open_stream(layout_.scratch, static_cast<uint32_t>(d.runs.size())));
  stream_ = std::move(stream);
  THIMBLE_LET(programs, Decoder(setting, policies_, weights_, layout_).record(*device_, *stream_));
  programs_ = std::move(programs);
  heads_.resize(d.runs.size());
  for (size_t i = 0; i < heads_.size(); ++i) {
    heads_[i].first = d.runs[i].first;
    heads_[i].capacity = d.runs[i].capacity;
  }
  states_.resize(uint64_t(options_.chunk) * cols_);
  return {};
}

void Reader::begin(const TrainingText& text) {
  tokens_ = text.tokens;
  tokens_.insert(tokens_.end(), text.tail.begin(), text.tail.end());
  marked_.assign(text.tokens.size(), 0);
  marked_.insert(marked_.end(), text.marked.begin(), text.marked.end());
  text_tokens_ = static_cast<uint32_t>(text.tokens.size());
  read_ = 0;
  for (HeadState& head : heads_) head.n_entries = 0;
}

Result<bool> Reader::step(const States& states) {
  const auto all = static_cast<uint32_t>(tokens_.size());
  if (read_ == all) return false;
  if (read_ == 0)
    for (const auto* views : {&observer_->max_logit, &observer_->log_prob})
      for (const View& view : *views)
        if (view)
          THIMBLE_TRY(
              device_->write(view, std::vector<float>(view.bytes / sizeof(float), kLeastLabel).data()));

  // No chunk has rows of both text and questions: rows label what was there before their chunk.
  const bool in_text = read_ < text_tokens_;
  const uint32_t rows = std::min((in_text ? text_tokens_ : all) - read_, options_.chunk);
  std::copy_n(tokens_.begin() + read_, rows, on_host<int32_t>(layout_.tokens));
  THIMBLE_TRY(device_->write(observer_->marked.slice(0, rows * sizeof(uint32_t)), marked_.data() + read_));
  for (size_t i = 0; i < heads_.size(); ++i) {
    HeadState& head = heads_[i];
    head.keep = head.n_entries + rows;
    if (dimensions_.runs[i].evicts) head.keep = std::min(head.keep, dimensions_.runs[i].keep);
  }
  StepParams step{};
  step.n_rows = rows;
  step.position = static_cast<int>(read_);
  const auto program = std::find_if(programs_.chunks.begin(), programs_.chunks.end(),
                                    [&](const ChunkProgram& chunk) { return rows <= chunk.max_rows; });
  const auto run = [&](uint32_t segment) {
    return stream_->submit(*program->program, segment, segment + 1, step, heads_);
  };
  THIMBLE_TRY(run(Decoder::kHead));
  for (uint32_t layer = 0; layer < model_->shape.layers; ++layer) {
    THIMBLE_TRY(run(1 + layer));
    if (!in_text || model_->layers[layer].window) continue;
    THIMBLE_TRY(stream_->wait());
    THIMBLE_TRY(
        device_->read(states_.data(), observer_->states.slice(0, uint64_t(rows) * cols_ * sizeof(float))));
    states(layer, read_, rows, states_.data());
  }
  THIMBLE_TRY(stream_->wait());
  for (HeadState& head : heads_) head.n_entries = head.keep;
  read_ += rows;
  return true;
}

Result<Reader::Labels> Reader::labels(uint32_t layer) const {
  const auto read = [&](const View& view) -> Result<std::vector<float>> {
    const uint32_t kv_heads = model_->shape.kv_heads;
    std::vector<float> labels(uint64_t(kv_heads) * text_tokens_);
    for (uint32_t head = 0; head < kv_heads; ++head)
      THIMBLE_TRY(device_->read(labels.data() + uint64_t(head) * text_tokens_,
                                view.slice(head * (view.bytes / kv_heads), text_tokens_ * sizeof(float))));
    return labels;
  };
  THIMBLE_LET(max_logit, read(observer_->max_logit[layer]));
  THIMBLE_LET(log_prob, read(observer_->log_prob[layer]));
  return Labels{std::move(max_logit), std::move(log_prob)};
}

}  // namespace thimble
