/* Thimble: reads long texts with a language model inside a byte budget that you set and that is never exceeded.
 *
 *   thimble_model* model;
 *   thimble_session* session;
 *   thimble_error error = {sizeof error};
 *   thimble_session_options options;
 *   thimble_session_options_init(&options, sizeof options);
 *   options.budget_bytes = 64 << 20;
 *   options.retention = THIMBLE_RETENTION_WINDOW;
 *   if (thimble_model_open("model.gguf", NULL, &model, &error) != THIMBLE_OK ||
 *       thimble_session_create(model, &options, &session, &error) != THIMBLE_OK) {
 *     fprintf(stderr, "%s\n", error.message);
 *     return 1;
 *   }
 *   thimble_session_feed(session, ids, count, &error);      // ids from thimble_tokenize; reads as much as it can
 *   for (int32_t token; thimble_session_step(session, &token, &error) == THIMBLE_OK;) {
 *     if (thimble_token_ends(model, token)) break;
 *     char text[256]; uint64_t length;
 *     thimble_session_text(session, token, text, sizeof text, &length, &error);
 *     fwrite(text, 1, length, stdout);
 *   }
 *   thimble_session_free(session);
 *   thimble_model_free(model);
 *
 * RULES THAT HOLD FOR EVERY FUNCTION
 *  - A function that can fail returns a thimble_status. THIMBLE_OK is 0. Output parameters are written only on success,
 *    except counts of the two-call functions (below). `error` is lent by the caller and may be NULL; on failure it holds
 *    the code and one sentence that says what is wrong and what to do. Sentences, also those of the log, and names are safe
 *    to print: control characters of a file are shown as "\u001b".
 *  - Nothing throws, aborts, exits, or prints. Nothing is sent anywhere.
 *  - Option structs start with their size: call the *_init function, then change fields. A program built with an older
 *    header runs with a newer library, and fields it does not know keep their defaults. NULL options mean defaults.
 *    Structs that are filled in start with their size too; set it before the call.
 *  - Text is UTF-8 with an explicit length and may hold NUL bytes; paths and names are NUL-terminated UTF-8 everywhere.
 *  - Two-call functions (a buffer, its capacity, an output count) write at most `capacity` elements and always set the
 *    count to what is needed; when it is more than the capacity they return THIMBLE_INVALID_ARGUMENT. Call with capacity
 *    0 and a NULL buffer to ask for the size.
 *  - Models and heads are immutable: any number of threads and sessions may use one. A session is used by one thread at
 *    a time; a second one gets THIMBLE_BUSY. thimble_session_interrupt alone may be called from any thread.
 *  - Callbacks run on the calling thread, inside the call, and must not call into the same session except to interrupt.
 *  - Free functions accept NULL. A model must not be freed before its sessions and heads; other handles have no order.
 */
#ifndef THIMBLE_H
#define THIMBLE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(THIMBLE_SHARED)
#ifdef THIMBLE_BUILD
#define THIMBLE_API __declspec(dllexport)
#else
#define THIMBLE_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define THIMBLE_API __attribute__((visibility("default")))
#else
#define THIMBLE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version ---- */

#define THIMBLE_VERSION_MAJOR 0
#define THIMBLE_VERSION_MINOR 1
#define THIMBLE_VERSION_PATCH 0
/* Grows when a function or a field was added; programs built with a smaller number go on working. */
#define THIMBLE_ABI 7

/* "0.1.0" of the library that runs, maybe not of this header. */
THIMBLE_API const char* thimble_version(void);
/* THIMBLE_ABI of the library that runs. */
THIMBLE_API uint32_t thimble_abi_version(void);
/* What was built in, for bug reports: "thimble 0.1.0, g++ 12.2.0, cpu". */
THIMBLE_API const char* thimble_build_info(void);

/* ---- errors ---- */

typedef int32_t thimble_status;
enum {
  THIMBLE_OK = 0,
  THIMBLE_INVALID_ARGUMENT = 10, /* an argument is not valid, or two options contradict each other */
  THIMBLE_UNSUPPORTED = 11,      /* this build, device or model cannot do that */
  THIMBLE_IO = 20,               /* a file could not be read */
  THIMBLE_FORMAT = 21,           /* a file is damaged or not what it should be */
  THIMBLE_MISMATCH = 22,         /* two files do not belong together */
  THIMBLE_BUDGET = 30,           /* the budget is too small; error.bytes_missing says by how much */
  THIMBLE_OUT_OF_MEMORY = 31,    /* the system or the device has no more memory */
  THIMBLE_CONTEXT_FULL = 40,     /* the pool is full and nothing may be evicted (context_length_exceeded) */
  THIMBLE_CANNOT_REWIND = 41,    /* something was evicted since that position; nothing changed */
  THIMBLE_INTERRUPTED = 50,      /* thimble_session_interrupt was called; repeat the call to go on */
  THIMBLE_BUSY = 51,             /* another call is inside this session; nothing changed */
  THIMBLE_DEVICE_LOST = 60,      /* the device stopped working; free the session and make a new one */
  THIMBLE_NOT_FINITE = 61,       /* the model gave NaN or infinite logits; rewind to go on from an earlier position */
  THIMBLE_INTERNAL = 90          /* a defect in Thimble; please report it */
};

/* "BUDGET": the name of a code without its prefix. Never NULL. */
THIMBLE_API const char* thimble_status_name(thimble_status status);
/* One sentence on what a code means in general. Never NULL. */
THIMBLE_API const char* thimble_status_text(thimble_status status);

typedef struct thimble_error {
  uint32_t struct_size;   /* sizeof(thimble_error); set it before the call, 0 gets no message */
  thimble_status code;
  uint64_t bytes_missing; /* THIMBLE_BUDGET: what the budget lacks; else 0 */
  char message[496];      /* UTF-8, NUL-terminated */
} thimble_error;

