// Tests random compositions: a model, options that the library takes together, and a script of calls. One
// session follows the script undisturbed. Another follows it while it is interrupted in every kind of place,
// cloned, saved and restored, rewound, and called in other pieces. Both must tell the same after each call,
// bit for bit.
//
// THIMBLE_COMPOSITIONS=COUNT:SEED sets how many compositions each device gets and the seed of the first; that
// of the next is larger by one. A failure names the one seed that repeats it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>

#include "backends/cpu/host/cpu_device.h"
#include "backends/cpu/kernels.h"
#include "tests/support/device_test_name.h"
#include "tests/support/drafting.h"
#include "tests/support/random.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/seeded_model.h"
#include "tests/support/shared_devices.h"
#include "tests/support/spy_device.h"
#include "tests/support/synthetic_model.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

// ---- random choices ----

bool one_in(Random& random, uint32_t n) { return random.below(n) == 0; }
uint32_t between(Random& random, uint32_t low, uint32_t high) { return low + random.below(high - low + 1); }
template <typename T>
T one_of(Random& random, std::initializer_list<T> values) {
  return values.begin()[random.below(static_cast<uint32_t>(values.size()))];
}

// ---- models ----

struct Mixed {
  std::string name;
  std::shared_ptr<const Model> model;
  std::shared_ptr<const Retainer> shares;  // a retainer that divides the pool, or null
  bool large = false;                      // takes a hundred times as long for each token as the others

  bool has_states() const { return model->has_states(); }
};

Mixed seeded(const std::string& name, Seeded s) {
  s.head_dim = 32;  // so that every format of keys and values can be stored
  const SeededModel m = seeded_model(s);
  return {name, m.model, s.shares.empty() ? nullptr : m.retainer};
}
Mixed synthetic(const std::string& shape) {
  return {shape, SyntheticFile(shape + " f16 FILE --seed 4 --sharp 3", "compositions").open(), nullptr, true};
}

// Models that differ in what their layers hold. The first four have layers of the same kinds of weights.
const std::vector<Mixed>& small_models() {
  static const std::vector<Mixed> all = {
      seeded("attention", {}), seeded("windows", {.layers = 3, .window = 25}),
      seeded("shares", {.shares = {0.3f, 2.4f, 0.9f, 0.4f}}), seeded("growing queries", growing())};
  return all;
}
const std::vector<Mixed>& large_models() {
  static const std::vector<Mixed> all = {synthetic("tiny-lfm2"), synthetic("tiny-falconh1"),
                                         synthetic("tiny-qwen35-mtp"), synthetic("tiny-glm4moe"),
                                         synthetic("tiny-deepseek2")};
  return all;
}

// Heads of a kind for a model, made once.
std::shared_ptr<const Retainer> heads_of(const Mixed& m, const std::string& kind) {
  static std::map<std::pair<const Mixed*, std::string>, std::shared_ptr<const Retainer>> made;
  std::shared_ptr<const Retainer>& heads = made[{&m, kind}];
  if (!heads) heads = seeded_retainer(*m.model, kind);
  return heads;
}

// A smaller model with the same tokens, which drafts.
std::shared_ptr<const Model> drafter_of(const Mixed& m) {
  static std::map<uint32_t, std::shared_ptr<const Model>> made;
  std::shared_ptr<const Model>& drafter = made[m.model->shape.vocab];
  if (!drafter) drafter = seeded_model({.layers = 1, .vocab = m.model->shape.vocab, .seed = 5}).model;
  return drafter;
}

// ---- options ----

