// A session: saved to a file, restored from one, and made smaller.
#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "base/checksum.h"
#include "runtime/plan/dimensions.h"
#include "runtime/session.h"

namespace thimble {

namespace {

std::string hex(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016" PRIx64, value);
  return digits;
}

std::string count(uint32_t value) { return value == kDefault ? "default" : std::to_string(value); }

// Whether all of these floats are finite.
bool are_finite(std::span<const std::byte> bytes) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(float)) {
    float value;
    std::memcpy(&value, &bytes[at], sizeof value);
    if (!std::isfinite(value)) return false;
  }
  return true;
}

// Whether these positions ascend from 0 on at least, end below `read`, and the last `unbroken` follow each
// other.
bool are_positions(std::span<const std::byte> bytes, uint64_t read, uint64_t unbroken) {
  const uint64_t entries = bytes.size() / sizeof(int32_t);
  int64_t before = -1;
  for (uint64_t i = 0; i < entries; ++i) {
    int32_t position;
    std::memcpy(&position, &bytes[i * sizeof position], sizeof position);
    if (position <= before || (entries - i <= unbroken && uint64_t(position) != read - (entries - i)))
      return false;
    before = position;
  }
  return before < static_cast<int64_t>(read);
}

}  // namespace

// What shapes the state, in the order in which differences are told.
std::vector<NamedSetting> Session::saved_settings() const {
  const SessionOptions& o = plan_.options;
  const char* const votes[] = {"auto", "layer", "group"};
  char theta[24];  // nine digits tell every float, and in all languages alike
  *std::to_chars(theta, std::end(theta) - 1, o.select_theta, std::chars_format::general, 9).ptr = '\0';
  const auto retainer = [&] {
    const std::span<const std::byte> file = o.retainer->file.bytes();
    return hex(checksum(file.data(), file.size()));
  };
  std::vector<NamedSetting> settings = {
      {"model", model_->info.architecture + " " + hex(model_->fingerprint())},
      {"vocabulary", count(model_->shape.vocab)},
      {"retention", policy_name(o.retention)},
      {"heads", o.retainer ? retainer() : "none"},
      {"retain_scope", o.retain_scope == RetainScope::kLayer ? "layer" : "head"},
      {"pool", count(o.pool)},
      {"chunk", count(o.chunk)},
      {"stabilizers", count(o.stabilizers)},
      {"local", count(o.local)},
      {"protect_init", count(o.protect_init)},
      {"max_new", count(o.max_new)},
      {"selection", policy_name(o.selection)},
      {"select_k", count(o.select_k)},
      {"select_init", count(o.select_init)},
      {"select_local", count(o.select_local)},
      {"select_theta", theta},
      {"vote", votes[static_cast<uint32_t>(o.vote)]},
      {"vote_scale", o.vote_scaled ? "sqrt" : "none"},
      {"vote_window", count(o.vote_window)},
      {"select_prefill", count(o.select_prefill)},
      {"select_page", count(o.select_page)},
      {"dense_layers", count(o.dense_layers)},
      {"positions", o.positions == Positions::kOriginal ? "original" : "list"},
      {"context", count(o.context)},
      {"seed", count(o.seed)},
  };
  if (policies_.retention->scores_on_host()) {  // which files from before there were such policies lack
    settings.push_back({"rebuild", count(o.rebuild)});
    settings.push_back({"rebuild_every", count(o.rebuild_every)});
  }
  return settings;
}

// Where the arrays of a session that holds this lie, in the order of a file's body.
std::vector<Session::Piece> Session::pieces(const Held& held, bool logits) const {
  const ModelShape& s = model_->shape;
  std::vector<Piece> all;
  for (uint32_t i = 0; i < held.entries.size(); ++i) {
    const LayerPool& pool = layout_.layers[i / s.kv_heads];
    const uint64_t first = held.runs[i].first, entries = held.entries[i];
    const auto add = [&](const View& array, uint64_t entry_bytes, Piece::Kind kind) {
      if (array && entries) all.push_back({array.slice(first * entry_bytes, entries * entry_bytes), kind});
    };
    add(pool.k.values, kv_bytes(pool.k.type, s.head_dim), Piece::kPlain);
    add(pool.v.values, kv_bytes(pool.v.type, s.head_dim), Piece::kPlain);
    add(pool.pos, sizeof(int32_t), Piece::kPositions);
    add(pool.cis, sizeof(float), Piece::kPlain);
  }
  if (logits)
    all.push_back({layout_.logits.slice(0, uint64_t(model_->output.rows) * sizeof(float)), Piece::kLogits});
  std::vector<View> carried;
  policies_.retention->carry(held, carried);
  for (const View& view : carried) all.push_back({view, Piece::kOfRetention});
  carried.clear();
  policies_.selection->carry(held, carried);
  for (const View& view : carried) all.push_back({view, Piece::kOfSelection});
  return all;
}

