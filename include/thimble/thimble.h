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
 *    except the counts of two-call functions (below). The caller owns `error`, which may be NULL. On failure it holds the
 *    code and one sentence that says what is wrong and what to do. Error sentences, log messages and names are safe to
 *    print: control characters from a file appear as "\u001b".
 *  - Nothing throws, aborts, exits, or prints. Nothing is sent anywhere.
 *  - Option structs start with their size: call the *_init function, then change fields. A program built with an older
 *    header runs with a newer library; fields that the program does not know keep their defaults. NULL options mean
 *    defaults. Structs that a call fills in start with their size too; set it before the call.
 *  - Text is UTF-8 with an explicit length and may hold NUL bytes; paths and names are NUL-terminated UTF-8 everywhere.
 *  - Two-call functions (a buffer, its capacity, an output count) write at most `capacity` elements and always set the
 *    count to what is needed; when it is more than the capacity they return THIMBLE_INVALID_ARGUMENT. Call with capacity
 *    0 and a NULL buffer to ask for the size.
 *  - Models and heads are immutable: any number of threads and sessions may use one. One thread at a time may use a
 *    session; a second one gets THIMBLE_BUSY. Only thimble_session_interrupt may be called from any thread.
 *  - Callbacks run on the calling thread, inside the call. They must not call into the same session except to interrupt.
 *  - Free functions accept NULL. Free a model after its sessions and heads; other handles may be freed in any order.
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
/* The number grows when a function or a field is added. Programs built with a smaller number keep working. */
#define THIMBLE_ABI 14

/* The version of the library that runs ("0.1.0"), which may differ from the version of this header. Static text. */
THIMBLE_API const char* thimble_version(void);
/* THIMBLE_ABI of the library that runs, which may differ from that of this header. */
THIMBLE_API uint32_t thimble_abi_version(void);
/* What was built in, for bug reports: "thimble 0.1.0, g++ 12.2.0, cpu". Static text. */
THIMBLE_API const char* thimble_build_info(void);

/* ---- errors ---- */

typedef int32_t thimble_status;
enum {
  THIMBLE_OK = 0,
  THIMBLE_INVALID_ARGUMENT = 10, /* an argument is invalid, or two options contradict each other */
  THIMBLE_UNSUPPORTED = 11,      /* this build, device or model cannot do it */
  THIMBLE_IO = 20,               /* a file could not be read or written */
  THIMBLE_FORMAT = 21,           /* a file is damaged or of another format */
  THIMBLE_MISMATCH = 22,         /* two files do not belong together */
  THIMBLE_BUDGET = 30,           /* the budget is too small; error.bytes_missing says by how much */
  THIMBLE_OUT_OF_MEMORY = 31,    /* the system or the device has no more memory */
  THIMBLE_CONTEXT_FULL = 40,     /* the pool is full and nothing may be evicted (context_length_exceeded) */
  THIMBLE_CANNOT_REWIND = 41,    /* entries after that position were evicted; nothing changed */
  THIMBLE_INTERRUPTED = 50,      /* thimble_session_interrupt was called; repeat the call to continue */
  THIMBLE_BUSY = 51,             /* another call on this session is running; nothing changed */
  THIMBLE_DEVICE_LOST = 60,      /* the device stopped working; free the session and create a new one */
  THIMBLE_NOT_FINITE = 61,       /* the logits were NaN or infinite; rewind to continue from an earlier position */
  THIMBLE_INTERNAL = 90          /* a defect in Thimble; please report it */
};

/* The name of a code without its prefix: "BUDGET". Never NULL; static text. */
THIMBLE_API const char* thimble_status_name(thimble_status status);
/* One sentence that explains a code in general. Never NULL; static text. */
THIMBLE_API const char* thimble_status_text(thimble_status status);

/* Why a call failed. The caller owns it. */
typedef struct thimble_error {
  uint32_t struct_size;   /* sizeof(thimble_error), set before the call; with 0 no message is written */
  thimble_status code;
  uint64_t bytes_missing; /* THIMBLE_BUDGET: bytes that the budget lacks; otherwise 0 */
  char message[496];      /* UTF-8, NUL-terminated */
} thimble_error;

/* ---- devices ---- */

/* A device that can run sessions. */
typedef struct thimble_device_info {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t total_bytes;  /* memory of the device, in bytes */
  uint64_t free_bytes;   /* memory that is free now, in bytes */
  char name[32];         /* the value for options.device: "cpu", "cuda:0", "vulkan:0" */
  char description[192]; /* the device's name for people */
} thimble_device_info;

/* The number of devices. Looking for devices has lasting effects: a call that uses a CUDA device makes that device
 * the calling thread's current one, and its context stays until the process ends. Vulkan drivers also stay loaded
 * once they were asked for devices. */
THIMBLE_API thimble_status thimble_device_count(uint32_t* count, thimble_error* error);
/* Device `index`, from 0 to thimble_device_count() - 1. */
THIMBLE_API thimble_status thimble_device_get(uint32_t index, thimble_device_info* info, thimble_error* error);

/* Measured rates of a device. */
typedef struct thimble_device_rates {
  uint32_t struct_size;
  uint32_t reserved;
  double bytes_per_second; /* memory: a large copy, counting bytes read and bytes written */
  double flop_per_second;  /* matrix units, at the precision that prefill multiplies with */
} thimble_device_rates;

/* Measure what a device can do, as a reference for the figures of a session. A call takes about a second and frees
 * the memory it used. `device` and `threads` are as in thimble_session_options. */
THIMBLE_API thimble_status thimble_device_measure(const char* device, uint32_t threads, thimble_device_rates* rates,
                                                  thimble_error* error);

/* ---- models ---- */

/* An open model: weights, tokenizer and metadata. Immutable, so any number of threads may use it. */
typedef struct thimble_model thimble_model;

/* Receives a warning for the user of the program: one NUL-terminated sentence, valid during the call. */
typedef void (*thimble_log_fn)(void* user, const char* message);

typedef struct thimble_model_options {
  uint32_t struct_size;
  uint32_t reserved;
  thimble_log_fn log; /* NULL: warnings are dropped */
  void* log_user;
} thimble_model_options;

/* Fill in the defaults. `struct_size` is sizeof *options. */
THIMBLE_API void thimble_model_options_init(thimble_model_options* options, uint32_t struct_size);

/* Open a GGUF model. The file is mapped read-only and must not change while the model exists. If the file becomes
 * shorter, later calls return THIMBLE_IO; if it is cut while a call reads it, the system may end the process
 * (SIGBUS; docs/limits.md). The same holds for files of heads. One file descriptor per file stays open. A file with
 * only a vocabulary can be opened too; it can tokenize. For a model in parts ("NAME-00001-of-00003.gguf"), the path
 * of any part opens all of them; they must be in the same folder. The caller frees *model. */
THIMBLE_API thimble_status thimble_model_open(const char* path, const thimble_model_options* options,
                                              thimble_model** model, thimble_error* error);
/* Open a model from an open file descriptor. The descriptor stays the caller's and may be closed after the call. */
THIMBLE_API thimble_status thimble_model_open_fd(int32_t descriptor, const thimble_model_options* options,
                                                 thimble_model** model, thimble_error* error);
/* Open a model from `size` bytes of an open file that begin at `offset`, for example from an uncompressed asset in
 * an Android package (AAsset_openFileDescriptor64). A size of UINT64_MAX extends to the end of the file. Returns
 * THIMBLE_INVALID_ARGUMENT if `offset` is not a multiple of the model file's alignment (32 bytes unless the file
 * says otherwise), and THIMBLE_IO if the file has fewer bytes. */
