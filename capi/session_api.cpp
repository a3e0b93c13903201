// Entry points for sessions: planning, reading, generating, and queries. A session handle allows one call at
// a time.
#include "base/file.h"
#include "base/new_file.h"
#include "capi/handles.h"
#include "runtime/memory/host_weights.h"
#include "runtime/memory/layer_pager.h"

using namespace thimble;
using namespace thimble::capi;

namespace {

// Exclusive access to a session. A call from a second thread, or from a callback, does not get it.
class Entry {
 public:
  explicit Entry(thimble_session& session) : session_(session), granted_(!session.busy.exchange(true)) {}
  ~Entry() {
    if (granted_) session_.busy = false;
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  bool granted() const { return granted_; }

 private:
  thimble_session& session_;
  const bool granted_;
};

// Runs `(thimble_session&) -> Status` with exclusive access to the session.
template <typename Body>
thimble_status enter(thimble_session* session, thimble_error* out, Body body) noexcept {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(session, "session"));
    const Entry entry(*session);
    if (!entry.granted())
      return error(Code::kBusy,
                   "another call is inside this session; wait for it, or give each thread its own session");
    return body(*session);
  });
}

// Creates the handle of a session. It allocates everything that later calls need.
std::unique_ptr<thimble_session> wrap(std::unique_ptr<Session> session, const OutsideOptions& outside) {
  auto handle = std::make_unique<thimble_session>();
  if (outside.progress)
    session->set_progress([progress = outside.progress, user = outside.progress_user](const Progress& now) {
      thimble_progress shown = {};
      shown.struct_size = sizeof shown;
      shown.pool_entries = now.entries;
      shown.pool_capacity = now.capacity;
      shown.done = now.done;
      shown.total = now.total;
      shown.tokens_per_second = now.tokens_per_second;
      progress(user, &shown);
    });
  if (const Tokenizer& tokenizer = session->model().tokenizer; tokenizer.ok()) {
    constexpr uint32_t kHeld = 4;  // the largest number of bytes that Utf8Stream holds back
    handle->piece.reserve(tokenizer.longest_piece());
    handle->text.reserve((tokenizer.longest_piece() + kHeld) * kReplacement.size());
  }
  handle->session = std::move(session);
  handle->outside = outside;
  return handle;
}

thimble_memory describe(const Model& model, const MemoryPlan& plan, uint64_t allocated) {
  thimble_memory m = {};
  m.pool = plan.options.pool;
  m.capacity = plan.capacity;
  m.finer_layers = plan.finer_layers;
  m.chunk = plan.options.chunk;
  m.budget = plan.options.budget;
  m.weights = plan.weights;
  m.shared = plan.shared;
  m.pool_bytes = plan.pool;
  m.states = plan.states;
  m.state_slots = plan.dimensions.state_slots;
  m.streamed = paged_bytes(model, plan.paged_layers) + host_weight_bytes(model, plan.host_groups);
  m.store = plan.store;
  m.store_file = plan.store_file;
  m.recall_bytes = plan.recall_bytes;
  m.view = plan.view;
  m.workspace = plan.workspace;
  m.io = plan.io;
  m.fixed = plan.fixed;
  m.total = plan.total;
  m.draft = plan.draft;
  m.allocated = allocated;
  m.dense_bytes_per_token = kv_bytes_per_token(model);
  m.mapped = model.info.file_bytes;
  m.mapped_resident = model.resident_bytes();
  if (const Retainer* retainer = plan.options.retainer.get()) {
    m.mapped += retainer->file.size();
    m.mapped_resident += retainer->file.resident_bytes();
  }
  m.host_tables = model.host_bytes();
  m.largest_position = plan.largest_position;
  m.selection_pays = plan.selection_pays;
  return m;
}

// Drops the partial code point at the end of an answer.
void drop_held_text(thimble_session& s) { s.held = {}; }

Status save(thimble_session& s, const void* note, uint64_t note_size, const WriteBytes& write) {
  return s.session->save(write, {static_cast<const std::byte*>(note), static_cast<size_t>(note_size)},
                         s.held.held());
}