SavedSession Session::saved() const {
  const SamplerOptions& sampler = sampler_.options();
  SavedSession s;
  s.stream = {.read = read_,
              .last_eviction = last_eviction_,
              .evicted = evicted_,
              .unscored = unscored_,
              .generation = generation_,
              .has_logits = has_logits_ ? 1u : 0u,
              .arg_max = has_logits_ ? *on_host<int32_t>(layout_.arg_max) : -1,
              .evictions = stats_.evictions,
              .generated = stats_.generated,
              .prefill_tokens = stats_.prefill_tokens,
              .prefill_seconds = stats_.prefill_seconds,
              .decode_seconds = stats_.decode_seconds,
              .prefill = stats_.prefill,
              .decode = stats_.decode,
              .selecting = selecting_,
              .temperature = sampler.temperature,
              .top_p = sampler.top_p,
              .min_p = sampler.min_p,
              .repeat_penalty = sampler.repeat_penalty,
              .top_k = sampler.top_k,
              .repeat_last = sampler.repeat_last,
              .seed = sampler.seed,
              .random = sampler_.random()};
  s.settings = saved_settings();
  for (size_t i = 0; i < entries_.size(); ++i)
    s.runs.push_back({entries_[i], plan_.dimensions.runs[i].keep, plan_.dimensions.runs[i].capacity});
  s.waiting = waiting_;
  s.unscored = unscored_tokens_;
  s.accepted = sampler_.accepted();
  return s;
}

Status Session::save(const WriteBytes& write, std::span<const std::byte> note, std::string_view held_text) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  const Setting setting{*model_, plan_.options, plan_.dimensions};
  const Held held{setting, plan_.dimensions.runs, entries_, read_, unscored_, generation_};
  const std::vector<Piece> all = pieces(held, has_logits_);
  SavedSession state = saved();
  uint32_t saturated;
  THIMBLE_TRY(device_->read(&saturated, layout_.saturated));
  state.stream.saturated = saturated;
  held_text.copy(state.stream.held_text, sizeof state.stream.held_text - 1);
  uint64_t bytes = 0;
  for (const Piece& piece : all) bytes += piece.view.bytes;
  const auto write_body = [&](const WriteBytes& out) -> Status {
    // Memory that the host shares is written as it lies.
    const bool shared = device_->info().unified;
    constexpr uint64_t kStaging = 4 << 20;
    std::vector<std::byte> staging(shared ? 0 : std::min(bytes, kStaging));
    for (const Piece& piece : all)
      for (uint64_t at = 0; at < piece.view.bytes; at += kStaging) {
        const View part = piece.view.slice(at, std::min(kStaging, piece.view.bytes - at));
        if (!shared) THIMBLE_TRY(device_->read(staging.data(), part));
        THIMBLE_TRY(out(shared ? on_host<std::byte>(part) : staging.data(), part.bytes));
      }
    return {};
  };
  return write_session_file(state, note, bytes, write_body, write);
}

// Which division a file was saved in: that of which it has the runs; else the one in use, and then
// check_settings says what differs.
uint32_t Session::saved_division(const SessionFile& file) const {
  const std::vector<Division>& divisions = plan_.dimensions.divisions;
  for (uint32_t i = 0; i < divisions.size(); ++i)
    if (std::equal(file.runs.begin(), file.runs.end(), divisions[i].runs.begin(), divisions[i].runs.end(),
                   [](const SavedRun& theirs, const HeadRun& ours) {
                     return theirs.keep == ours.keep && theirs.capacity == ours.capacity;
                   }))
      return i;
  return plan_.dimensions.division;
}