THIMBLE_API thimble_status thimble_model_open_fd_range(int32_t descriptor, uint64_t offset, uint64_t size,
                                                       const thimble_model_options* options, thimble_model** model,
                                                       thimble_error* error);
/* Open a model in parts from the descriptors of all its parts, in any order. */
THIMBLE_API thimble_status thimble_model_open_fds(const int32_t* descriptors, uint64_t count,
                                                  const thimble_model_options* options, thimble_model** model,
                                                  thimble_error* error);
/* Open a model from memory. The memory is not copied: keep it unchanged until the model is freed. `data` must have
 * the file's alignment, 32 bytes unless the file says otherwise; the start of a page always does. */
THIMBLE_API thimble_status thimble_model_open_buffer(const void* data, uint64_t size,
                                                     const thimble_model_options* options, thimble_model** model,
                                                     thimble_error* error);
/* Free a model. Free its sessions and heads first. */
THIMBLE_API void thimble_model_free(thimble_model* model);

typedef struct thimble_model_info {
  uint32_t struct_size;
  uint32_t has_weights;    /* 0: the file has only a vocabulary */
  uint32_t has_tokenizer;  /* 0: the model takes token ids only */
  uint32_t layers, d_model, heads, kv_heads, head_dim, d_ff, vocab;
  uint32_t context_length; /* positions that the model was trained for */
  int32_t bos, eos;        /* token ids; -1: the model has none */
  uint32_t files;          /* number of files the model consists of; 1: not split */
  uint64_t parameters;
  uint64_t file_bytes;
  uint64_t kv_bytes_per_token; /* f16 keys and values that dense attention keeps for each token, summed over the
                                  layers without a window */
  char architecture[32];
  char name[96];
  char quantization[16]; /* tensor type of most bytes */
  char chat_format[32];  /* "jinja": the file's chat template is run; otherwise the known format that the template
                            was recognised as, or "" */
  char chat_problem[224]; /* one sentence on why the template is not run; "" if it is */
  uint32_t experts, experts_per_token; /* per layer; d_ff is then the width of one expert; 0: none */
  uint32_t window, window_layers;      /* `window_layers` layers attend to the last `window` tokens only */
} thimble_model_info;

/* Fill in what is known about a model. Set info->struct_size first. */
THIMBLE_API thimble_status thimble_model_get_info(const thimble_model* model, thimble_model_info* info,
                                                  thimble_error* error);

/* The KV heads of each layer, which may differ: one number for each layer. 0: the layer has no keys and values of its
 * own, for example because it is recurrent. thimble_model_info.kv_heads is the largest. Two-call. */
THIMBLE_API thimble_status thimble_model_kv_heads(const thimble_model* model, uint32_t* kv_heads, uint64_t capacity,
                                                  uint64_t* count, thimble_error* error);

/* Metadata of the file, for people. thimble_model_metadata_get returns entry `index` as a key and a printed value;
 * long arrays are shortened. Two-call, once for the key and once for the value. */
THIMBLE_API thimble_status thimble_model_metadata_count(const thimble_model* model, uint64_t* count,
                                                        thimble_error* error);
THIMBLE_API thimble_status thimble_model_metadata_get(const thimble_model* model, uint64_t index, char* key,
                                                      uint64_t key_capacity, uint64_t* key_length, char* value,
                                                      uint64_t value_capacity, uint64_t* value_length,
                                                      thimble_error* error);

typedef struct thimble_tensor_info {
  uint32_t struct_size;
  uint32_t dims;
  uint64_t shape[4]; /* fastest-varying dimension first */
  uint64_t bytes;
  char name[72];
  char type[16];
} thimble_tensor_info;

/* The number of tensors in the model's files. */
THIMBLE_API thimble_status thimble_model_tensor_count(const thimble_model* model, uint64_t* count,
                                                      thimble_error* error);
/* Tensor `index`, from 0 to thimble_model_tensor_count() - 1. Set info->struct_size first. */
THIMBLE_API thimble_status thimble_model_tensor_get(const thimble_model* model, uint64_t index,
                                                    thimble_tensor_info* info, thimble_error* error);

/* ---- heads: the retainer of a model, in a sidecar file that belongs to it ---- */

/* The trained heads of a model. Immutable, so any number of threads and sessions may use them. */
typedef struct thimble_heads thimble_heads;

/* Open a file of heads and check it against the model. Returns THIMBLE_MISMATCH if the heads were trained for
 * another model. The caller frees *heads. The _fd and _buffer forms take a descriptor and memory as
 * thimble_model_open_fd and thimble_model_open_buffer do. */
THIMBLE_API thimble_status thimble_heads_open(const thimble_model* model, const char* path, thimble_heads** heads,
                                              thimble_error* error);
THIMBLE_API thimble_status thimble_heads_open_fd(const thimble_model* model, int32_t descriptor,
                                                 thimble_heads** heads, thimble_error* error);
THIMBLE_API thimble_status thimble_heads_open_buffer(const thimble_model* model, const void* data, uint64_t size,
                                                     thimble_heads** heads, thimble_error* error);
/* Free heads. A session needs them only until it was created. */
THIMBLE_API void thimble_heads_free(thimble_heads* heads);
/* The retention that the heads were made for: ADORE for ADORE's controller; otherwise MIX, KEYDIFF or LOCRET, whichever
 * the check found best when the heads were trained (the key retainer.retention); LOCRET if the file does not say. */
THIMBLE_API int32_t thimble_heads_retention(const thimble_heads* heads);

/* Convert a published retainer into a file of heads for this model. `input` is a torch.save checkpoint (Locret, Fast
 * KVzip), a safetensors file, or the folder that a safetensors file was published in (KVzap). No code in a
 * checkpoint is run. `kind` is "locret", "linear", "mlp" or "sink"; with NULL, the names of the tensors decide.
 * `output` must not exist. Returns THIMBLE_MISMATCH, naming the difference, if the shapes do not fit the model. Such
 * files do not record which model they were trained for, so a model of the same shapes is not detected. */
THIMBLE_API thimble_status thimble_heads_import(const thimble_model* model, const char* input, const char* kind,
                                                const char* output, thimble_error* error);
/* Describe a file of heads as a JSON object: "name", "kind", "input", "target" (what the scores estimate),
 * "architecture", "layers", "heads", "kv_heads", "head_dim", "fingerprint" of the model ("" if the file has none),
 * "parameters", "file_bytes" and "metadata" (an object of all keys). Two keys are present only if the file has them:
 * "trained", an object with "texts", "tokens", "steps", "seed" and "data"; and "shares", each KV head's share of the
 * pools, 1 on average, as one array per layer (null entries if the layer has a window). With a model (it may be
 * NULL) there is also "fits", and if that is false "misfit", the error sentence of thimble_heads_open. Two-call. */
THIMBLE_API thimble_status thimble_heads_info(const char* path, const thimble_model* model, char* json,
                                              uint64_t capacity, uint64_t* length, thimble_error* error);

/* ---- making heads: training, step by step ---- */

/* Training in progress. */
typedef struct thimble_training thimble_training;

