//! thimble.h: the structs, the constants, and the functions of libthimble, with the names of the header, which
//! documents them.
#![allow(non_camel_case_types)]

use std::mem::{size_of, MaybeUninit};
use std::os::raw::{c_char, c_void};
use std::ptr::addr_of;

/// A struct's name, size, and fields; a field's name, offset and size.
pub type Layout = (&'static str, usize, Vec<(&'static str, usize, usize)>);

fn pointee_size<T>(_: *const T) -> usize {
    size_of::<T>()
}

// Each of these macros also makes a list that the tests compare with the C compiler's output.
macro_rules! structs {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type),* }
        )*

        /// The layouts of all structs.
        pub fn layouts() -> Vec<Layout> {
            vec![$({
                let value = MaybeUninit::<$name>::uninit();
                let base = value.as_ptr();
                (stringify!($name), size_of::<$name>(), vec![$({
                    // Safety: the address of a field is taken, nothing is read.
                    let field = unsafe { addr_of!((*base).$field) };
                    (stringify!($field), field as usize - base as usize, pointee_size(field))
                }),*])
            }),*]
        }
    };
}

macro_rules! constants {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(pub const $name: $type = $value;)*
        /// All constants by name.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),*];
    };
}

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        extern "C" { $(pub fn $name($($argument: $type),*) $(-> $result)?;)* }
        /// The names of all functions.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
    };
}

pub type thimble_status = i32;
pub type thimble_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, message: *const c_char)>;

#[repr(C)]
pub struct thimble_model {
    _opaque: [u8; 0],
}
#[repr(C)]
pub struct thimble_heads {
    _opaque: [u8; 0],
}
#[repr(C)]
pub struct thimble_grammar {
    _opaque: [u8; 0],
}
#[repr(C)]
pub struct thimble_session {
    _opaque: [u8; 0],
}

structs! {
    thimble_error { struct_size: u32, code: thimble_status, bytes_missing: u64, message: [c_char; 496] }
    thimble_device_info {
        struct_size: u32, reserved: u32, total_bytes: u64, free_bytes: u64, name: [c_char; 32], description: [c_char; 192],
    }
    thimble_model_options { struct_size: u32, reserved: u32, log: thimble_log_fn, log_user: *mut c_void }
    thimble_model_info {
        struct_size: u32, has_weights: u32, has_tokenizer: u32, layers: u32, d_model: u32, heads: u32, kv_heads: u32,
        head_dim: u32, d_ff: u32, vocab: u32, context_length: u32, bos: i32, eos: i32, files: u32, parameters: u64,
        file_bytes: u64, kv_bytes_per_token: u64, architecture: [c_char; 32], name: [c_char; 96], quantization: [c_char; 16],
        chat_format: [c_char; 32], chat_problem: [c_char; 224], experts: u32, experts_per_token: u32, window: u32,
        window_layers: u32,
    }
    thimble_chat_options {
        struct_size: u32, flags: u32, format: *const c_char, source: *const c_char, source_length: u64,
        messages: *const c_void, message_count: u64, messages_json: *const c_char, messages_json_length: u64,
        variables: *const c_char, variables_length: u64, held: u64, time: i64,
    }
    thimble_session_options {
        struct_size: u32, threads: u32, device: *const c_char, heads: *const thimble_heads, budget_bytes: u64, retention: i32,
        retain_scope: i32, pool: u32, chunk: u32, stabilizers: u32, local: u32, protect_init: u32, max_new: u32,
        selection: i32, select_k: u32, select_init: u32, select_local: u32, select_theta: f32, vote: i32, vote_scale: i32,
        vote_window: u32, select_prefill: u32, positions: i32, context: u32, seed: u32, progress: *const c_void,
        progress_user: *mut c_void, select_page: u32, dense_layers: u32, watch: u32, rebuild: u32,
        rebuild_every: u32, draft: i32, draft_tokens: u32, recall_format: i32, draft_model: *const thimble_model,
        recall_mem_bytes: u64, recall: u32, recall_every: u32, recall_disk_bytes: u64, key_format: i32,
        value_format: i32, recall_prefill: u32, reserved: u32,
    }
    thimble_memory {
        struct_size: u32, pool: u32, capacity: u32, chunk: u32, budget: u64, weights: u64, shared: u64, pool_bytes: u64,
        view: u64, workspace: u64, io: u64, fixed: u64, total: u64, allocated: u64, dense_bytes_per_token: u64, mapped: u64,
        mapped_resident: u64, host_tables: u64, largest_position: u32, selection_pays: u32,
        states: u64, state_slots: u64, draft: u64, streamed: u64, store: u64,
        store_file: u64, finer_layers: u32, reserved: u32, recall_bytes: u64,
    }
    thimble_sampler_options {
        struct_size: u32, temperature: f32, top_k: u32, top_p: f32, min_p: f32, repeat_penalty: f32, repeat_last: u32,
        reserved: u32, seed: u64, presence_penalty: f32, frequency_penalty: f32,
    }
    thimble_stats {
        struct_size: u32, entries: u32, position: u64, waiting: u64, evicted: u64, evictions: u64, generated: u64,
        selected: u64, cache_hits: u64, cache_misses: u64, prefill_tokens: u64, prefill_seconds: f64, decode_seconds: f64,
        prefill_bytes: f64, prefill_flop: f64, decode_bytes: f64, decode_flop: f64, saturated: u64,
        stored: u64, recalled: u64,
    }
}