// Whether a file was saved by a session like this one.
Status Session::check_settings(const SessionFile& file, std::span<const HeadRun> runs) const {
  const auto refuse = [&](const std::string& what, const std::string& theirs, const std::string& ours) {
    return error(Code::kMismatch,
                 "%s was saved with %s %s, this session has %s; make the session as the saved one was",
                 file.name.c_str(), what.c_str(), theirs.c_str(), ours.c_str());
  };
  const std::vector<NamedSetting> settings = saved_settings();
  for (const NamedSetting& ours : settings) {
    const auto theirs = std::find_if(file.settings.begin(), file.settings.end(),
                                     [&](const NamedSetting& s) { return s.name == ours.name; });
    if (theirs == file.settings.end()) return refuse("no setting", ours.name, ours.value);
    if (theirs->value != ours.value) return refuse(ours.name, theirs->value, ours.value);
  }
  if (file.settings.size() != settings.size())
    return file.damaged("it has settings that this library does not know");
  if (file.runs.size() != entries_.size()) return file.damaged("it has another number of heads");
  for (size_t i = 0; i < entries_.size(); ++i) {
    const HeadRun& run = runs[i];
    const SavedRun& theirs = file.runs[i];
    const size_t kv_heads = model_->shape.kv_heads;
    const std::string name =
        " of layer " + std::to_string(i / kv_heads) + ", KV head " + std::to_string(i % kv_heads);
    if (theirs.keep != run.keep) return refuse("pool" + name, count(theirs.keep), count(run.keep));
    if (theirs.capacity != run.capacity)
      return refuse("capacity" + name, count(theirs.capacity), count(run.capacity));
  }
  return {};
}

// Whether what a file's head says of the stream can be.
Status Session::check_stream(const SessionFile& file, std::span<const HeadRun> runs) const {
  const SessionOptions& o = plan_.options;
  const SavedStream& s = file.stream;
  const uint64_t bound = o.context ? o.context : INT32_MAX;
  if (s.generation > INT32_MAX) return file.damaged("it was evicted from more often than it may be");
  if (s.read > bound || s.last_eviction > s.read || file.waiting.size() > uint64_t(o.chunk) + o.local + 1 ||
      s.read + file.waiting.size() > bound)
    return file.damaged("it has more tokens than there may be");
  if (!check_tokens(file.waiting).ok() || !check_tokens(file.unscored).ok() || !sampler_.takes(file.accepted))
    return file.damaged("it has tokens that are not in the vocabulary");
  if (s.unscored > policies_.retention->upkeep_rows(o) || s.unscored > s.read ||
      file.unscored.size() != (policies_.retention->reads_again() ? s.unscored : 0))
    return file.damaged("it has more tokens without scores than there may be");
  const uint64_t unbroken = s.read - s.last_eviction;  // entries that a rewind may drop
  for (size_t i = 0; i < file.runs.size(); ++i) {
    const uint32_t entries = file.runs[i].entries;
    const HeadRun& run = runs[i];
    const size_t layer_head = i - i % model_->shape.kv_heads;
    const bool windowed = model_->layers[i / model_->shape.kv_heads].window;
    const HeadRun& other = runs[layer_head];
    const bool alike =
        (windowed || !plan_.dimensions.moves) && run.keep == other.keep && run.capacity == other.capacity;
    if (entries > run.capacity || entries > s.read || entries < unbroken ||
        (!run.evicts && (entries != s.read || entries + file.waiting.size() > run.capacity)) ||
        (!windowed && entries < s.unscored) || (alike && entries != file.runs[layer_head].entries))
      return file.damaged("its heads hold what they cannot");
  }
  if (s.has_logits > 1 || s.arg_max < -1 ||
      (s.arg_max >= 0 && static_cast<uint32_t>(s.arg_max) >= model_->output.rows) ||
      (s.has_logits && (s.read == 0 || !file.waiting.empty())))
    return file.damaged("its logits cannot be");
  for (const double value : {s.prefill_seconds, s.decode_seconds, s.prefill.bytes, s.prefill.flop,
                             s.decode.bytes, s.decode.flop, s.selecting.bytes, s.selecting.flop})
    if (!(value >= 0) || !std::isfinite(value)) return file.damaged("its statistics cannot be");
  return {};
}

// Whether the arrays of a file may be gone on with.
Status Session::check_body(const SessionFile& file, const Held& held, std::span<const Piece> all) const {
  const SavedStream& s = file.stream;
  std::vector<std::span<const std::byte>> of_retention, of_selection;
  uint64_t at = 0;
  for (const Piece& piece : all) {
    const std::span<const std::byte> bytes = file.body.subspan(at, piece.view.bytes);
    at += bytes.size();
    if (piece.kind == Piece::kOfRetention) of_retention.push_back(bytes);
    if (piece.kind == Piece::kOfSelection) of_selection.push_back(bytes);
    if (piece.kind == Piece::kPositions && !are_positions(bytes, s.read, s.read - s.last_eviction))
      return file.damaged("its positions do not ascend to where it stands");
    if (piece.kind == Piece::kLogits && s.arg_max >= 0 && !are_finite(bytes))
      return file.damaged("its logits are not finite");
  }
  if (!policies_.retention->can_carry(held, of_retention))
    return file.damaged("its retention leads out of what is held");
  if (!policies_.selection->can_carry(held, of_selection))
    return file.damaged("its selection leads out of what is held");
  return {};
}