typedef struct thimble_training_options {
  uint32_t struct_size;
  uint32_t threads;         /* worker threads, on the host also for a card; 0: one for each core that the process may
                               use */
  const char* device;       /* NULL: "cpu"; a name from thimble_device_info, or "auto" for the best device */
  const char* const* data;  /* paths of training data: plain UTF-8 texts such as books, in which facts are hidden, or
                               JSON lines of prompts and answers (docs/retainers.md) */
  uint32_t data_count;
  uint32_t texts;           /* training texts; 0: 16 */
  uint32_t steps;           /* optimizer steps; 0: 300 */
  uint32_t equal_shares;    /* 1: every KV head gets an equal share of the pools; 0: shares are counted, and written
                               if the final check finds them better than equal shares */
  const char* output;       /* the file of heads to write; must not exist */
  const char* heads;        /* NULL: train new heads; otherwise a file of heads to write again, with shares if they
                               help */
  const char* kind;         /* "mlp" (NULL), "locret", "linear", "sink", or "adore" for ADORE's controller, which
                               takes no target and no shares */
  const char* target;       /* what scores estimate: "log_prob" (NULL), "max_logit" (not for sink), "log_kvzip_plus",
                               or "auto": the one that answers most questions after a short training */
  uint64_t seed;
  uint64_t memory_bytes;    /* limit for everything that training allocates; 0: 1 GiB for the samples of the texts,
                               not counting the memory to read them; for "linear", as much as it needs */
  uint64_t text_tokens;     /* tokens per training text; 0: 6144; at least 1024, at most two thirds of the model's
                               context, because the questions appended to a text need up to half its length again */
} thimble_training_options;

/* Fill in the defaults. `struct_size` is sizeof *options. */
THIMBLE_API void thimble_training_options_init(thimble_training_options* options, uint32_t struct_size);

enum { /* phases of training */
  THIMBLE_TRAINING_READING = 0,  /* unit: tokens */
  THIMBLE_TRAINING_FITTING = 1,  /* unit: optimizer steps */
  THIMBLE_TRAINING_CHECKING = 2, /* unit: readings of held-out texts; the output is written in this phase */
  THIMBLE_TRAINING_DONE = 3,
  THIMBLE_TRAINING_TRYING = 4    /* unit: targets; the first phase, only with the target "auto" */
};

typedef struct thimble_training_progress {
  uint32_t struct_size;
  int32_t phase;       /* THIMBLE_TRAINING_* */
  uint64_t done, total; /* in the unit of the phase */
  double per_second;   /* since the phase began */
  double loss;         /* of the last optimizer step */
  double recall;       /* measured every few optimizer steps: the share of the questions about a held-out text that
                          are answered with an eighth of the memory; if `dense` is below a half, the share of the
                          right answers' probability that is kept; -1: not measured in this step */
  double dense;        /* the share of the questions about held-out texts that are answered with nothing evicted,
                          measured before fitting; if it is below a half, the check compares probabilities of right
                          answers; -1: not known yet */
} thimble_training_progress;

/* Begin training, or resume the same training from the file `output`.partial. Texts, batches and sums depend on the
 * seed and not on the number of threads. The caller frees *training. UNSUPPORTED in a library that was built without
 * training (THIMBLE_TRAINING=OFF). */
THIMBLE_API thimble_status thimble_training_create(const thimble_model* model, const thimble_training_options* options,
                                                   thimble_training** training, thimble_error* error);
/* Do the next piece of work: read a chunk, make an optimizer step, or read a text for the check. Call it until the
 * phase is DONE. Progress is saved in `output`.partial after each text, and every minute while fitting. `progress`
 * may be NULL. */
THIMBLE_API thimble_status thimble_training_step(thimble_training* training, thimble_training_progress* progress,
                                                 thimble_error* error);
/* Save the state of the fit in `output`.partial now. */
THIMBLE_API thimble_status thimble_training_save(thimble_training* training, thimble_error* error);
/* The result of the final check as a JSON object. Returns THIMBLE_INVALID_ARGUMENT before the phase is DONE.
 * Two-call.
 *
 * For retainers:
 *   "target"      what the scores estimate
 *   "tried"       with target "auto": an array of {"target", "recall"}, recall null for a target that could not be tried
 *   "questions"   number of questions
 *   "dense"       share of them answered with nothing evicted
 *   "dense_perplexity"  perplexity of the right answers with nothing evicted
 *   "measure"     "answers", or "probability" if "dense" is below a half
 *   "recall"      an array of objects: "part" (8 for an eighth of the memory), and for "heads" (as the file is written),
 *                 "locret", "keydiff", "mix" and "window" (with equal pools) and, if shares were counted, "counted"
 *                 ("retention" with them): the share of questions answered, or of a right token's probability kept;
 *                 in the second case also "heads_perplexity" and so on, null if infinite
 *   "shares"      "counted" if counted shares were better and were written, else "equal"
 *   "retention"   "keydiff" or "mix" if that was better than the scores alone, else "locret"
 *   "seconds"     time of this process by phase: "trying", "reading", "labels", "fitting", "checking"
 *   "verdict"     sentences for people
 *
 * For a controller:
 *   "kind"        "adore"
 *   "step"        the optimizer step whose state was taken
 *   "queries"     number of held-out queries
 *   "base_rate"   share of (query, earlier token) pairs in which the token is among those attended to most
 *   "accuracy", "f1"  of predicting those pairs with probabilities above a half
 *   "f1_of_best", "f1_of_last"  of taking the best scores, or as many recent tokens, instead
 *   "seconds", "verdict"  as above */
THIMBLE_API thimble_status thimble_training_report(const thimble_training* training, char* json, uint64_t capacity,
                                                   uint64_t* length, thimble_error* error);
/* Free a training. `output`.partial stays for a later thimble_training_create. */
THIMBLE_API void thimble_training_free(thimble_training* training);

/* ---- text ---- */

#define THIMBLE_TOKENIZE_ADD_BOS 1u       /* put BOS first if the model asks for it */
#define THIMBLE_TOKENIZE_PARSE_SPECIAL 2u /* text that spells a control token becomes its id: for prompts from you or
                                             thimble_chat_render, not for documents */
#define THIMBLE_TOKENIZE_CONTINUE 4u      /* the text continues one that was cut by thimble_tokenize_cut */

/* Convert text to token ids; any bytes are accepted. If `offsets` is not NULL, offsets[i] is the byte at which token
 * i starts in the text. Two-call: `capacity` is that of ids and of offsets. */
THIMBLE_API thimble_status thimble_tokenize(const thimble_model* model, const char* text, uint64_t length,
                                            uint32_t flags, int32_t* ids, uint64_t* offsets, uint64_t capacity,
                                            uint64_t* count, thimble_error* error);

/* Where to cut a text that arrives in pieces: the number of bytes, from the start of `text`, that become the same
 * ids when they are tokenized alone and the rest is tokenized with CONTINUE. It is the last place that is safe
 * whatever text follows: after a word, before white space. 0: there is no safe place yet; wait for more text, or for
 * the end. */
THIMBLE_API uint64_t thimble_tokenize_cut(const thimble_model* model, const char* text, uint64_t length);

#define THIMBLE_DETOKENIZE_SPECIAL 1u /* write control tokens as their text; without it they are left out */

/* Convert token ids to text. The text consists of whole code points; bytes that are not part of one become U+FFFD.
 * Two-call. */
THIMBLE_API thimble_status thimble_detokenize(const thimble_model* model, const int32_t* ids, uint64_t count,
                                              uint32_t flags, char* text, uint64_t capacity, uint64_t* length,
                                              thimble_error* error);

/* The bytes of one token, possibly part of a code point. For a control token, its text. Two-call. */
THIMBLE_API thimble_status thimble_token_bytes(const thimble_model* model, int32_t id, char* bytes, uint64_t capacity,
                                               uint64_t* length, thimble_error* error);

