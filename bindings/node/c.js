// thimble.h for koffi: the structs, the constants and the functions of libthimble, as declared in the header.
import { existsSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import koffi from 'koffi';

const ABI = 14; // THIMBLE_ABI that this file was written for; a library with a larger number works too

export const constants = {
  THIMBLE_ABI: ABI,
  THIMBLE_TOKENIZE_ADD_BOS: 1, THIMBLE_TOKENIZE_PARSE_SPECIAL: 2, THIMBLE_DETOKENIZE_SPECIAL: 1,
  THIMBLE_CHAT_ADD_ASSISTANT: 1,
  THIMBLE_DEFAULT: 0xffffffff, THIMBLE_RECALL_ALL: 0xffffffff,
  THIMBLE_OK: 0, THIMBLE_INVALID_ARGUMENT: 10, THIMBLE_UNSUPPORTED: 11, THIMBLE_IO: 20, THIMBLE_FORMAT: 21,
  THIMBLE_MISMATCH: 22, THIMBLE_BUDGET: 30, THIMBLE_OUT_OF_MEMORY: 31, THIMBLE_CONTEXT_FULL: 40,
  THIMBLE_CANNOT_REWIND: 41, THIMBLE_INTERRUPTED: 50, THIMBLE_BUSY: 51, THIMBLE_DEVICE_LOST: 60,
  THIMBLE_NOT_FINITE: 61, THIMBLE_INTERNAL: 90,
  THIMBLE_RETENTION_DEFAULT: -1, THIMBLE_RETENTION_NONE: 0, THIMBLE_RETENTION_WINDOW: 1, THIMBLE_RETENTION_RANDOM: 2,
  THIMBLE_RETENTION_LOCRET: 3, THIMBLE_RETENTION_KEYDIFF: 4, THIMBLE_RETENTION_TOVA: 5, THIMBLE_RETENTION_REREAD: 6,
  THIMBLE_RETENTION_ADORE: 7, THIMBLE_RETENTION_MIX: 8,
  THIMBLE_RETAIN_PER_HEAD: 0, THIMBLE_RETAIN_LAYER: 1,
  THIMBLE_SELECTION_DENSE: 0, THIMBLE_SELECTION_TOKENSELECT: 1, THIMBLE_SELECTION_QUEST: 2,
  THIMBLE_VOTE_AUTO: 0, THIMBLE_VOTE_LAYER: 1, THIMBLE_VOTE_GROUP: 2,
  THIMBLE_KV_F16: 0, THIMBLE_KV_Q8_0: 1, THIMBLE_KV_Q4_0: 2,
  THIMBLE_POSITIONS_LIST: 0, THIMBLE_POSITIONS_ORIGINAL: 1,
  THIMBLE_SCALE_NONE: 0, THIMBLE_SCALE_SQRT: 1,
  THIMBLE_DRAFT_NONE: 0, THIMBLE_DRAFT_LOOKUP: 1, THIMBLE_DRAFT_MODEL: 2, THIMBLE_DRAFT_MTP: 3,
};

const text = (size) => koffi.array('char', size, 'String');
const log = koffi.proto('void thimble_log_fn(void *user, const char *message)');

// Names in order, by type: fields('uint32_t', 'a b') is {a: 'uint32_t', b: 'uint32_t'}.
const fields = (type, names) => Object.fromEntries(names.split(' ').map((name) => [name, type]));

export const structs = {
  thimble_error: koffi.struct('thimble_error',
    { struct_size: 'uint32_t', code: 'int32_t', bytes_missing: 'uint64_t', message: text(496) }),
  thimble_device_info: koffi.struct('thimble_device_info',
    { ...fields('uint32_t', 'struct_size reserved'), ...fields('uint64_t', 'total_bytes free_bytes'), name: text(32),
      description: text(192) }),
  thimble_model_options: koffi.struct('thimble_model_options',
    { ...fields('uint32_t', 'struct_size reserved'), log: koffi.pointer(log), log_user: 'void *' }),
  thimble_model_info: koffi.struct('thimble_model_info',
    { ...fields('uint32_t', 'struct_size has_weights has_tokenizer layers d_model heads kv_heads head_dim d_ff vocab context_length'),
      ...fields('int32_t', 'bos eos'), files: 'uint32_t',
      ...fields('uint64_t', 'parameters file_bytes kv_bytes_per_token'), architecture: text(32), name: text(96),
      quantization: text(16), chat_format: text(32), chat_problem: text(224),
      ...fields('uint32_t', 'experts experts_per_token window window_layers') }),
  thimble_chat_options: koffi.struct('thimble_chat_options',
    { ...fields('uint32_t', 'struct_size flags'), ...fields('const char *', 'format source'), source_length: 'uint64_t',
      messages: 'void *', message_count: 'uint64_t', messages_json: 'const char *', messages_json_length: 'uint64_t',
      variables: 'const char *', variables_length: 'uint64_t', held: 'uint64_t', time: 'int64_t' }),
  thimble_session_options: koffi.struct('thimble_session_options',
    { ...fields('uint32_t', 'struct_size threads'), device: 'const char *', heads: 'void *', budget_bytes: 'uint64_t',
      ...fields('int32_t', 'retention retain_scope'),
      ...fields('uint32_t', 'pool chunk stabilizers local protect_init max_new'), selection: 'int32_t',
      ...fields('uint32_t', 'select_k select_init select_local'), select_theta: 'float',
      ...fields('int32_t', 'vote vote_scale'), ...fields('uint32_t', 'vote_window select_prefill'), positions: 'int32_t',
      ...fields('uint32_t', 'context seed'), ...fields('void *', 'progress progress_user'),
      ...fields('uint32_t', 'select_page dense_layers watch rebuild rebuild_every'), ...fields('int32_t', 'draft'),
      ...fields('uint32_t', 'draft_tokens'), recall_format: 'int32_t', draft_model: 'void *',
      recall_mem_bytes: 'uint64_t', ...fields('uint32_t', 'recall recall_every'), recall_disk_bytes: 'uint64_t',
      ...fields('int32_t', 'key_format value_format'), ...fields('uint32_t', 'recall_prefill reserved') }),
  thimble_memory: koffi.struct('thimble_memory',
    { ...fields('uint32_t', 'struct_size pool capacity chunk'),
      ...fields('uint64_t', 'budget weights shared pool_bytes view workspace io fixed total allocated dense_bytes_per_token mapped mapped_resident host_tables'),
      ...fields('uint32_t', 'largest_position selection_pays'),
      ...fields('uint64_t', 'states state_slots draft streamed store store_file'), ...fields('uint32_t', 'finer_layers reserved'),
      recall_bytes: 'uint64_t' }),
  thimble_sampler_options: koffi.struct('thimble_sampler_options',
    { struct_size: 'uint32_t', temperature: 'float', top_k: 'uint32_t', ...fields('float', 'top_p min_p repeat_penalty'),
      ...fields('uint32_t', 'repeat_last reserved'), seed: 'uint64_t', ...fields('float', 'presence_penalty frequency_penalty') }),
  thimble_stats: koffi.struct('thimble_stats',
    { ...fields('uint32_t', 'struct_size entries'),
      ...fields('uint64_t', 'position waiting evicted evictions generated selected cache_hits cache_misses prefill_tokens'),
      ...fields('double', 'prefill_seconds decode_seconds prefill_bytes prefill_flop decode_bytes decode_flop'),
      ...fields('uint64_t', 'saturated stored recalled') }),
};

// $THIMBLE_LIBRARY, else the library next to this file, else the one that the system's loader finds.
function load() {
  const name = process.platform === 'win32' ? 'libthimble.dll' : 'libthimble.so';
  const local = join(dirname(fileURLToPath(import.meta.url)), name);
  const path = process.env.THIMBLE_LIBRARY || (existsSync(local) ? local : name);
  let library, abi;
  try {
    library = koffi.load(path);
    abi = library.func('uint32_t thimble_abi_version()')();
  } catch (error) {
    throw new Error(`libthimble cannot be loaded from ${path}: ${error.message}; set THIMBLE_LIBRARY to its path`);
  }
  if (abi < ABI) throw new Error(`${path} has ABI ${abi}, this package needs ${ABI}: install a newer libthimble`);
  return library;
}

// Handles are void pointers, buffers typed arrays; texts that may hold NUL bytes are buffers with a length.
const declarations = `
const char *thimble_version()
uint32_t thimble_abi_version()
const char *thimble_build_info()
const char *thimble_status_name(int32_t status)
int32_t thimble_device_count(_Out_ uint32_t *count, _Inout_ thimble_error *error)
int32_t thimble_device_get(uint32_t index, _Inout_ thimble_device_info *info, _Inout_ thimble_error *error)
void thimble_model_options_init(_Out_ thimble_model_options *options, uint32_t struct_size)
int32_t thimble_model_open(const char *path, thimble_model_options *options, _Out_ void **model, _Inout_ thimble_error *error)
void thimble_model_free(void *model)
int32_t thimble_model_get_info(void *model, _Inout_ thimble_model_info *info, _Inout_ thimble_error *error)
int32_t thimble_heads_open(void *model, const char *path, _Out_ void **heads, _Inout_ thimble_error *error)
void thimble_heads_free(void *heads)
int32_t thimble_heads_retention(void *heads)
int32_t thimble_tokenize(void *model, const void *text, uint64_t length, uint32_t flags, void *ids, void *offsets, uint64_t capacity, _Out_ uint64_t *count, _Inout_ thimble_error *error)
int32_t thimble_detokenize(void *model, const void *ids, uint64_t count, uint32_t flags, void *text, uint64_t capacity, _Out_ uint64_t *length, _Inout_ thimble_error *error)
int32_t thimble_token_ends(void *model, int32_t id)
void thimble_chat_options_init(_Out_ thimble_chat_options *options, uint32_t struct_size)
int32_t thimble_chat_render(void *model, thimble_chat_options *options, void *text, uint64_t capacity, _Out_ uint64_t *length, _Inout_ thimble_error *error)
const char *thimble_retention_name(int32_t retention)
const char *thimble_selection_name(int32_t selection)
void thimble_session_options_init(_Out_ thimble_session_options *options, uint32_t struct_size)
int32_t thimble_session_plan(void *model, thimble_session_options *options, _Inout_ thimble_memory *memory, _Inout_ thimble_error *error)
int32_t thimble_session_largest_pool(void *model, thimble_session_options *options, _Out_ uint32_t *pool, _Inout_ thimble_error *error)
int32_t thimble_session_create(void *model, thimble_session_options *options, _Out_ void **session, _Inout_ thimble_error *error)
void thimble_session_free(void *session)
int32_t thimble_session_feed(void *session, const void *tokens, uint64_t count, _Inout_ thimble_error *error)
int32_t thimble_session_flush(void *session, _Inout_ thimble_error *error)
int32_t thimble_session_step(void *session, _Out_ int32_t *token, _Inout_ thimble_error *error)
int32_t thimble_session_accept(void *session, int32_t token, _Inout_ thimble_error *error)
int32_t thimble_session_logits(void *session, _Out_ void **logits, _Out_ uint32_t *count, _Inout_ thimble_error *error)
int32_t thimble_session_score(void *session, const void *tokens, uint64_t count, void *logprobs, _Inout_ thimble_error *error)
int32_t thimble_session_text(void *session, int32_t token, void *text, uint64_t capacity, _Out_ uint64_t *length, _Inout_ thimble_error *error)
int32_t thimble_session_rewind(void *session, uint64_t position, _Inout_ thimble_error *error)
int32_t thimble_session_clone(void *session, _Out_ void **clone, _Inout_ thimble_error *error)
int32_t thimble_session_reset(void *session, _Inout_ thimble_error *error)
void thimble_session_interrupt(void *session)
int32_t thimble_session_kept(void *session, uint32_t layer, uint32_t kv_head, void *positions, uint64_t capacity, _Out_ uint64_t *count, _Inout_ thimble_error *error)
int32_t thimble_session_stored_by_position(void *session, void *stored, uint64_t capacity, _Out_ uint64_t *count, _Inout_ thimble_error *error)
int32_t thimble_session_kept_by_position(void *session, void *kept, void *attended, uint64_t capacity, _Out_ uint64_t *count, _Inout_ thimble_error *error)
void thimble_sampler_options_init(_Out_ thimble_sampler_options *options, uint32_t struct_size)
int32_t thimble_session_set_sampler(void *session, thimble_sampler_options *options, _Inout_ thimble_error *error)
int32_t thimble_session_set_bias(void *session, const void *tokens, const void *biases, uint64_t count, _Inout_ thimble_error *error)
int32_t thimble_grammar_create_json_schema(void *model, const void *schema, uint64_t length, _Out_ void **grammar, _Inout_ thimble_error *error)
int32_t thimble_grammar_create_regex(void *model, const void *pattern, uint64_t length, _Out_ void **grammar, _Inout_ thimble_error *error)
int32_t thimble_grammar_create_gbnf(void *model, const void *text, uint64_t length, _Out_ void **grammar, _Inout_ thimble_error *error)
void thimble_grammar_free(void *grammar)
int32_t thimble_session_set_grammar(void *session, void *grammar, _Inout_ thimble_error *error)
int32_t thimble_session_memory(void *session, _Inout_ thimble_memory *memory, _Inout_ thimble_error *error)
int32_t thimble_session_get_options(void *session, _Inout_ thimble_session_options *options, _Inout_ thimble_error *error)
int32_t thimble_session_stats(void *session, _Inout_ thimble_stats *stats, _Inout_ thimble_error *error)
int32_t thimble_session_save(void *session, const char *path, const void *note, uint64_t note_size, _Inout_ thimble_error *error)
int32_t thimble_session_restore(void *session, const char *path, _Inout_ thimble_error *error)
int32_t thimble_session_file_info(const char *path, void *json, uint64_t capacity, _Out_ uint64_t *length, _Inout_ thimble_error *error)
int32_t thimble_session_file_note(const char *path, void *note, uint64_t capacity, _Out_ uint64_t *length, _Inout_ thimble_error *error)
int32_t thimble_session_shrink(void *session, uint32_t pool, _Out_ uint64_t *freed, _Inout_ thimble_error *error)
`;

const library = load();
export const lib = Object.fromEntries(declarations.trim().split('\n').map((declaration) =>
  [declaration.match(/(thimble_\w+)\(/)[1], library.func(declaration)]));

/** A call failed: `code` is its code in thimble.h, `status` its name ("BUDGET"), `bytesMissing` the bytes that a budget lacks. */
export class ThimbleError extends Error {
  constructor(code, message, bytesMissing) {
    super(message);
    this.name = 'ThimbleError';
    this.code = code;
    this.status = lib.thimble_status_name(code);
    this.bytesMissing = bytesMissing;
  }
}

const newError = () => ({ struct_size: koffi.sizeof(structs.thimble_error), code: 0, bytes_missing: 0, message: '' });

function check(status, error) {
  if (status !== 0) throw new ThimbleError(status, error.message, error.bytes_missing);
}

/** Calls a function that returns a status and takes an error after these arguments. */
export function call(name, ...args) {
  const error = newError();
  check(lib[name](...args, error), error);
}

/** The same on a worker thread. The arguments' buffers live as long as the call: the promise holds them. */
export function callAsync(name, ...args) {
  const error = newError();
  return new Promise((resolve, reject) => {
    lib[name].async(...args, error, (failure, status) => {
      try {
        if (failure) throw failure;
        check(status, error);
        resolve(args);
      } catch (problem) {
        reject(problem);
      }
    });
  });
}

/** Asks a two-call function for the size, then for the elements: `attempt(buffer or null, capacity, count)` calls it. */
export function twoCalls(make, attempt) {
  const count = [0];
  try {
    attempt(null, 0, count);
  } catch (error) {
    if (!count[0]) throw error; // the buffer was not too small
  }
  const buffer = make(Number(count[0]));
  attempt(buffer, buffer.length, count);
  return buffer;
}

/** An options struct with its defaults. */
export function initialised(name) {
  const options = {};
  lib[`${name}_init`](options, koffi.sizeof(structs[name]));
  return options;
}

/** A struct for a call to fill in. */
export function sized(name) {
  const size = koffi.sizeof(structs[name]);
  return { ...koffi.decode(Buffer.alloc(size), structs[name]), struct_size: size };
}

/** A copy of the floats at a pointer of the library. */
export const floatsAt = (pointer, count) => Float32Array.from(koffi.decode(pointer, koffi.array('float', count, 'Typed')));