Result<std::string> Session::restore(MappedFile mapped, std::string name) {
  THIMBLE_TRY(check_files());
  THIMBLE_LET(file, SessionFile::open(std::move(mapped), std::move(name)));
  const SavedStream& s = file.stream;
  const SamplerOptions sampler{.temperature = s.temperature,
                               .top_k = s.top_k,
                               .top_p = s.top_p,
                               .min_p = s.min_p,
                               .repeat_penalty = s.repeat_penalty,
                               .repeat_last = s.repeat_last,
                               .seed = s.seed};
  const uint32_t division = saved_division(file);
  const std::vector<HeadRun>& runs =
      plan_.dimensions.divisions.empty() ? plan_.dimensions.runs : plan_.dimensions.divisions[division].runs;
  THIMBLE_TRY(check_settings(file, runs));
  THIMBLE_TRY(check_stream(file, runs));
  if (!Sampler::check(sampler).ok()) return file.damaged("its sampler cannot be");
  std::vector<uint32_t> entries;
  for (const SavedRun& run : file.runs) entries.push_back(run.entries);
  const Setting setting{*model_, plan_.options, plan_.dimensions};
  const Held held{setting, runs, entries, s.read, s.unscored, s.generation};
  const std::vector<Piece> all = pieces(held, s.has_logits);
  uint64_t bytes = 0;
  for (const Piece& piece : all) bytes += piece.view.bytes;
  if (bytes != file.body.size()) return file.damaged("its arrays are not as large as its head says");
  THIMBLE_TRY(file.check_body());
  THIMBLE_TRY(check_body(file, held, all));

  // From here on nothing can fail but the device, after which the session holds nothing.
  THIMBLE_TRY(reset());
  plan_.dimensions.use(division);
  place_heads();
  const std::byte* from = file.body.data();
  for (const Piece& piece : all) {
    THIMBLE_TRY(device_->write(piece.view, from));
    from += piece.view.bytes;
  }
  const uint32_t saturated = static_cast<uint32_t>(s.saturated);
  THIMBLE_TRY(device_->write(layout_.saturated, &saturated));
  *on_host<int32_t>(layout_.arg_max) = s.arg_max;
  sampler_.restore(sampler, s.random, file.accepted);
  waiting_.assign(file.waiting.begin(), file.waiting.end());
  unscored_tokens_.assign(file.unscored.begin(), file.unscored.end());
  read_ = s.read;
  entries_ = entries;
  unscored_ = s.unscored;
  last_eviction_ = s.last_eviction;
  generation_ = s.generation;
  has_logits_ = s.has_logits;
  finite_logits_ = !s.has_logits || s.arg_max >= 0;
  evicted_ = s.evicted;
  stats_.evictions = s.evictions;
  stats_.generated = s.generated;
  stats_.prefill_tokens = s.prefill_tokens;
  stats_.prefill_seconds = s.prefill_seconds;
  stats_.decode_seconds = s.decode_seconds;
  stats_.prefill = s.prefill;
  stats_.decode = s.decode;
  selecting_ = s.selecting;
  return std::string(s.held_text, std::find(s.held_text, std::end(s.held_text), '\0'));
}

// ---- a smaller pool ----

// To a clone. Of a pool that was made smaller only what is held, since a copy of what was given back would
// take its memory again.
Status Session::copy_pool(Session& twin) const {
  if (!plan_.released)
    return device_->copy({twin.pool_.get(), 0, pool_->size}, {pool_.get(), 0, pool_->size});
  // The twin's pool is still empty: what this gives back is the wish for huge pages, which would reach into
  // it.
  THIMBLE_TRY(device_->release({twin.pool_.get(), 0, twin.pool_->size}));
  const Setting setting{*model_, plan_.options, plan_.dimensions};
  const Held held{setting, plan_.dimensions.runs, entries_, read_, unscored_, generation_};
  const std::vector<Piece> from = pieces(held, false), to = twin.pieces(held, false);
  for (size_t i = 0; i < from.size(); ++i) THIMBLE_TRY(device_->copy(to[i].view, from[i].view));
  return device_->copy(twin.layout_.saturated, layout_.saturated);
}