void draw_retention(Random& random, const Mixed& m, SessionOptions& o) {
  int32_t retentions = 0;
  while (policy_name(Retention{retentions})) ++retentions;
  o.retention = Retention(random.below(static_cast<uint32_t>(retentions)));
  const bool evicts = traits(o.retention).evicts();
  const Takes takes = traits(o.retention).takes;
  if (takes == Takes::kRetainer)
    o.retainer = heads_of(m, one_of<const char*>(random, {"locret", "linear", "mlp", "sink"}));
  if (takes == Takes::kController) o.retainer = heads_of(m, "adore");
  if (m.shares && (takes == Takes::kRetainer || takes == Takes::kShares) && !one_in(random, 3))
    o.retainer = m.shares;
  o.pool = !evicts             ? between(random, 100, 600)
           : one_in(random, 4) ? between(random, 150, 300)
                               : between(random, 30, 120);
  o.chunk = one_in(random, 8) ? between(random, 1, 4) : between(random, 8, 64);
  if (one_in(random, 2)) o.stabilizers = between(random, 0, 14);
  if (!one_in(random, 6)) o.local = between(random, 0, 30);
  if (one_in(random, 2)) o.protect_init = between(random, 0, 8);
  o.max_new = between(random, 1, 80);
  o.seed = random.below(1000);
  if (one_in(random, 5)) o.retain_scope = RetainScope::kLayer;
  if (one_in(random, 4)) o.positions = Positions::kOriginal;
  if (one_in(random, 10)) o.context = between(random, 150, 700);
  if (o.retention == Retention::kAdore || one_in(random, 20)) o.rebuild = between(random, 0, 4);
  if (o.rebuild) o.rebuild_every = between(random, 0, 3);
}

void draw_selection(Random& random, SessionOptions& o) {
  o.selection = one_of(random, {Selection::kDense, Selection::kTokenSelect, Selection::kQuest});
  if (o.selection == Selection::kDense) return;
  o.select_k = between(random, 4, 64);
  o.select_init = between(random, 0, 8);
  o.select_local = between(random, 1, 40);
  o.select_theta = one_of(random, {1.0f, 0.5f, 0.9f, -1.0f});
  o.vote = one_of(random, {VoteScope::kAuto, VoteScope::kLayer, VoteScope::kGroup});
  o.vote_scale = one_of(random, {VoteScale::kNone, VoteScale::kSqrt});
  o.vote_window = one_of(random, {0u, 3u});
  o.select_prefill = one_of(random, {kDefault, 0u, 1u});
  if (o.selection == Selection::kQuest) o.select_page = one_of(random, {0u, 4u, 8u, 16u});
  o.dense_layers = between(random, 0, 2);
}

void draw_store(Random& random, SessionOptions& o) {
  (one_in(random, 2) ? o.recall_mem : o.recall_disk) =
      one_in(random, 3) ? between(random, 20, 100) << 10 : uint64_t{2} << 20;
  o.recall = one_in(random, 2) ? kRecallAll : between(random, 8, 200);
  if (!o.recalls_all()) o.recall_every = one_of(random, {0u, 1u, 8u, 30u});
  o.recall_prefill = o.recalls_all() && one_in(random, 2);
}

SessionOptions draw_options(Random& random, const Mixed& m) {
  static constexpr auto kAll = {KvFormat::kF16, KvFormat::kQ8_0, KvFormat::kQ4_0};
  SessionOptions o;
  draw_retention(random, m, o);
  if (one_in(random, 2)) draw_selection(random, o);
  if (one_in(random, 2)) draw_store(random, o);
  if (one_in(random, 2)) o.key_format = one_of(random, kAll), o.value_format = one_of(random, kAll);
  if (o.recall) o.recall_format = one_of(random, kAll);
  o.watch = one_in(random, 6);
  if (one_in(random, takes_drafts(o) && !o.recall && !o.watch ? 2 : 10)) {
    o.draft = one_of(random, {Draft::kLookup, Draft::kModel, Draft::kMtp});
    o.draft_tokens = between(random, 1, 3);
    if (o.draft == Draft::kModel) o.draft_model = drafter_of(m);
  }
  return o;
}