/* ---- devices ---- */

typedef struct thimble_device_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t total_bytes;  /* memory of the device */
  uint64_t free_bytes;   /* of which free now */
  char name[32];         /* what options.device takes: "cpu", "cuda:0", "vulkan:0" */
  char description[192]; /* for people */
} thimble_device_info;

/* Calls that use a CUDA device make it the calling thread's current one, and its context stays until the process ends; so do
   Vulkan's drivers, once it was asked for its devices. */
THIMBLE_API thimble_status thimble_device_count(uint32_t* count, thimble_error* error);
THIMBLE_API thimble_status thimble_device_get(uint32_t index, thimble_device_info* info, thimble_error* error);

typedef struct thimble_device_rates {
  uint32_t struct_size;
  uint32_t reserved;
  double bytes_per_second; /* of memory: a large copy, bytes read and bytes written */
  double flop_per_second;  /* of the matrix units, at the precision that reading multiplies with */
} thimble_device_rates;

/* Measures what a device can do, to compare with: takes about a second, and memory that it gives back. `device` and
   `threads` as in the options of a session. */
THIMBLE_API thimble_status thimble_device_measure(const char* device, uint32_t threads, thimble_device_rates* rates,
                                                  thimble_error* error);

/* ---- models ---- */

typedef struct thimble_model thimble_model;

/* A warning for the user of the program, one sentence, NUL-terminated; valid during the call. */
typedef void (*thimble_log_fn)(void* user, const char* message);

typedef struct thimble_model_options {
  uint32_t struct_size;
  uint32_t reserved;
  thimble_log_fn log; /* NULL: warnings are dropped */
  void* log_user;
} thimble_model_options;

THIMBLE_API void thimble_model_options_init(thimble_model_options* options, uint32_t struct_size);

/* Open a GGUF model; the file is mapped read-only and must not change while the model lives: calls return THIMBLE_IO once it is
 * shorter than it was, but where it is cut while one runs the system may end the process (SIGBUS; docs/limits.md). The same holds
 * for files of heads. One file descriptor is kept open for each file. A file that holds only a
 * vocabulary opens too and can tokenise. Of a model in parts ("NAME-00001-of-00003.gguf") any part's path opens all, which
 * lie beside it. */
THIMBLE_API thimble_status thimble_model_open(const char* path, const thimble_model_options* options,
                                              thimble_model** model, thimble_error* error);
/* The same from an open file descriptor, which stays yours and may be closed at once. */
THIMBLE_API thimble_status thimble_model_open_fd(int32_t descriptor, const thimble_model_options* options,
                                                 thimble_model** model, thimble_error* error);
/* The same from `size` bytes of an open file that begin at `offset`: of an asset in an Android package, for example, that lies
 * there uncompressed (AAsset_openFileDescriptor64). A size of UINT64_MAX goes to the file's end. THIMBLE_INVALID_ARGUMENT where `offset` is no multiple of the model file's own
 * alignment, 32 bytes unless it says otherwise, THIMBLE_IO where the file has not as many bytes. */
THIMBLE_API thimble_status thimble_model_open_fd_range(int32_t descriptor, uint64_t offset, uint64_t size,
                                                       const thimble_model_options* options, thimble_model** model,
                                                       thimble_error* error);
/* The same from the descriptors of all parts of a model, in any order. */
THIMBLE_API thimble_status thimble_model_open_fds(const int32_t* descriptors, uint64_t count,
                                                  const thimble_model_options* options, thimble_model** model,
                                                  thimble_error* error);
/* The same from memory, which is not copied: keep it unchanged until the model is freed, and align it to the file's own
 * alignment, 32 bytes unless it says otherwise; a page always does. */
THIMBLE_API thimble_status thimble_model_open_buffer(const void* data, uint64_t size,
                                                     const thimble_model_options* options, thimble_model** model,
                                                     thimble_error* error);
THIMBLE_API void thimble_model_free(thimble_model* model);

typedef struct thimble_model_info {
  uint32_t struct_size;
  uint32_t has_weights;    /* 0: a vocabulary only */
  uint32_t has_tokenizer;  /* 0: token ids only */
  uint32_t layers, d_model, heads, kv_heads, head_dim, d_ff, vocab;
  uint32_t context_length; /* positions the model was trained for */
  int32_t bos, eos;        /* token ids, -1 where there is none */
  uint32_t files;          /* that the model lies in; 1 if it is in one piece */
  uint64_t parameters;
  uint64_t file_bytes;
  uint64_t kv_bytes_per_token; /* f16 keys and values that dense attention keeps for every token: of layers without a
                                * window */
  char architecture[32];
  char name[96];
  char quantization[16]; /* the type that most bytes have */
  char chat_format[32];  /* "jinja": the file's chat template is run; a known format that is recognised in it; or "" */
  char chat_problem[224]; /* why the template is not run, a sentence; "" where it is */
  uint32_t experts, experts_per_token; /* of a layer, d_ff being that of one; 0: none */
  uint32_t window, window_layers;      /* so many layers attend to the last `window` tokens alone */
} thimble_model_info;

THIMBLE_API thimble_status thimble_model_get_info(const thimble_model* model, thimble_model_info* info,
                                                  thimble_error* error);

/* Metadata of the file, for people: entry `index` as key and printed value (long arrays shortened). */
THIMBLE_API thimble_status thimble_model_metadata_count(const thimble_model* model, uint64_t* count,
                                                        thimble_error* error);
THIMBLE_API thimble_status thimble_model_metadata_get(const thimble_model* model, uint64_t index, char* key,
                                                      uint64_t key_capacity, uint64_t* key_length, char* value,
                                                      uint64_t value_capacity, uint64_t* value_length,
                                                      thimble_error* error);