/* 1 if this token ends a generation (end of text, of turn or of message), otherwise 0. */
THIMBLE_API int32_t thimble_token_ends(const thimble_model* model, int32_t id);

/* One message of a conversation. */
typedef struct thimble_message {
  const char* role; /* "system", "user", "assistant", or any other role the template knows */
  const char* content;
  uint64_t content_length;
} thimble_message;

#define THIMBLE_CHAT_ADD_ASSISTANT 1u /* end where the assistant's answer begins */
#define THIMBLE_CHAT_CONTINUE 2u      /* the messages follow an answer that the session already holds */
#define THIMBLE_CHAT_PARSE_CONTENT 4u /* text in a message that spells a control token, such as <|im_end|>, becomes
                                         that token: for messages that you wrote. Without the flag, a noncharacter
                                         (U+FDD0) is put before it; thimble_tokenize drops that character and keeps
                                         the rest as text */

/* Format messages as the model was trained to read them. Tokenize the text with THIMBLE_TOKENIZE_PARSE_SPECIAL, and
 * with ADD_BOS for the first text of a session. With `format` NULL, the chat template of the model's file is run:
 * Jinja in a sandbox, which sees only the messages and whose time, memory and output are bounded. If it cannot be
 * run, a known format that is recognised in it is used. `format` "chatml", "llama3", "llama2", "phi3", "mistral",
 * "zephyr" or "thimble" selects that format; the name of a further template in the file, such as "tool_use", runs
 * that template. Returns THIMBLE_UNSUPPORTED if the template can neither be run nor recognised, and
 * THIMBLE_INVALID_ARGUMENT with the template's own sentence if it refuses the messages. Two-call.
 *
 * THIMBLE_CHAT_CONTINUE gives the text for a session that already holds earlier messages, an answer and its
 * end-of-turn token: what the template writes after that answer. The session then reads only new text. What it holds
 * stays unchanged, although many templates write earlier turns differently when they render a whole conversation
 * (some drop an answer's thoughts, for example). Returns THIMBLE_UNSUPPORTED if the template gives no text that
 * could follow; in that case reset the session and pass all messages. */
THIMBLE_API thimble_status thimble_chat_text(const thimble_model* model, const char* format,
                                             const thimble_message* messages, uint64_t count, uint32_t flags,
                                             char* text, uint64_t capacity, uint64_t* length, thimble_error* error);

typedef struct thimble_chat_options {
  uint32_t struct_size;
  uint32_t flags;                  /* THIMBLE_CHAT_* */
  const char* format;              /* NULL: as the model's file says; otherwise a further template of the file or a
                                      known format */
  const char* source;              /* a Jinja template to run instead of the model's; NULL: none */
  uint64_t source_length;
  const thimble_message* messages;
  uint64_t message_count;
  const char* messages_json;       /* replaces `messages`: an array of objects with "role", "content" and whatever
                                      else the template reads, such as "tool_calls" or "reasoning_content"; NULL:
                                      none */
  uint64_t messages_json_length;
  const char* variables;           /* a JSON object of further variables for the template: "tools" (an array),
                                      "enable_thinking", "documents". They override Thimble's own: bos_token,
                                      eos_token, add_generation_prompt, and tools and documents set to none. NULL:
                                      none */
  uint64_t variables_length;
  uint64_t held;                   /* the number of leading messages that the session already holds; the last of them
                                      is an answer with its end-of-turn token. Like CONTINUE, with those messages
                                      passed */
  int64_t time;                    /* the current time for the template, in seconds since 1970, as local wall-clock
                                      time; 0: now */
} thimble_chat_options;

/* Fill in the defaults. `struct_size` is sizeof *options. */
THIMBLE_API void thimble_chat_options_init(thimble_chat_options* options, uint32_t struct_size);

/* Like thimble_chat_text, with everything that a template can read. Known formats use only roles and contents; they
 * leave out the thoughts of earlier answers and take no variables. Some messages that a template refuses are
 * rewritten for it: system messages, ids and arguments of calls, thoughts next to calls (docs/chat-templates.md).
 * Two-call. */
THIMBLE_API thimble_status thimble_chat_render(const thimble_model* model, const thimble_chat_options* options,
                                               char* text, uint64_t capacity, uint64_t* length, thimble_error* error);

/* ---- session options ---- */

#define THIMBLE_DEFAULT UINT32_MAX /* the value that asks for the default, in fields that say so */
#define THIMBLE_RECALL_ALL UINT32_MAX /* as `recall` of thimble_session_options: everything in the store */

enum { /* retention: which entries stay when a pool is over its size */
  THIMBLE_RETENTION_DEFAULT = -1, /* the retention of options.heads (thimble_heads_retention) if they are set,
                                     otherwise NONE */
  THIMBLE_RETENTION_NONE = 0,   /* all entries; a full pool returns THIMBLE_CONTEXT_FULL */
  THIMBLE_RETENTION_WINDOW = 1, /* the first protect_init entries (sinks) and the most recent ones */
  THIMBLE_RETENTION_RANDOM = 2, /* random entries, for comparison */
  THIMBLE_RETENTION_LOCRET = 3, /* the entries that options.heads, a retainer of any kind, scores highest */
  THIMBLE_RETENTION_KEYDIFF = 4, /* the entries whose keys are least like the mean key; needs no training;
                                    options.heads, if set, give the shares of the pool */
  THIMBLE_RETENTION_TOVA = 5, /* the entries that the last token attends to most, the same for all heads of a layer;
                                 needs no training */
  THIMBLE_RETENTION_REREAD = 6, /* the entries that their own chunk attends to most when it is read a second time;
                                   needs no training, takes twice the time */
  THIMBLE_RETENTION_ADORE = 7, /* the tokens that options.heads, ADORE's controller, scores highest, the same in all
                                  layers and heads; each generated token may read `rebuild` evicted tokens again;
                                  allows no selection */
  THIMBLE_RETENTION_MIX = 8 /* the entries with the highest sum of LOCRET's score, by options.heads, and KEYDIFF's */
};
enum { THIMBLE_RETAIN_PER_HEAD = 0, THIMBLE_RETAIN_LAYER = 1 }; /* each KV head its own, or a layer's heads the same */
enum { /* selection: which entries a generated token attends to */
  THIMBLE_SELECTION_DENSE = 0,       /* all entries of the pool */
  THIMBLE_SELECTION_TOKENSELECT = 1, /* the sinks, the select_k entries with the most votes of the heads, and the
                                        most recent ones */
  THIMBLE_SELECTION_QUEST = 2        /* the pages of select_page entries, select_k entries in all, whose keys may
                                        match the query best */
};
/* The name of a policy as the command takes it ("locret", "tokenselect"). NULL for a number without a policy, so
 * counting up from 0 lists all of them. Static text. */