std::string description(const SessionOptions& o) {
  std::ostringstream text;
  text << policy_name(o.retention) << (o.retainer ? " with heads" : "") << ", recall_mem " << o.recall_mem
       << ", recall_disk " << o.recall_disk;
#define X(type, name, at_first, values, saved) \
  if (o.name != type(at_first)) text << ", " #name " " << static_cast<double>(o.name);
  THIMBLE_SESSION_OPTIONS(X)
#undef X
  return text.str();
}

// ---- scripts ----

enum class Verb { kFeed, kFlush, kStep, kAccept, kScore, kRewind, kShrink, kReset };

constexpr const char* kVerbs[] = {"feed", "flush", "step", "accept", "score", "rewind", "shrink", "reset"};

struct Call {
  Verb verb;
  std::vector<int32_t> tokens = {};  // of feed, accept and score
  uint64_t number = 0;               // rewind: the position; shrink: the pool
};

std::vector<int32_t> draw_tokens(Random& random, size_t count) {
  const uint64_t seed = random.below(4);
  return one_in(random, 2) ? repeating(count, seed) : seeded_tokens(count, 64, seed);
}

// `longest`: tokens of the longest text.
std::vector<Call> draw_script(Random& random, uint32_t longest) {
  std::vector<Call> script = {{Verb::kFeed, draw_tokens(random, between(random, 1, longest))}};
  const auto generate = [&] {
    for (uint32_t i = between(random, 1, std::max(4u, longest / 12)); i; --i) script.push_back({Verb::kStep});
  };
  generate();
  for (uint32_t turn = between(random, 3, 8); turn; --turn) switch (random.below(16)) {
      case 0:
        script.push_back({Verb::kFlush});
        break;
      case 1:
        script.push_back({Verb::kRewind, {}, random.below(100)});  // as a share, until it is known
        if (one_in(random, 2)) script.push_back({Verb::kAccept, draw_tokens(random, 1)});
        break;
      case 2:
        if (one_in(random, 2)) script.push_back({Verb::kShrink, {}, between(random, 20, 80)});
        break;
      case 3:
        if (one_in(random, 2)) script.push_back({Verb::kReset});
        break;
      case 4:
      case 5:
        script.push_back({Verb::kScore, draw_tokens(random, between(random, 1, 40))});
        break;
      case 6:
      case 7:
        for (const int32_t token : draw_tokens(random, between(random, 1, std::max(4u, longest / 12))))
          script.push_back({Verb::kAccept, {token}});
        break;
      case 8:
      case 9:
      case 10:
      case 11:
        script.push_back({Verb::kFeed, draw_tokens(random, between(random, 1, longest))});
        break;
      default:
        generate();
    }
  script.push_back({Verb::kFeed, draw_tokens(random, between(random, 1, longest))});
  generate();
  return script;
}

struct Composition {
  const Mixed& mixed;
  SessionOptions options;
  SamplerOptions sampler;
  std::vector<Call> script;
};

// ---- what a session tells ----

std::vector<uint32_t> bits(std::span<const float> values) {
  std::vector<uint32_t> all(values.size());
  std::transform(values.begin(), values.end(), all.begin(),
                 [](float f) { return std::bit_cast<uint32_t>(f); });
  return all;
}

struct Told {
  std::string refusal;  // of the call; empty: it succeeded
  int32_t token = -1;   // of a step
  std::vector<uint32_t> log_probs, logits, held, stored;
  Kept kept_then;
  std::vector<uint64_t> numbers;
  uint64_t generated = 0;
  bool operator==(const Told&) const = default;
};

std::string refusal_of(const Status& status) {
  return status.ok() ? "" : std::string(code_name(status.code())) + ": " + status.message();
}

void tell_state(Session& s, Told& told) {
  const uint64_t read = must(s.positions_read());
  std::vector<float> held(read), stored(read);
  must(s.kept_by_position(held.data(), nullptr));
  s.stored_by_position(stored);
  told.held = bits(held);
  told.stored = bits(stored);
  if (s.state().has_logits && s.state().arg_max >= 0) told.logits = bits(must(s.logits()));
  told.kept_then = kept(s);
  const SessionStats n = must(s.stats());
  told.numbers = {n.position, n.waiting, n.evicted, n.evictions, n.saturated, n.stored, n.recalled};
  told.generated = n.generated;
}