Status restore(thimble_session& s, MappedFile file, std::string name) {
  THIMBLE_LET(held, s.session->restore(std::move(file), std::move(name)));
  drop_held_text(s);
  std::string complete;  // stays empty, because the held bytes are an unfinished code point
  s.held.push(held, complete);
  return {};
}

}  // namespace

thimble_status thimble_session_plan(const thimble_model* model, const thimble_session_options* options,
                                    thimble_memory* memory, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_struct(memory, "memory"));
    THIMBLE_LET(request, read_request(*model, options));
    THIMBLE_LET(plan, make_plan(*model->model, *request.device, request.options));
    write_struct(memory, describe(*model->model, plan, 0));
    return {};
  });
}

thimble_status thimble_session_plan_heads(const thimble_model* model, const thimble_session_options* options,
                                          uint32_t* keeps, uint64_t capacity, uint64_t* count,
                                          thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need_buffer(keeps, capacity, count, "keeps"));
    THIMBLE_LET(request, read_request(*model, options));
    THIMBLE_LET(plan, make_plan(*model->model, *request.device, request.options));
    const std::vector<HeadRun>& runs = plan.dimensions.last_runs();
    THIMBLE_TRY(need_room(runs.size(), capacity, count));
    for (size_t i = 0; i < runs.size(); ++i) {
      const bool windowed = model->model->owner_of_run(i).window != 0;
      keeps[i] = windowed ? 0 : runs[i].keep;
    }
    return {};
  });
}

thimble_status thimble_session_largest_pool(const thimble_model* model,
                                            const thimble_session_options* options, uint32_t* pool,
                                            thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(pool, "pool"));
    THIMBLE_LET(request, read_request(*model, options));
    THIMBLE_LET(largest, largest_pool(*model->model, *request.device, request.options));
    *pool = largest;
    return {};
  });
}

thimble_status thimble_session_create(const thimble_model* model, const thimble_session_options* options,
                                      thimble_session** session, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(model, "model"));
    THIMBLE_TRY(need(session, "session"));
    THIMBLE_LET(request, read_request(*model, options));
    THIMBLE_LET(made, Session::create(model->model, request.device, request.options));
    *session = wrap(std::move(made), request.outside).release();
    return {};
  });
}

void thimble_session_free(thimble_session* session) { delete session; }

thimble_status thimble_session_feed(thimble_session* session, const int32_t* tokens, uint64_t count,
                                    thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_array(tokens, count, "tokens"));
    const Status fed = s.session->feed({tokens, static_cast<size_t>(count)});
    const bool queued = fed.ok() || fed.code() == Code::kInterrupted;  // otherwise nothing changed
    if (count && queued) drop_held_text(s);
    return fed;
  });
}

thimble_status thimble_session_flush(thimble_session* session, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) { return s.session->flush(); });
}

thimble_status thimble_session_step(thimble_session* session, int32_t* token, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(token, "token"));
    THIMBLE_LET(next, s.session->step());
    *token = next;
    return {};
  });
}

thimble_status thimble_session_accept(thimble_session* session, int32_t token, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) { return s.session->accept(token); });
}

thimble_status thimble_session_logits(thimble_session* session, const float** logits, uint32_t* count,
                                      thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(logits, "logits"));
    THIMBLE_TRY(need(count, "count"));
    THIMBLE_TRY(s.session->settle());
    THIMBLE_LET(values, s.session->logits());
    *logits = values.data();
    *count = static_cast<uint32_t>(values.size());
    return {};
  });
}

thimble_status thimble_session_score(thimble_session* session, const int32_t* tokens, uint64_t count,
                                     float* logprobs, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_array(tokens, count, "tokens"));
    THIMBLE_TRY(need_array(logprobs, count, "logprobs"));
    const size_t n = static_cast<size_t>(count);
    return s.session->score({tokens, n}, {logprobs, n});
  });
}