THIMBLE_API const char* thimble_retention_name(int32_t retention);
THIMBLE_API const char* thimble_selection_name(int32_t selection);
enum { /* what a retention does and needs: bits of thimble_retention_traits */
  THIMBLE_TRAIT_EVICTS = 1,        /* it evicts entries when a pool is over its size */
  THIMBLE_TRAIT_EVICTS_EACH = 2,   /* once the pool is full, each generated token evicts one entry, so an answer needs no
                                      room in the pool */
  THIMBLE_TRAIT_SHARES = 4,        /* it takes the shares of options.heads, if they are set */
  THIMBLE_TRAIT_RETAINER = 8,      /* options.heads must be a retainer */
  THIMBLE_TRAIT_CONTROLLER = 16,   /* options.heads must be ADORE's controller */
  THIMBLE_TRAIT_REMEMBERS = 32     /* it keeps a record of every token, in host memory that grows with options.context */
};
/* The traits of a retention, a sum of the bits above. 0 for a number without a policy. */
THIMBLE_API uint32_t thimble_retention_traits(int32_t retention);
enum { THIMBLE_VOTE_AUTO = 0, THIMBLE_VOTE_LAYER = 1, THIMBLE_VOTE_GROUP = 2 }; /* auto: group with retention, else layer */
enum { /* formats of keys and values in the pool: bytes for 32 channels */
  THIMBLE_KV_F16 = 0,  /* 64 */
  THIMBLE_KV_Q8_0 = 1, /* 34: 8 bits a channel and a scale, after a Hadamard transform */
  THIMBLE_KV_Q4_0 = 2  /* 18: 4 bits, in the same way */
};
enum { THIMBLE_POSITIONS_LIST = 0, THIMBLE_POSITIONS_ORIGINAL = 1 }; /* rotary position: index in the list, or in the text */
enum { THIMBLE_SCALE_NONE = 0, THIMBLE_SCALE_SQRT = 1 };             /* vote scores: as published, or / sqrt(head_dim) */
enum { /* drafts: where guesses of the next tokens come from */
  THIMBLE_DRAFT_NONE = 0,
  THIMBLE_DRAFT_LOOKUP = 1, /* from what followed the last tokens earlier in the text; helps if answers repeat it */
  THIMBLE_DRAFT_MODEL = 2,  /* from options.draft_model, which reads a window of the text */
  THIMBLE_DRAFT_MTP = 3     /* from a layer of the model's file that was trained for it (multi-token prediction) */
};

/* How far a call has come. */
typedef struct thimble_progress {
  uint32_t struct_size;
  uint32_t pool_entries;  /* entries in every head's pool now */
  uint32_t pool_capacity;
  uint32_t reserved;
  uint64_t done, total;   /* tokens read; tokens read or waiting */
  double tokens_per_second; /* since this call began */
} thimble_progress;

/* Receives progress after each chunk, on the calling thread. */
typedef void (*thimble_progress_fn)(void* user, const thimble_progress* progress);

typedef struct thimble_session_options {
  uint32_t struct_size;
  uint32_t threads;             /* worker threads; with a card, those of the host that serve its store of evicted
                                   entries; 0: one for each core that the process may use, for a card at most 16 */
  const char* device;           /* NULL: "auto", the best device; or a name from thimble_device_info */
  const thimble_heads* heads;   /* for LOCRET, MIX and ADORE; KEYDIFF uses only their shares of the pool. Needed until
                                   thimble_session_create returns */
  uint64_t budget_bytes;        /* limit for all bytes that this session and its clones allocate; 0: none */
  int32_t retention;            /* THIMBLE_RETENTION_* */
  int32_t retain_scope;         /* THIMBLE_RETAIN_* */
  uint32_t pool;                /* entries that a head keeps; 0: what the heads were trained for, or what fits the
                                   budget */
  uint32_t chunk;               /* tokens read at a time; 0: what the heads were trained for, or 1024; ADORE raises
                                   it to rebuild + 1 */
  uint32_t stabilizers;         /* most recent entries that are kept between chunks; THIMBLE_DEFAULT: with heads the
                                   share of the pool that they were trained with (a quarter if they do not say), 16
                                   for ADORE, which always keeps them, otherwise 0 */
  uint32_t local;               /* last tokens of a prompt, which are not evicted with it; THIMBLE_DEFAULT: 100 with
                                   a retention, 0 without one and for ADORE */
  uint32_t protect_init;        /* first entries, which are never evicted; THIMBLE_DEFAULT: as the file of heads
                                   says, otherwise 4 */
  uint32_t max_new;             /* room for generated tokens before the next eviction; 0: 256. local + max_new is
                                   raised to 64. ADORE ignores it, because it evicts with every token */
  int32_t selection;            /* THIMBLE_SELECTION_* */
  uint32_t select_k;            /* entries to select; 0: 2048 */
  uint32_t select_init;         /* TOKENSELECT: first entries that are always selected; THIMBLE_DEFAULT: 128 */
  uint32_t select_local;        /* TOKENSELECT: most recent entries that are always selected; 0: 512 */
  float select_theta;           /* selection cache: reuse a selection if the cosine of the queries is above this;
                                   1 or more (default): never; -1: always */
  int32_t vote;                 /* THIMBLE_VOTE_* */
  int32_t vote_scale;           /* THIMBLE_SCALE_* */
  uint32_t vote_window;         /* width of the max-pool over votes, in tokens; 0: none */
  uint32_t select_prefill;      /* TOKENSELECT; 1: also select during prefill, at most select_local tokens at a time;
                                   0: read densely; THIMBLE_DEFAULT: 1 without a retention, otherwise 0 */
  int32_t positions;            /* THIMBLE_POSITIONS_*; QUEST always uses ORIGINAL */
  uint32_t context;             /* limit on positions; 0: the model's for ORIGINAL and ADORE, otherwise none. A model
                                   with two sets of rotary factors (longrope) uses the short ones if this value is
                                   set and within their range, otherwise the long ones: compare policies with the
                                   same context */
  uint32_t seed;                /* for THIMBLE_RETENTION_RANDOM */
  thimble_progress_fn progress; /* called after each chunk; NULL: none */
  void* progress_user;
  uint32_t select_page;         /* QUEST: entries per page; 0: 16 */
  uint32_t dense_layers;        /* QUEST: first layers that attend to all entries; THIMBLE_DEFAULT: 2 */
  uint32_t watch;               /* 1: keep the last token's queries of every layer, and room to use them (both in the
                                   plan), so that thimble_session_kept_by_position can report attention; 0 (default):
                                   do not */
  uint32_t rebuild;             /* ADORE: evicted tokens that a generated token reads again, at most 63; 0: none */
  uint32_t rebuild_every;       /* ADORE: generated tokens from one such reading to the next; 0: 1 */
  int32_t draft;                /* THIMBLE_DRAFT_*: guess the next tokens and read them in one step; what is generated
                                   has the same distribution. Not with a selection, TOVA, ADORE, watch or a store */
  uint32_t draft_tokens;        /* tokens of a draft, at most 15; 0: the number that generates fastest, found by measuring
                                   steps and counting right guesses */
  int32_t recall_format;        /* THIMBLE_KV_*: format in the store of keys and values that the pool has in F16 */
  const thimble_model* draft_model; /* for THIMBLE_DRAFT_MODEL: a smaller model with the same tokens. The plan and the
                                   budget include its memory. Needed until thimble_session_create returns */
  uint64_t recall_mem_bytes;    /* host memory for a store of evicted entries, which budget_bytes does not cover; 0: none,
                                   and what is evicted is gone. Each session, clone and slot of a server has a store of
                                   its own. Needs a retention that evicts, not ADORE; refused with local 0 and with latent
                                   attention */
  uint32_t recall;              /* entries of each head that come back from the store; the queries at the end of the
                                   prompt and of generated tokens choose them; 0: 512 with a store.
                                   THIMBLE_RECALL_ALL: none come back; the end of the prompt, and generated and scored
                                   tokens, attend to the whole store where it is (thimble_memory.recall_bytes). A file is
                                   read to a part of `io` for this, layer by layer. Refused with a selection */
  uint32_t recall_every;        /* generated tokens from one such choice to the next; 0: 128. Refused with
                                   THIMBLE_RECALL_ALL */
  uint64_t recall_disk_bytes;   /* like recall_mem_bytes, in a temporary file; budget_bytes covers its index. Restoring needs
                                   room for a second file */
  int32_t key_format;           /* THIMBLE_KV_*: how the pool stores keys. A layer keeps F16 where heads are no multiple
                                   of 32 channels wide, or where keys have a large bias, and Q8_0 instead of Q4_0 where
                                   keys have a bias or few layers see the whole text (thimble_memory.finer_layers) */
  int32_t value_format;         /* the same for values, whatever their bias */
  uint32_t recall_prefill;      /* with THIMBLE_RECALL_ALL. 0: a text attends to the pool while it is read; 1: to the whole
                                   store too, so that nothing is lost, in the time of dense attention */
  uint32_t reserved;
} thimble_session_options;