// What the session attended to with its last token; empty if it is not known.
std::vector<uint32_t> attended(Session& s) {
  if (!s.plan().options.watch || s.state().attended == Attended::kUnknown) return {};
  std::vector<float> shares(must(s.positions_read()));
  must(s.kept_by_position(nullptr, shares.data()));
  return bits(shares);
}

const char* difference(const Told& a, const Told& b) {
  if (a.refusal != b.refusal) return "the refusal";
  if (a.token != b.token) return "the token";
  if (a.log_probs != b.log_probs) return "the log-probabilities";
  if (a.numbers != b.numbers || a.generated != b.generated) return "the statistics";
  if (a.kept_then != b.kept_then) return "the kept entries";
  if (a.held != b.held || a.stored != b.stored) return "what is held or stored by position";
  if (a.logits != b.logits) return "the logits";
  return nullptr;
}

// ---- the undisturbed session ----

Status perform(Session& s, const Call& call, Told& told) {
  switch (call.verb) {
    case Verb::kFeed:
      return s.feed(call.tokens);
    case Verb::kFlush:
      return s.flush();
    case Verb::kStep: {
      THIMBLE_SET(told.token, s.step());
      return {};
    }
    case Verb::kAccept:
      return s.accept(call.tokens[0]);
    case Verb::kScore: {
      std::vector<float> log_probs(call.tokens.size());
      THIMBLE_TRY(s.score(call.tokens, log_probs));
      told.log_probs = bits(log_probs);
      return {};
    }
    case Verb::kRewind:
      return s.rewind(call.number);
    case Verb::kShrink:
      return s.shrink(static_cast<uint32_t>(call.number)).status();
    case Verb::kReset:
      return s.reset();
  }
  return {};
}

// A share of the way from where a rewind can no longer go to the end of the stream.
uint64_t position_at(const Session& s, uint64_t percent) {
  const uint64_t last = s.state().position(), first = s.state().earliest() - (s.state().earliest() > 0);
  return first + (last - first) * percent / 100;
}

// ---- the disturbed session ----

struct Counts {
  uint64_t calls = 0, refused_calls = 0, interrupts = 0, abandoned = 0, clones = 0, restores = 0, rewinds = 0,
           recut = 0;
};

// Asks only once how much memory is free, which takes a third of the time of a small session.
class QuickDevice : public SpyDevice {
 public:
  explicit QuickDevice(std::shared_ptr<Device> inner)
      : SpyDevice(std::move(inner)), known_(SpyDevice::info()) {}
  DeviceInfo info() const override { return known_; }

 private:
  DeviceInfo known_;
};

// Which devices sessions are moved to, and whether several rows have the bits of single ones there.
struct Machine {
  std::vector<std::shared_ptr<SpyDevice>> devices;
  bool exact_rows;
};

class Disturbed {
 public:
  Disturbed(const Composition& c, const Machine& machine, uint64_t seed, Counts& counts)
      : c_(c), machine_(machine), random_{seed}, counts_(counts), session_(open(c.options)) {
    if (may_interrupt()) interrupt_one_in_ = one_of(random_, {1u, 2u, 7u, 30u, 0u});
    for (const auto& device : machine_.devices)
      device->before_submit = [this](const Program&, const StepParams&, std::span<const HeadState>) {
        if (armed_ && interrupt_one_in_ && one_in(random_, interrupt_one_in_)) session_->interrupt();
      };
    must(session_->set_sampler(c.sampler));
  }
  ~Disturbed() {
    for (const auto& device : machine_.devices) device->before_submit = {};
  }

  Session& session() { return *session_; }
  const std::string& log() const { return log_; }
  // Tokens that were generated and taken back; the session's statistics count them.
  uint64_t taken_back() const { return taken_back_; }