typedef struct thimble_tensor_info {
  uint32_t struct_size;
  uint32_t dims;
  uint64_t shape[4]; /* fastest first */
  uint64_t bytes;
  char name[72];
  char type[16];
} thimble_tensor_info;

THIMBLE_API thimble_status thimble_model_tensor_count(const thimble_model* model, uint64_t* count,
                                                      thimble_error* error);
THIMBLE_API thimble_status thimble_model_tensor_get(const thimble_model* model, uint64_t index,
                                                    thimble_tensor_info* info, thimble_error* error);

/* ---- heads: the retainer of a model, in a sidecar file that belongs to it ---- */

typedef struct thimble_heads thimble_heads;

/* Open the heads and check them against the model. Refused with THIMBLE_MISMATCH when they were trained for another. */
THIMBLE_API thimble_status thimble_heads_open(const thimble_model* model, const char* path, thimble_heads** heads,
                                              thimble_error* error);
THIMBLE_API thimble_status thimble_heads_open_fd(const thimble_model* model, int32_t descriptor,
                                                 thimble_heads** heads, thimble_error* error);
THIMBLE_API thimble_status thimble_heads_open_buffer(const thimble_model* model, const void* data, uint64_t size,
                                                     thimble_heads** heads, thimble_error* error);
THIMBLE_API void thimble_heads_free(thimble_heads* heads);
/* The retention that they serve: THIMBLE_RETENTION_LOCRET; KEYDIFF where their training found that better than their scores
 * (the key retainer.retention says so); or ADORE for its controller. */
THIMBLE_API int32_t thimble_heads_retention(const thimble_heads* heads);

/* Write a published retainer as a file of heads for this model. `input` is a checkpoint of torch.save (Locret, Fast KVzip),
 * of which nothing is run, or a file of safetensors or the folder it was published in (KVzap). `kind` is "locret", "linear",
 * "mlp" or "sink"; NULL: the names of the tensors decide. `output` must not exist. THIMBLE_MISMATCH, saying what differs, when
 * the retainer has other shapes than the model asks for; which model it was trained for such files do not say. */
THIMBLE_API thimble_status thimble_heads_import(const thimble_model* model, const char* input, const char* kind,
                                                const char* output, thimble_error* error);
/* What a file of heads says about itself, as a JSON object: "name", "kind", "input", "target" (what the scores estimate),
 * "architecture", "layers", "heads", "kv_heads", "head_dim" and "fingerprint" of its model ("" where the file has none),
 * "parameters", "file_bytes", "metadata" (an object of all keys), and where the file has them "trained", an object of what it was
 * trained on ("texts", "tokens", "steps", "seed", "data"), and "shares", the part of the pools that each KV head gets, 1 on
 * average, as an array for each layer, of null where the layer has a window. With a model, which may be NULL, also "fits", and
 * where that is false "misfit", the sentence that thimble_heads_open would refuse it with. Two-call. */
THIMBLE_API thimble_status thimble_heads_info(const char* path, const thimble_model* model, char* json,
                                              uint64_t capacity, uint64_t* length, thimble_error* error);

/* ---- making heads: training, step by step ---- */

typedef struct thimble_training thimble_training;

typedef struct thimble_training_options {
  uint32_t struct_size;
  uint32_t threads;         /* worker threads, of a card's host too; 0: one for each core that the process may use */
  const char* device;       /* "cpu" (NULL), or another (thimble_device_info), "auto": the best one */
  const char* const* data;  /* paths: plain texts in UTF-8, books for example, in which facts are hidden; JSON lines of
                             * prompts and answers (docs/retainers.md) */
  uint32_t data_count;
  uint32_t texts;           /* that are read to learn from; 0: 16 */
  uint32_t steps;           /* of the optimizer; 0: 300 */
  uint32_t equal_shares;    /* 1: every KV head gets as much of the pools as the others; 0: shares are counted, and written
                             * where the check finds them better than equal pools */
  const char* output;       /* the file of heads to write; must not exist */
  const char* heads;        /* NULL: heads are trained. Else this file is written anew, with shares where they help */
  const char* kind;         /* "mlp" (NULL), "locret", "linear", "sink"; "adore": a controller, without target and shares */
  const char* target;       /* what scores estimate: "log_prob" (NULL), "max_logit" (no sink), "log_kvzip_plus", "kvzip"; "auto":
                             * which of them answers most after a short training */
  uint64_t seed;
  uint64_t memory_bytes;    /* all that training may take; 0: a GiB for what is kept of the texts, beside reading them; of
                             * "linear" what it needs */
  uint64_t text_tokens;     /* of a text, 1024 at least; 0: 6144; two thirds of the model's context at most, with what is asked
                             * behind it half as many again */
} thimble_training_options;

THIMBLE_API void thimble_training_options_init(thimble_training_options* options, uint32_t struct_size);

enum { /* what is being done */
  THIMBLE_TRAINING_READING = 0,  /* tokens */
  THIMBLE_TRAINING_FITTING = 1,  /* steps */
  THIMBLE_TRAINING_CHECKING = 2, /* readings of texts that were held out; the output is written */
  THIMBLE_TRAINING_DONE = 3,
  THIMBLE_TRAINING_TRYING = 4    /* targets; before all else, for the target "auto" */
};

typedef struct thimble_training_progress {
  uint32_t struct_size;
  int32_t phase;       /* THIMBLE_TRAINING_* */
  uint64_t done, total; /* of the phase, in its unit */
  double per_second;   /* since the phase began */
  double loss;         /* of the last step of fitting */
  double recall;       /* after a few steps of fitting, the share of the questions about a held-out text that are answered
                          with an eighth of the memory, or where `dense` is below a half, the part of the right answers'
                          probability that is kept; of all others -1 */
  double dense;        /* the share of the questions about held-out texts that is answered with nothing dropped, known before
                          anything is fitted; below a half the check compares probabilities of right answers; -1: not known yet */
} thimble_training_progress;