/* Fill in the defaults. `struct_size` is sizeof *options. */
THIMBLE_API void thimble_session_options_init(thimble_session_options* options, uint32_t struct_size);

/* ---- plan: the memory of a session, without creating it ---- */

/* The memory of a session. All sizes are in bytes. */
typedef struct thimble_memory {
  uint32_t struct_size;
  uint32_t pool;       /* entries that a head keeps after an eviction */
  uint32_t capacity;   /* entries that the largest head has room for: pool + local + max_new if all heads are equal */
  uint32_t chunk;      /* tokens read at a time */
  uint64_t budget;     /* the limit; 0: none */
  uint64_t weights;    /* weights placed on the device; 0 if they are read from the mapping */
  uint64_t shared;     /* the part of `weights` that other sessions already placed; not counted again */
  uint64_t pool_bytes; /* keys, values, positions, scores; states of recurrent layers */
  uint64_t view;       /* keys and values of one layer, gathered for prefill attention */
  uint64_t workspace;  /* activations and scratch */
  uint64_t io;         /* tokens, logits, sampler */
  uint64_t fixed;      /* what the device itself needs: threads, context, libraries */
  uint64_t total;      /* the sum of the above without `shared`, and `draft`: what the budget covers */
  uint64_t allocated;  /* what this session and its clones hold now, added up from what allocators returned; 0 in a
                          plan. For recorded CUDA programs it is by how much the card's free memory shrank while they
                          were made. Vulkan drivers do not report what programs take, so that is only in `fixed` and
                          `total` */
  uint64_t dense_bytes_per_token; /* what a dense f16 cache would take for each token of the text */
  uint64_t mapped;          /* files of model and heads: not allocated, shared with the system's page cache */
  uint64_t mapped_resident; /* the part of `mapped` that is in memory now */
  uint64_t host_tables;     /* vocabulary and tensor tables of the model */
  uint32_t largest_position; /* the largest rotary position that reading uses; UINT32_MAX: grows with the text */
  uint32_t selection_pays;   /* 1: selecting reads fewer bytes than attending to the whole pool */
  uint64_t states;      /* the part of pool_bytes for states of recurrent layers; 0: the model has none */
  uint64_t state_slots; /* slots of equal size in `states`: the current state, the next one, and snapshots for rewinding */
  uint64_t draft;       /* part of total, but of none of the above: what a draft model or a layer for drafts takes, its weights on
                           the device, pool, workspace and io */
  uint64_t streamed; /* weights that do not fit, so that each step reads them again; 0: none. CPU: the part of `mapped` that
                        does not fit in memory. A card: what the budget has no room for; the card reads copies of it in the
                        host's memory, which are in no other number */
  uint64_t store;       /* host memory of the store of evicted entries: in no other number */
  uint64_t store_file;  /* the temporary file of evicted entries; its index is part of `io` */
  uint32_t finer_layers; /* layers whose keys or values have more bits than key_format and value_format say */
  uint32_t reserved;
  uint64_t recall_bytes; /* with THIMBLE_RECALL_ALL: what each generated token reads of a full store */
} thimble_memory;

/* The memory of a session with these options. With a budget and pool 0, the pool is the largest that fits.
 * If none fits next to all weights on a card, some weights stay in the host's memory, and the pool has at most 4,096
 * entries. THIMBLE_BUDGET says how many bytes are missing and what would fit. The call allocates nothing that outlives it.
 * Set memory->struct_size first. */
THIMBLE_API thimble_status thimble_session_plan(const thimble_model* model, const thimble_session_options* options,
                                                thimble_memory* memory, thimble_error* error);

/* How many entries each KV head keeps in such a session: one number for each head of the first layer, then of the
 * second, and so on; thimble_model_kv_heads says how many a layer has. If the file of heads divides the pools, the
 * numbers differ, and hold for texts that are long enough for all shares. 0: the layer has a window. Two-call. */
THIMBLE_API thimble_status thimble_session_plan_heads(const thimble_model* model, const thimble_session_options* options,
                                                      uint32_t* keeps, uint64_t capacity, uint64_t* count,
                                                      thimble_error* error);

/* The largest pool, in entries per head, that fits options.budget_bytes. options.pool is ignored. */
THIMBLE_API thimble_status thimble_session_largest_pool(const thimble_model* model,
                                                        const thimble_session_options* options, uint32_t* pool,
                                                        thimble_error* error);

/* ---- sessions ---- */

/* One sequence of tokens and its memory. One thread at a time may use it. */
typedef struct thimble_session thimble_session;

/* Create a session. All the memory it will ever need is allocated here. Heads may be freed afterwards. The caller
 * frees *session. */
THIMBLE_API thimble_status thimble_session_create(const thimble_model* model, const thimble_session_options* options,
                                                  thimble_session** session, thimble_error* error);
/* Free a session. Its clones stay valid. */
THIMBLE_API void thimble_session_free(thimble_session* session);

/* Append tokens to the prompt and read every chunk that is certain to be complete. Where chunks end depends only on
 * the text and not on how calls divide it. After THIMBLE_INTERRUPTED some tokens may be queued or read: repeat the
 * call with the same tokens to continue. Any other call abandons the rest; that includes a feed of other tokens,
 * even if they differ only in tokens that were not read yet. After THIMBLE_CONTEXT_FULL, or THIMBLE_INVALID_ARGUMENT
 * for an id outside the vocabulary, no token of this call was queued. */
THIMBLE_API thimble_status thimble_session_feed(thimble_session* session, const int32_t* tokens, uint64_t count,
                                                thimble_error* error);
/* End the prompt: read all waiting tokens. The logits of the next token are available afterwards. With a retention
 * that evicts, the pool then holds `pool` entries and the last `local` tokens of the prompt. Tokens that would
 * exceed the capacity later, of a further turn or generated, first cause an eviction down to `pool` entries. */
THIMBLE_API thimble_status thimble_session_flush(thimble_session* session, thimble_error* error);
/* Flush, then sample the next token, append it and return it. The caller decides whether it ends the answer
 * (thimble_token_ends). After THIMBLE_INTERRUPTED repeat the call: a token that was already sampled stays in the
 * stream, and only a repeated step returns it. */
THIMBLE_API thimble_status thimble_session_step(thimble_session* session, int32_t* token, thimble_error* error);
/* Like thimble_session_step, with a token that the caller chose instead of a sampled one. */
THIMBLE_API thimble_status thimble_session_accept(thimble_session* session, int32_t token, thimble_error* error);
/* The logits of the next token: `count` floats, one for each token of the vocabulary. The session owns them; they
 * are valid until its next call. `count` is less than the model's `vocab` if the file's matrices have rows that
 * belong to no token. Such ids are never generated, and their log-probability is minus infinity. An interrupted
 * token is finished first; its call may still be repeated. */