  // Makes a call of the script, of which the undisturbed session told this.
  void perform(const Call& call, const Told& expected, Told& told) {
    log_.clear();
    if (may_lose_drafts() && one_in(random_, call.verb == Verb::kFeed ? 2 : 4)) disturb(call, expected);
    if (may_interrupt() && one_in(random_, 8)) session_->interrupt();
    told.refusal = refusal_of(call_in_pieces(call, expected, told));
    session_->forget_interrupt();
    if (call.verb == Verb::kReset) taken_back_ = 0;
  }

 private:
  // Whether the bits stay the same if a draft is left: if a row has the same bits in a step of several rows
  // and alone. Any other call leaves a draft; a restored session has none.
  bool may_lose_drafts() const {
    return c_.options.draft == Draft::kNone || (machine_.exact_rows && !c_.mixed.has_states());
  }

  // A draft model or layer that is interrupted guesses nothing, so the next step reads fewer rows.
  bool may_interrupt() const { return may_lose_drafts() || c_.options.draft == Draft::kLookup; }

  std::unique_ptr<Session> open(const SessionOptions& o) {
    const auto device = machine_.devices[random_.below(static_cast<uint32_t>(machine_.devices.size()))];
    return must(Session::create(c_.mixed.model, device, o));  // a list of short parts is in no plan
  }

  static const Status& status_of(const Status& status) { return status; }
  template <typename T>
  static const Status& status_of(const Result<T>& result) {
    return result.status();
  }

  // Repeats a call of the session while it is interrupted, and looks at the session in between.
  template <typename MakeCall>
  auto insist(const MakeCall& make_call) {
    for (;;) {
      armed_ = true;
      auto result = make_call();
      armed_ = false;
      if (status_of(result).code() != Code::kInterrupted) return result;
      ++counts_.interrupts;
      if (one_in(random_, 6)) look();
    }
  }

  void look() {
    must(session_->settle());
    kept(*session_);
    Told ignored;
    tell_state(*session_, ignored);
  }

  Status call_in_pieces(const Call& call, const Told& expected, Told& told) {
    switch (call.verb) {
      case Verb::kFeed:
        return feed(call.tokens, expected.refusal.empty());
      case Verb::kStep:
      case Verb::kAccept: {
        if (!expected.refusal.empty()) break;
        const bool steps = call.verb == Verb::kStep;
        const int32_t token = steps ? expected.token : call.tokens[0];
        const bool accepts = !steps || (c_.sampler.temperature == 0 && one_in(random_, 4));
        counts_.recut += steps && accepts;
        return append(token, accepts, steps ? &told.token : nullptr);
      }
      case Verb::kScore: {
        std::vector<float> log_probs(call.tokens.size());  // a repeated call writes the rest of them
        const Status status = insist([&] { return session_->score(call.tokens, log_probs); });
        if (status.ok()) told.log_probs = bits(log_probs);
        return status;
      }
      default:
        break;
    }
    return insist([&] { return test::perform(*session_, call, told); });
  }

  // Feeds a text in pieces. A piece that is interrupted may be left; then the rest is fed.
  Status feed(std::span<const int32_t> tokens, bool in_pieces) {
    for (;;) {
      auto piece = tokens;
      if (in_pieces && one_in(random_, 2)) {
        piece = tokens.first(random_.below(static_cast<uint32_t>(tokens.size()) + 1));
        ++counts_.recut;
      }
      const uint64_t before = session_->state().position();
      bool abandons = in_pieces && one_in(random_, 6) && may_lose_drafts();
      const Status status = insist_or_leave([&] { return session_->feed(piece); }, abandons);
      if (abandons) piece = piece.first(session_->state().position() - before);
      if (!status.ok()) return status;
      tokens = tokens.subspan(piece.size());
      if (tokens.empty() && !abandons) return {};
    }
  }