/* Begin, or go on with what `output`.partial holds of the same training. Texts, runs and sums are the same for a seed,
 * whatever the number of threads. */
THIMBLE_API thimble_status thimble_training_create(const thimble_model* model, const thimble_training_options* options,
                                                   thimble_training** training, thimble_error* error);
/* Read a chunk, make a step, or read a text to check; until the phase is DONE. What was done is kept in `output`.partial:
 * each text when it was read, the fit every minute. `progress` may be NULL. */
THIMBLE_API thimble_status thimble_training_step(thimble_training* training, thimble_training_progress* progress,
                                                 thimble_error* error);
/* Keep the fit in `output`.partial now. */
THIMBLE_API thimble_status thimble_training_save(thimble_training* training, thimble_error* error);
/* What the check found, as a JSON object. Of retainers "target", of "auto" also "tried" (an array of "target" and "recall",
 * null where it could not be tried), "questions", "dense" (the share answered where all is kept), "dense_perplexity" (of the
 * right answers there), "measure" ("answers", or where "dense" is below a half "probability"), "recall" (an array of "part": 8
 * for an eighth of the memory, and of "heads", "window", "keydiff" and, where shares were counted, "equal" and "counted" the
 * share that is answered, or the part of a right token's probability that is kept, and then also "heads_perplexity" and so on,
 * null where it is infinite), "shares" ("counted" where they were better than "equal" ones and are written), "retention"
 * ("keydiff" where that was better than the scores, else "locret"), "seconds" (where the time of this process went: "trying",
 * "reading", "labels", "fitting", "checking"), "verdict" (sentences). Of a controller "kind" ("adore"), "step" (of the state
 * that was taken), "queries" (of held-out texts), and of these and the tokens before them "base_rate" (that are among those
 * attended to most), "accuracy", "f1" (of probabilities above a half), "f1_of_best" (of the best scores), "f1_of_last" (of as
 * many recent tokens), and "seconds" and "verdict" as above. THIMBLE_INVALID_ARGUMENT before DONE. Two-call. */
THIMBLE_API thimble_status thimble_training_report(const thimble_training* training, char* json, uint64_t capacity,
                                                   uint64_t* length, thimble_error* error);
THIMBLE_API void thimble_training_free(thimble_training* training);

/* ---- text ---- */

#define THIMBLE_TOKENIZE_ADD_BOS 1u       /* put BOS in front where the model asks for one */
#define THIMBLE_TOKENIZE_PARSE_SPECIAL 2u /* the text of control tokens becomes their ids: for prompts that you or
                                             thimble_chat_render wrote, and not for documents */
#define THIMBLE_TOKENIZE_CONTINUE 4u      /* the text goes on after one that was cut by thimble_tokenize_cut */

/* Text to token ids; any bytes are accepted. `offsets`, when not NULL, gets where each token starts in the text, in bytes.
 * Two-call: `capacity` is that of ids and of offsets. */
THIMBLE_API thimble_status thimble_tokenize(const thimble_model* model, const char* text, uint64_t length,
                                            uint32_t flags, int32_t* ids, uint64_t* offsets, uint64_t capacity,
                                            uint64_t* count, thimble_error* error);

/* For text that comes in pieces, and is never held as a whole: how many bytes from its beginning become the same ids by
 * themselves, with the rest tokenised after them with CONTINUE, as all of it at once. It is the last place where that is sure,
 * whatever follows: behind a word, in front of white space. 0 where there is none; then wait for more text, or for its end. */
THIMBLE_API uint64_t thimble_tokenize_cut(const thimble_model* model, const char* text, uint64_t length);

#define THIMBLE_DETOKENIZE_SPECIAL 1u /* control tokens are written as their text; else left out */

/* Token ids to text, cut at whole code points (what is none becomes U+FFFD). Two-call. */
THIMBLE_API thimble_status thimble_detokenize(const thimble_model* model, const int32_t* ids, uint64_t count,
                                              uint32_t flags, char* text, uint64_t capacity, uint64_t* length,
                                              thimble_error* error);

/* The bytes of one token, maybe part of a code point; of a control token, its text. Two-call. */
THIMBLE_API thimble_status thimble_token_bytes(const thimble_model* model, int32_t id, char* bytes, uint64_t capacity,
                                               uint64_t* length, thimble_error* error);

/* 1 where this token ends a generation (end of text, of turn, of message), else 0. */
THIMBLE_API int32_t thimble_token_ends(const thimble_model* model, int32_t id);

typedef struct thimble_message {
  const char* role; /* "system", "user", "assistant"; what else there is, the template knows */
  const char* content;
  uint64_t content_length;
} thimble_message;

#define THIMBLE_CHAT_ADD_ASSISTANT 1u /* end where the assistant's answer begins */
#define THIMBLE_CHAT_CONTINUE 2u      /* the messages go on after an answer that the session already holds */
#define THIMBLE_CHAT_PARSE_CONTENT 4u /* what spells a control token in a message, <|im_end|> say, is one: for messages you
                                         wrote. Without it, it stays text: thimble_tokenize does not parse what has U+FDD0, a
                                         noncharacter, in front of it, and leaves that out */

/* Messages as the model was taught to read them, to be tokenised with THIMBLE_TOKENIZE_PARSE_SPECIAL (and ADD_BOS for the
 * first). With `format` NULL the chat template of the model's file is run (Jinja, in a box: it sees the messages alone, and
 * its time, memory and output are bounded); where it cannot be, a known format that is recognised in it serves. `format`
 * "chatml", "llama3", "llama2", "phi3", "mistral", "zephyr" or "thimble" writes that one, and the name of a further template
 * of the file, "tool_use" for example, runs it. THIMBLE_UNSUPPORTED when the template can neither be run nor is known,
 * THIMBLE_INVALID_ARGUMENT when it refuses the messages, in its own words. Two-call.
 *
 * THIMBLE_CHAT_CONTINUE gives the text for a session that holds earlier messages, an answer and its end-of-turn token: what the
 * template writes after that answer, so that the session reads new text only. What it holds stays as it is, though many
 * templates write earlier turns otherwise when they render a whole conversation (they drop an answer's thoughts, say). A
 * template that gives no text which could follow is THIMBLE_UNSUPPORTED: begin afresh with all messages. */