constants! {
    THIMBLE_ABI: u32 = 14;
    THIMBLE_TOKENIZE_ADD_BOS: u32 = 1;
    THIMBLE_TOKENIZE_PARSE_SPECIAL: u32 = 2;
    THIMBLE_DETOKENIZE_SPECIAL: u32 = 1;
    THIMBLE_CHAT_ADD_ASSISTANT: u32 = 1;
    THIMBLE_DEFAULT: u32 = u32::MAX;
    THIMBLE_RECALL_ALL: u32 = u32::MAX;
    THIMBLE_OK: thimble_status = 0;
    THIMBLE_INVALID_ARGUMENT: thimble_status = 10;
    THIMBLE_UNSUPPORTED: thimble_status = 11;
    THIMBLE_IO: thimble_status = 20;
    THIMBLE_FORMAT: thimble_status = 21;
    THIMBLE_MISMATCH: thimble_status = 22;
    THIMBLE_BUDGET: thimble_status = 30;
    THIMBLE_OUT_OF_MEMORY: thimble_status = 31;
    THIMBLE_CONTEXT_FULL: thimble_status = 40;
    THIMBLE_CANNOT_REWIND: thimble_status = 41;
    THIMBLE_INTERRUPTED: thimble_status = 50;
    THIMBLE_BUSY: thimble_status = 51;
    THIMBLE_DEVICE_LOST: thimble_status = 60;
    THIMBLE_NOT_FINITE: thimble_status = 61;
    THIMBLE_INTERNAL: thimble_status = 90;
    THIMBLE_RETENTION_DEFAULT: i32 = -1;
    THIMBLE_RETENTION_NONE: i32 = 0;
    THIMBLE_RETENTION_WINDOW: i32 = 1;
    THIMBLE_RETENTION_RANDOM: i32 = 2;
    THIMBLE_RETENTION_LOCRET: i32 = 3;
    THIMBLE_RETENTION_KEYDIFF: i32 = 4;
    THIMBLE_RETENTION_TOVA: i32 = 5;
    THIMBLE_RETENTION_REREAD: i32 = 6;
    THIMBLE_RETENTION_ADORE: i32 = 7;
    THIMBLE_RETENTION_MIX: i32 = 8;
    THIMBLE_RETAIN_PER_HEAD: i32 = 0;
    THIMBLE_RETAIN_LAYER: i32 = 1;
    THIMBLE_SELECTION_DENSE: i32 = 0;
    THIMBLE_SELECTION_TOKENSELECT: i32 = 1;
    THIMBLE_SELECTION_QUEST: i32 = 2;
    THIMBLE_VOTE_AUTO: i32 = 0;
    THIMBLE_VOTE_LAYER: i32 = 1;
    THIMBLE_VOTE_GROUP: i32 = 2;
    THIMBLE_KV_F16: i32 = 0;
    THIMBLE_KV_Q8_0: i32 = 1;
    THIMBLE_KV_Q4_0: i32 = 2;
    THIMBLE_POSITIONS_LIST: i32 = 0;
    THIMBLE_POSITIONS_ORIGINAL: i32 = 1;
    THIMBLE_SCALE_NONE: i32 = 0;
    THIMBLE_SCALE_SQRT: i32 = 1;
    THIMBLE_DRAFT_NONE: i32 = 0;
    THIMBLE_DRAFT_LOOKUP: i32 = 1;
    THIMBLE_DRAFT_MODEL: i32 = 2;
    THIMBLE_DRAFT_MTP: i32 = 3;
}

