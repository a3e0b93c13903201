#include "training/trainer.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <numeric>

#include "base/size_text.h"
#include "base/system.h"
#include "runtime/heads/sidecar.h"
#include "text/json.h"
#include "training/random.h"
#include "training/report.h"
#include "training/sink.h"

namespace thimble {
namespace {

constexpr uint32_t kCountedTexts = 2, kAskedTexts = 2, kAskedQuestions = 24;  // kAskedQuestions is per text
constexpr uint32_t kAskedParts = 4;  // a text is asked about after each quarter of the steps except the last
constexpr uint32_t kSharesPart = 4;  // shares are counted for pools that hold a quarter of a text
// The part of the pools that is divided equally. Attention to a repetition is so unequal that, by counts
// alone, half of the heads of a real model would keep almost nothing (docs/evaluation.md).
constexpr double kEvenPart = 0.5;
constexpr uint32_t kParts[] = {8, 16};
// The retentions that the check compares in equal pools.
struct Compared {
  Retention retention;
  Recall Trainer::Checked::*recall;
};
constexpr Compared kCompared[] = {{Retention::kLocret, &Trainer::Checked::locret},
                                  {Retention::kKeyDiff, &Trainer::Checked::keydiff},
                                  {Retention::kMix, &Trainer::Checked::mix},
                                  {Retention::kWindow, &Trainer::Checked::window}};
constexpr uint32_t kBestPart = 16;    // the best sixteenth of a text's tokens
constexpr uint64_t kWorkVersion = 3;  // format version of OUTPUT.partial and OUTPUT.tried, and of the texts
constexpr uint64_t kDefaultSamples = uint64_t(1) << 30;

std::vector<std::byte> halves_of(const std::vector<float>& values) {
  std::vector<uint16_t> halves(values.size());
  std::transform(values.begin(), values.end(), halves.begin(), f32_to_f16);
  return bytes_of(halves);
}

constexpr struct {
  Target target;
  const char* name;
} kTargets[] = {{Target::kLogProb, "log_prob"},
                {Target::kMaxLogit, "max_logit"},
                {Target::kLogKvzipPlus, "log_kvzip_plus"}};

}  // namespace

const char* name_of(Target target) {
  const auto* of = std::find_if(std::begin(kTargets), std::end(kTargets),
                                [&](const auto& t) { return t.target == target; });
  return of->name;
}

// ---- preparation ----

Trainer::Trainer(std::shared_ptr<const Model> model, std::shared_ptr<Device> device, TrainingOptions options)
    : model_(std::move(model)),
      device_(std::move(device)),
      options_(std::move(options)),
      threads_(options_.threads ? options_.threads : core_count()) {}

Result<std::unique_ptr<Trainer>> Trainer::create(std::shared_ptr<const Model> model,
                                                 std::shared_ptr<Device> device,
                                                 const TrainingOptions& options) {
  std::unique_ptr<Trainer> trainer(new Trainer(std::move(model), std::move(device), options));
  THIMBLE_TRY(trainer->prepare());
  return trainer;
}

Status Trainer::prepare() {
  const TrainingOptions& o = options_;
  THIMBLE_TRY(check_training(*model_, o));
  if (o.kind == Retainer::Kind::kSink && o.target == Target::kMaxLogit && !o.tries_targets)
    return error(
        Code::kUnsupported,
        "a sink retainer predicts a share of attention, and max_logit is not a share; choose another "
        "--target for it");
  if (shares_values() && o.target == Target::kLogKvzipPlus && !o.tries_targets)
    return error(Code::kUnsupported,
                 "log_kvzip_plus weighs the values of each head, and heads of this model make theirs from "
                 "channels that they share; choose another --target");
  for (uint32_t i = 0; i < model_->shape.layers; ++i)
    if (model_->layers[i].attends_to_all()) layers_.push_back(i);
  if (!trains()) {
    THIMBLE_LET(file, MappedFile::open(o.heads));
    THIMBLE_LET(retainer, model_->open_retainer(std::move(file), o.heads));
    if (retainer->kind == Retainer::Kind::kAdore)
      return error(
          Code::kInvalidArgument,
          "%s holds a controller, which decides for all heads at once, so there are no shares of them to "
          "count; give a retainer of another kind",
          o.heads.c_str());
    retainer_ = retainer;
  }

  return trains() && o.tries_targets ? open_tries() : begin();
}

Status Trainer::begin() {
  const TrainingOptions& o = options_;
  THIMBLE_LET(length, length_of_texts(*model_, o.text_tokens, repeats() || !o.equal_shares));
  text_tokens_ = length;
  tail_tokens_ = length / 2;
  THIMBLE_TRY(make_texts());
  uint32_t tail = 0;
  for (const auto* texts : {&texts_, &counted_})
    for (const TrainingText& text : *texts) tail = std::max(tail, text.longest_tail());
  THIMBLE_LET(reader, Reader::open(model_, device_, input(), text_tokens_, tail, o.memory,
                                   trains() && o.target == Target::kLogKvzipPlus, o.threads));
  reader_ = std::move(reader);
  // Of all readings of the check, those without a pool need the most memory.
  uint64_t checking = 0;
  for (const TrainingText& text : asked_) {
    THIMBLE_LET(bytes, bytes_to_ask(text, *model_, *device_, Retention::kNone, nullptr, 0));
    checking = std::max(checking, bytes);
  }
  THIMBLE_TRY(trains() ? plan_learning(checking) : refuse_beyond_budget(checking));
  if (trains()) THIMBLE_TRY(open_state());
  uint64_t tokens = 0, read = 0;
  for (uint32_t i = 0; i < all_texts(); ++i) {
    const uint64_t of_text = i < texts_read_for_labels() ? text(i).all_tokens() : text(i).tokens.size();
    tokens += of_text;
    if (i < text_) read += of_text;
  }
  set_phase(Phase::kReading, read, tokens);
  saved_at_ = steady_seconds();
  return {};
}

// ---- targets ----

// The file begins with a signature, followed by the results of each tried target in order.
Status Trainer::open_tries() {
  to_try_ = {Target::kLogProb};
  if (!shares_values()) to_try_.push_back(Target::kLogKvzipPlus);
  if (options_.kind != Retainer::Kind::kSink) to_try_.insert(to_try_.begin() + 1, Target::kMaxLogit);
  const std::string path = options_.output + ".tried";
  THIMBLE_LET(state, StateFile::open(path));
  tries_ = std::move(state);
  const uint64_t facts[] = {
      kWorkVersion,   model_->fingerprint(), options_.seed,       static_cast<uint64_t>(options_.kind),
      options_.texts, options_.steps,        options_.text_tokens};
  uint64_t signature = hash_of(facts, sizeof facts), found = 0;
  for (const std::string& file : options_.data) {
    THIMBLE_LET(mapped, MappedFile::open(file));
    const uint64_t size = mapped.size();
    signature = hash_of(&size, sizeof size, hash_of(file.data(), file.size(), signature));
  }
  if (tries_.size() == 0) {
    THIMBLE_TRY(tries_.write(0, &signature, sizeof signature));
    found = signature;
  } else if (tries_.size() >= sizeof found) {
    THIMBLE_TRY(tries_.read(0, &found, sizeof found));
  }
  if (found != signature)
    return error(Code::kMismatch,
                 "%s was left by another training; remove it, or train with the same model, texts and flags",
                 path.c_str());
  Recall found_of[2];  // with the trial's retainer, and dense
  for (uint64_t at = sizeof signature; at + sizeof found_of <= tries_.size(); at += sizeof found_of) {
    if (tried_.size() == to_try_.size()) break;
    THIMBLE_TRY(tries_.read(at, found_of, sizeof found_of));
    tried_.push_back({to_try_[tried_.size()], found_of[0], found_of[1]});
  }
  set_phase(Phase::kTrying, tried_.size(), to_try_.size());
  return {};
}

static Status remove_file(const std::string& path) {
  THIMBLE_LET(file, StateFile::open(path));
  return file.remove();
}

// Starts a short training without shares, which would hide how good the scores are.
Status Trainer::start_trial() {
  constexpr uint32_t kTexts = 4, kSteps = 60;
  TrainingOptions o = options_;
  o.tries_targets = false;
  o.target = to_try_[tried_.size()];
  o.output = options_.output + ".trying";
  o.texts = std::min(o.texts, kTexts);
  o.steps = std::min(o.steps, kSteps);
  o.equal_shares = true;
  THIMBLE_TRY(remove_file(o.output));  // of a trial that was stopped during its check
  THIMBLE_LET(trial, create(model_, device_, o));
  trial_ = std::move(trial);
  trial_->asks_ = false;
  return {};
}

// One step of a trial. After the last trial, the best target is chosen.
Status Trainer::try_on() {
  if (tried_.size() < to_try_.size()) {
    Recall found[2];  // with the trial's retainer, and dense
    if (!trial_) {
      const Status started = start_trial();
      if (started.code() == Code::kUnsupported || started.code() == Code::kInvalidArgument ||
          started.code() == Code::kBudget)
        refused_ = started;  // no questions were asked
      else
        return started;
    } else {
      THIMBLE_LET(more, trial_->step());
      if (more) return {};
      for (const Checked& c : trial_->checked()) found[0].add(c.locret);
      found[1] = trial_->dense();
      trial_.reset();
      THIMBLE_TRY(remove_file(options_.output + ".trying"));
    }
    THIMBLE_TRY(tries_.write(sizeof(uint64_t) + tried_.size() * sizeof found, found, sizeof found));
    THIMBLE_TRY(tries_.flush());
    tried_.push_back({to_try_[tried_.size()], found[0], found[1]});
    done_ = tried_.size();
    return {};
  }
  const Tried& best = best_of(tried_);
  if (!best.recall.asked && !refused_.ok()) return refused_;
  options_.target = best.target;
  return begin();
}

const Trainer::Tried& Trainer::best_of(const std::vector<Tried>& tried) {
  return *std::max_element(tried.begin(), tried.end(), [](const Tried& a, const Tried& b) {
    if (!a.recall.asked || !b.recall.asked) return a.recall.asked < b.recall.asked;
    return a.recall.reported(a.dense) < b.recall.reported(b.dense);
  });
}

// ---- texts ----

// Creates prompts with answers, books with hidden facts, or both in turn; or, for KVzip+, repetitions of any
// of these texts.
Status Trainer::make_texts_to_learn(const TextMaker& maker) {
  if (repeats()) {
    for (uint32_t i = 0; i < options_.texts; ++i) texts_.push_back(maker.repeated(i, false));
    return {};
  }
  texts_ = maker.answered(maker.has_books() ? options_.texts / 2 : options_.texts);
  if (maker.has_books())
    for (uint32_t i = static_cast<uint32_t>(texts_.size()); i < options_.texts; ++i)
      texts_.push_back(maker.make(i, false));
  if (texts_.empty())
    return error(Code::kInvalidArgument,
                 "no prompt of --data has %u tokens or more, the least for training; give longer ones, "
                 "or a book",
                 kRunTokens);
  return {};
}

Status Trainer::make_texts() {
  THIMBLE_LET(maker, TextMaker::open(model_, options_.data, text_tokens_, tail_tokens_, options_.seed));
  book_hash_ = maker.book_hash();
  if (trains()) THIMBLE_TRY(make_texts_to_learn(maker));
  if (!options_.equal_shares)
    for (uint32_t i = 0; i < kCountedTexts; ++i) counted_.push_back(maker.repeated(i, true));
  counts_.assign(counted_.size(), std::vector<double>(layers_.size() * model_->shape.kv_heads));
  for (uint32_t i = 0; i < kAskedTexts; ++i) asked_.push_back(maker.make(kCountedTexts + i, true));
  dense_.resize(asked_.size());
  return {};
}

Status Trainer::refuse_beyond_budget(uint64_t least) const {
  if (!options_.memory || least <= options_.memory) return {};
  const uint64_t missing = least - options_.memory;
  return error(Code::kBudget, "training takes at least %s, %s more than --mem-budget allows",
               size_text(least).c_str(), size_text(missing).c_str())
      .set_bytes_missing(missing);
}

// The samples stay in memory next to the reader, then during the dense questions, then during the fit. They
// are freed before the check.
Status Trainer::plan_learning(uint64_t checking) {
  const ModelShape& m = model_->shape;
  shape_ = {static_cast<uint32_t>(layers_.size()), m.kv_heads, reader_->state_cols()};
  uint64_t beside, least;
  if (sums_up()) {
    THIMBLE_LET(bytes, LeastSquares::bytes(*device_, shape_, text_tokens_));
    beside = std::max(reader_->bytes(), checking);
    least = bytes;
  } else {
    THIMBLE_LET(of_fit, Fit::bytes(*device_, shape_, fit_options()));
    beside = std::max({reader_->bytes(), checking, of_fit});
    least = 16 * shape_.run_bytes();
  }
  THIMBLE_TRY(refuse_beyond_budget(beside + least));
  runs_of_text_.resize(texts_.size());
  if (!sums_up()) {
    choose_runs(beside);
    // Samples have priority over these questions, because samples make the retainer and the questions only
    // show progress.
    asks_ = !options_.memory || beside + samples_.runs() * shape_.run_bytes() + checking <= options_.memory;
    return {};
  }
  THIMBLE_LET(made, LeastSquares::make(device_, shape_, text_tokens_, options_.threads));
  least_squares_ = std::move(made);
  return {};
}

// Chooses as many runs of all texts as fit into memory, by the seed.
void Trainer::choose_runs(uint64_t beside) {
  std::vector<std::pair<uint32_t, uint32_t>> chosen;  // text, and run in it
  for (uint32_t i = 0; i < texts_.size(); ++i)
    for (uint32_t run = 0; run < texts_[i].tokens.size() / kRunTokens; ++run) chosen.emplace_back(i, run);
  const uint64_t all = chosen.size(), room = options_.memory ? options_.memory - beside : kDefaultSamples;
  const uint64_t kept = std::min(all, std::max<uint64_t>(room / shape_.run_bytes(), 1));
  if (kept < all) {
    Random random = random_of(options_.seed, 0x72756e73u);
    random.shuffle(chosen);
    chosen.resize(kept);
    std::sort(chosen.begin(), chosen.end());
  }
  for (const auto& [of_text, run] : chosen) runs_of_text_[of_text].push_back(run);
  uint32_t first = 0;
  for (const auto& runs : runs_of_text_) {
    first_run_.push_back(first);
    first += static_cast<uint32_t>(runs.size());
  }
  samples_ = Samples(shape_, static_cast<uint32_t>(kept));
}

Retainer::Input Trainer::input() const {
  return options_.kind == Retainer::Kind::kLocret ? Retainer::Input::kQkv : Retainer::Input::kX;
}

uint32_t Trainer::hidden() const {
  const uint32_t d = model_->shape.d_model;
  switch (options_.kind) {
    case Retainer::Kind::kLocret:
      return std::clamp(d / 2, 16u, 1024u);
    case Retainer::Kind::kMlp:
      return std::clamp(d / 8, 64u, 1024u);
    case Retainer::Kind::kSink:
      return (model_->shape.heads + model_->shape.kv_heads) * kSinkRank;
    default:
      return 0;
  }
}

FitOptions Trainer::fit_options() const {
  return {.kind = options_.kind,
          .act = options_.kind == Retainer::Kind::kMlp ? kActGeluErf : model_->act,
          .hidden = hidden(),
          .group = model_->shape.heads / model_->shape.kv_heads,
          .steps = options_.steps,
          .runs = 16,
          .weighs_best = options_.target != Target::kMaxLogit,
          .seed = options_.seed,
          .threads = options_.threads};
}

const TrainingText& Trainer::text(uint32_t number) const {
  if (number < texts_.size()) return texts_[number];
  if (number < texts_read_for_labels()) return counted_[number - texts_.size()];
  return asked_[number - texts_read_for_labels()];
}

double& Trainer::clock() {
  if (phase_ == Phase::kReading && text_ >= texts_read_for_labels()) return seconds_.checking;
  const bool in_labels =
      phase_ == Phase::kReading && reading_ && reader_->tokens_read() >= text(text_).tokens.size();
  return in_labels ? seconds_.labels : Training::clock();
}

// ---- reading ----

Status Trainer::read_on() {
  if (text_ == all_texts()) return trains() ? start_fit() : write_sidecar();
  if (text_ >= texts_read_for_labels()) return ask_densely();
  const TrainingText& t = text(text_);
  if (!reading_) {
    reader_->begin(t);
    sample_of_.assign(ceil_div(text_tokens_, kRunTokens), -1);
    if (text_ < texts_.size())
      for (size_t i = 0; i < runs_of_text_[text_].size(); ++i)
        sample_of_[runs_of_text_[text_][i]] = static_cast<int32_t>(first_run_[text_] + i);
  }
  reading_ = true;
  // States that are not needed stay on the device.
  const uint64_t before = reader_->tokens_read(), end = before + reader_->next_count();
  bool keeps = sums_up() && text_ < texts_.size();
  for (uint64_t run = before / kRunTokens; run < std::min(ceil_div(end, kRunTokens), sample_of_.size());
       ++run)
    keeps |= sample_of_[run] >= 0;
  Reader::States keep;
  if (keeps)
    keep = [this](uint32_t layer, uint32_t first, uint32_t rows, const float* states) {
      keep_states(layer, first, rows, states);
    };
  THIMBLE_LET(more, reader_->step(keep));
  done_ += reader_->tokens_read() - before;
  return more ? Status() : finish_text();
}

// Dense questions come before the fit, so that it is known what the check can measure.
Status Trainer::ask_densely() {
  reader_.reset();
  const TrainingText& t = text(text_);
  THIMBLE_LET(recall, ask_about(t, model_, device_, Retention::kNone, nullptr,
                                {.pool = 0, .most = kAskedQuestions, .answers = true, .probability = true}));
  dense_[text_ - texts_read_for_labels()] = recall;
  if (trains()) THIMBLE_TRY(save_record(text_));
  ++text_;
  done_ += t.tokens.size();
  return {};
}

Recall Trainer::dense() const {
  Recall all;
  for (const Recall& of_text : dense_) all.add(of_text);
  return all;
}

double Trainer::answered_densely() const {
  return asked_.empty() || text_ < all_texts() ? -1 : dense().share();
}

// Keeps rows of the text: all rows for a linear retainer, else the rows of chosen runs.
void Trainer::keep_states(uint32_t layer, uint32_t first, uint32_t rows, const float* states) {
  const auto slot = static_cast<uint32_t>(std::find(layers_.begin(), layers_.end(), layer) - layers_.begin());
  const uint64_t cols = shape_.cols;
  threads_.run(rows, [&](uint32_t i, uint32_t) {
    const uint32_t row = first + i;
    const int32_t sample = sample_of_[row / kRunTokens];
    if (!least_squares_ && sample < 0) return;
    uint16_t* to = least_squares_
                       ? least_squares_->states(slot) + row * cols
                       : samples_.states(static_cast<uint32_t>(sample), slot) + row % kRunTokens * cols;
    const float* from = states + i * cols;
    for (uint64_t c = 0; c < cols; ++c) to[c] = f32_to_f16(std::clamp(from[c], -65504.0f, 65504.0f));
  });
}

// Processes the labels of a text that was read completely.
Status Trainer::finish_text() {
  const bool learns = text_ < texts_.size();
  const auto tokens = static_cast<uint32_t>(text(text_).tokens.size());
  unsaved_ &= !learns;          // the sums are incomplete until all layers of the text are added
  std::vector<float> to_count;  // labels of a text for the counts, by layer and head
  for (uint32_t l = 0; l < layers_.size(); ++l) {
    THIMBLE_LET(labels, reader_->labels(layers_[l]));
    const std::vector<float>& of = options_.target == Target::kMaxLogit ? labels.max_logit : labels.log_prob;
    if (!learns)
      to_count.insert(to_count.end(), labels.log_prob.begin(), labels.log_prob.end());
    else if (least_squares_)
      THIMBLE_TRY(least_squares_->add(l, tokens, of.data()));
    else
      keep_labels(l, of);
  }
  if (!learns) count_best(to_count);
  if (learns && least_squares_) {
    least_squares_->end_text(tokens);
    unsaved_ = true;
  } else if (trains()) {
    THIMBLE_TRY(save_record(text_));
  }
  ++text_;
  reading_ = false;
  return {};
}

// Keeps the labels of chosen runs, and marks those that are among the best of the text and head.
void Trainer::keep_labels(uint32_t layer, const std::vector<float>& labels) {
  const size_t tokens = text(text_).tokens.size();
  for (uint32_t head = 0; head < shape_.heads; ++head) {
    const float* label = labels.data() + head * tokens;
    std::vector<float> sorted(label, label + tokens);
    const auto least = sorted.begin() + static_cast<ptrdiff_t>(tokens / kBestPart) - 1;
    std::nth_element(sorted.begin(), least, sorted.end(), std::greater<>());
    for (size_t i = 0; i < runs_of_text_[text_].size(); ++i) {
      const uint32_t run = first_run_[text_] + static_cast<uint32_t>(i);
      const float* from = label + uint64_t(runs_of_text_[text_][i]) * kRunTokens;
      std::copy_n(from, kRunTokens, samples_.labels(run, layer) + uint64_t(head) * kRunTokens);
      std::transform(from, from + kRunTokens, samples_.best(run, layer) + uint64_t(head) * kRunTokens,
                     [&](float x) { return x >= *least; });
    }
  }
}

// Counts the best labels over all heads, as many as the pools hold together.
void Trainer::count_best(const std::vector<float>& labels) {
  const size_t tokens = text(text_).tokens.size();
  std::vector<float> sorted = labels;
  const auto least = sorted.begin() + static_cast<ptrdiff_t>(labels.size() / kSharesPart) - 1;
  std::nth_element(sorted.begin(), least, sorted.end(), std::greater<>());
  std::vector<double> counts;
  for (size_t at = 0; at < labels.size(); at += tokens)
    counts.push_back(static_cast<double>(std::count_if(labels.begin() + static_cast<ptrdiff_t>(at),
                                                       labels.begin() + static_cast<ptrdiff_t>(at + tokens),
                                                       [&](float x) { return x >= *least; })));
  counts_[text_ - texts_.size()] = std::move(counts);
}

std::vector<float> Trainer::shares() const {
  const uint32_t kv_heads = model_->shape.kv_heads;
  std::vector<float> shares(model_->layer_of_run.size(), 1);
  std::vector<double> sums(layers_.size() * kv_heads);
  for (const auto& counts : counts_)
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += counts[i];
  const double mean = std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(sums.size());
  for (size_t i = 0; i < sums.size(); ++i)
    shares[model_->layers[layers_[i / kv_heads]].attention()->first_run + i % kv_heads] =
        static_cast<float>(kEvenPart + (1 - kEvenPart) * sums[i] / mean);
  return shares;
}

// ---- saved state ----

// Each text that was read has a record. The saved state of the fit follows the records. Texts that go into
// sums have no records; the sums follow the other records.
uint64_t Trainer::record_bytes(uint32_t text) const {
  if (text >= texts_read_for_labels()) return sizeof(Recall);
  if (text >= texts_.size()) return layers_.size() * model_->shape.kv_heads * sizeof(double);
  return runs_of_text_[text].size() * shape_.run_bytes();
}
uint64_t Trainer::record_at(uint32_t text) const {
  uint64_t at = kPartialBegin;
  for (uint32_t i = sums_up() ? static_cast<uint32_t>(texts_.size()) : 0; i < text; ++i)
    at += sizeof(uint64_t) + record_bytes(i);
  return at;
}
// Calls each(data, bytes) for each part of a text's record.
template <typename Each>
Status Trainer::each_part(uint32_t text, const Each& each) {
  if (text >= texts_read_for_labels())
    return each(&dense_[text - texts_read_for_labels()], record_bytes(text));
  if (text >= texts_.size()) return each(counts_[text - texts_.size()].data(), record_bytes(text));
  const SampleShape& s = shape_;
  for (uint32_t i = 0; i < runs_of_text_[text].size(); ++i) {
    const uint32_t run = first_run_[text] + i;
    THIMBLE_TRY(each(samples_.states(run, 0), s.state_elements() * sizeof(uint16_t)));
    THIMBLE_TRY(each(samples_.labels(run, 0), s.label_elements() * sizeof(float)));
    THIMBLE_TRY(each(samples_.best(run, 0), s.label_elements()));
  }
  return {};
}

Status Trainer::save_record(uint32_t text) {
  uint64_t hash = kHashSeed, at = record_at(text) + sizeof hash;
  THIMBLE_TRY(each_part(text, [&](const void* data, uint64_t bytes) {
    hash = hash_of(data, bytes, hash);
    at += bytes;
    return state_.write(at - bytes, data, bytes);
  }));
  THIMBLE_TRY(state_.write(record_at(text), &hash, sizeof hash));
  return state_.flush();
}

// Loads the record of a text. Returns false if it was not written completely.
Result<bool> Trainer::take_record(uint32_t text) {
  uint64_t saved, hash = kHashSeed, at = record_at(text) + sizeof saved;
  if (state_.size() < at + record_bytes(text)) return false;
  THIMBLE_TRY(state_.read(record_at(text), &saved, sizeof saved));
  const Status taken = each_part(text, [&](void* data, uint64_t bytes) -> Status {
    THIMBLE_TRY(state_.read(at, data, bytes));
    hash = hash_of(data, bytes, hash);
    at += bytes;
    return {};
  });
  THIMBLE_TRY(taken);
  return saved == hash;
}

Status Trainer::open_state() {
  const uint64_t facts[] = {kWorkVersion,
                            model_->fingerprint(),
                            book_hash_,
                            options_.seed,
                            static_cast<uint64_t>(options_.kind),
                            static_cast<uint64_t>(options_.target),
                            options_.texts,
                            options_.steps,
                            options_.equal_shares,
                            text_tokens_,
                            samples_.runs()};
  THIMBLE_LET(state, open_partial(options_.output + ".partial", hash_of(facts, sizeof facts)));
  state_ = std::move(state);
  if (least_squares_) THIMBLE_TRY(take_sums());
  if (least_squares_ && text_ < texts_.size()) return {};
  for (; text_ < all_texts(); ++text_) {
    THIMBLE_LET(taken, take_record(text_));
    if (!taken) break;
  }
  resumed_ = text_ > 0;
  return {};
}

Status Trainer::take_sums() {
  const std::vector<std::span<std::byte>> sums = least_squares_->state();
  uint64_t bytes = 0;
  for (const std::span<std::byte> part : sums) bytes += part.size();
  saved_.emplace(record_at(all_texts()), bytes);
  THIMBLE_LET(found, saved_->load(state_, sums));
  if (!found) least_squares_->clear();
  text_ = static_cast<uint32_t>(least_squares_->texts());
  resumed_ = found;
  return {};
}

// The records of texts are saved when they are read. Sums are saved here. Their solutions are not saved,
// because they can be computed again.
Status Trainer::save() {
  saved_at_ = steady_seconds();
  if (trial_) return trial_->save();
  if (unsaved_) {
    unsaved_ = false;
    return saved_->save(state_, least_squares_->state());
  }
  if (!fit_ || fit_->diverged()) return {};
  std::vector<std::byte> state = fit_->save();
  return saved_->save(state_, {state});
}

// ---- fitting ----

Status Trainer::start_fit() {
  if (least_squares_) {
    set_phase(Phase::kFitting, 0, least_squares_->steps());
    return {};
  }
  THIMBLE_LET(fit, Fit::start(device_, samples_, fit_options()));
  fit_ = std::move(fit);
  std::vector<std::byte> latest(fit_->state_bytes());
  saved_.emplace(record_at(all_texts()), latest.size());
  THIMBLE_LET(found, saved_->load(state_, {latest}));
  if (found) THIMBLE_TRY(fit_->load(latest));
  loss_ = fit_->loss();
  set_phase(Phase::kFitting, fit_->steps_done(), fit_->steps());
  return {};
}

Status Trainer::fit_on() {
  if (least_squares_) {
    THIMBLE_LET(more, least_squares_->step());
    done_ = least_squares_->steps_done();
    loss_ = least_squares_->loss();
    return more ? Status() : write_sidecar();
  }
  recall_ = -1;
  THIMBLE_LET(more, fit_->step());
  done_ = fit_->steps_done();
  loss_ = fit_->loss();
  if (fit_->diverged()) {
    if (done_ == 0)
      return error(
          Code::kNotFinite,
          "the loss is not a number from the first step on: the model gives NaN or infinite states; train "
          "for another file of it");
    if (fit_->good_step() == 0)
      return error(Code::kNotFinite,
                   "the loss was no longer a number after step %u, before any good state was kept, so "
                   "nothing is written; train with another --seed or other texts",
                   fit_->steps_done());
    diverged_ = {fit_->steps_done(), fit_->good_step()};
  }
  if (!more) return write_sidecar();
  for (uint64_t part = 1; part < kAskedParts; ++part)
    if (asks_ && done_ == total_ * part / kAskedParts) return ask_meanwhile();
  return {};
}

// Asks about a held-out text with the current state of the fit. It changes nothing, and is skipped if the
// device has too little memory.
Status Trainer::ask_meanwhile() {
  const double begin = steady_seconds();
  const auto asked = [&]() -> Result<Recall> {
    THIMBLE_LET(file, made());
    return ask_with(file, asked_.front(), Retention::kLocret, kParts[0]);
  }();
  if (asked.ok()) recall_ = asked->reported(dense_.front(), dense().measure());
  const double seconds = steady_seconds() - begin;
  seconds_.checking += seconds;
  seconds_.fitting -= seconds;  // the step counts these seconds, too
  return asked.ok() || asked.status().code() == Code::kOutOfMemory ? Status() : asked.status();
}

// ---- the result ----

// The tensors of a fitted layer. Matrices are written as f16, all else as f32.
void Trainer::add_layer(NewGguf& file, const std::string& name, const FittedLayer& fitted) const {
  const FitOptions fit = fit_options();
  const uint64_t cols = shape_.cols, heads = shape_.heads;
  const auto layer = std::make_shared<FittedLayer>(fitted);
  // Adds elements of one of the layer's vectors, from `first` on, in the given shape.
  const auto add = [&](const char* part, std::vector<float> FittedLayer::*of, uint64_t first, uint64_t width,
                       uint64_t rows, DType type) {
    file.add(
        name + part, rows ? std::vector<uint64_t>{width, rows} : std::vector<uint64_t>{width}, type, [=] {
          const auto from = ((*layer).*of).begin() + static_cast<ptrdiff_t>(first);
          const std::vector<float> values(from, from + static_cast<ptrdiff_t>(width * (rows ? rows : 1)));
          return type == DType::kF16 ? halves_of(values) : bytes_of(values);
        });
  };
  const auto matrix = [&](const char* part, auto of, uint64_t first, uint64_t width, uint64_t rows) {
    add(part, of, first, width, rows, DType::kF16);
  };
  const auto vector = [&](const char* part, auto of, uint64_t first, uint64_t width) {
    add(part, of, first, width, 0, DType::kF32);
  };
  switch (fit.kind) {
    case Retainer::Kind::kLinear:
      matrix(".weight", &FittedLayer::second, 0, cols, heads);
      vector(".bias", &FittedLayer::second_bias, 0, heads);
      break;
    case Retainer::Kind::kMlp:
      vector("_fc1.bias", &FittedLayer::first_bias, 0, fit.hidden);
      vector("_fc2.bias", &FittedLayer::second_bias, 0, heads);
      [[fallthrough]];
    case Retainer::Kind::kLocret:
      matrix("_fc1.weight", &FittedLayer::first, 0, cols, fit.hidden);
      matrix("_fc2.weight", &FittedLayer::second, 0, fit.hidden, heads);
      break;
    case Retainer::Kind::kAdore:
      break;
    case Retainer::Kind::kSink: {
      const uint64_t queries = heads * fit.group, sinks = heads * kSinkCount;
      matrix("_q.weight", &FittedLayer::first, 0, cols, queries * kSinkRank);
      matrix("_k.weight", &FittedLayer::first, queries * kSinkRank * cols, cols, heads * kSinkRank);
      vector("_q.bias", &FittedLayer::first_bias, 0, queries * kSinkRank);
      vector("_q_norm.weight", &FittedLayer::second, 0, kSinkRank);
      vector("_k_norm.weight", &FittedLayer::second, kSinkRank, kSinkRank);
      add("_kbase", &FittedLayer::second, 2 * kSinkRank, kSinkRank, sinks, DType::kF32);
      vector("_b", &FittedLayer::second, (2 + sinks) * kSinkRank, queries);
      break;
    }
  }
}

// A copy of a file of heads, without the entries that a check added. The values of its tensors are read
// immediately.
static Result<NewGguf> copy_of(const MappedFile& file, const std::string& name) {
  THIMBLE_LET(old, Gguf::parse(file, name));
  NewGguf copy;
  for (const auto& [key, value] : old.metadata())
    if (key != "retainer.budget" && key != "retainer.retention" && !key.starts_with("retainer.checked."))
      copy.set(key, value);
  for (const GgufTensor& t : old.tensors())
    copy.add(std::string(t.name), {t.shape, t.shape + t.dims}, static_cast<DType>(t.type),
             [values = std::vector<std::byte>(t.data, t.data + t.bytes)] { return values; });
  return copy;
}

static void set_array(NewGguf& file, const char* key, GgufType type, const auto& values) {
  file.set(key, GgufValue{type, true, values.size(), std::as_bytes(std::span(values))});
}

// The fitted or given retainer, with equal pools.
Result<NewGguf> Trainer::made() const {
  if (!trains()) return copy_of(retainer_->file, options_.heads);
  NewGguf file;
  const FitOptions fit = fit_options();
  begin_sidecar(file, *model_, model_->info.name + " retainer", fit.kind);
  file.set("retainer.input", input() == Retainer::Input::kQkv ? "qkv" : "x");
  file.set("retainer.target", name_of(options_.target));
  if (fit.kind == Retainer::Kind::kLocret || fit.kind == Retainer::Kind::kMlp) {
    file.set("retainer.act", name_of_act(fit.act));
    file.set("retainer.hidden", fit.hidden);
  } else if (fit.kind == Retainer::Kind::kSink) {
    file.set("retainer.rank", kSinkRank);
    file.set("retainer.sinks", kSinkCount);
  }
  const uint64_t of_texts =
      std::accumulate(texts_.begin(), texts_.end(), uint64_t{0},
                      [](uint64_t sum, const TrainingText& t) { return sum + t.tokens.size(); });
  set_trained_on(file, fit.kind,
                 {.texts = texts_.size(),
                  .tokens = least_squares_ ? of_texts : uint64_t(samples_.runs()) * kRunTokens,
                  .steps = least_squares_ ? 0
                           : diverged_    ? diverged_->good
                                          : fit_->steps_done(),
                  .seed = options_.seed,
                  .data = options_.data});
  for (uint32_t i = 0; i < layers_.size(); ++i)
    add_layer(file, "blk." + std::to_string(layers_[i]) + ".retain",
              least_squares_ ? least_squares_->layer(i) : fit_->layer(i));
  return file;
}

Result<std::shared_ptr<const Retainer>> Trainer::open_retainer(const std::string& path) const {
  THIMBLE_LET(mapped, MappedFile::open(path));
  return model_->open_retainer(std::move(mapped), path);
}

Status Trainer::write_sidecar() {
  THIMBLE_LET(file, made());
  THIMBLE_TRY(file.write(options_.output));
  THIMBLE_LET(retainer, open_retainer(options_.output));
  retainer_ = retainer;
  if (trains()) THIMBLE_TRY(state_.remove());
  if (options_.tries_targets) THIMBLE_TRY(tries_.remove());
  fit_.reset();
  samples_ = Samples();
  least_squares_.reset();
  unsaved_ = false;
  for (const uint32_t part : kParts) checked_.push_back({part, {}, {}, {}, {}, {}});
  set_phase(Phase::kChecking, 0,
            kAskedTexts * std::size(kParts) * (std::size(kCompared) + (counted_.empty() ? 0 : 1)));
  return {};
}

Result<Recall> Trainer::ask(const TrainingText& text, Retention retention,
                            std::shared_ptr<const Retainer> retainer, uint32_t part) const {
  const Measure measure = dense().measure();
  return ask_about(text, model_, device_, retention, std::move(retainer),
                   {.pool = text_tokens_ / part,
                    .most = kAskedQuestions,
                    .answers = measure == Measure::kAnswers,
                    .probability = measure == Measure::kProbability});
}

// Asks with a temporary file, which is then removed.
Result<Recall> Trainer::ask_with(const NewGguf& file, const TrainingText& text, Retention retention,
                                 uint32_t part) const {
  const std::string path = options_.output + ".asked";
  THIMBLE_TRY(remove_file(path));  // of a process that was killed
  const auto recall = [&]() -> Result<Recall> {
    THIMBLE_TRY(file.write(path));
    THIMBLE_LET(retainer, open_retainer(path));
    return ask(text, retention, retainer, part);
  }();
  THIMBLE_TRY(remove_file(path));
  return recall;
}

// Reads one text once. All texts are read with each part of the memory: first with equal pools and each
// retention of kCompared, then with the counted shares and the best retention.
Status Trainer::check_on() {
  const auto parts = static_cast<uint32_t>(checked_.size()), readings = kAskedTexts * parts;
  const uint32_t way = check_ / readings;
  const TrainingText& t = asked_[check_ % readings / parts];
  Checked& checked = checked_[check_ % parts];
  const auto asked = [&]() -> Result<Recall> {
    if (way < std::size(kCompared)) return ask(t, kCompared[way].retention, retainer_, checked.part);
    THIMBLE_LET(file, copy_of(retainer_->file, options_.output));
    set_array(file, "retainer.budget", GgufType::kF32, shares());
    return ask_with(file, t, retention_, checked.part);
  }();
  if (!asked.ok())
    return error(asked.status().code(), "%s is written, but could not be checked: %s",
                 options_.output.c_str(), asked.status().message().c_str());
  (way < std::size(kCompared) ? checked.*kCompared[way].recall : checked.counted).add(*asked);
  done_ = ++check_;
  if (check_ == readings * std::size(kCompared)) retention_ = best_of(checked_, dense());
  return check_ == total_ ? finish_check() : Status();
}

// At most one standard deviation of the difference between two shares of so many answers. It is 0 for
// probabilities, because they are of the same tokens.
static double noise_of(uint64_t asked, Measure measure) {
  return measure == Measure::kAnswers ? std::sqrt(0.5 / static_cast<double>(asked)) : 0;
}

static Recall sum_of(const std::vector<Trainer::Checked>& checked, Recall Trainer::Checked::*of) {
  Recall sum;
  for (const Trainer::Checked& c : checked) sum.add(c.*of);
  return sum;
}

Retention Trainer::best_of(const std::vector<Checked>& checked, const Recall& dense) {
  // The mix is best at keeping entries that no training text asks about (docs/evaluation.md). This check
  // cannot measure that.
  const Recall mix = sum_of(checked, &Checked::mix);
  double most = mix.reported(dense) + noise_of(mix.asked, dense.measure());
  Retention best = Retention::kMix;
  for (const Compared& c : kCompared) {
    const double found = sum_of(checked, c.recall).reported(dense);
    if (c.retention == Retention::kWindow || found <= most) continue;
    best = c.retention;
    most = found;
  }
  return best;
}

const Recall& Trainer::in_equal_pools(const Checked& of) const {
  const auto* const c = std::find_if(std::begin(kCompared), std::end(kCompared),
                                     [&](const Compared& one) { return one.retention == retention_; });
  return of.*c->recall;
}

const Recall& Trainer::retainer(const Checked& of) const {
  return shares_help_ ? of.counted : in_equal_pools(of);
}

// Keeps the shares if they give better results than equal pools, and writes the file again with the results.
Status Trainer::finish_check() {
  const Recall dense = this->dense();
  Recall equal;
  for (const Checked& c : checked_) equal.add(in_equal_pools(c));
  shares_help_ = sum_of(checked_, &Checked::counted).reported(dense) > equal.reported(dense);

  THIMBLE_LET(file, copy_of(retainer_->file, options_.output));
  std::vector<uint32_t> parts;
  std::vector<float> heads;
  for (const Checked& c : checked_) {
    parts.push_back(c.part);
    heads.push_back(static_cast<float>(retainer(c).reported(dense)));
  }
  const std::vector<float> densely = {static_cast<float>(dense.share()),
                                      static_cast<float>(dense.perplexity())};
  file.set("retainer.checked.measure", name_of(dense.measure()));
  file.set("retainer.checked.questions", dense.asked);
  file.set("retainer.checked.tokens", text_tokens_);
  set_array(file, "retainer.checked.dense", GgufType::kF32, densely);
  set_array(file, "retainer.checked.parts", GgufType::kU32, parts);
  set_array(file, "retainer.checked.heads", GgufType::kF32, heads);
  for (const Compared& way : kCompared) {
    std::vector<float> found;
    for (const Checked& c : checked_) found.push_back(static_cast<float>((c.*way.recall).reported(dense)));
    const std::string key = std::string("retainer.checked.") + policy_name(way.retention);
    set_array(file, key.c_str(), GgufType::kF32, found);
  }
  if (retention_ != Retention::kLocret) file.set("retainer.retention", policy_name(retention_));
  if (shares_help_) set_array(file, "retainer.budget", GgufType::kF32, shares());
  retainer_.reset();  // some systems cannot replace a mapped file
  THIMBLE_TRY(file.replace(options_.output));
  set_phase(Phase::kDone, total_, total_);
  return {};
}

static std::string percent(double share) { return std::to_string(std::lround(100 * share)) + " %"; }

std::string judgement_of(const Recall& dense, const Recall& retainer, const Recall& window) {
  const bool answers = dense.measure() == Measure::kAnswers;
  const double kept = retainer.reported(dense), by_window = window.reported(dense);
  const double all = answers ? dense.share() : 1;
  std::string said;
  if (!answers)
    said = "The model answers " + percent(dense.share()) +
           " of these questions even when nothing is evicted, so the check compares the probability of a "
           "right token instead: at an eighth of the memory, the retainer keeps " +
           percent(kept) + " of it, and a window " + percent(by_window) + ". ";
  const double noise = noise_of(dense.asked, dense.measure());
  if (answers ? kept < by_window + noise : kept <= by_window)
    return said +
           "The retainer is not better than a window here; train with more texts and steps, or do not use "
           "it.";
  if (kept < 0.9 * all) {
    const std::string lost = answers ? percent(std::max(0.0, all - kept)) + " of the questions"
                                     : percent(1 - kept) + " of that probability";
    return said + "The retainer beats a window and loses " + lost +
           " at an eighth of the memory; more texts and steps may help.";
  }
  return said + "The retainer keeps what these questions need at an eighth of the memory.";
}

std::string Trainer::verdict() const {
  if (phase_ != Phase::kDone) return "";
  const std::string stopped = diverged_ ? "The loss was no longer a number after step " +
                                              std::to_string(diverged_->at) + ", and the state of step " +
                                              std::to_string(diverged_->good) + " was taken. "
                                        : "";
  const std::string shares =
      counted_.empty() ? ""
      : shares_help_   ? " Counted shares of the pools were better than equal ones, so the file has them."
                       : " Counted shares of the pools were not better than equal ones.";
  const std::string retention =
      retention_ == Retention::kMix
          ? " The file selects the mix of its scores and KeyDiff's."
          : std::string(retention_ == Retention::kLocret ? " The scores alone" : " KeyDiff alone") +
                " did better than the mix of both, so the file selects " + policy_name(retention_) + ".";
  return stopped + judgement_of(dense(), retainer(checked_.front()), checked_.front().window) + shares +
         retention;
}

std::string Trainer::report() const {
  const Recall dense = this->dense();
  JsonWriter parts, tried;
  for (const Checked& c : checked_) {
    JsonWriter part;
    part.number("part", c.part);
    const auto add = [&](const std::string& name, const Recall& recall) {
      part.raw(name, json_number(recall.reported(dense)));
      if (dense.measure() == Measure::kProbability)
        part.raw(name + "_perplexity", json_number(recall.perplexity()));
    };
    add("heads", retainer(c));
    for (const Compared& way : kCompared) add(policy_name(way.retention), c.*way.recall);
    if (!counted_.empty()) add("counted", c.counted);
    parts.element(part.object());
  }
  for (const Tried& t : tried_) {
    JsonWriter target;
    target.text("target", name_of(t.target));
    target.raw("recall", t.recall.asked ? json_number(t.recall.reported(t.dense)) : "null");
    tried.element(target.object());
  }
  JsonWriter json;
  json.text("target", name_of(options_.target));
  if (!tried.empty()) json.raw("tried", tried.array());
  json.number("questions", dense.asked);
  json.raw("dense", json_number(dense.share()));
  json.raw("dense_perplexity", json_number(dense.perplexity()));
  json.text("measure", name_of(dense.measure()));
  json.raw("recall", parts.array());
  json.text("shares", shares_help_ ? "counted" : "equal");
  json.text("retention", policy_name(retention_));
  json.raw("seconds", json_of(seconds_));
  json.text("verdict", verdict());
  return json.object();
}

}  // namespace thimble