THIMBLE_API thimble_status thimble_chat_text(const thimble_model* model, const char* format,
                                             const thimble_message* messages, uint64_t count, uint32_t flags,
                                             char* text, uint64_t capacity, uint64_t* length, thimble_error* error);

typedef struct thimble_chat_options {
  uint32_t struct_size;
  uint32_t flags;                  /* THIMBLE_CHAT_* */
  const char* format;              /* NULL: as the model's file says; else the name of a further template of the file, or of
                                      a known format */
  const char* source;              /* a template in Jinja to run instead of the model's; NULL: none */
  uint64_t source_length;
  const thimble_message* messages;
  uint64_t message_count;
  const char* messages_json;       /* instead of `messages`: an array of objects with "role", "content" and what else the
                                      template reads, "tool_calls" or "reasoning_content" for example; NULL: none */
  uint64_t messages_json_length;
  const char* variables;           /* a JSON object of what the template reads besides: "tools" (an array), "enable_thinking",
                                      "documents"; these go before Thimble's own (bos_token, eos_token,
                                      add_generation_prompt, and none as tools and documents). NULL: none */
  uint64_t variables_length;
  uint64_t held;                   /* so many messages, the last of them an answer with its end-of-turn token, the session
                                      holds already: as CONTINUE, but for messages that are given */
  int64_t time;                    /* what the template takes for now, seconds since 1970 of the clock on the wall; 0: now */
} thimble_chat_options;

THIMBLE_API void thimble_chat_options_init(thimble_chat_options* options, uint32_t struct_size);

/* thimble_chat_text with all that a template can read. Known formats take roles and contents alone (thoughts of earlier answers
 * are left out), and no variables. Of messages that a template does not take, some are written otherwise: system messages, the
 * ids and arguments of calls, thoughts next to calls (docs/chat-templates.md). */
THIMBLE_API thimble_status thimble_chat_render(const thimble_model* model, const thimble_chat_options* options,
                                               char* text, uint64_t capacity, uint64_t* length, thimble_error* error);

/* ---- session options ---- */

#define THIMBLE_DEFAULT UINT32_MAX /* for the fields that say so */

enum { /* retention: which entries stay when a pool is over its size */
  THIMBLE_RETENTION_DEFAULT = -1, /* what options.heads are for (thimble_heads_retention) where it is set, else NONE */
  THIMBLE_RETENTION_NONE = 0,   /* all; a full pool is THIMBLE_CONTEXT_FULL */
  THIMBLE_RETENTION_WINDOW = 1, /* the first protect_init (sinks) and the most recent */
  THIMBLE_RETENTION_RANDOM = 2, /* random ones, for comparison */
  THIMBLE_RETENTION_LOCRET = 3, /* those that options.heads, a retainer of any kind, scores highest */
  THIMBLE_RETENTION_KEYDIFF = 4, /* those whose keys are least like the mean of all; needs no training, and takes of options.heads
                                    how they share the pool */
  THIMBLE_RETENTION_TOVA = 5, /* those that the last token read attends to most, the same in all heads of a layer; no training */
  THIMBLE_RETENTION_REREAD = 6, /* those that their own text attends to most when each chunk is read twice; no training, twice the
                                   time */
  THIMBLE_RETENTION_ADORE = 7 /* the same in all layers and heads: those that options.heads, ADORE's controller, scores highest;
                                 each generated token may read `rebuild` released ones once more. Takes no selection */
};
enum { THIMBLE_RETAIN_PER_HEAD = 0, THIMBLE_RETAIN_LAYER = 1 }; /* each KV head its own entries, or all of a layer the same */
enum { /* selection: which entries a generated token attends to */
  THIMBLE_SELECTION_DENSE = 0,       /* all that the pool holds */
  THIMBLE_SELECTION_TOKENSELECT = 1, /* sinks, the select_k that the heads vote for, the most recent */
  THIMBLE_SELECTION_QUEST = 2        /* the pages of select_page entries, select_k in all, whose keys may match best */
};
/* The names of policies as the command takes them ("locret", "tokenselect"), by their numbers above; NULL for a number that
   none has, so that counting up from 0 lists them all. */
THIMBLE_API const char* thimble_retention_name(int32_t retention);
THIMBLE_API const char* thimble_selection_name(int32_t selection);
enum { THIMBLE_VOTE_AUTO = 0, THIMBLE_VOTE_LAYER = 1, THIMBLE_VOTE_GROUP = 2 }; /* auto: group with a retention, else layer */
enum { THIMBLE_POSITIONS_LIST = 0, THIMBLE_POSITIONS_ORIGINAL = 1 }; /* rotary position: index among the attended, or in the text */
enum { THIMBLE_SCALE_NONE = 0, THIMBLE_SCALE_SQRT = 1 };             /* vote scores as published, or divided by sqrt(head_dim) */

typedef struct thimble_progress {
  uint32_t struct_size;
  uint32_t pool_entries;  /* entries in every head's pool now */
  uint32_t pool_capacity;
  uint32_t reserved;
  uint64_t done, total;   /* tokens read, and read or waiting */
  double tokens_per_second; /* since this call began */
} thimble_progress;

typedef void (*thimble_progress_fn)(void* user, const thimble_progress* progress);

