/* JNI between the Java classes in this folder and libthimble. Numbers and arrays are copied; errors become
 * ThimbleException. Handles are longs. Texts are bytes in UTF-8, because JNI's modified UTF-8 differs; names
 * end with a NUL. */
#include <jni.h>
#include <stdlib.h>
#include <string.h>

#include "thimble/thimble.h"

/* ---- fields of structs and of the Java objects that mirror them ---- */

typedef struct {
  const char* name; /* the name in C; in Java it is in camel case */
  char kind;        /* of the Java field: I int, J long, F float, D double, S String */
  size_t offset;
} Row;

/* A row. If field and kind differ in size, the array's size is negative and compilation fails. */
#define ROW(field, kind, size) \
  { #field, kind, offsetof(STRUCT, field) + 0 * sizeof(char[sizeof(((STRUCT*)0)->field) == (size) ? 1 : -1]) }
#define I(field) ROW(field, 'I', 4)
#define F(field) ROW(field, 'F', 4)
#define J(field) ROW(field, 'J', 8)
#define D(field) ROW(field, 'D', 8)
#define S(field) ROW(field, 'S', sizeof(((STRUCT*)0)->field))

#define STRUCT thimble_device_info
static const Row kDevice[] = {J(total_bytes), J(free_bytes), S(name), S(description)};
#undef STRUCT

#define STRUCT thimble_model_info
static const Row kModelInfo[] = {I(has_weights),
                                 I(has_tokenizer),
                                 I(layers),
                                 I(d_model),
                                 I(heads),
                                 I(kv_heads),
                                 I(head_dim),
                                 I(d_ff),
                                 I(vocab),
                                 I(context_length),
                                 I(bos),
                                 I(eos),
                                 I(files),
                                 J(parameters),
                                 J(file_bytes),
                                 J(kv_bytes_per_token),
                                 S(architecture),
                                 S(name),
                                 S(quantization),
                                 S(chat_format),
                                 S(chat_problem),
                                 I(experts),
                                 I(experts_per_token),
                                 I(window),
                                 I(window_layers)};
#undef STRUCT

#define STRUCT thimble_memory
static const Row kMemory[] = {I(pool),          I(capacity),
                              I(chunk),         J(budget),
                              J(weights),       J(shared),
                              J(pool_bytes),    J(view),
                              J(workspace),     J(io),
                              J(fixed),         J(total),
                              J(allocated),     J(dense_bytes_per_token),
                              J(mapped),        J(mapped_resident),
                              J(host_tables),   I(largest_position),
                              I(selection_pays), J(states),
                              J(state_slots),   J(draft),
                              J(streamed),      J(store),         J(store_file),
                              I(finer_layers),  J(recall_bytes)};
#undef STRUCT

#define STRUCT thimble_stats
static const Row kStats[] = {I(entries),       J(position),       J(waiting),         J(evicted),
                             J(evictions),     J(generated),      J(selected),        J(cache_hits),
                             J(cache_misses),  J(prefill_tokens), D(prefill_seconds), D(decode_seconds),
                             D(prefill_bytes), D(prefill_flop),   D(decode_bytes),    D(decode_flop),
                             J(saturated),     J(stored),         J(recalled)};
#undef STRUCT

#define STRUCT thimble_session_options
static const Row kOptions[] = {
    I(threads),   J(budget_bytes), I(retention),   I(retain_scope),   I(pool),
    I(chunk),     I(stabilizers),  I(local),       I(protect_init),   I(max_new),
    I(selection), I(select_k),     I(select_init), I(select_local),   F(select_theta),
    I(vote),      I(vote_scale),   I(vote_window), I(select_prefill), I(positions),
    I(context),   I(seed),         I(select_page), I(dense_layers),   I(watch),
    I(rebuild),   I(rebuild_every), I(draft),      I(draft_tokens),
    I(recall_format), J(recall_mem_bytes), I(recall), I(recall_every),
    J(recall_disk_bytes), I(key_format), I(value_format), I(recall_prefill)};
#undef STRUCT

#define STRUCT thimble_sampler_options
static const Row kSampler[] = {F(temperature),    I(top_k),       F(top_p), F(min_p),
                               F(repeat_penalty), I(repeat_last), J(seed),
                               F(presence_penalty), F(frequency_penalty)};
#undef STRUCT

#undef I
#undef F
#undef J
#undef D
#undef S
#define COUNT(rows) (sizeof(rows) / sizeof(rows)[0])

static void camel(const char* name, char* out) {
  for (; *name; ++name) {
    if (*name != '_') {
      *out++ = *name;
    } else {
      *out++ = (char)(*++name - 'a' + 'A');
    }
  }
  *out = 0;
}

static jbyteArray bytes(JNIEnv* env, const char* data, size_t length) {
  jbyteArray array = (*env)->NewByteArray(env, (jsize)length);
  if (array) (*env)->SetByteArrayRegion(env, array, 0, (jsize)length, (const jbyte*)data);
  return array;
}

/* A String; NULL if an exception is pending in Java. */
static jobject text(JNIEnv* env, const char* utf8) {
  jclass thimble = (*env)->FindClass(env, "thimble/Thimble");
  jmethodID make = thimble ? (*env)->GetStaticMethodID(env, thimble, "text", "([B)Ljava/lang/String;") : NULL;
  jbyteArray array = make ? bytes(env, utf8, strlen(utf8)) : NULL;
  jobject out = array ? (*env)->CallStaticObjectMethod(env, thimble, make, array) : NULL;
  (*env)->DeleteLocalRef(env, array);
  (*env)->DeleteLocalRef(env, thimble);
  return (*env)->ExceptionCheck(env) ? NULL : out;
}

static jfieldID field_of(JNIEnv* env, jclass type, const Row* row) {
  static const char* const kTypes[] = {"I", "J", "F", "D", "Ljava/lang/String;"};
  char name[64];
  camel(row->name, name);
  return (*env)->GetFieldID(env, type, name, kTypes[strchr("IJFDS", row->kind) - "IJFDS"]);
}

static void show_text(JNIEnv* env, jobject object, jfieldID field, const char* utf8) {
  jobject value = text(env, utf8);
  if (!value) return;
  (*env)->SetObjectField(env, object, field, value);
  (*env)->DeleteLocalRef(env, value);
}

/* Struct to object. */
static void show(JNIEnv* env, const Row* rows, size_t count, const void* from, jobject object) {
  jclass type = (*env)->GetObjectClass(env, object);
  for (const Row* row = rows; row < rows + count; ++row) {
    const char* at = (const char*)from + row->offset;
    jfieldID field = field_of(env, type, row);
    if (!field) return;
    switch (row->kind) {
      case 'I':
        (*env)->SetIntField(env, object, field, *(const jint*)at);
        break;
      case 'J':
        (*env)->SetLongField(env, object, field, *(const jlong*)at);
        break;
      case 'F':
        (*env)->SetFloatField(env, object, field, *(const jfloat*)at);
        break;
      case 'D':
        (*env)->SetDoubleField(env, object, field, *(const jdouble*)at);
        break;
      default:
        show_text(env, object, field, at);
        break;
    }
    if ((*env)->ExceptionCheck(env)) return;
  }
}

/* Object to struct; only numbers. */
static void take(JNIEnv* env, const Row* rows, size_t count, jobject object, void* to) {
  jclass type = (*env)->GetObjectClass(env, object);
  for (const Row* row = rows; row < rows + count; ++row) {
    char* at = (char*)to + row->offset;
    jfieldID field = field_of(env, type, row);
    if (!field) return;
    switch (row->kind) {
      case 'I':
        *(jint*)at = (*env)->GetIntField(env, object, field);
        break;
      case 'J':
        *(jlong*)at = (*env)->GetLongField(env, object, field);
        break;
      case 'F':
        *(jfloat*)at = (*env)->GetFloatField(env, object, field);
        break;
      default:
        *(jdouble*)at = (*env)->GetDoubleField(env, object, field);
        break;
    }
  }
}

/* ---- errors ---- */

#define NEW_ERROR \
  { sizeof(thimble_error), 0, 0, "" }

/* Whether the call succeeded; if not, an exception is pending in Java. */
static int done(JNIEnv* env, thimble_status status, const thimble_error* error) {
  if (status == THIMBLE_OK) return 1;
  jclass type = (*env)->FindClass(env, "thimble/ThimbleException");
  jmethodID make = type ? (*env)->GetMethodID(env, type, "<init>", "(I[BJ)V") : NULL;
  jbyteArray message = make ? bytes(env, error->message, strlen(error->message)) : NULL;
  jobject exception =
      message ? (*env)->NewObject(env, type, make, status, message, (jlong)error->bytes_missing) : NULL;
  if (exception && !(*env)->ExceptionCheck(env)) (*env)->Throw(env, exception);
  return 0;
}

static void no_memory(JNIEnv* env) {
  (*env)->ThrowNew(env, (*env)->FindClass(env, "java/lang/OutOfMemoryError"), "thimblejni has no memory");
}

/* ---- arrays ---- */

/* The contents of a byte array; data is NULL if the array is null. Release it with drop(). */
typedef struct {
  jbyteArray array;
  char* data;
  uint64_t length;
} Bytes;

static Bytes lend(JNIEnv* env, jbyteArray array) {
  Bytes lent = {array, NULL, 0};
  if (array) {
    lent.data = (char*)(*env)->GetByteArrayElements(env, array, NULL);
    lent.length = (uint64_t)(*env)->GetArrayLength(env, array);
  }
  return lent;
}

static void drop(JNIEnv* env, Bytes lent) {
  if (lent.data) (*env)->ReleaseByteArrayElements(env, lent.array, (jbyte*)lent.data, JNI_ABORT);
}

/* A two-call function after its other arguments are bound. */
typedef thimble_status (*Attempt)(const void* arguments, void* buffer, uint64_t capacity, uint64_t* count,
                                  thimble_error* error);

/* Calls it twice. The caller frees the buffer, which holds *count elements; NULL if an exception is pending in Java. */
static void* two_calls(JNIEnv* env, Attempt attempt, const void* arguments, size_t element, uint64_t* count) {
  thimble_error error = NEW_ERROR;
  void* buffer;
  *count = 0;
  thimble_status status = attempt(arguments, NULL, 0, count, &error);
  if (status != THIMBLE_OK && *count == 0) return done(env, status, &error), NULL; /* the buffer was not too small */
  buffer = malloc((size_t)*count * element + 1);
  if (!buffer) return no_memory(env), NULL;
  if (status != THIMBLE_OK) status = attempt(arguments, buffer, *count, count, &error);
  if (!done(env, status, &error)) return free(buffer), NULL;
  return buffer;
}

static jbyteArray bytes_of(JNIEnv* env, Attempt attempt, const void* arguments) {
  uint64_t count;
  char* buffer = two_calls(env, attempt, arguments, 1, &count);
  jbyteArray array = buffer ? bytes(env, buffer, (size_t)count) : NULL;
  free(buffer);
  return array;
}

static jintArray ints_of(JNIEnv* env, Attempt attempt, const void* arguments) {
  uint64_t count;
  int32_t* buffer = two_calls(env, attempt, arguments, sizeof *buffer, &count);
  jintArray array = buffer ? (*env)->NewIntArray(env, (jsize)count) : NULL;
  if (array) (*env)->SetIntArrayRegion(env, array, 0, (jsize)count, buffer);
  free(buffer);
  return array;
}

static jfloatArray floats_of(JNIEnv* env, Attempt attempt, const void* arguments) {
  uint64_t count;
  float* buffer = two_calls(env, attempt, arguments, sizeof *buffer, &count);
  jfloatArray array = buffer ? (*env)->NewFloatArray(env, (jsize)count) : NULL;
  if (array) (*env)->SetFloatArrayRegion(env, array, 0, (jsize)count, buffer);
  free(buffer);
  return array;
}

/* A static native method of the class Native. */
#define METHOD(result, name) JNIEXPORT result JNICALL Java_thimble_Native_##name
#define ENV JNIEnv *env __attribute__((unused)), jclass type __attribute__((unused))
#define MODEL ((thimble_model*)(intptr_t)model)
#define SESSION ((thimble_session*)(intptr_t)session)
#define HANDLE(pointer) ((jlong)(intptr_t)(pointer))

/* ---- library ---- */

METHOD(jint, abiVersion)(ENV) { return (jint)thimble_abi_version(); }

METHOD(jbyteArray, version)(ENV) { return bytes(env, thimble_version(), strlen(thimble_version())); }

METHOD(jbyteArray, buildInfo)(ENV) { return bytes(env, thimble_build_info(), strlen(thimble_build_info())); }

METHOD(jbyteArray, statusName)(ENV, jint status) {
  return bytes(env, thimble_status_name(status), strlen(thimble_status_name(status)));
}

METHOD(jint, deviceCount)(ENV) {
  thimble_error error = NEW_ERROR;
  uint32_t count = 0;
  done(env, thimble_device_count(&count, &error), &error);
  return (jint)count;
}

METHOD(void, deviceGet)(ENV, jint index, jobject device) {
  thimble_error error = NEW_ERROR;
  thimble_device_info info = {.struct_size = sizeof info};
  if (done(env, thimble_device_get((uint32_t)index, &info, &error), &error))
    show(env, kDevice, COUNT(kDevice), &info, device);
}

/* ---- models ---- */

typedef struct {
  JNIEnv* env;
  jobject list;
} Log;

static void keep_warning(void* user, const char* message) {
  const Log* log = user;
  JNIEnv* env = log->env;
  jobject sentence = (*env)->ExceptionCheck(env) ? NULL : text(env, message);
  jmethodID add;
  if (!sentence) return;
  add = (*env)->GetMethodID(env, (*env)->GetObjectClass(env, log->list), "add", "(Ljava/lang/Object;)Z");
  if (add) (*env)->CallBooleanMethod(env, log->list, add, sentence);
  (*env)->DeleteLocalRef(env, sentence);
}

METHOD(jlong, modelOpen)(ENV, jbyteArray path, jobject warnings) {
  thimble_error error = NEW_ERROR;
  thimble_model* model = NULL;
  thimble_model_options options;
  Log log = {env, warnings};
  Bytes name = lend(env, path);
  thimble_status status;
  thimble_model_options_init(&options, sizeof options);
  options.log = keep_warning;
  options.log_user = &log;
  status = thimble_model_open(name.data, &options, &model, &error);
  drop(env, name);
  done(env, status, &error);
  return HANDLE(model);
}

METHOD(void, modelFree)(ENV, jlong model) { thimble_model_free(MODEL); }

METHOD(void, modelInfo)(ENV, jlong model, jobject out) {
  thimble_error error = NEW_ERROR;
  thimble_model_info info = {.struct_size = sizeof info};
  if (done(env, thimble_model_get_info(MODEL, &info, &error), &error))
    show(env, kModelInfo, COUNT(kModelInfo), &info, out);
}

METHOD(jlong, headsOpen)(ENV, jlong model, jbyteArray path) {
  thimble_error error = NEW_ERROR;
  thimble_heads* heads = NULL;
  Bytes name = lend(env, path);
  thimble_status status = thimble_heads_open(MODEL, name.data, &heads, &error);
  drop(env, name);
  done(env, status, &error);
  return HANDLE(heads);
}

METHOD(void, headsFree)(ENV, jlong heads) { thimble_heads_free((thimble_heads*)(intptr_t)heads); }

METHOD(jint, headsRetention)(ENV, jlong heads) {
  return thimble_heads_retention((const thimble_heads*)(intptr_t)heads);
}

typedef struct {
  const thimble_model* model;
  const void* data;
  uint64_t count;
  uint32_t flags;
} Text;

static thimble_status try_tokenize(const void* arguments, void* ids, uint64_t capacity, uint64_t* count,
                                   thimble_error* error) {
  const Text* a = arguments;
  return thimble_tokenize(a->model, a->data, a->count, a->flags, ids, NULL, capacity, count, error);
}

METHOD(jintArray, tokenize)(ENV, jlong model, jbyteArray from, jint flags) {
  Bytes lent = lend(env, from);
  const Text arguments = {MODEL, lent.data, lent.length, (uint32_t)flags};
  jintArray ids = ints_of(env, try_tokenize, &arguments);
  drop(env, lent);
  return ids;
}

static thimble_status try_detokenize(const void* arguments, void* out, uint64_t capacity, uint64_t* length,
                                     thimble_error* error) {
  const Text* a = arguments;
  return thimble_detokenize(a->model, a->data, a->count, a->flags, out, capacity, length, error);
}

METHOD(jbyteArray, detokenize)(ENV, jlong model, jintArray from, jint flags) {
  jint* ids = (*env)->GetIntArrayElements(env, from, NULL);
  const Text arguments = {MODEL, ids, (uint64_t)(*env)->GetArrayLength(env, from), (uint32_t)flags};
  jbyteArray out = bytes_of(env, try_detokenize, &arguments);
  (*env)->ReleaseIntArrayElements(env, from, ids, JNI_ABORT);
  return out;
}

METHOD(jboolean, tokenEnds)(ENV, jlong model, jint token) { return thimble_token_ends(MODEL, token) != 0; }

typedef struct {
  const thimble_model* model;
  thimble_chat_options options;
} Chat;

static thimble_status try_chat(const void* arguments, void* out, uint64_t capacity, uint64_t* length,
                               thimble_error* error) {
  const Chat* a = arguments;
  return thimble_chat_render(a->model, &a->options, out, capacity, length, error);
}

METHOD(jbyteArray, chat)
(ENV, jlong model, jbyteArray messages, jint flags, jlong held, jbyteArray format, jbyteArray source,
 jbyteArray variables) {
  Bytes json = lend(env, messages), name = lend(env, format), jinja = lend(env, source),
        read = lend(env, variables);
  Chat arguments = {.model = MODEL};
  jbyteArray out;
  thimble_chat_options_init(&arguments.options, sizeof arguments.options);
  arguments.options.flags = (uint32_t)flags;
  arguments.options.held = (uint64_t)held;
  arguments.options.format = name.data;
  arguments.options.source = jinja.data;
  arguments.options.source_length = jinja.length;
  arguments.options.messages_json = json.data;
  arguments.options.messages_json_length = json.length;
  arguments.options.variables = read.data;
  arguments.options.variables_length = read.length;
  out = bytes_of(env, try_chat, &arguments);
  drop(env, json), drop(env, name), drop(env, jinja), drop(env, read);
  return out;
}

/* ---- options and plans ---- */

METHOD(void, optionsInit)(ENV, jobject object) {
  thimble_session_options options;
  thimble_session_options_init(&options, sizeof options);
  show(env, kOptions, COUNT(kOptions), &options, object);
}

METHOD(void, samplerInit)(ENV, jobject object) {
  thimble_sampler_options options;
  thimble_sampler_options_init(&options, sizeof options);
  show(env, kSampler, COUNT(kSampler), &options, object);
}

static thimble_session_options read_options(JNIEnv* env, jobject object, Bytes device, jlong heads,
                                            jlong drafter) {
  thimble_session_options options;
  thimble_session_options_init(&options, sizeof options);
  take(env, kOptions, COUNT(kOptions), object, &options);
  options.device = device.data;
  options.heads = (const thimble_heads*)(intptr_t)heads;
  options.draft_model = (const thimble_model*)(intptr_t)drafter;
  return options;
}

METHOD(void, plan)(ENV, jlong model, jobject given, jbyteArray device, jlong heads, jlong drafter,
                   jobject out) {
  thimble_error error = NEW_ERROR;
  thimble_memory memory = {.struct_size = sizeof memory};
  Bytes name = lend(env, device);
  const thimble_session_options options = read_options(env, given, name, heads, drafter);
  const thimble_status status = thimble_session_plan(MODEL, &options, &memory, &error);
  drop(env, name);
  if (done(env, status, &error)) show(env, kMemory, COUNT(kMemory), &memory, out);
}

METHOD(jint, largestPool)(ENV, jlong model, jobject given, jbyteArray device, jlong heads, jlong drafter) {
  thimble_error error = NEW_ERROR;
  uint32_t pool = 0;
  Bytes name = lend(env, device);
  const thimble_session_options options = read_options(env, given, name, heads, drafter);
  const thimble_status status = thimble_session_largest_pool(MODEL, &options, &pool, &error);
  drop(env, name);
  done(env, status, &error);
  return (jint)pool;
}

/* ---- sessions ---- */

METHOD(jlong, sessionCreate)(ENV, jlong model, jobject given, jbyteArray device, jlong heads, jlong drafter) {
  thimble_error error = NEW_ERROR;
  thimble_session* session = NULL;
  Bytes name = lend(env, device);
  const thimble_session_options options = read_options(env, given, name, heads, drafter);
  const thimble_status status = thimble_session_create(MODEL, &options, &session, &error);
  drop(env, name);
  done(env, status, &error);
  return HANDLE(session);
}

METHOD(void, sessionFree)(ENV, jlong session) { thimble_session_free(SESSION); }

METHOD(void, interrupt)(ENV, jlong session) { thimble_session_interrupt(SESSION); }

METHOD(void, feed)(ENV, jlong session, jintArray tokens) {
  thimble_error error = NEW_ERROR;
  jint* ids = (*env)->GetIntArrayElements(env, tokens, NULL);
  const thimble_status status =
      thimble_session_feed(SESSION, ids, (uint64_t)(*env)->GetArrayLength(env, tokens), &error);
  (*env)->ReleaseIntArrayElements(env, tokens, ids, JNI_ABORT);
  done(env, status, &error);
}

METHOD(void, flush)(ENV, jlong session) {
  thimble_error error = NEW_ERROR;
  done(env, thimble_session_flush(SESSION, &error), &error);
}

METHOD(jint, step)(ENV, jlong session) {
  thimble_error error = NEW_ERROR;
  int32_t token = 0;
  done(env, thimble_session_step(SESSION, &token, &error), &error);
  return token;
}

METHOD(void, accept)(ENV, jlong session, jint token) {
  thimble_error error = NEW_ERROR;
  done(env, thimble_session_accept(SESSION, token, &error), &error);
}

/* The first call with enough room takes the token, so a call that only asks for the length is not possible. */
METHOD(jbyteArray, text)(ENV, jlong session, jint token) {
  thimble_error error = NEW_ERROR;
  char some[256];
  char* more;
  jbyteArray out = NULL;
  uint64_t length = 0;
  thimble_status status = thimble_session_text(SESSION, token, some, sizeof some, &length, &error);
  if (status == THIMBLE_OK || length <= sizeof some)
    return done(env, status, &error) ? bytes(env, some, (size_t)length) : NULL;
  more = malloc((size_t)length);
  if (!more) return no_memory(env), NULL;
  status = thimble_session_text(SESSION, token, more, length, &length, &error);
  if (done(env, status, &error)) out = bytes(env, more, (size_t)length);
  free(more);
  return out;
}

METHOD(jfloatArray, logits)(ENV, jlong session) {
  thimble_error error = NEW_ERROR;
  const float* values = NULL;
  uint32_t count = 0;
  jfloatArray out;
  if (!done(env, thimble_session_logits(SESSION, &values, &count, &error), &error)) return NULL;
  out = (*env)->NewFloatArray(env, (jsize)count);
  if (out) (*env)->SetFloatArrayRegion(env, out, 0, (jsize)count, values);
  return out;
}

METHOD(void, score)(ENV, jlong session, jintArray tokens, jfloatArray logprobs) {
  thimble_error error = NEW_ERROR;
  jint* ids = (*env)->GetIntArrayElements(env, tokens, NULL);
  jfloat* out = (*env)->GetFloatArrayElements(env, logprobs, NULL);
  const uint64_t count = (uint64_t)(*env)->GetArrayLength(env, tokens);
  const thimble_status status = thimble_session_score(SESSION, ids, count, out, &error);
  (*env)->ReleaseIntArrayElements(env, tokens, ids, JNI_ABORT);
  (*env)->ReleaseFloatArrayElements(env, logprobs, out, 0);
  done(env, status, &error);
}

METHOD(void, rewind)(ENV, jlong session, jlong position) {
  thimble_error error = NEW_ERROR;
  done(env, thimble_session_rewind(SESSION, (uint64_t)position, &error), &error);
}

METHOD(void, reset)(ENV, jlong session) {
  thimble_error error = NEW_ERROR;
  done(env, thimble_session_reset(SESSION, &error), &error);
}

METHOD(jlong, sessionClone)(ENV, jlong session) {
  thimble_error error = NEW_ERROR;
  thimble_session* twin = NULL;
  done(env, thimble_session_clone(SESSION, &twin, &error), &error);
  return HANDLE(twin);
}

typedef struct {
  thimble_session* session;
  uint32_t layer, kv_head;
} Kept;

static thimble_status try_kept(const void* arguments, void* out, uint64_t capacity, uint64_t* count,
                               thimble_error* error) {
  const Kept* a = arguments;
  return thimble_session_kept(a->session, a->layer, a->kv_head, out, capacity, count, error);
}

METHOD(jintArray, kept)(ENV, jlong session, jint layer, jint kv_head) {
  const Kept arguments = {SESSION, (uint32_t)layer, (uint32_t)kv_head};
  return ints_of(env, try_kept, &arguments);
}

static thimble_status try_held(const void* session, void* out, uint64_t capacity, uint64_t* count,
                               thimble_error* error) {
  return thimble_session_kept_by_position((thimble_session*)(intptr_t)session, out, NULL, capacity, count,
                                          error);
}

METHOD(jfloatArray, keptByPosition)(ENV, jlong session) { return floats_of(env, try_held, SESSION); }

static thimble_status try_attended(const void* session, void* out, uint64_t capacity, uint64_t* count,
                                   thimble_error* error) {
  return thimble_session_kept_by_position((thimble_session*)(intptr_t)session, NULL, out, capacity, count,
                                          error);
}

METHOD(jfloatArray, attendedByPosition)(ENV, jlong session) { return floats_of(env, try_attended, SESSION); }

static thimble_status try_stored(const void* session, void* out, uint64_t capacity, uint64_t* count,
                                 thimble_error* error) {
  return thimble_session_stored_by_position((thimble_session*)(intptr_t)session, out, capacity, count, error);
}

METHOD(jfloatArray, storedByPosition)(ENV, jlong session) { return floats_of(env, try_stored, SESSION); }

METHOD(void, setSampler)(ENV, jlong session, jobject given) {
  thimble_error error = NEW_ERROR;
  thimble_sampler_options options;
  thimble_sampler_options_init(&options, sizeof options);
  take(env, kSampler, COUNT(kSampler), given, &options);
  done(env, thimble_session_set_sampler(SESSION, &options, &error), &error);
}

METHOD(void, setBias)(ENV, jlong session, jintArray tokens, jfloatArray biases) {
  thimble_error error = NEW_ERROR;
  jint* ids = (*env)->GetIntArrayElements(env, tokens, NULL);
  if (!ids) return;
  jfloat* values = (*env)->GetFloatArrayElements(env, biases, NULL);
  if (values) {
    const uint64_t count = (uint64_t)(*env)->GetArrayLength(env, tokens);
    done(env, thimble_session_set_bias(SESSION, (const int32_t*)ids, values, count, &error), &error);
    (*env)->ReleaseFloatArrayElements(env, biases, values, JNI_ABORT);
  }
  (*env)->ReleaseIntArrayElements(env, tokens, ids, JNI_ABORT);
}

METHOD(jlong, grammarCreate)(ENV, jlong model, jint kind, jbyteArray text) {
  thimble_error error = NEW_ERROR;
  thimble_grammar* grammar = NULL;
  Bytes bytes = lend(env, text);
  thimble_status status =
      kind == 0   ? thimble_grammar_create_json_schema(MODEL, bytes.data, bytes.length, &grammar, &error)
      : kind == 1 ? thimble_grammar_create_regex(MODEL, bytes.data, bytes.length, &grammar, &error)
                  : thimble_grammar_create_gbnf(MODEL, bytes.data, bytes.length, &grammar, &error);
  drop(env, bytes);
  done(env, status, &error);
  return HANDLE(grammar);
}

METHOD(void, grammarFree)(ENV, jlong grammar) { thimble_grammar_free((thimble_grammar*)(intptr_t)grammar); }

METHOD(void, setGrammar)(ENV, jlong session, jlong grammar) {
  thimble_error error = NEW_ERROR;
  done(env, thimble_session_set_grammar(SESSION, (const thimble_grammar*)(intptr_t)grammar, &error), &error);
}

METHOD(void, memory)(ENV, jlong session, jobject out) {
  thimble_error error = NEW_ERROR;
  thimble_memory memory = {.struct_size = sizeof memory};
  if (done(env, thimble_session_memory(SESSION, &memory, &error), &error))
    show(env, kMemory, COUNT(kMemory), &memory, out);
}

// Returns the device's name.
METHOD(jbyteArray, options)(ENV, jlong session, jobject out) {
  thimble_error error = NEW_ERROR;
  thimble_session_options options = {.struct_size = sizeof options};
  if (!done(env, thimble_session_get_options(SESSION, &options, &error), &error)) return NULL;
  show(env, kOptions, COUNT(kOptions), &options, out);
  return bytes(env, options.device, strlen(options.device));
}

METHOD(void, stats)(ENV, jlong session, jobject out) {
  thimble_error error = NEW_ERROR;
  thimble_stats stats = {.struct_size = sizeof stats};
  if (done(env, thimble_session_stats(SESSION, &stats, &error), &error))
    show(env, kStats, COUNT(kStats), &stats, out);
}

METHOD(void, save)(ENV, jlong session, jbyteArray path, jbyteArray note) {
  thimble_error error = NEW_ERROR;
  Bytes name = lend(env, path), with = lend(env, note);
  const thimble_status status = thimble_session_save(SESSION, name.data, with.data, with.length, &error);
  drop(env, name), drop(env, with);
  done(env, status, &error);
}

METHOD(void, restore)(ENV, jlong session, jbyteArray path) {
  thimble_error error = NEW_ERROR;
  Bytes name = lend(env, path);
  const thimble_status status = thimble_session_restore(SESSION, name.data, &error);
  drop(env, name);
  done(env, status, &error);
}

METHOD(jlong, shrink)(ENV, jlong session, jint pool) {
  thimble_error error = NEW_ERROR;
  uint64_t freed = 0;
  done(env, thimble_session_shrink(SESSION, (uint32_t)pool, &freed, &error), &error);
  return (jlong)freed;
}

static thimble_status try_info(const void* path, void* out, uint64_t capacity, uint64_t* length,
                               thimble_error* error) {
  return thimble_session_file_info(path, out, capacity, length, error);
}

METHOD(jbyteArray, sessionFileInfo)(ENV, jbyteArray path) {
  Bytes name = lend(env, path);
  jbyteArray out = bytes_of(env, try_info, name.data);
  drop(env, name);
  return out;
}

static thimble_status try_note(const void* path, void* out, uint64_t capacity, uint64_t* length,
                               thimble_error* error) {
  return thimble_session_file_note(path, out, capacity, length, error);
}

METHOD(jbyteArray, sessionFileNote)(ENV, jbyteArray path) {
  Bytes name = lend(env, path);
  jbyteArray out = bytes_of(env, try_note, name.data);
  drop(env, name);
  return out;
}

/* ---- for the tests: the fields that are copied, "thimble_stats.entries I" ---- */

typedef struct {
  const char* name;
  const Row* rows;
  size_t count;
} Table;

METHOD(jbyteArray, rows)(ENV) {
  static const Table kTables[] = {{"thimble_device_info", kDevice, COUNT(kDevice)},
                                  {"thimble_model_info", kModelInfo, COUNT(kModelInfo)},
                                  {"thimble_memory", kMemory, COUNT(kMemory)},
                                  {"thimble_stats", kStats, COUNT(kStats)},
                                  {"thimble_session_options", kOptions, COUNT(kOptions)},
                                  {"thimble_sampler_options", kSampler, COUNT(kSampler)}};
  char lines[8192] = "";
  for (const Table* table = kTables; table < kTables + COUNT(kTables); ++table) {
    for (const Row* row = table->rows; row < table->rows + table->count; ++row) {
      const char kind[] = {' ', row->kind, '\n', 0};
      strcat(strcat(strcat(strcat(lines, table->name), "."), row->name), kind);
    }
  }
  return bytes(env, lines, strlen(lines));
}
