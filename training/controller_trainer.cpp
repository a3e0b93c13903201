#include "training/controller_trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/size_text.h"
#include "base/system.h"
#include "runtime/heads/sidecar.h"
#include "text/json.h"
#include "training/embeddings.h"
#include "training/random.h"
#include "training/report.h"
#include "training/texts.h"

namespace thimble {
namespace {

// The values of the paper, except the pool: here the model is not fine-tuned, and then four times `best`
// entries are needed.
constexpr uint32_t kWidth = 128, kBest = 96, kPool = 4 * kBest;
constexpr double kRate = 5e-3, kDecay = 0.98, kDecaySteps = 2000;

constexpr uint32_t kQueries = 32;  // per text
// Excerpts per step; warm-up tokens and scored tokens per excerpt.
constexpr uint32_t kExcerpts = 16, kWarm = 192, kLearnt = 64;
constexpr uint32_t kBetweenMeasures = 50;

}  // namespace

void ControllerQuality::add(const LabelledQuery& query, const std::vector<float>& logits) {
  std::vector<bool> label(logits.size());
  for (const uint32_t position : query.best)
    if (position < label.size()) label[position] = true;
  pairs += logits.size();
  for (size_t i = 0; i < logits.size(); ++i) {
    const bool claims = logits[i] > 0;
    positives += label[i];
    right += claims == label[i];
    claimed += claims;
    hits += claims && label[i];
    const double x = static_cast<double>(logits[i]);
    loss += std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))) - (label[i] ? x : 0);
  }
  if (!std::isfinite(loss)) return;  // NaN has no order
  const size_t count = std::min<size_t>(kBest, logits.size());
  std::vector<uint32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0u);
  std::nth_element(
      order.begin(), order.begin() + static_cast<ptrdiff_t>(count), order.end(),
      [&](uint32_t a, uint32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a > b; });
  chosen += count;
  for (size_t i = 0; i < count; ++i) {
    best_hits += label[order[i]];
    last_hits += label[logits.size() - 1 - i];
  }
}

// ---- preparation ----

ControllerTrainer::ControllerTrainer(std::shared_ptr<const Model> model, std::shared_ptr<Device> device,
                                     TrainingOptions options)
    : model_(std::move(model)),
      device_(std::move(device)),
      options_(std::move(options)),
      threads_(options_.threads ? options_.threads : core_count()),
      shape_{model_->shape.d_model, kWidth} {}

Result<std::unique_ptr<ControllerTrainer>> ControllerTrainer::create(std::shared_ptr<const Model> model,
                                                                     std::shared_ptr<Device> device,
                                                                     const TrainingOptions& options) {
  std::unique_ptr<ControllerTrainer> trainer(
      new ControllerTrainer(std::move(model), std::move(device), options));
  THIMBLE_TRY(trainer->prepare());
  return trainer;
}

Status ControllerTrainer::prepare() {
  const TrainingOptions& o = options_;
  THIMBLE_TRY(check_training(*model_, o));
  if (o.texts < 2)
    return error(Code::kInvalidArgument,
                 "a controller needs at least 2 texts: one for training and one that is held out");
  if (o.tries_targets || o.target != Target::kLogProb)
    return error(Code::kInvalidArgument,
                 "a controller learns what the model attends to most and has no other target; leave --target "
                 "out");
  if (o.equal_shares || !o.heads.empty())
    return error(Code::kInvalidArgument,
                 "a controller decides for all heads at once, so there are no shares of them to count; leave "
                 "--budgets out");
  if (std::any_of(model_->layers.begin(), model_->layers.end(), [](const auto& l) { return l.has_window(); }))
    return error(Code::kUnsupported,
                 "a controller decides for all layers at once, and layers of this model attend to a window; "
                 "train a retainer of another --kind");
  if (model_->has_states())
    return error(Code::kUnsupported,
                 "a controller reads evicted tokens again out of order, which layers with a recurrent state "
                 "cannot; train a retainer of another --kind");
  THIMBLE_TRY(make_texts());
  std::vector<int32_t> distinct;
  find_rows(distinct);
  THIMBLE_TRY(open_reader(distinct.size()));
  THIMBLE_TRY(open_state());
  THIMBLE_LET(embeddings, embeddings_of(*model_, *device_, distinct));
  embeddings_ = std::move(embeddings);
  uint64_t tokens = 0, read = 0;
  for (uint32_t i = 0; i < texts_.size(); ++i) {
    tokens += texts_[i].tokens.size();
    if (i < text_) read += texts_[i].tokens.size();
  }
  set_phase(Phase::kReading, read, tokens);
  saved_at_ = steady_seconds();
  return {};
}