functions! {
    fn thimble_version() -> *const c_char;
    fn thimble_abi_version() -> u32;
    fn thimble_build_info() -> *const c_char;
    fn thimble_status_name(status: thimble_status) -> *const c_char;
    fn thimble_device_count(count: *mut u32, error: *mut thimble_error) -> thimble_status;
    fn thimble_device_get(index: u32, info: *mut thimble_device_info, error: *mut thimble_error) -> thimble_status;
    fn thimble_model_options_init(options: *mut thimble_model_options, struct_size: u32);
    fn thimble_model_open(
        path: *const c_char, options: *const thimble_model_options, model: *mut *mut thimble_model, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_model_free(model: *mut thimble_model);
    fn thimble_model_get_info(
        model: *const thimble_model, info: *mut thimble_model_info, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_heads_open(
        model: *const thimble_model, path: *const c_char, heads: *mut *mut thimble_heads, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_heads_free(heads: *mut thimble_heads);
    fn thimble_heads_retention(heads: *const thimble_heads) -> i32;
    fn thimble_tokenize(
        model: *const thimble_model, text: *const c_char, length: u64, flags: u32, ids: *mut i32, offsets: *mut u64,
        capacity: u64, count: *mut u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_detokenize(
        model: *const thimble_model, ids: *const i32, count: u64, flags: u32, text: *mut c_char, capacity: u64,
        length: *mut u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_token_ends(model: *const thimble_model, id: i32) -> i32;
    fn thimble_chat_options_init(options: *mut thimble_chat_options, struct_size: u32);
    fn thimble_chat_render(
        model: *const thimble_model, options: *const thimble_chat_options, text: *mut c_char, capacity: u64, length: *mut u64,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_retention_name(retention: i32) -> *const c_char;
    fn thimble_selection_name(selection: i32) -> *const c_char;
    fn thimble_session_options_init(options: *mut thimble_session_options, struct_size: u32);
    fn thimble_session_plan(
        model: *const thimble_model, options: *const thimble_session_options, memory: *mut thimble_memory,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_largest_pool(
        model: *const thimble_model, options: *const thimble_session_options, pool: *mut u32, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_create(
        model: *const thimble_model, options: *const thimble_session_options, session: *mut *mut thimble_session,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_free(session: *mut thimble_session);
    fn thimble_session_feed(
        session: *mut thimble_session, tokens: *const i32, count: u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_flush(session: *mut thimble_session, error: *mut thimble_error) -> thimble_status;
    fn thimble_session_step(session: *mut thimble_session, token: *mut i32, error: *mut thimble_error) -> thimble_status;
    fn thimble_session_accept(session: *mut thimble_session, token: i32, error: *mut thimble_error) -> thimble_status;
    fn thimble_session_logits(
        session: *mut thimble_session, logits: *mut *const f32, count: *mut u32, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_score(
        session: *mut thimble_session, tokens: *const i32, count: u64, logprobs: *mut f32, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_text(
        session: *mut thimble_session, token: i32, text: *mut c_char, capacity: u64, length: *mut u64,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_rewind(session: *mut thimble_session, position: u64, error: *mut thimble_error) -> thimble_status;
    fn thimble_session_clone(
        session: *mut thimble_session, clone: *mut *mut thimble_session, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_reset(session: *mut thimble_session, error: *mut thimble_error) -> thimble_status;
    fn thimble_session_interrupt(session: *mut thimble_session);
    fn thimble_session_kept(
        session: *mut thimble_session, layer: u32, kv_head: u32, positions: *mut i32, capacity: u64, count: *mut u64,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_stored_by_position(
        session: *mut thimble_session, stored: *mut f32, capacity: u64, count: *mut u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_kept_by_position(
        session: *mut thimble_session, kept: *mut f32, attended: *mut f32, capacity: u64, count: *mut u64,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_sampler_options_init(options: *mut thimble_sampler_options, struct_size: u32);
    fn thimble_session_set_sampler(
        session: *mut thimble_session, options: *const thimble_sampler_options, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_set_bias(
        session: *mut thimble_session, tokens: *const i32, biases: *const f32, count: u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_grammar_create_json_schema(
        model: *const thimble_model, schema: *const c_char, length: u64, grammar: *mut *mut thimble_grammar,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_grammar_create_regex(
        model: *const thimble_model, pattern: *const c_char, length: u64, grammar: *mut *mut thimble_grammar,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_grammar_create_gbnf(
        model: *const thimble_model, text: *const c_char, length: u64, grammar: *mut *mut thimble_grammar,
        error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_grammar_free(grammar: *mut thimble_grammar);
    fn thimble_session_set_grammar(
        session: *mut thimble_session, grammar: *const thimble_grammar, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_memory(
        session: *mut thimble_session, memory: *mut thimble_memory, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_get_options(
        session: *mut thimble_session, options: *mut thimble_session_options, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_stats(
        session: *mut thimble_session, stats: *mut thimble_stats, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_save(
        session: *mut thimble_session, path: *const c_char, note: *const c_void, note_size: u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_restore(
        session: *mut thimble_session, path: *const c_char, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_file_info(
        path: *const c_char, json: *mut c_char, capacity: u64, length: *mut u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_file_note(
        path: *const c_char, note: *mut c_void, capacity: u64, length: *mut u64, error: *mut thimble_error,
    ) -> thimble_status;
    fn thimble_session_shrink(
        session: *mut thimble_session, pool: u32, freed: *mut u64, error: *mut thimble_error,
    ) -> thimble_status;
}