thimble_status thimble_session_text(thimble_session* session, int32_t token, char* text, uint64_t capacity,
                                    uint64_t* length, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_buffer(text, capacity, length, "text"));
    const Model& model = s.session->model();
    THIMBLE_TRY(need_tokenizer(model));
    THIMBLE_TRY(need_token(model, token));
    s.piece.clear();
    s.text.clear();
    model.tokenizer.append_piece(token, false, s.piece);
    Utf8Stream held = s.held;
    held.push(s.piece, s.text);
    THIMBLE_TRY(give_text(s.text, text, capacity, length));
    s.held = held;
    return {};
  });
}

thimble_status thimble_session_rewind(thimble_session* session, uint64_t position, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(s.session->rewind(position));
    drop_held_text(s);
    return {};
  });
}

thimble_status thimble_session_clone(thimble_session* session, thimble_session** clone, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(clone, "clone"));
    THIMBLE_LET(twin, s.session->clone());
    std::unique_ptr<thimble_session> handle = wrap(std::move(twin), s.outside);
    handle->held = s.held;
    *clone = handle.release();
    return {};
  });
}

thimble_status thimble_session_reset(thimble_session* session, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(s.session->reset());
    drop_held_text(s);
    return {};
  });
}

thimble_status thimble_session_save(thimble_session* session, const char* path, const void* note,
                                    uint64_t note_size, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(path, "path"));
    THIMBLE_TRY(need_array(static_cast<const char*>(note), note_size, "note"));
    THIMBLE_LET(file, NewFile::replace(path));
    THIMBLE_TRY(save(s, note, note_size, [&](const void* data, size_t n) { return file.write(data, n); }));
    return file.complete();
  });
}

thimble_status thimble_session_save_fd(thimble_session* session, int32_t descriptor, const void* note,
                                       uint64_t note_size, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_array(static_cast<const char*>(note), note_size, "note"));
    return save(s, note, note_size,
                [&](const void* data, size_t n) { return write_to_descriptor(descriptor, data, n); });
  });
}

thimble_status thimble_session_file_bytes(thimble_session* session, uint64_t note_size, uint64_t* bytes,
                                          thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(bytes, "bytes"));
    THIMBLE_SET(*bytes, s.session->file_bytes(note_size));
    return {};
  });
}

thimble_status thimble_session_restore(thimble_session* session, const char* path, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(path, "path"));
    THIMBLE_LET(file, MappedFile::open(path));
    return restore(s, std::move(file), path);
  });
}

thimble_status thimble_session_restore_fd(thimble_session* session, int32_t descriptor, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_LET(file, MappedFile::from_descriptor(descriptor));
    return restore(s, std::move(file), "file descriptor " + std::to_string(descriptor));
  });
}

thimble_status thimble_session_file_info(const char* path, char* json, uint64_t capacity, uint64_t* length,
                                         thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(path, "path"));
    THIMBLE_TRY(need_buffer(json, capacity, length, "json"));
    THIMBLE_LET(mapped, MappedFile::open(path));
    THIMBLE_LET(file, SessionFile::open(std::move(mapped), path));
    return give_text(file.info(), json, capacity, length);
  });
}

thimble_status thimble_session_file_note(const char* path, void* note, uint64_t capacity, uint64_t* length,
                                         thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(path, "path"));
    char* const bytes = static_cast<char*>(note);
    THIMBLE_TRY(need_buffer(bytes, capacity, length, "note"));
    THIMBLE_LET(mapped, MappedFile::open(path));
    THIMBLE_LET(file, SessionFile::open(std::move(mapped), path));
    return give_text({reinterpret_cast<const char*>(file.note.data()), file.note.size()}, bytes, capacity,
                     length);
  });
}

thimble_status thimble_session_shrink(thimble_session* session, uint32_t pool, uint64_t* freed,
                                      thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need(freed, "freed"));
    THIMBLE_LET(bytes, s.session->shrink(pool));
    *freed = bytes;
    return {};
  });
}

void thimble_session_interrupt(thimble_session* session) {
  if (session) session->session->interrupt();
}