// The plan of a session that was asked for this pool: what this one is to be, but for where its runs begin.
Result<MemoryPlan> Session::smaller_plan(uint32_t pool) const {
  if (!pool || pool > plan_.options.pool)
    return error(Code::kInvalidArgument, "a pool of %u is not smaller than the %u that the session has", pool,
                 plan_.options.pool);
  THIMBLE_TRY(device_->release({pool_.get(), 0, 0}));
  SessionOptions options = plan_.asked;
  if (!options.keeps.empty())
    return error(
        Code::kUnsupported,
        "the session was given a pool for each head, which cannot shrink together; make a smaller one");
  options.pool = pool;
  THIMBLE_LET(smaller, make_plan(*model_, *device_, options));
  const Dimensions& now = plan_.dimensions;
  if (now.moves) {  // runs stay where they are from here on, and divided as for the text so far
    smaller.dimensions.runs = runs_for(*model_, smaller.options, policies_, now.text);
    for (size_t i = 0; i < entries_.size(); ++i) {  // a rounded share may be one entry more
      HeadRun& run = smaller.dimensions.runs[i];
      run.keep = std::min(run.keep, now.runs[i].keep);
      run.capacity = std::min(run.capacity, now.runs[i].capacity);
    }
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    const HeadRun& run = smaller.dimensions.runs[i];
    if (run.capacity > plan_.dimensions.runs[i].capacity || run.keep > plan_.dimensions.runs[i].keep)
      return error(
          Code::kUnsupported,
          "with a pool of %u a head would keep more than now, for which it has no room; make a smaller "
          "session",
          pool);
    const size_t layer_head = i - i % model_->shape.kv_heads;
    if (!now.moves && now.runs[i].keep == now.runs[layer_head].keep &&
        run.keep != smaller.dimensions.runs[layer_head].keep)  // programs were recorded for equal ones
      return error(Code::kUnsupported,
                   "a pool of %u does not divide evenly among heads that keep equally many; choose another",
                   pool);
    if (!run.evicts && entries_[i] + waiting_.size() > run.capacity)
      return error(Code::kUnsupported,
                   "the session holds %llu tokens, a pool of %u has room for %u, and its retention evicts "
                   "nothing; choose a larger one",
                   static_cast<unsigned long long>(entries_[i] + waiting_.size()), pool, run.capacity);
  }
  return smaller;
}

// Evicts down to what the heads keep in a smaller pool. On failure, an interrupt too, the pool is as large as
// before.
Status Session::evict_to(const MemoryPlan& smaller) {
  std::vector<HeadRun>& runs = plan_.dimensions.runs;
  const std::vector<HeadRun> before = runs;
  bool fits = true;
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[i].keep = smaller.dimensions.runs[i].keep;
    runs[i].protect_first = smaller.dimensions.runs[i].protect_first;
    runs[i].protect_last = smaller.dimensions.runs[i].protect_last;
    const bool shrinks = smaller.dimensions.runs[i].capacity < runs[i].capacity;
    fits = fits && (!runs[i].evicts || !shrinks || entries_[i] <= runs[i].keep);
  }
  if (fits) return {};
  const Status evicted = start(unscored_ ? upkeep_run(true, false) : eviction_run(false));
  if (!evicted.ok()) runs = before;
  return evicted;
}

Result<uint64_t> Session::shrink(uint32_t pool) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  THIMBLE_LET(smaller, smaller_plan(pool));
  THIMBLE_TRY(evict_to(smaller));
  uint64_t freed = 0;
  for (size_t i = 0; i < heads_.size(); ++i) {
    const LayerPool& arrays = layout_.layers[i / model_->shape.kv_heads];
    HeadRun& run = plan_.dimensions.runs[i];
    const uint64_t first = run.first + smaller.dimensions.runs[i].capacity, end = run.first + run.capacity;
    const uint32_t layer_entries = plan_.dimensions.layer_entries[i / model_->shape.kv_heads];
    for (const View& array : {arrays.k.values, arrays.v.values, arrays.pos, arrays.cis}) {
      const uint64_t entry_bytes = array.bytes / layer_entries;
      if (!array) continue;
      THIMBLE_LET(bytes, device_->release(array.slice(first * entry_bytes, (end - first) * entry_bytes)));
      freed += bytes;
    }
    heads_[i].capacity = run.capacity = smaller.dimensions.runs[i].capacity;
  }
  plan_.dimensions.divisions.clear();
  plan_.asked = smaller.asked;
  plan_.options = smaller.options;
  plan_.capacity = plan_.dimensions.capacity = smaller.capacity;
  plan_.largest_position = smaller.largest_position;
  plan_.selection_pays = smaller.selection_pays;
  plan_.pool -= freed;
  plan_.total -= freed;
  plan_.released += freed;
  reservation_.reserved -= freed;
  reservation_.allocated -= freed;
  ledger_->reserved -= freed;
  ledger_->allocated -= freed;
  return freed;
}

}  // namespace thimble