// The text and the questions and answers after it form one token sequence. Queries come from all of it.
Status ControllerTrainer::make_texts() {
  THIMBLE_LET(length, length_of_texts(*model_, options_.text_tokens, false));
  text_tokens_ = length;
  THIMBLE_LET(maker, TextMaker::open(model_, options_.data, length, length / 2, options_.seed));
  book_hash_ = maker.book_hash();
  const uint32_t held_out = std::max(1u, options_.texts / 5), learnt = options_.texts - held_out;
  std::vector<TrainingText> made = maker.answered(maker.has_books() ? learnt / 2 : learnt);
  while (maker.has_books() && made.size() < learnt)
    made.push_back(maker.make(static_cast<uint32_t>(made.size()), false));
  if (made.empty())
    return error(Code::kInvalidArgument,
                 "no prompt of --data is long enough for training; give longer prompts or a book");
  learnt_ = static_cast<uint32_t>(made.size());
  for (uint32_t i = 0; i < held_out; ++i) made.push_back(maker.make(i, true));
  for (const TrainingText& from : made) {
    Text& text = texts_.emplace_back();
    text.tokens = from.tokens;
    if (!from.tails.empty())
      text.tokens.insert(text.tokens.end(), from.tails[0].tokens.begin(), from.tails[0].tokens.end());
    // Queries start at position kBest, because all tokens before an earlier query would be among its best.
    Random random = random_of(options_.seed, 0x71756572u + texts_.size());
    std::set<uint32_t> asked;
    while (asked.size() < kQueries)
      asked.insert(random.between(kBest, static_cast<uint32_t>(text.tokens.size()) - 1));
    text.asked.assign(asked.begin(), asked.end());
  }
  return {};
}

// Assigns a row of the embeddings to each distinct token of the texts.
void ControllerTrainer::find_rows(std::vector<int32_t>& distinct) {
  for (const Text& text : texts_) distinct.insert(distinct.end(), text.tokens.begin(), text.tokens.end());
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  for (Text& text : texts_)
    for (const int32_t token : text.tokens)
      text.rows.push_back(static_cast<uint32_t>(std::lower_bound(distinct.begin(), distinct.end(), token) -
                                                distinct.begin()));
}

Status ControllerTrainer::open_reader(uint64_t distinct) {
  size_t longest = 0;
  for (const Text& text : texts_) longest = std::max(longest, text.tokens.size());
  const auto positions = static_cast<uint32_t>(longest);
  const uint64_t rows = distinct * model_->shape.d_model * sizeof(float);
  const uint64_t of_labels = AttentionLabels::bytes(*model_, positions, threads_);
  const uint64_t of_fit =
      ControllerNetwork<float>::bytes(shape_, std::max(positions, kExcerpts * (kWarm + kLearnt))) +
      4 * parameters_of(shape_) * sizeof(float);  // gradient, moments, best
  THIMBLE_LET(reader, Reader::open(model_, device_, Retainer::Input::kQkv, positions, 0, options_.memory,
                                   false, options_.threads));
  const uint64_t least = rows + std::max(reader->bytes() + of_labels, of_fit);
  if (options_.memory && options_.memory < least)
    return error(Code::kBudget, "training takes at least %s, %s more than --mem-budget allows",
                 size_text(least).c_str(), size_text(least - options_.memory).c_str())
        .set_bytes_missing(least - options_.memory);
  reader_ = std::move(reader);
  labels_ = std::make_unique<AttentionLabels>(*model_, positions, kBest, threads_);
  return {};
}

// ---- reading ----