  // Appends the token that is expected next, by a step or by accept(). A call that is interrupted may be
  // left.
  Status append(int32_t token, bool accepts, int32_t* told) {
    if (told) *told = token;
    for (;;) {
      const uint64_t before = session_->state().position();
      bool abandons = one_in(random_, 6) && may_lose_drafts();
      const Status status = insist_or_leave(
          [&]() -> Status {
            if (accepts) return session_->accept(token);
            THIMBLE_LET(sampled, session_->step());
            if (told) *told = sampled;
            return {};
          },
          abandons);
      if (!abandons || session_->state().position() > before) return status;
    }
  }

  // Repeats a call while it is interrupted, or with `abandons`, leaves it after the first interrupt by going
  // on with a copy. Afterwards `abandons` says whether the call was left.
  template <typename MakeCall>
  Status insist_or_leave(const MakeCall& make_call, bool& abandons) {
    if (!std::exchange(abandons, false)) return insist(make_call);
    armed_ = true;
    const Status status = make_call();
    armed_ = false;
    if (status.code() != Code::kInterrupted) return status;
    ++counts_.interrupts;
    ++counts_.abandoned;
    abandons = true;
    log_ += "abandon ";
    one_in(random_, 2) ? go_on_as_clone() : go_on_as_restored();
    return {};
  }

  void disturb(const Call& next, const Told& expected) {
    if (next.verb == Verb::kFeed && expected.refusal.empty() && one_in(random_, 2))
      return go_astray_and_rewind();
    switch (random_.below(4)) {
      case 0:
        go_on_as_clone();
        break;
      case 1:
        go_on_as_restored();
        break;
      case 2:
        lead_a_clone_astray();
        break;
      default:
        if (next.verb == Verb::kStep || next.verb == Verb::kAccept) {
          log_ += "flush ";
          ++counts_.recut;
          (void)insist([&] { return session_->flush(); });
        }
    }
  }

  std::unique_ptr<Session> clone() {
    ++counts_.clones;
    return must(insist([&] { return session_->clone(); }));
  }

  void go_on_as_clone() {
    log_ += "clone ";
    auto twin = clone();
    if (one_in(random_, 2)) stray(*session_);
    session_ = std::move(twin);
  }

  void lead_a_clone_astray() {
    log_ += "clone-astray ";
    stray(*clone());
  }

  void go_on_as_restored() {
    log_ += "restore ";
    ++counts_.restores;
    SessionBytes bytes;
    must(insist([&] {
      bytes.clear();
      return session_->save(
          [&](const void* data, size_t size) {
            const std::byte* from = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), from, from + size);
            return Status();
          },
          {});
    }));
    if (one_in(random_, 2)) session_ = open(session_->plan().options);
    if (one_in(random_, 2)) stray(*session_);
    restore(*session_, bytes);
  }

  // Reads and generates something else.
  void stray(Session& s) {
    const auto ignore = [](const Status&) {};
    ignore(s.feed(draw_tokens(random_, between(random_, 1, 60))));
    for (uint32_t i = random_.below(6); i; --i) ignore(s.step().status());
    if (one_in(random_, 3)) ignore(s.feed(draw_tokens(random_, between(random_, 1, 20))));
  }

  // Goes on from here with other tokens, and back. If that was too far, goes on as a clone that was made
  // before.
  void go_astray_and_rewind() {
    const SequenceState& state = session_->state();
    if (!state.waiting.empty() || !may_return()) return;
    log_ += "astray ";
    const uint64_t position = state.position();
    auto twin = clone();
    const uint64_t generated = state.generated, evictions = state.evictions;
    stray(*session_);
    const Status status = insist([&] { return session_->rewind(position); });
    ++counts_.rewinds;
    if (status.ok() && state.evictions == evictions) {
      taken_back_ += state.generated - generated;
      return;
    }
    EXPECT_TRUE(status.ok() || status.code() == Code::kCannotRewind) << status.message();
    session_ = std::move(twin);
  }

  // Whether a rewind to here has the bits of a session that never left.
  bool may_return() const {
    const SequenceState& s = session_->state();
    if (c_.mixed.has_states() && (s.snapshots.empty() || s.snapshots.back().position != s.read)) return false;
    // What was recalled meanwhile stays, and tova evicts by the query of the last token that was read.
    return !c_.options.most_recalled() && c_.options.retention != Retention::kTova;
  }

  const Composition& c_;
  const Machine& machine_;
  Random random_;
  Counts& counts_;
  std::unique_ptr<Session> session_;
  uint32_t interrupt_one_in_ = 0;  // submissions; 0: never
  bool armed_ = false;
  uint64_t taken_back_ = 0;
  std::string log_;  // how the session was disturbed before and in the latest call
};