typedef struct thimble_session_options {
  uint32_t struct_size;
  uint32_t threads;             /* cpu: worker threads; 0: one for each core that the process may use */
  const char* device;           /* "auto" (NULL), "cpu", ... */
  const thimble_heads* heads;   /* for THIMBLE_RETENTION_LOCRET and ADORE; KEYDIFF takes how they share the pool */
  uint64_t budget_bytes;        /* all that this session and its clones may allocate; 0: no limit */
  int32_t retention;            /* THIMBLE_RETENTION_* */
  int32_t retain_scope;         /* THIMBLE_RETAIN_* */
  uint32_t pool;                /* entries that a head keeps; 0: what the heads were trained for, or what fits the budget */
  uint32_t chunk;               /* tokens read at a time; 0: what the heads were trained for, or 1024; ADORE
                                   makes it rebuild + 1 at least */
  uint32_t stabilizers;         /* most recent entries kept between chunks; THIMBLE_DEFAULT: with heads the share of the pool
                                   that they were trained with (a quarter where they do not say), 16 for ADORE, which keeps
                                   them always, else 0 */
  uint32_t local;               /* last tokens of a prompt, never evicted with it; THIMBLE_DEFAULT: 100 with retention, 0 for ADORE and
                                   without */
  uint32_t protect_init;        /* first entries never evicted; THIMBLE_DEFAULT: what the file of heads says, else 4 */
  uint32_t max_new;             /* room for generated tokens before the next eviction; 0: 256; local and it make up 64 at least; of
                                   no meaning for ADORE, which evicts with every token */
  int32_t selection;            /* THIMBLE_SELECTION_* */
  uint32_t select_k;            /* 0: 2048 */
  uint32_t select_init;         /* TOKENSELECT; THIMBLE_DEFAULT: 128 */
  uint32_t select_local;        /* TOKENSELECT; 0: 512 */
  float select_theta;           /* selection cache: reuse above this cosine; >= 1 (default) never, -1 always */
  int32_t vote;                 /* THIMBLE_VOTE_* */
  int32_t vote_scale;           /* THIMBLE_SCALE_* */
  uint32_t vote_window;         /* max-pool over votes, in tokens; 0: none */
  uint32_t select_prefill;      /* TOKENSELECT; 1: select while reading, too, select_local tokens at a time at most; 0: read
                                   densely; THIMBLE_DEFAULT: 1 without retention, else 0 */
  int32_t positions;            /* THIMBLE_POSITIONS_*; QUEST is always ORIGINAL */
  uint32_t context;             /* bound on positions; 0: the model's for ORIGINAL and ADORE, else none. A model with two sets of rotary
                                   factors (longrope) takes the short ones where a context is given that they were made
                                   for, else the long ones: policies to be compared get the same context */
  uint32_t seed;                /* of THIMBLE_RETENTION_RANDOM */
  thimble_progress_fn progress; /* called after each chunk; NULL: none */
  void* progress_user;
  uint32_t select_page;         /* QUEST: entries of a page; 0: 16 */
  uint32_t dense_layers;        /* QUEST: first layers that attend to everything; THIMBLE_DEFAULT: 2 */
  uint32_t watch;               /* 1: keep the last token's queries of every layer, by which thimble_session_kept_by_position
                                   tells what it attended to, and room to do so (in the plan); 0 (default): not */
  uint32_t rebuild;             /* ADORE: released tokens that a generated one reads again, at most 63; 0: none */
  uint32_t rebuild_every;       /* ADORE: generated tokens from one that does so to the next; 0: 1 */
  uint32_t reserved;
} thimble_session_options;

/* Fills in the defaults. `struct_size` is sizeof *options. */
THIMBLE_API void thimble_session_options_init(thimble_session_options* options, uint32_t struct_size);

/* ---- plan: what a session would take, without taking it ---- */

typedef struct thimble_memory {
  uint32_t struct_size;
  uint32_t pool;       /* entries that a head keeps after an eviction */
  uint32_t capacity;   /* entries that the largest head has room for: pool + local + max_new where all are equal */
  uint32_t chunk;      /* tokens read at a time */
  uint64_t budget;     /* 0: no limit */
  uint64_t weights;    /* weights placed on the device (0 where they are read from the mapping) */
  uint64_t shared;     /* of `weights`, what other sessions already placed; not counted again */
  uint64_t pool_bytes; /* keys, values, positions, scores */
  uint64_t view;       /* keys and values of one layer as prefill attention reads them */
  uint64_t workspace;  /* activations and scratch */
  uint64_t io;         /* tokens, logits, sampler */
  uint64_t fixed;      /* the device's own: threads, context, libraries */
  uint64_t total;      /* all of the above, shared weights left out: what the budget covers */
  uint64_t allocated;  /* what this session and its clones hold now, added up from what allocators gave; 0 in a plan. Of
                          recorded programs, what the free memory of an NVIDIA card shrank by meanwhile; what a Vulkan
                          driver takes for them it does not tell, so that is in `fixed` and `total` alone */
  uint64_t dense_bytes_per_token; /* what a dense f16 cache would take for every token of the text */
  uint64_t mapped;          /* the files of model and heads: not allocated, shared with the system's page cache */
  uint64_t mapped_resident; /* of which in memory now */
  uint64_t host_tables;     /* vocabulary and tensor tables of the model */
  uint32_t largest_position; /* the largest rotary position that reading uses; UINT32_MAX: grows with the text */
  uint32_t selection_pays;   /* 1: selecting reads fewer bytes than attending to the whole pool */
} thimble_memory;

/* What a session with these options takes. With a budget and pool 0, the largest pool that fits. THIMBLE_BUDGET says how
 * many bytes are missing and what would fit. Allocates nothing that outlives the call. */
THIMBLE_API thimble_status thimble_session_plan(const thimble_model* model, const thimble_session_options* options,
                                                thimble_memory* memory, thimble_error* error);

/* How many entries each KV head keeps in such a session, a number for each head of the first layer and so on. They differ where
 * the heads' file divides the pools: then they are those of a text that is long enough for all shares. 0 where the layer has a
 * window. Two-call. */