Status ControllerTrainer::read_on() {
  if (text_ == texts_.size()) {
    reader_.reset();
    labels_.reset();
    return start_fit();
  }
  const Text& text = texts_[text_];
  if (!reading_) {
    TrainingText whole;
    whole.tokens = text.tokens;
    reader_->begin(whole);
    labels_->begin(text.asked);
  }
  reading_ = true;
  const uint64_t before = reader_->tokens_read();
  THIMBLE_LET(more, reader_->step([&](uint32_t layer, uint32_t first, uint32_t rows, const float* qkv) {
    const double begin = steady_seconds();
    labels_->add(layer, first, rows, qkv);
    seconds_.labels += steady_seconds() - begin;
  }));
  done_ += reader_->tokens_read() - before;
  return more ? Status() : finish_text();
}

Status ControllerTrainer::finish_text() {
  if (!labels_->finite())
    return error(Code::kNotFinite,
                 "the model gives NaN or infinite queries or keys, so what it attends to is not known; train "
                 "for another file of it");
  Text& text = texts_[text_];
  text.queries = labels_->labels();
  std::vector<uint32_t> record;
  for (const LabelledQuery& query : text.queries)
    record.insert(record.end(), query.best.begin(), query.best.end());
  const uint64_t hash = hash_of(record.data(), record_bytes()), at = record_at(text_);
  THIMBLE_TRY(state_.write(at + sizeof hash, record.data(), record_bytes()));
  THIMBLE_TRY(state_.write(at, &hash, sizeof hash));
  THIMBLE_TRY(state_.flush());
  ++text_;
  reading_ = false;
  return {};
}

// ---- saved state ----

// A text's record contains the labels of its queries, kBest per query.
uint64_t ControllerTrainer::record_bytes() const { return kQueries * kBest * sizeof(uint32_t); }
uint64_t ControllerTrainer::record_at(uint32_t text) const {
  return kPartialBegin + text * (sizeof(uint64_t) + record_bytes());
}

Status ControllerTrainer::open_state() {
  const uint64_t facts[] = {
      model_->fingerprint(), book_hash_,     options_.seed, static_cast<uint64_t>(options_.kind),
      options_.texts,        options_.steps, text_tokens_};
  THIMBLE_LET(state, open_partial(options_.output + ".partial", hash_of(facts, sizeof facts)));
  state_ = std::move(state);
  for (; text_ < texts_.size(); ++text_) {
    THIMBLE_LET(taken, take_record(texts_[text_], record_at(text_)));
    if (!taken) break;
  }
  resumed_ = text_ > 0;
  return {};
}

// Returns false if the record was not written completely.
Result<bool> ControllerTrainer::take_record(Text& text, uint64_t at) {
  uint64_t hash;
  std::vector<uint32_t> record(kQueries * kBest);
  if (state_.size() < at + sizeof hash + record_bytes()) return false;
  THIMBLE_TRY(state_.read(at, &hash, sizeof hash));
  THIMBLE_TRY(state_.read(at + sizeof hash, record.data(), record_bytes()));
  if (hash != hash_of(record.data(), record_bytes())) return false;
  for (auto best = record.begin(); best != record.end(); best += kBest)
    text.queries.push_back({text.asked[text.queries.size()], {best, best + kBest}});
  return true;
}

std::vector<std::byte> ControllerTrainer::state() const {
  std::vector<std::byte> all;
  const auto add = [&](std::span<const std::byte> part) { all.insert(all.end(), part.begin(), part.end()); };
  for (const std::span<const float> part :
       {std::as_const(*controller_).parameters(), std::span<const float>(momentum_),
        std::span<const float>(variance_), std::span<const float>(best_)})
    add(std::as_bytes(part));
  add(std::as_bytes(std::span(&fit_, 1)));
  return all;
}

void ControllerTrainer::load(const std::vector<std::byte>& all) {
  const std::byte* at = all.data();
  const auto take = [&](std::span<std::byte> part) {
    std::copy_n(at, part.size(), part.begin());
    at += part.size();
  };
  for (const std::span<float> part : {controller_->parameters(), std::span<float>(momentum_),
                                      std::span<float>(variance_), std::span<float>(best_)})
    take(std::as_writable_bytes(part));
  take(std::as_writable_bytes(std::span(&fit_, 1)));
}