// ---- the test ----

struct Total {
  uint64_t count = 0, seed = 1;
};

// The count and the seed that the environment gives, or these.
Total total_or(Total at_first) {
  const char* text = std::getenv("THIMBLE_COMPOSITIONS");
  if (!text) return at_first;
  char* end = nullptr;
  Total total{std::strtoull(text, &end, 10), at_first.seed};
  if (*end == ':') total.seed = std::strtoull(end + 1, &end, 10);
  EXPECT_TRUE(*end == '\0' && total.count) << "THIMBLE_COMPOSITIONS is COUNT or COUNT:SEED, not " << text;
  return total;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.usable) names.push_back(info.name);
  return names;
}

class CompositionsOn : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
    if (on_cpu()) {
      const double rate = cpu::kernels().flop_per_second;
      plain_ = spy(must(open_cpu_device(1)));
      small_ = {.devices = {spy(must(open_cpu_device(1, 85e3 / rate))), spy(must(open_cpu_device(1)))},
                .exact_rows = true};
      large_ = {.devices = {spy(must(open_cpu_device(1, 1e6 / rate))), spy(must(open_cpu_device(1)))},
                .exact_rows = true};
    } else {
      const auto device = spy(
          shared_device(GetParam(), [] { return must(open_device(GetParam(), strictly({.threads = 2}))); }));
      small_ = large_ = {.devices = {device}, .exact_rows = false};
      plain_ = device;
    }
  }

  static bool on_cpu() { return GetParam() == "cpu"; }
  static std::shared_ptr<SpyDevice> spy(std::shared_ptr<Device> device) {
    return std::make_shared<QuickDevice>(std::move(device));
  }
  bool is_slow() const { return plain_->info().software; }

  const Mixed& draw_model(Random& random) const {
    const std::vector<Mixed>& all = is_slow() || !one_in(random, 8) ? small_models() : large_models();
    return all[random.below(static_cast<uint32_t>(all.size()))];
  }

  // Draws options until the library takes them. Those that it refuses are refused twice with one sentence.
  Composition draw(Random& random) {
    const Mixed& m = draw_model(random);
    for (;;) {
      const SessionOptions o = draw_options(random, m);
      const auto made = Session::create(m.model, plain_, o);
      if (made.ok()) {
        const SamplerOptions warm{.temperature = 0.9f,
                                  .top_p = one_of(random, {1.0f, 0.9f}),
                                  .min_p = 0,
                                  .repeat_penalty = one_of(random, {1.0f, 1.2f}),
                                  .seed = random.below(100)};
        const SamplerOptions sampler = one_in(random, 2) ? SamplerOptions{} : warm;
        return {m, o, sampler, draw_script(random, is_slow() ? 40 : m.large ? 60 : 160)};
      }
      ++refused_;
      const Status& first = made.status();
      EXPECT_TRUE(first.code() == Code::kInvalidArgument || first.code() == Code::kUnsupported ||
                  first.code() == Code::kBudget)
          << refusal_of(first) << " for " << description(o);
      EXPECT_FALSE(std::string(first.message()).empty());
      EXPECT_EQ(refusal_of(Session::create(m.model, plain_, o).status()), refusal_of(first))
          << description(o);
      EXPECT_EQ(refusal_of(make_plan(*m.model, *plain_, o).status()), refusal_of(first)) << description(o);
    }
  }

  void compare(Composition c, uint64_t seed) {
    const auto plain = open_session(c.mixed.model, c.options, plain_);
    must(plain->set_sampler(c.sampler));
    Disturbed disturbed(c, c.mixed.large ? large_ : small_, ~seed, counts_);
    size_t i = 0;
    for (Call& call : c.script) {
      if (call.verb == Verb::kRewind) call.number = position_at(*plain, call.number);
      Told expected, told;
      expected.refusal = refusal_of(perform(*plain, call, expected));
      tell_state(*plain, expected);
      disturbed.perform(call, expected, told);
      tell_state(disturbed.session(), told);
      told.generated -= disturbed.taken_back();
      const char* differs = difference(told, expected);
      ASSERT_EQ(differs, nullptr) << differs << " differ after call " << i << ", "
                                  << kVerbs[size_t(call.verb)]
                                  << ", before which the session was disturbed by [ " << disturbed.log()
                                  << "]; refused with \"" << told.refusal << "\" and \"" << expected.refusal
                                  << '"';
      const std::vector<uint32_t> a = attended(*plain), b = attended(disturbed.session());
      if (!a.empty() && !b.empty()) {
        ASSERT_EQ(a, b) << "after call " << i;
      }
      ++counts_.calls;
      counts_.refused_calls += !expected.refusal.empty();
      ++i;
    }
  }

  void run(uint64_t seed) {
    for (const Machine* machine : {&small_, &large_})
      for (const auto& device : machine->devices)  // what they recorded
        device->selections.clear(), device->scores.clear(), device->pages.clear(), device->attention.clear(),
            device->growths.clear(), device->watches.clear(), device->convolutions.clear();
    Random random{seed};
    const Composition c = draw(random);
    retentions_[policy_name(c.options.retention)]++;
    SCOPED_TRACE("repeat it with THIMBLE_COMPOSITIONS=1:" + std::to_string(seed) + "\n" + c.mixed.name +
                 ", " + description(c.options));
    try {
      compare(c, seed);
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
  }

  Machine small_, large_;
  std::shared_ptr<SpyDevice> plain_;
  Counts counts_;
  uint64_t refused_ = 0;
  std::map<std::string, uint64_t> retentions_;
};
INSTANTIATE_TEST_SUITE_P(Device, CompositionsOn, ::testing::ValuesIn(device_names()), device_test_name);