THIMBLE_API thimble_status thimble_session_logits(thimble_session* session, const float** logits, uint32_t* count,
                                                  thimble_error* error);
/* Flush, append these tokens, and return the natural logarithm of each one's probability given all tokens before it,
 * in logprobs[count]. With a selection the tokens are read one by one, as thimble_session_step does. After
 * THIMBLE_INTERRUPTED repeat the call with the same arguments. */
THIMBLE_API thimble_status thimble_session_score(thimble_session* session, const int32_t* tokens, uint64_t count,
                                                 float* logprobs, thimble_error* error);
/* The text of the next token of an answer. Bytes of an incomplete code point are held back until it is complete;
 * control tokens have no text. Two-call; the token counts as taken only on success. feed, rewind and reset drop
 * held-back bytes. */
THIMBLE_API thimble_status thimble_session_text(thimble_session* session, int32_t token, char* text, uint64_t capacity,
                                                uint64_t* length, thimble_error* error);
/* Forget every token from `position` on (counted in tokens of the stream; 0: all). The sampler returns to its state
 * at that position. Returns THIMBLE_CANNOT_REWIND if entries were evicted since. Feed at least one token before the
 * next step. */
THIMBLE_API thimble_status thimble_session_rewind(thimble_session* session, uint64_t position, thimble_error* error);
/* Create a second session with the same state, for example to ask several questions about one reading. It counts
 * towards the same budget with pool_bytes + view + workspace + io of the plan, and with `draft` without the draft
 * model's weights. The caller frees *clone. */
THIMBLE_API thimble_status thimble_session_clone(thimble_session* session, thimble_session** clone,
                                                 thimble_error* error);
/* Return to the state after creation. Sampler settings are kept. */
THIMBLE_API thimble_status thimble_session_reset(thimble_session* session, thimble_error* error);

/* Save the session to a file: pool, positions, scores, waiting tokens, sampler and policy state, and what decides
 * whether another session may restore it (fingerprints of model and heads, and the settings). The data is written to
 * PATH.part, which is then renamed, so a crash at any moment leaves the old file or the new one. `note` (may be
 * NULL) is stored with it for the caller, for example the messages of a conversation or the ids of the text. After
 * THIMBLE_INTERRUPTED, which may come after each 4 MiB, the old file is unchanged; repeat the call. A device with its
 * own memory needs up to 4 MiB outside the budget, and every device room for note, settings and waiting tokens. */
THIMBLE_API thimble_status thimble_session_save(thimble_session* session, const char* path, const void* note, uint64_t note_size,
                                                thimble_error* error);
/* Like thimble_session_save, writing at the current position of an open descriptor, which stays open. After
 * THIMBLE_INTERRUPTED a part may be written: go back before the call is repeated. On Windows the descriptor must be in
 * binary mode. */
THIMBLE_API thimble_status thimble_session_save_fd(thimble_session* session, int32_t descriptor, const void* note,
                                                   uint64_t note_size, thimble_error* error);
/* The size of the file that thimble_session_save would write now with a note of `note_size` bytes. After
 * THIMBLE_INTERRUPTED repeat the call. */
THIMBLE_API thimble_status thimble_session_file_bytes(thimble_session* session, uint64_t note_size, uint64_t* bytes,
                                                      thimble_error* error);
/* Replace the session's state by a saved one, from whatever device it was saved on. The session must have the
 * settings of the saved one (device, threads, budget, progress and watch may differ); otherwise THIMBLE_MISMATCH
 * names the first difference. A damaged file returns THIMBLE_FORMAT. On failure the session is unchanged, except
 * that it is empty after THIMBLE_DEVICE_LOST. */
THIMBLE_API thimble_status thimble_session_restore(thimble_session* session, const char* path, thimble_error* error);
/* Like thimble_session_restore, with an open descriptor. The whole file is read; the descriptor stays open. */
THIMBLE_API thimble_status thimble_session_restore_fd(thimble_session* session, int32_t descriptor, thimble_error* error);
/* Describe a session file as a JSON object: position, entries, settings (docs/sessions.md). Only the start of the
 * file is read; thimble_session_file_note does the same. Two-call. */
THIMBLE_API thimble_status thimble_session_file_info(const char* path, char* json, uint64_t capacity, uint64_t* length,
                                                     thimble_error* error);
/* The note that was passed to thimble_session_save. Two-call. */
THIMBLE_API thimble_status thimble_session_file_note(const char* path, void* note, uint64_t capacity, uint64_t* length,
                                                     thimble_error* error);

/* Give memory back: evict down to `pool` entries per head (as thimble_session_options.pool) and free the memory
 * after them where the device can (cpu: whole pages). *freed is in bytes. Afterwards the session behaves like one
 * created with that pool. Returns THIMBLE_UNSUPPORTED with a reason if it cannot; nothing changed then. After
 * THIMBLE_INTERRUPTED repeat the call. */
THIMBLE_API thimble_status thimble_session_shrink(thimble_session* session, uint32_t pool, uint64_t* freed, thimble_error* error);

/* Ask the session to stop. Any thread and any signal handler may call this. The running call, or if there is none
 * the next one, returns THIMBLE_INTERRUPTED: on cards within the time of one layer of a chunk or token, on the CPU
 * within about 25 ms on an idle processor. The call after that continues; results are bit-identical to those without
 * an interrupt. Calls that only inspect (logits, kept, kept_by_position, stored_by_position, stats, memory,
 * text) do not abandon the interrupted call: it may be repeated after them. */
THIMBLE_API void thimble_session_interrupt(thimble_session* session);

/* The original positions of the entries that a KV head holds, ascending. Heads may hold different numbers of
 * entries. An interrupted chunk or token is finished first; its call may still be repeated. Two-call. */
THIMBLE_API thimble_status thimble_session_kept(thimble_session* session, uint32_t layer, uint32_t kv_head,
                                                int32_t* positions, uint64_t capacity, uint64_t* count,
                                                thimble_error* error);
/* What is still held, and what the last token attended to, by original position. Either array may be NULL. Two-call:
 * `capacity` is that of both arrays, in positions. *count is the number of positions read; waiting tokens are not
 * included. An interrupted chunk or token is finished first.
 *
 * kept[i] is the share, 0 to 1, of the (layer, KV head) pairs that hold position i. Layers with a window are left
 * out. The device computes it for 32768 positions at a time; each pass reads the positions of all entries and copies
 * 4 bytes for each position of the text to the host.
 *
 * attended[i] is the attention that the last token paid to position i, averaged over all layers and heads. It is
 * scaled to sum to 1 if the model's attention sinks take a share. It is computed on demand from the keys that the
 * last token attended to, which are read again once (CPU) or twice (CUDA, Vulkan). That took 0.2 to 1.5 times the
 * time of a whole step (docs/benchmarks.md). A token that was generated with a selection attended only to the
 * selected entries.
 *
 * Returns THIMBLE_INVALID_ARGUMENT for `attended` without options.watch, and whenever it is not known: before a
 * token was read, after a rewind past the last token, and after an eviction until the next token is read or
 * generated. (A prompt's last `local` tokens are read after its eviction; a chunk in the middle of a prompt is
 * evicted from at once.) With ADORE, which evicts with every token, it is never known once the pool is full; nor is
 * it after a token that attended to a store (THIMBLE_RECALL_ALL). A clone knows what its session knew unless that
 * session was shrunk; a restored session does not. */