// The records of texts are saved when they are read.
Status ControllerTrainer::save() {
  saved_at_ = steady_seconds();
  if (phase_ != Phase::kFitting) return {};
  std::vector<std::byte> all = state();
  return saved_fit_->save(state_, {all});
}

// ---- fitting ----

// Initialises like PyTorch: uniform, bounded by 1 / sqrt(fan_in).
void ControllerTrainer::initialise() {
  Random random = random_of(options_.seed, 0x696e6974u);
  for (const ControllerTensor& tensor : tensors_of(shape_)) {
    const double bound = 1 / std::sqrt(double(tensor.fan_in));
    for (float& p : controller_->parameters().subspan(tensor.first, tensor.size()))
      p = static_cast<float>((2 * random.uniform() - 1) * bound);
  }
}

Status ControllerTrainer::start_fit() {
  controller_ = std::make_unique<ControllerNetwork<float>>(shape_, embeddings_, threads_);
  const uint64_t count = parameters_of(shape_);
  for (auto* values : {&momentum_, &variance_, &best_}) values->assign(count, 0);
  initialise();
  std::vector<std::byte> latest(4 * count * sizeof(float) + sizeof fit_);
  saved_fit_.emplace(record_at(static_cast<uint32_t>(texts_.size())), latest.size());
  THIMBLE_LET(found, saved_fit_->load(state_, {latest}));
  if (found) load(latest);
  set_phase(Phase::kFitting, fit_.step, options_.steps);
  return {};
}

// Chooses excerpts by the step's number. Each token of an excerpt is before some query.
std::vector<Excerpt> ControllerTrainer::excerpts_of(uint64_t step) const {
  Random random = random_of(options_.seed, 0x73746570u + step);
  std::vector<Excerpt> excerpts;
  for (uint32_t i = 0; i < kExcerpts; ++i) {
    const Text& text = texts_[random.below(learnt_)];
    const uint32_t end = text.queries.back().position, count = std::min(kLearnt, end);
    const uint32_t begin = random.between(0, end - count), warm = std::min(begin, kWarm);
    excerpts.push_back({.rows = std::span(text.rows).subspan(begin - warm, warm + count),
                        .first = begin - warm,
                        .warm = warm,
                        .queries = text.queries});
  }
  return excerpts;
}

// One step of Adam.
void ControllerTrainer::update(const std::vector<float>& gradient) {
  constexpr float kFirst = 0.9f, kSecond = 0.999f, kLeast = 1e-8f;
  const std::span<float> parameters = controller_->parameters();
  const double step = double(fit_.step) + 1,
               rate = kRate * std::pow(kDecay, std::floor(double(fit_.step) / kDecaySteps));
  const auto scale = static_cast<float>(rate / (1 - std::pow(kFirst, step)));
  const auto root = static_cast<float>(std::sqrt(1 - std::pow(kSecond, step)));
  for (size_t i = 0; i < gradient.size(); ++i) {
    momentum_[i] = kFirst * momentum_[i] + (1 - kFirst) * gradient[i];
    variance_[i] = kSecond * variance_[i] + (1 - kSecond) * gradient[i] * gradient[i];
    parameters[i] -= scale * momentum_[i] / (std::sqrt(variance_[i]) / root + kLeast);
  }
}

void ControllerTrainer::measure(const Text& text, ControllerQuality& quality) {
  const std::vector<std::vector<float>> logits = controller_->score(text.rows, text.queries);
  for (size_t q = 0; q < logits.size(); ++q) quality.add(text.queries[q], logits[q]);
}

// Keeps the parameters if they are better than the best ones so far.
void ControllerTrainer::keep_best() {
  ControllerQuality quality;
  for (uint32_t i = learnt_; i < texts_.size(); ++i) measure(texts_[i], quality);
  if (!std::isfinite(quality.loss) || (fit_.best_step && quality.f1_of_best() <= fit_.best)) return;
  const std::span<const float> parameters = controller_->parameters();
  best_.assign(parameters.begin(), parameters.end());
  fit_.best = quality.f1_of_best();
  fit_.best_step = fit_.step;
}

