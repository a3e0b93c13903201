// Saving a session to a file, and restoring it.
#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "base/checksum.h"
#include "runtime/session.h"

namespace thimble {

namespace {

std::string hex(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016" PRIx64, value);
  return digits;
}

std::string count(uint32_t value) { return value == kDefault ? "default" : std::to_string(value); }

uint64_t bytes_of(std::span<const Engine::Array> arrays) {
  uint64_t bytes = 0;
  for (const Engine::Array& array : arrays) bytes += array.view.bytes;
  return bytes;
}

// Whether all of these floats are finite.
bool are_finite(std::span<const std::byte> bytes) {
  for (size_t at = 0; at < bytes.size(); at += sizeof(float)) {
    float value;
    std::memcpy(&value, &bytes[at], sizeof value);
    if (!std::isfinite(value)) return false;
  }
  return true;
}

// Whether the positions ascend from at least 0, end below `read`, and the last `unbroken` of them are
// consecutive.
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

// The value of an option as files have it.
template <typename T>
std::string text_of(T value, const OptionValues& values) {
  for (const OptionChoice& choice : values.choices)
    if (choice.number == static_cast<int32_t>(value)) return choice.in_files;
  if (values.all && static_cast<uint32_t>(value) == UINT32_MAX) return values.all;
  return count(static_cast<uint32_t>(value));
}

std::string text_of(float value, const OptionValues&) {
  char text[24];  // nine digits identify every float, independently of the locale
  return {text, std::to_chars(text, std::end(text), value, std::chars_format::general, 9).ptr};
}

std::string text_of(const Retainer& retainer) {
  const std::span<const std::byte> file = retainer.file.bytes();
  return hex(checksum(file.data(), file.size()));
}

// The settings that shape the state, in the order in which differences are reported.
std::vector<NamedSetting> saved_settings(const Engine& engine) {
  const SessionOptions& o = engine.options();
  const bool on_host = traits(o.retention).scored == Scored::kOnHost;
  std::vector<NamedSetting> settings = {
      {"model", engine.model().info.architecture + " " + hex(engine.model().fingerprint())},
      {"vocabulary", count(engine.model().shape.vocab)},
      {"retention", policy_name(o.retention)},
      {"heads", o.retainer ? text_of(*o.retainer) : "none"},
  };
#define X(type, name, at_first, values, saved)                           \
  if (saved == Saved::kYes || (saved == Saved::kOnHost && on_host) ||    \
      (saved == Saved::kWithStore && o.recall) ||                        \
      (saved == Saved::kIfSet && o.name != static_cast<type>(at_first))) \
    settings.push_back({#name, text_of(o.name, values)});
  THIMBLE_SESSION_OPTIONS(X)
#undef X
  return settings;
}

// Adds the settings that files lack where an option has its value at first.
std::vector<NamedSetting> with_unset(std::vector<NamedSetting> settings) {
  const auto add = [&](const char* name, const std::string& value) {
    if (std::none_of(settings.begin(), settings.end(), [&](const NamedSetting& s) { return s.name == name; }))
      settings.push_back({name, value});
  };
#define X(type, name, at_first, values, saved) \
  if (saved == Saved::kIfSet) add(#name, text_of(static_cast<type>(at_first), values));
  THIMBLE_SESSION_OPTIONS(X)
#undef X
  return settings;
}

}  // namespace

// ---- saving ----

SavedSession Session::saved() const {
  SavedSession s{.sequence = state_, .sampler = state_.sampler.saved(), .settings = saved_settings(*engine_)};
  for (const HeadRun& run : runs()) s.pools.push_back({run.keep, run.capacity});
  if (const RecallStore* store = engine_->store())
    s.store_pages.assign(store->counts().begin(), store->counts().end());
  return s;
}

Status Session::save(const WriteBytes& write, std::span<const std::byte> note, std::string_view held_text) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  THIMBLE_LET(saturated, engine_->saturated());
  state_.saturated = saturated;
  SavedSession session = saved();
  held_text.copy(session.held_text, sizeof session.held_text - 1);
  const std::vector<Engine::Array> arrays = engine_->arrays(state_, state_.has_logits);
  const RecallStore* store = engine_->store();
  const auto write_body = [&](const WriteBytes& out) -> Status {
    // Memory that the host shares is written without a copy.
    const bool shared = engine_->device().info().unified;
    constexpr uint64_t kStaging = 4 << 20;
    std::vector<std::byte> staging(shared ? 0 : std::min(bytes_of(arrays), kStaging));
    for (const Engine::Array& array : arrays)
      for (uint64_t at = 0; at < array.view.bytes; at += kStaging) {
        THIMBLE_TRY(engine_->check_interrupt());
        const View part = array.view.slice(at, std::min(kStaging, array.view.bytes - at));
        if (!shared) THIMBLE_TRY(engine_->device().read(staging.data(), part));
        THIMBLE_TRY(out(shared ? on_host<std::byte>(part) : staging.data(), part.bytes));
      }
    return store ? store->save(out) : Status();
  };
  return engine_->check_store(write_session_file(session, note, body_bytes(arrays), write_body, write),
                              state_);
}

uint64_t Session::body_bytes(std::span<const Engine::Array> arrays) const {
  const RecallStore* store = engine_->store();
  return bytes_of(arrays) + (store ? store->saved_bytes(store->counts()) : 0);
}

Result<uint64_t> Session::file_bytes(uint64_t note_bytes) {
  THIMBLE_TRY(begin(Call::kNone, {}));
  return session_file_bytes(saved(), body_bytes(engine_->arrays(state_, state_.has_logits))) + note_bytes;
}

// ---- restoring ----

// The division in which a file was saved: the one that has the file's runs. If none has them, the current
// division; check_settings() then reports the difference.
uint32_t Session::saved_division(const SessionFile& file) const {
  const std::vector<Division>& divisions = engine_->dimensions().divisions;
  for (uint32_t i = 0; i < divisions.size(); ++i)
    if (std::equal(file.pools.begin(), file.pools.end(), divisions[i].runs.begin(), divisions[i].runs.end(),
                   [](const SavedPool& theirs, const HeadRun& ours) {
                     return theirs.keep == ours.keep && theirs.capacity == ours.capacity;
                   }))
      return i;
  return state_.division;
}

// Checks that a file was saved by a session with these settings and runs.
Status Session::check_settings(const SessionFile& file, std::span<const HeadRun> runs) const {
  const auto refuse = [&](const std::string& what, const std::string& theirs, const std::string& ours) {
    return error(Code::kMismatch,
                 "%s was saved with %s %s, this session has %s; make the session as the saved one was",
                 file.name.c_str(), what.c_str(), theirs.c_str(), ours.c_str());
  };
  const std::vector<NamedSetting> settings = with_unset(saved_settings(*engine_)),
                                  saved = with_unset(file.settings);
  for (const NamedSetting& ours : settings) {
    const auto theirs =
        std::find_if(saved.begin(), saved.end(), [&](const NamedSetting& s) { return s.name == ours.name; });
    if (theirs == saved.end()) return refuse("no setting", ours.name, ours.value);
    if (theirs->value != ours.value) return refuse(ours.name, theirs->value, ours.value);
  }
  if (saved.size() != settings.size()) return file.damaged("it has settings that this library does not know");
  if (file.pools.size() != runs.size()) return file.damaged("it has another number of heads");
  const uint32_t pages = plan().store_pages;
  if (file.store_pages.empty() != !engine_->store())
    return file.damaged("its store does not fit its settings");
  for (size_t i = 0; i < file.store_pages.size(); ++i)
    if (file.store_pages[i] > pages)
      return refuse("pages of a head in the store", count(file.store_pages[i]), count(pages));
  for (size_t i = 0; i < runs.size(); ++i) {
    const SavedPool& theirs = file.pools[i];
    const std::string name = " of layer " + std::to_string(model().layer_of_run[i]) + ", KV head " +
                             std::to_string(i - model().owner_of_run(i).first_run);
    if (theirs.keep != runs[i].keep) return refuse("pool" + name, count(theirs.keep), count(runs[i].keep));
    if (theirs.capacity != runs[i].capacity)
      return refuse("capacity" + name, count(theirs.capacity), count(runs[i].capacity));
  }
  return {};
}

// Checks that the session can continue with the arrays of a file.
Status Session::check_body(const SessionFile& file, std::span<const Engine::Array> arrays) const {
  const SequenceFields& s = file.sequence;
  std::vector<std::span<const std::byte>> of_retention, of_selection;
  uint64_t at = 0;
  for (const Engine::Array& array : arrays) {
    const std::span<const std::byte> bytes = file.body.subspan(at, array.view.bytes);
    at += bytes.size();
    if (array.kind == Engine::Array::kOfRetention) of_retention.push_back(bytes);
    if (array.kind == Engine::Array::kOfSelection) of_selection.push_back(bytes);
    if (array.kind == Engine::Array::kPositions && !are_positions(bytes, s.read, s.read - s.last_eviction))
      return file.damaged("its positions do not ascend to the last token that was read");
    if (array.kind == Engine::Array::kLogits && s.arg_max >= 0 && !are_finite(bytes))
      return file.damaged("its logits are not finite");
  }
  if (const RecallStore* store = engine_->store())
    if (const char* fault = store->fault(file.store_pages, file.body.subspan(at), s.read, s.recalled))
      return file.damaged(fault);
  const Held held = engine_->held(s);
  if (!retention().can_carry(held, of_retention))
    return file.damaged("its retention's arrays name entries that it does not hold");
  if (!selection().can_carry(held, of_selection))
    return file.damaged("its selection's arrays name entries that it does not hold");
  return {};
}

Result<std::string> Session::restore(MappedFile mapped, std::string name) {
  THIMBLE_TRY(engine_->check_files());
  THIMBLE_LET(file, SessionFile::open(std::move(mapped), std::move(name)));
  SequenceFields& s = file.sequence;
  s.division = s.placed = saved_division(file);
  const std::vector<HeadRun>& runs = engine_->runs(s);
  THIMBLE_TRY(check_settings(file, runs));
  if (const char* fault = s.fault(engine_->setting(), runs)) return file.damaged(fault);
  if (!state_.sampler.takes(file.sampler.accepted))
    return file.damaged("it has tokens that are not in the vocabulary");
  if (!Sampler::check(file.sampler.options).ok()) return file.damaged("its sampler options are out of range");
  if (const uint32_t slots = engine_->dimensions().state_slots) s.number_slots(slots - 2);
  const std::vector<Engine::Array> arrays = engine_->arrays(s, s.has_logits);
  const RecallStore* store = engine_->store();
  if (bytes_of(arrays) + (store ? store->saved_bytes(file.store_pages) : 0) != file.body.size())
    return file.damaged("its arrays are not as large as its head says");
  THIMBLE_TRY(file.check_body());
  THIMBLE_TRY(check_body(file, arrays));
  THIMBLE_TRY(take(file, arrays));
  return std::string(file.held_text, std::find(file.held_text, std::end(file.held_text), '\0'));
}

// Continues from a file that was checked. The store's temporary file is written first, because this can fail.
// After that only the device can fail. The session is then empty.
Status Session::take(SessionFile& file, std::span<const Engine::Array> arrays) {
  RecallStore* const store = engine_->store();
  const std::span<const std::byte> pages = file.body.subspan(bytes_of(arrays));
  std::optional<ScratchFile> rows;
  if (store) THIMBLE_SET(rows, store->file_of(file.store_pages, pages));
  THIMBLE_TRY(reset());
  const std::byte* from = file.body.data();
  for (const Engine::Array& array : arrays) {
    if (array.kind != Engine::Array::kWithoutRoom) THIMBLE_TRY(engine_->device().write(array.view, from));
    from += array.view.bytes;
  }
  if (store) store->restore(file.store_pages, pages, std::move(rows));
  THIMBLE_TRY(engine_->set_saturated(static_cast<uint32_t>(file.sequence.saturated)));
  file.sequence.forget_snapshots_without_slot();
  state_.restore(file.sequence, file.sampler);
  return {};
}

}  // namespace thimble