THIMBLE_API thimble_status thimble_session_plan_heads(const thimble_model* model, const thimble_session_options* options,
                                                      uint32_t* keeps, uint64_t capacity, uint64_t* count,
                                                      thimble_error* error);

/* The inverse question: the largest pool for options.budget_bytes, whatever options.pool says. */
THIMBLE_API thimble_status thimble_session_largest_pool(const thimble_model* model,
                                                        const thimble_session_options* options, uint32_t* pool,
                                                        thimble_error* error);

/* ---- sessions ---- */

typedef struct thimble_session thimble_session;

/* Make a session; everything it will ever need is allocated here. Keep the heads until then only. */
THIMBLE_API thimble_status thimble_session_create(const thimble_model* model, const thimble_session_options* options,
                                                  thimble_session** session, thimble_error* error);
THIMBLE_API void thimble_session_free(thimble_session* session);

/* Append tokens to the prompt and read as many chunks as are surely complete: where chunks end depends on the text alone,
 * not on how calls cut it. After THIMBLE_INTERRUPTED a part was queued or read: repeat the call with the same tokens and
 * it goes on where it stopped; any other call abandons the rest, and one with other tokens, even if only in what was not read
 * yet, is another call. After THIMBLE_CONTEXT_FULL, or THIMBLE_INVALID_ARGUMENT for an id that is not in the vocabulary, nothing
 * of this call was queued. */
THIMBLE_API thimble_status thimble_session_feed(thimble_session* session, const int32_t* tokens, uint64_t count,
                                                thimble_error* error);
/* End the prompt: read all that waits. The logits of the next token are there afterwards. With a retention that evicts, a
 * prompt leaves `pool` entries and its last `local` tokens; whatever would then pass the capacity, a further turn or generated
 * tokens, first evicts down to `pool` again. */
THIMBLE_API thimble_status thimble_session_flush(thimble_session* session, thimble_error* error);
/* Flush, sample the next token, append it, and give it. The caller decides whether it ends the answer
 * (thimble_token_ends). After THIMBLE_INTERRUPTED repeat the call: a token that was sampled stays in the stream, and only a
 * repeated step gives it. */
THIMBLE_API thimble_status thimble_session_step(thimble_session* session, int32_t* token, thimble_error* error);
/* The same with a token that the caller chose. */
THIMBLE_API thimble_status thimble_session_accept(thimble_session* session, int32_t token, thimble_error* error);
/* The logits of the next token, `count` floats, owned by the session and valid until its next call: one for each token of the
 * vocabulary. That is fewer than the model's `vocab` where the file's matrices have rows that no token has; such ids are never
 * generated, and their log-probability is minus infinity. A token that was interrupted is finished first; its call may still be
 * repeated. */
THIMBLE_API thimble_status thimble_session_logits(thimble_session* session, const float** logits, uint32_t* count,
                                                  thimble_error* error);
/* Flush, then append these tokens and give the natural logarithm of each one's probability after all before it:
 * logprobs[count]; with a selection one by one, as stepping does. After THIMBLE_INTERRUPTED repeat the call with the same arguments. */
THIMBLE_API thimble_status thimble_session_score(thimble_session* session, const int32_t* tokens, uint64_t count,
                                                 float* logprobs, thimble_error* error);
/* The text of the next token of an answer: bytes of an unfinished code point are held back until it is whole, and control
 * tokens have no text. Two-call; the token is taken only on success. feed, rewind and reset drop what is held back. */
THIMBLE_API thimble_status thimble_session_text(thimble_session* session, int32_t token, char* text, uint64_t capacity,
                                                uint64_t* length, thimble_error* error);
/* Forget everything from this position on (tokens of the stream, 0: all); the sampler is where it was then.
 * THIMBLE_CANNOT_REWIND when entries were evicted since. Feed at least one token before the next step. */
THIMBLE_API thimble_status thimble_session_rewind(thimble_session* session, uint64_t position, thimble_error* error);
/* A session that goes on from the same state: one reading serves many questions. It counts towards the same budget, with
 * pool_bytes + view + workspace + io of the plan. */
THIMBLE_API thimble_status thimble_session_clone(thimble_session* session, thimble_session** clone,
                                                 thimble_error* error);
/* Start afresh: as after create, sampler settings kept. */
THIMBLE_API thimble_status thimble_session_reset(thimble_session* session, thimble_error* error);

/* Write all that the session holds to a file: pool, positions, scores, waiting tokens, sampler, policies, and what tells whether
 * another session may take it: fingerprints of model and heads, the settings. Written beside (PATH.part) and renamed: a kill at
 * any moment leaves the old file or the new one. `note` (may be NULL) are bytes of the caller's that travel with it, the messages
 * of a conversation or the ids of the text, for example. After THIMBLE_INTERRUPTED the old file is there; repeat the call. Takes
 * up to 4 MiB beside the budget on devices with memory of their own, and room for note, settings and waiting tokens. */
THIMBLE_API thimble_status thimble_session_save(thimble_session* session, const char* path, const void* note, uint64_t note_size,
                                                thimble_error* error);
/* The same from where an open descriptor stands, which stays open; on Windows in binary mode. */
THIMBLE_API thimble_status thimble_session_save_fd(thimble_session* session, int32_t descriptor, const void* note,
                                                   uint64_t note_size, thimble_error* error);
/* Take the state of a saved session, whatever device it was saved on. The session must be made with the settings that the saved
 * one had (device, threads, budget, progress and watch may differ); else THIMBLE_MISMATCH names the first difference. A damaged file is
 * THIMBLE_FORMAT. On failure the session is as before; after THIMBLE_DEVICE_LOST it holds nothing. */