Status ControllerTrainer::fit_on() {
  if (fit_.step < options_.steps && !fit_.diverged) {
    std::vector<float> gradient(parameters_of(shape_));
    fit_.loss = controller_->loss(excerpts_of(fit_.step), gradient);
    fit_.diverged = !std::isfinite(fit_.loss);
    if (!fit_.diverged) {
      update(gradient);
      done_ = ++fit_.step;
      if (fit_.step % kBetweenMeasures == 0 || fit_.step == options_.steps) keep_best();
      return {};
    }
  }
  if (!fit_.best_step)
    return error(Code::kNotFinite,
                 "the loss is not a number before the first step: the model's embedding may hold NaN or "
                 "infinite values; train for another file of it");
  std::copy(best_.begin(), best_.end(), controller_->parameters().begin());
  return write_sidecar();
}

// ---- the result ----

Status ControllerTrainer::write_sidecar() {
  NewGguf file;
  begin_sidecar(file, *model_, model_->info.name + " controller", Retainer::Kind::kAdore);
  file.set("adore.width", kWidth);
  file.set("adore.top_k", kBest);
  file.set("adore.pool", kPool);
  uint64_t tokens = 0;
  for (uint32_t i = 0; i < learnt_; ++i) tokens += texts_[i].tokens.size();
  set_trained_on(file, Retainer::Kind::kAdore,
                 {.texts = learnt_,
                  .tokens = tokens,
                  .steps = static_cast<uint32_t>(fit_.best_step),
                  .seed = options_.seed,
                  .data = options_.data});
  for (const ControllerTensor& t : tensors_of(shape_)) {
    const auto shape = t.rows == 1 ? std::vector<uint64_t>{t.cols} : std::vector<uint64_t>{t.cols, t.rows};
    file.add(std::string("adore.") + t.name, shape, DType::kF32, [this, t] {
      return bytes_of(std::vector<float>(best_.begin() + static_cast<ptrdiff_t>(t.first),
                                         best_.begin() + static_cast<ptrdiff_t>(t.first + t.size())));
    });
  }
  THIMBLE_TRY(file.write(options_.output));
  THIMBLE_TRY(state_.remove());
  set_phase(Phase::kChecking, 0, texts_.size() - learnt_);
  return {};
}

Status ControllerTrainer::check_on() {
  measure(texts_[learnt_ + done_], quality_);
  if (++done_ == total_) set_phase(Phase::kDone, total_, total_);
  return {};
}

std::string ControllerTrainer::verdict() const {
  const auto percent = [](double share) { return std::to_string(std::lround(100 * share)) + " %"; };
  const std::string stopped = fit_.diverged ? "The loss was no longer a number after step " +
                                                  std::to_string(fit_.step) +
                                                  ", so the best state before it was taken. "
                                            : "";
  const double best = quality_.f1_of_best(), last = quality_.f1_of_last();
  const std::string found =
      "The " + std::to_string(kBest) + " tokens that the controller scores highest are " + percent(best) +
      " of those that the model attends to most, the last " + std::to_string(kBest) + " are " + percent(last);
  return stopped + found +
         (best > last ? "." : "; train with more texts and steps, or do not use the controller.");
}

std::string ControllerTrainer::report() const {
  const ControllerQuality& q = quality_;
  JsonWriter json;
  json.text("kind", "adore");
  json.number("step", fit_.best_step);
  json.number("queries", (texts_.size() - learnt_) * kQueries);
  json.raw("base_rate", json_number(q.base_rate()));
  json.raw("accuracy", json_number(q.accuracy()));
  json.raw("f1", json_number(q.f1()));
  json.raw("f1_of_best", json_number(q.f1_of_best()));
  json.raw("f1_of_last", json_number(q.f1_of_last()));
  json.raw("seconds", json_of(seconds_));
  json.text("verdict", verdict());
  return json.object();
}

}  // namespace thimble