TEST_P(CompositionsOn, AreTheSameHoweverTheyAreDisturbed) {
  // Seeds 1 and 2 take over a minute on the software driver.
  const Total total = total_or(on_cpu() ? Total{150, 1} : is_slow() ? Total{3, 3} : Total{100, 1});
  uint64_t done = 0, failed = 0;
  for (; done < total.count && failed < 10; ++done) {
    const int before = ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
    run(total.seed + done);
    failed += ::testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count() > before;
  }
  const Counts& n = counts_;
  const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf(
      "%llu compositions from seed %llu, %llu refused before them; %llu calls, %llu of them refused; "
      "disturbed by "
      "%llu interrupts (%llu calls abandoned), %llu clones, %llu restores, %llu rewinds, %llu calls in other "
      "pieces\n",
      number(done), number(total.seed), number(refused_), number(n.calls), number(n.refused_calls),
      number(n.interrupts), number(n.abandoned), number(n.clones), number(n.restores), number(n.rewinds),
      number(n.recut));
  if (total.count < 100) return;
  for (int32_t i = 0; policy_name(Retention{i}); ++i)
    EXPECT_GT(retentions_[policy_name(Retention{i})], 0u) << i;
  for (const uint64_t kind :
       {refused_, n.refused_calls, n.interrupts, n.abandoned, n.clones, n.restores, n.rewinds, n.recut})
    EXPECT_GT(kind, 0u);
}

}  // namespace
}  // namespace thimble::test