THIMBLE_API thimble_status thimble_session_restore(thimble_session* session, const char* path, thimble_error* error);
/* The same with the whole file behind an open descriptor, which stays open. */
THIMBLE_API thimble_status thimble_session_restore_fd(thimble_session* session, int32_t descriptor, thimble_error* error);
/* What a session file says of itself, as a JSON object: position, entries, settings (docs/sessions.md). Two-call. Reads the file's
 * head alone, as thimble_session_file_note does. */
THIMBLE_API thimble_status thimble_session_file_info(const char* path, char* json, uint64_t capacity, uint64_t* length,
                                                     thimble_error* error);
/* The caller's bytes in it. Two-call. */
THIMBLE_API thimble_status thimble_session_file_note(const char* path, void* note, uint64_t capacity, uint64_t* length,
                                                     thimble_error* error);

/* Give memory back: evict down to `pool` entries a head (as thimble_session_options.pool), and free what is then behind them
 * where the device can (cpu: whole pages). *freed: bytes. The session is then one that was made with that pool. THIMBLE_UNSUPPORTED,
 * one sentence, where it cannot; nothing changed then. After THIMBLE_INTERRUPTED repeat the call. */
THIMBLE_API thimble_status thimble_session_shrink(thimble_session* session, uint32_t pool, uint64_t* freed, thimble_error* error);

/* Ask the session to stop; from any thread, also from a signal handler. The running call, or else the next one, returns
 * THIMBLE_INTERRUPTED: on cards within the time of one layer of a chunk, or of a token; on the CPU within about 25 ms of an
 * idle processor. The call after that goes on, bit for bit as if nothing had happened. Looking does not abandon
 * the interrupted call: it may be repeated after logits, kept, kept_by_position, stats, memory, and text. */
THIMBLE_API void thimble_session_interrupt(thimble_session* session);

/* The original positions that a KV head still holds, ascending; heads may hold different numbers of them. A chunk or token that
 * was interrupted is finished first; its call may still be repeated. Two-call. */
THIMBLE_API thimble_status thimble_session_kept(thimble_session* session, uint32_t layer, uint32_t kv_head,
                                                int32_t* positions, uint64_t capacity, uint64_t* count,
                                                thimble_error* error);
/* What is still held, and what the last token that was read made of it, by original position. kept[i]: the share, 0 to 1, of
 * the (layer, KV head) pairs that hold position i; layers with a window are left out. The device adds it up, for 32768
 * positions of the text at a time: it reads all positions held, and hands 4 bytes for each of the text to the host.
 * attended[i]: the attention that the last token paid to position i, mean over all layers and heads, made to sum to 1 where
 * a model's attention sinks take a share. It is computed when it is asked for: from the keys that the last token attended
 * to, read once more (CPU) or twice (CUDA, Vulkan), and then added up likewise, which took 0.2 to 1.5 times the time of a whole
 * step (docs/benchmarks.md). A token that was generated under a selection attended to what was listed alone.
 * Either may be NULL. *count is the number of positions read; tokens that wait are not among them. A chunk or token that was
 * interrupted is finished first. Two-call: `capacity` is that of both, in positions.
 * THIMBLE_INVALID_ARGUMENT for `attended` without options.watch, and while it is not known: before a token was read, after a
 * rewind to before the last one, and after an eviction until the next is read or generated (a prompt's last `local` tokens
 * are read after that; a chunk in its middle is evicted from at once). With ADORE, where every token evicts, it is never known
 * once the pool is full. A clone knows what its session knew, unless that was made smaller; a restored session does not. */
THIMBLE_API thimble_status thimble_session_kept_by_position(thimble_session* session, float* kept, float* attended,
                                                            uint64_t capacity, uint64_t* count,
                                                            thimble_error* error);

typedef struct thimble_sampler_options {
  uint32_t struct_size;
  float temperature;    /* 0 (default): always the most likely token */
  uint32_t top_k;       /* 0: all; default 40 */
  float top_p;          /* 1: all; default 0.95 */
  float min_p;          /* 0: all; default 0.05 */
  float repeat_penalty; /* 1 (default): none */
  uint32_t repeat_last; /* tokens that the penalty looks at; default 64, at most 4096 */
  uint32_t reserved;
  uint64_t seed;        /* default 0 */
} thimble_sampler_options;

THIMBLE_API void thimble_sampler_options_init(thimble_sampler_options* options, uint32_t struct_size);
THIMBLE_API thimble_status thimble_session_set_sampler(thimble_session* session,
                                                       const thimble_sampler_options* options, thimble_error* error);

/* What the session holds, to the byte; `allocated` counts what was really allocated. */
THIMBLE_API thimble_status thimble_session_memory(thimble_session* session, thimble_memory* memory,
                                                  thimble_error* error);

typedef struct thimble_stats {
  uint32_t struct_size;
  uint32_t entries;         /* in the pool of the head that holds most */
  uint64_t position;        /* tokens of the stream so far, read or waiting */
  uint64_t waiting;         /* of which not read yet, or not wholly where an interrupt stopped it */
  uint64_t evicted;         /* entries that a head has dropped, mean over layers and heads */
  uint64_t evictions;       /* times that any were */
  uint64_t generated;       /* tokens from step and accept */
  uint64_t selected;        /* entries that the last generated token attended to, mean over layers and heads */
  uint64_t cache_hits, cache_misses; /* selection cache, summed over layers */
  uint64_t prefill_tokens;
  double prefill_seconds, decode_seconds;
  /* What those seconds must at least have moved and computed: each weight and each attended entry once a step; two
     operations to a multiplication with addition. */
  double prefill_bytes, prefill_flop, decode_bytes, decode_flop;
  uint64_t saturated;       /* keys' and values' numbers that were beyond f16's range and became its largest */
} thimble_stats;

THIMBLE_API thimble_status thimble_session_stats(thimble_session* session, thimble_stats* stats, thimble_error* error);

#ifdef __cplusplus
}
#endif

#endif