THIMBLE_API thimble_status thimble_session_kept_by_position(thimble_session* session, float* kept, float* attended,
                                                            uint64_t capacity, uint64_t* count,
                                                            thimble_error* error);

/* What was evicted and can be recalled, by original position: stored[i] is the share, 0 to 1, of the same pairs that
 * have position i in the store of evicted entries and not in the pool. What is in neither is gone. Without a store all
 * are 0. Two-call; *count is as for thimble_session_kept_by_position. An interrupted chunk or token is finished
 * first. */
THIMBLE_API thimble_status thimble_session_stored_by_position(thimble_session* session, float* stored,
                                                              uint64_t capacity, uint64_t* count,
                                                              thimble_error* error);

/* How the next token is sampled from the logits. */
typedef struct thimble_sampler_options {
  uint32_t struct_size;
  float temperature;    /* 0 (default): always the most likely token */
  uint32_t top_k;       /* most likely tokens to sample from; 0: all; default 40 */
  float top_p;          /* probability mass to sample from; 1: all; default 0.95 */
  float min_p;          /* least probability, relative to the most likely token; 0: all; default 0.05 */
  float repeat_penalty; /* divides the positive logits of tokens that the answer has (see presence_penalty), and
                           multiplies the others; 1 (default): no penalty */
  uint32_t repeat_last; /* last tokens of the answer that it applies to; default 64, at most 4096 */
  uint32_t reserved;
  uint64_t seed;        /* of the random numbers; default 0 */
  float presence_penalty;  /* subtracted from the logits of tokens that the answer has, which are those generated or
                              accepted since the prompt (at most the last 4096); 0 (default): none. A session file
                              contains neither this one nor the next */
  float frequency_penalty; /* subtracted for each time that the answer has the token; 0 (default): none */
} thimble_sampler_options;

/* Fill in the defaults. `struct_size` is sizeof *options. */
THIMBLE_API void thimble_sampler_options_init(thimble_sampler_options* options, uint32_t struct_size);
/* Set how thimble_session_step samples. The random sequence restarts from options->seed. */
THIMBLE_API thimble_status thimble_session_set_sampler(thimble_session* session,
                                                       const thimble_sampler_options* options, thimble_error* error);
/* Add numbers to the logits of some tokens before one is sampled: biases[i] to that of tokens[i]. They stay, also after
 * a reset, until the next call; a count of 0 removes them. At most 1024; a token must not be named twice. A session
 * file does not contain them. */
THIMBLE_API thimble_status thimble_session_set_bias(thimble_session* session, const int32_t* tokens,
                                                    const float* biases, uint64_t count, thimble_error* error);

/* ---- grammars: what an answer may be ---- */

/* The texts that a model may generate. Immutable, so any number of threads and sessions may use one. Making one takes
 * up to a second for the first grammar of a model, which sorts its vocabulary, and a few milliseconds after that. Its
 * memory is not in any budget: about 10 MiB for the vocabulary, shared by all grammars of a model, and at most about
 * 40 MiB for each grammar that is in use. */
typedef struct thimble_grammar thimble_grammar;

/* The JSON texts that a JSON schema describes (docs/grammars.md lists the keywords). Members come in the order of
 * `properties`; there is at most one space or line feed after { [ , : and before } ]. {"type": "object"} allows any
 * JSON object. Returns THIMBLE_INVALID_ARGUMENT for a schema that is wrong or that no value meets, and
 * THIMBLE_UNSUPPORTED for one that uses more than is supported; the message names the place in the schema
 * ("#/properties/age"). The caller frees *grammar, before or after the model. */
THIMBLE_API thimble_status thimble_grammar_create_json_schema(const thimble_model* model, const char* schema,
                                                              uint64_t length, thimble_grammar** grammar,
                                                              thimble_error* error);
/* The texts that match a regular expression (ECMAScript's notation) as a whole. */
THIMBLE_API thimble_status thimble_grammar_create_regex(const thimble_model* model, const char* pattern, uint64_t length,
                                                        thimble_grammar** grammar, thimble_error* error);
/* The texts of the rule "root" of a grammar in llama.cpp's notation (GBNF). `<[ID]>` in it is the control token with
 * this number. */
THIMBLE_API thimble_status thimble_grammar_create_gbnf(const thimble_model* model, const char* text, uint64_t length,
                                                       thimble_grammar** grammar, thimble_error* error);
/* Free a grammar. Sessions that use it keep what they need. */
THIMBLE_API void thimble_grammar_free(thimble_grammar* grammar);

/* From now on, the generated tokens form a text of the grammar, which begins with the next one. Set it where the
 * answer begins: after the prompt was fed, or after the model has thought. Where the text may end, tokens that end a
 * generation (thimble_token_ends) are allowed too; where it must end, only these. Other control tokens are generated
 * only where the grammar names them, and thimble_session_accept refuses a token that does not continue the text. Tokens from feed and score
 * do not count. A clone continues from the same place; rewind returns to the place at that position; reset and
 * restore begin the text anew. Set it again for the next answer, or NULL for answers without a grammar. Returns
 * THIMBLE_MISMATCH if the grammar was made for another model. */
THIMBLE_API thimble_status thimble_session_set_grammar(thimble_session* session, const thimble_grammar* grammar,
                                                       thimble_error* error);

/* The memory of the session. `allocated` counts what was really allocated, to the byte. Set memory->struct_size
 * first. */
THIMBLE_API thimble_status thimble_session_memory(thimble_session* session, thimble_memory* memory,
                                                  thimble_error* error);

/* The options of the session, with every default decided that its policies use: the pool that fits the budget, for
 * example, or `local`. A session that is created with them, and with its heads, has the same options and plan, unless it
 * was shrunk. `heads` is NULL, because the caller may have freed them; `threads` is as it was given; `device` is the
 * device's name, valid until the session is freed. Set options->struct_size first. */
THIMBLE_API thimble_status thimble_session_get_options(thimble_session* session, thimble_session_options* options,
                                                       thimble_error* error);

/* Counters of a session since it was created or reset. */
typedef struct thimble_stats {
  uint32_t struct_size;
  uint32_t entries;         /* in the pool of the head that holds most */
  uint64_t position;        /* tokens of the stream so far, read or waiting */
  uint64_t waiting;         /* tokens not read yet, or not completely because of an interrupt */
  uint64_t evicted;         /* entries dropped per head, mean over layers and heads */
  uint64_t evictions;       /* evictions that dropped entries */
  uint64_t generated;       /* tokens from step and accept */
  uint64_t selected;        /* entries that the last generated token attended to, mean over layers and heads */
  uint64_t cache_hits, cache_misses; /* selection cache, summed over layers */
  uint64_t prefill_tokens;
  double prefill_seconds, decode_seconds;
  /* The least that was moved and computed in those seconds: each weight and each attended entry once per step; a
     multiply-add counts as two operations. */
  double prefill_bytes, prefill_flop, decode_bytes, decode_flop;
  uint64_t saturated;       /* numbers in keys and values that exceeded the range of f16 and were clamped */
  uint64_t stored;          /* entries in the store of evicted ones, mean over layers and heads, recalled or not */
  uint64_t recalled;        /* entries that came back from the store, in the pool of the head that holds most of them */
} thimble_stats;

/* The session's counters. Set stats->struct_size first. */
THIMBLE_API thimble_status thimble_session_stats(thimble_session* session, thimble_stats* stats, thimble_error* error);

#ifdef __cplusplus
}
#endif

#endif