thimble_status thimble_session_kept(thimble_session* session, uint32_t layer, uint32_t kv_head,
                                    int32_t* positions, uint64_t capacity, uint64_t* count,
                                    thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_buffer(positions, capacity, count, "positions"));
    THIMBLE_TRY(s.session->settle());
    THIMBLE_LET(held, s.session->kept_count(layer, kv_head));
    THIMBLE_TRY(need_room(held, capacity, count));
    return s.session->kept(layer, kv_head, {positions, held});
  });
}

thimble_status thimble_session_kept_by_position(thimble_session* session, float* kept, float* attended,
                                                uint64_t capacity, uint64_t* count, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_buffer(kept ? kept : attended, kept || attended ? capacity : 0, count, "kept"));
    THIMBLE_LET(read, s.session->positions_read());
    THIMBLE_TRY(need_room(read, capacity, count));
    return s.session->kept_by_position(kept, attended);
  });
}

thimble_status thimble_session_stored_by_position(thimble_session* session, float* stored, uint64_t capacity,
                                                  uint64_t* count, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_buffer(stored, capacity, count, "stored"));
    THIMBLE_LET(read, s.session->positions_read());
    THIMBLE_TRY(need_room(read, capacity, count));
    s.session->stored_by_position({stored, read});
    return {};
  });
}

thimble_status thimble_session_set_sampler(thimble_session* session, const thimble_sampler_options* lent,
                                           thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    thimble_sampler_options o;
    thimble_sampler_options_init(&o, sizeof o);
    THIMBLE_TRY(read_struct(lent, "options", o));
    SamplerOptions options;
    options.temperature = o.temperature;
    options.top_k = o.top_k;
    options.top_p = o.top_p;
    options.min_p = o.min_p;
    options.repeat_penalty = o.repeat_penalty;
    options.repeat_last = o.repeat_last;
    options.seed = o.seed;
    return s.session->set_sampler(options, {o.presence_penalty, o.frequency_penalty});
  });
}

thimble_status thimble_session_set_bias(thimble_session* session, const int32_t* tokens, const float* biases,
                                        uint64_t count, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_array(tokens, count, "tokens"));
    THIMBLE_TRY(need_array(biases, count, "biases"));
    return s.session->set_bias({tokens, count}, {biases, count});
  });
}

thimble_status thimble_session_set_grammar(thimble_session* session, const thimble_grammar* grammar,
                                           thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    if (grammar && grammar->model.get() != &s.session->model())
      return error(Code::kMismatch,
                   "the grammar was made for another model than the session's; make it again");
    s.session->set_grammar(grammar ? grammar->grammar : nullptr);
    return {};
  });
}

thimble_status thimble_session_memory(thimble_session* session, thimble_memory* memory, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_struct(memory, "memory"));
    write_struct(memory, describe(s.session->model(), s.session->plan(), s.session->allocated()));
    return {};
  });
}

thimble_status thimble_session_get_options(thimble_session* session, thimble_session_options* options,
                                           thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_struct(options, "options"));
    write_struct(options, write_options(s.session->plan().options, s.outside));
    return {};
  });
}

thimble_status thimble_session_stats(thimble_session* session, thimble_stats* stats, thimble_error* out) {
  return enter(session, out, [&](thimble_session& s) -> Status {
    THIMBLE_TRY(need_struct(stats, "stats"));
    THIMBLE_LET(now, s.session->stats());
    thimble_stats value = {};
    value.entries = now.entries;
    value.position = now.position;
    value.waiting = now.waiting;
    value.evicted = now.evicted;
    value.evictions = now.evictions;
    value.generated = now.generated;
    value.selected = now.selected;
    value.cache_hits = now.cache_hits;
    value.cache_misses = now.cache_misses;
    value.prefill_tokens = now.prefill_tokens;
    value.prefill_seconds = now.prefill_seconds;
    value.decode_seconds = now.decode_seconds;
    value.prefill_bytes = now.prefill.bytes;
    value.prefill_flop = now.prefill.flop;
    value.decode_bytes = now.decode.bytes;
    value.decode_flop = now.decode.flop;
    value.saturated = now.saturated;
    value.stored = now.stored;
    value.recalled = now.recalled;
    write_struct(stats, value);
    return {};
  });
}
