//! Read texts far longer than memory with a language model, inside a byte budget.
//!
//! ```no_run
//! use thimble::{Model, Options, Retention};
//!
//! # fn main() -> thimble::Result<()> {
//! let model = Model::open("model.gguf")?;
//! let options = Options::new().budget_bytes(64 << 20).retention(Retention::Window).pool(1024);
//! let mut session = model.session(&options)?;
//! session.feed(&model.tokenize("Once upon a time", thimble::ADD_BOS)?)?;
//! for piece in session.generate(64) {
//!     print!("{}", piece?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! thimble.h documents the calls; names here are those of the header. Any number of threads may use a `Model`; one thread
//! at a time may use a `Session`, which `&mut self` enforces; an `Interrupter` stops it from any other thread.

mod options;

use std::ffi::{CStr, CString};
use std::fmt;
use std::mem::size_of;
use std::ops::Deref;
use std::os::raw::{c_char, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

pub use options::{Chat, Draft, KvFormat, Message, Options, Positions, RetainScope, Retention, Sampler, Selection, Vote, VoteScale};
pub use thimble_sys as sys;
pub use thimble_sys::{thimble_memory as Memory, thimble_stats as Stats};

/// For `Model::tokenize`: put BOS first if the model asks for it.
pub const ADD_BOS: u32 = sys::THIMBLE_TOKENIZE_ADD_BOS;
/// For `Model::tokenize`: text that spells a control token becomes its id.
pub const PARSE_SPECIAL: u32 = sys::THIMBLE_TOKENIZE_PARSE_SPECIAL;

pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// One of `sys::THIMBLE_...`.
    pub code: i32,
    /// One sentence that says what is wrong and what to do.
    pub message: String,
    /// For `THIMBLE_BUDGET`: the bytes that the budget lacks, otherwise 0.
    pub bytes_missing: u64,
}

impl Error {
    fn invalid(message: &str) -> Error {
        Error { code: sys::THIMBLE_INVALID_ARGUMENT, message: message.into(), bytes_missing: 0 }
    }

    /// The code's name, "BUDGET".
    pub fn name(&self) -> &'static str {
        // Safety: the names are constants of the library, in ASCII.
        unsafe { CStr::from_ptr(sys::thimble_status_name(self.code)) }.to_str().unwrap_or("")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Calls a function whose last argument is an error.
fn check(call: impl FnOnce(*mut sys::thimble_error) -> sys::thimble_status) -> Result<()> {
    let mut error = sys::thimble_error {
        struct_size: size_of::<sys::thimble_error>() as u32,
        code: 0,
        bytes_missing: 0,
        message: [0; 496],
    };
    match call(&mut error) {
        sys::THIMBLE_OK => Ok(()),
        code => Err(Error { code, message: text(&error.message), bytes_missing: error.bytes_missing }),
    }
}

/// Asks a two-call function, `call(buffer, capacity, count, error)`, for the size and then for the elements.
fn two_calls<T: Copy>(
    zero: T,
    mut call: impl FnMut(*mut T, u64, &mut u64, *mut sys::thimble_error) -> sys::thimble_status,
) -> Result<Vec<T>> {
    let mut count = 0;
    let first = check(|error| call(null_mut(), 0, &mut count, error));
    if count == 0 {
        return first.map(|()| Vec::new());
    }
    let mut buffer = vec![zero; count as usize];
    check(|error| call(buffer.as_mut_ptr(), buffer.len() as u64, &mut count, error))?;
    buffer.truncate(count as usize);
    Ok(buffer)
}

/// The text in a struct's array, up to its NUL.
fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Converts bytes that the library guarantees to be UTF-8.
fn utf8(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| Error::invalid("the library gave a text that is not UTF-8"))
}

fn c_text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid("a name or path contains a NUL byte"))
}

fn c_path(path: &Path) -> Result<CString> {
    c_text(path.to_str().ok_or_else(|| Error::invalid("paths must be UTF-8"))?)
}

/// The version of the library that runs, "0.1.0".
pub fn version() -> String {
    // Safety: a constant of the library.
    unsafe { CStr::from_ptr(sys::thimble_version()) }.to_string_lossy().into_owned()
}

/// A device of this machine.
#[derive(Clone, Debug)]
pub struct Device {
    /// The value for `Options::device`.
    pub name: String,
    pub description: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// The devices of this machine.
pub fn devices() -> Result<Vec<Device>> {
    let mut count = 0;
    // Safety: the pointers are valid during the calls.
    check(|error| unsafe { sys::thimble_device_count(&mut count, error) })?;
    (0..count)
        .map(|index| {
            let mut info = zeroed::<sys::thimble_device_info>();
            info.struct_size = size_of::<sys::thimble_device_info>() as u32;
            check(|error| unsafe { sys::thimble_device_get(index, &mut info, error) })?;
            let (name, description) = (text(&info.name), text(&info.description));
            Ok(Device { name, description, total_bytes: info.total_bytes, free_bytes: info.free_bytes })
        })
        .collect()
}

/// A C struct of numbers, pointers and arrays of them, all zero.
fn zeroed<T: Copy>() -> T {
    // Safety: only used with structs of thimble_sys, for whose fields zero is a value.
    unsafe { std::mem::zeroed() }
}

// ---- models ----

struct ModelHandle {
    pointer: *mut sys::thimble_model,
    warnings: Vec<String>,
}

// Safety: models are immutable, and any number of threads may use one (thimble.h).
unsafe impl Send for ModelHandle {}
unsafe impl Sync for ModelHandle {}

impl Drop for ModelHandle {
    fn drop(&mut self) {
        // Safety: sessions and heads hold this handle, so none is left.
        unsafe { sys::thimble_model_free(self.pointer) }
    }
}

/// A model in a GGUF file. A clone is the same model.
#[derive(Clone)]
pub struct Model(Arc<ModelHandle>);

/// A description of a model: the fields of `thimble_model_info`, its texts as methods.
#[derive(Clone, Copy)]
pub struct ModelInfo(sys::thimble_model_info);

impl Deref for ModelInfo {
    type Target = sys::thimble_model_info;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl ModelInfo {
    pub fn architecture(&self) -> String {
        text(&self.0.architecture)
    }
    pub fn name(&self) -> String {
        text(&self.0.name)
    }
    pub fn quantization(&self) -> String {
        text(&self.0.quantization)
    }
    pub fn chat_format(&self) -> String {
        text(&self.0.chat_format)
    }
    pub fn chat_problem(&self) -> String {
        text(&self.0.chat_problem)
    }
}

unsafe extern "C" fn keep_warning(user: *mut c_void, message: *const c_char) {
    let warnings = &mut *user.cast::<Vec<String>>();
    warnings.push(CStr::from_ptr(message).to_string_lossy().into_owned());
}

impl Model {
    /// Opens a model; the file must not change while the model exists.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        // Safety: a function of the library without arguments.
        if unsafe { sys::thimble_abi_version() } < sys::THIMBLE_ABI {
            return Err(Error::invalid("the loaded libthimble is older than this crate: install a newer one"));
        }
        let path = c_path(path.as_ref())?;
        let mut warnings: Vec<String> = Vec::new();
        let mut pointer = null_mut();
        let mut options = zeroed::<sys::thimble_model_options>();
        // Safety: options, path and warnings outlive the calls, and the callback runs only inside them.
        unsafe {
            sys::thimble_model_options_init(&mut options, size_of::<sys::thimble_model_options>() as u32);
            options.log = Some(keep_warning);
            options.log_user = (&mut warnings as *mut Vec<String>).cast();
            check(|error| sys::thimble_model_open(path.as_ptr(), &options, &mut pointer, error))?;
        }
        Ok(Model(Arc::new(ModelHandle { pointer, warnings })))
    }

    /// The library's warnings about the file, one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    pub fn info(&self) -> Result<ModelInfo> {
        let mut info = zeroed::<sys::thimble_model_info>();
        info.struct_size = size_of::<sys::thimble_model_info>() as u32;
        // Safety: the model exists, and `info` has the stated size.
        check(|error| unsafe { sys::thimble_model_get_info(self.0.pointer, &mut info, error) })?;
        Ok(ModelInfo(info))
    }

    /// Text, of any bytes, to token ids. `flags`: `ADD_BOS`, `PARSE_SPECIAL`.
    pub fn tokenize(&self, text: impl AsRef<[u8]>, flags: u32) -> Result<Vec<i32>> {
        let text = text.as_ref();
        // Safety: the text has the stated length, and the buffer has room for `capacity` ids.
        two_calls(0, |ids, capacity, count, error| unsafe {
            let (data, length) = (text.as_ptr().cast(), text.len() as u64);
            sys::thimble_tokenize(self.0.pointer, data, length, flags, ids, null_mut(), capacity, count, error)
        })
    }

    /// Token ids to text. With `special` control tokens are written as their text, otherwise they are left out.
    pub fn detokenize(&self, ids: &[i32], special: bool) -> Result<String> {
        let flags = if special { sys::THIMBLE_DETOKENIZE_SPECIAL } else { 0 };
        // Safety: as above.
        utf8(two_calls(0u8, |text, capacity, length, error| unsafe {
            let (data, count) = (ids.as_ptr(), ids.len() as u64);
            sys::thimble_detokenize(self.0.pointer, data, count, flags, text.cast(), capacity, length, error)
        })?)
    }

    /// Whether this token ends an answer.
    pub fn token_ends(&self, id: i32) -> bool {
        // Safety: the model exists.
        unsafe { sys::thimble_token_ends(self.0.pointer, id) != 0 }
    }

    /// Messages formatted as the model was trained to read them; tokenize the text with `PARSE_SPECIAL`.
    pub fn chat(&self, messages: &[Message<'_>], chat: &Chat<'_>) -> Result<String> {
        chat.with_c(messages, |options| {
            // Safety: the objects that the options point to exist during the call.
            utf8(two_calls(0u8, |text, capacity, length, error| unsafe {
                sys::thimble_chat_render(self.0.pointer, options, text.cast(), capacity, length, error)
            })?)
        })
    }

    /// Opens the heads, a trained retainer of this model.
    pub fn heads(&self, path: impl AsRef<Path>) -> Result<Heads> {
        let path = c_path(path.as_ref())?;
        let mut pointer = null_mut();
        // Safety: model and path exist during the call.
        check(|error| unsafe { sys::thimble_heads_open(self.0.pointer, path.as_ptr(), &mut pointer, error) })?;
        Ok(Heads(Arc::new(HeadsHandle { pointer, model: self.0.clone() })))
    }

    /// The JSON texts that a JSON schema describes.
    pub fn json_schema(&self, schema: &str) -> Result<Grammar> {
        self.grammar(sys::thimble_grammar_create_json_schema, schema)
    }

    /// The texts that match a regular expression as a whole.
    pub fn regex(&self, pattern: &str) -> Result<Grammar> {
        self.grammar(sys::thimble_grammar_create_regex, pattern)
    }

    /// The texts of a grammar in llama.cpp's notation.
    pub fn gbnf(&self, text: &str) -> Result<Grammar> {
        self.grammar(sys::thimble_grammar_create_gbnf, text)
    }

    fn grammar(&self, create: CreateGrammar, text: &str) -> Result<Grammar> {
        let mut pointer = null_mut();
        // Safety: model and text exist during the call.
        check(|error| unsafe { create(self.0.pointer, text.as_ptr().cast(), text.len() as u64, &mut pointer, error) })?;
        Ok(Grammar { pointer })
    }

    /// The memory of a session with these options.
    pub fn plan(&self, options: &Options) -> Result<Memory> {
        let mut memory = zeroed::<Memory>();
        memory.struct_size = size_of::<Memory>() as u32;
        let options = options.for_model(self)?;
        // Safety: the options own what they point to.
        check(|error| unsafe { sys::thimble_session_plan(self.0.pointer, &options.raw, &mut memory, error) })?;
        Ok(memory)
    }

    /// The largest pool that fits the options' budget.
    pub fn largest_pool(&self, options: &Options) -> Result<u32> {
        let mut pool = 0;
        let options = options.for_model(self)?;
        // Safety: as above.
        check(|error| unsafe { sys::thimble_session_largest_pool(self.0.pointer, &options.raw, &mut pool, error) })?;
        Ok(pool)
    }

    /// Creates a session; all memory that it will ever need is allocated here.
    pub fn session(&self, options: &Options) -> Result<Session> {
        let mut pointer = null_mut();
        let options = options.for_model(self)?;
        // Safety: as above.
        check(|error| unsafe { sys::thimble_session_create(self.0.pointer, &options.raw, &mut pointer, error) })?;
        Ok(Session::own(pointer, self))
    }
}

struct HeadsHandle {
    pointer: *mut sys::thimble_heads,
    model: Arc<ModelHandle>,
}

// Safety: heads are immutable, and any number of threads may use them (thimble.h).
unsafe impl Send for HeadsHandle {}
unsafe impl Sync for HeadsHandle {}

impl Drop for HeadsHandle {
    fn drop(&mut self) {
        // Safety: this is their only owner.
        unsafe { sys::thimble_heads_free(self.pointer) }
    }
}

/// A trained retainer of a model: `Model::heads` opens it, `Options::heads` takes it.
#[derive(Clone)]
pub struct Heads(Arc<HeadsHandle>);

impl Heads {
    /// The retention that the heads serve: `Retention::Locret`, or `Keydiff` or `Mix` where their training found that
    /// better; or `Adore` for its controller.
    pub fn retention(&self) -> Retention {
        // Safety: the handle lives as long as this.
        match unsafe { sys::thimble_heads_retention(self.0.pointer) } {
            sys::THIMBLE_RETENTION_KEYDIFF => Retention::Keydiff,
            sys::THIMBLE_RETENTION_MIX => Retention::Mix,
            sys::THIMBLE_RETENTION_ADORE => Retention::Adore,
            _ => Retention::Locret,
        }
    }
}

type CreateGrammar = unsafe extern "C" fn(
    *const sys::thimble_model,
    *const std::os::raw::c_char,
    u64,
    *mut *mut sys::thimble_grammar,
    *mut sys::thimble_error,
) -> sys::thimble_status;

/// The texts that a model may generate: `Model::json_schema`, `regex` and `gbnf` make one, `Session::set_grammar` takes it.
pub struct Grammar {
    pointer: *mut sys::thimble_grammar,
}

// Safety: grammars are immutable, and any number of threads may use them (thimble.h).
unsafe impl Send for Grammar {}
unsafe impl Sync for Grammar {}

impl Drop for Grammar {
    fn drop(&mut self) {
        // Safety: this is its only owner; sessions keep what they need.
        unsafe { sys::thimble_grammar_free(self.pointer) }
    }
}

// ---- sessions ----

struct SessionHandle {
    pointer: *mut sys::thimble_session,
    model: Model,
}

// Safety: a session may move between threads. A shared one can only be interrupted, which any thread may do (thimble.h); all
// other calls take a `&mut Session`.
unsafe impl Send for SessionHandle {}
unsafe impl Sync for SessionHandle {}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        // Safety: the session and its interrupters were dropped.
        unsafe { sys::thimble_session_free(self.pointer) }
    }
}

/// One sequence of tokens and its memory. `Model::session` creates it.
pub struct Session(Arc<SessionHandle>);

/// Stops a session's calls from any thread. It keeps the session's memory alive.
#[derive(Clone)]
pub struct Interrupter(Arc<SessionHandle>);

impl Interrupter {
    /// The running call, or if there is none the next one, fails with `THIMBLE_INTERRUPTED`; repeat it to continue.
    pub fn interrupt(&self) {
        // Safety: the handle keeps the session alive.
        unsafe { sys::thimble_session_interrupt(self.0.pointer) }
    }
}

impl Session {
    fn own(pointer: *mut sys::thimble_session, model: &Model) -> Session {
        Session(Arc::new(SessionHandle { pointer, model: model.clone() }))
    }

    fn call(
        &mut self,
        call: impl FnOnce(*mut sys::thimble_session, *mut sys::thimble_error) -> sys::thimble_status,
    ) -> Result<()> {
        check(|error| call(self.0.pointer, error))
    }

    pub fn model(&self) -> &Model {
        &self.0.model
    }

    pub fn interrupter(&self) -> Interrupter {
        Interrupter(self.0.clone())
    }

    // Safety of the calls below: the session exists and only this thread uses it (`&mut self`); pointers are valid during the
    // call, and buffers have the stated sizes.

    /// Appends tokens to the prompt and reads every chunk that is complete. After `THIMBLE_INTERRUPTED` repeat the call to continue.
    pub fn feed(&mut self, tokens: &[i32]) -> Result<()> {
        self.call(|s, error| unsafe { sys::thimble_session_feed(s, tokens.as_ptr(), tokens.len() as u64, error) })
    }

    /// Ends the prompt: reads all waiting tokens.
    pub fn flush(&mut self) -> Result<()> {
        self.call(|s, error| unsafe { sys::thimble_session_flush(s, error) })
    }

    /// Samples the next token, appends it and returns it. `Model::token_ends` tells whether it ends the answer.
    pub fn step(&mut self) -> Result<i32> {
        let mut token = 0;
        self.call(|s, error| unsafe { sys::thimble_session_step(s, &mut token, error) })?;
        Ok(token)
    }

    /// Like step, with a token that the caller chose.
    pub fn accept(&mut self, token: i32) -> Result<()> {
        self.call(|s, error| unsafe { sys::thimble_session_accept(s, token, error) })
    }

    /// The text of the next token of an answer; bytes of an incomplete code point are held back until it is complete.
    pub fn text(&mut self, token: i32) -> Result<String> {
        // The first call with enough room takes the token, so a call that only asks for the length is not possible.
        let mut buffer = vec![0u8; 256];
        loop {
            let mut length = 0;
            let room = buffer.len() as u64;
            let given = self.call(|s, error| unsafe {
                sys::thimble_session_text(s, token, buffer.as_mut_ptr().cast(), room, &mut length, error)
            });
            if length <= room {
                buffer.truncate(length as usize);
                return given.and_then(|()| utf8(buffer));
            }
            buffer.resize(length as usize, 0);
        }
    }

    /// The answer, piece by piece, until a token ends it or `limit` tokens were generated.
    pub fn generate(&mut self, limit: usize) -> Answer<'_> {
        Answer { session: self, left: limit }
    }

    /// The logits of the next token, one for each token of the vocabulary; valid until the next call.
    pub fn logits(&mut self) -> Result<&[f32]> {
        let (mut values, mut count) = (null(), 0);
        self.call(|s, error| unsafe { sys::thimble_session_logits(s, &mut values, &mut count, error) })?;
        Ok(unsafe { std::slice::from_raw_parts(values, count as usize) })
    }

    /// Appends these tokens; returns the natural logarithm of each one's probability given all before it.
    pub fn score(&mut self, tokens: &[i32]) -> Result<Vec<f32>> {
        let mut logprobs = vec![0.0; tokens.len()];
        let count = tokens.len() as u64;
        self.call(|s, error| unsafe {
            sys::thimble_session_score(s, tokens.as_ptr(), count, logprobs.as_mut_ptr(), error)
        })?;
        Ok(logprobs)
    }

    /// Forgets every token from this position on; `THIMBLE_CANNOT_REWIND` if entries were evicted since.
    pub fn rewind(&mut self, position: u64) -> Result<()> {
        self.call(|s, error| unsafe { sys::thimble_session_rewind(s, position, error) })
    }

    /// Returns to the state after creation.
    pub fn reset(&mut self) -> Result<()> {
        self.call(|s, error| unsafe { sys::thimble_session_reset(s, error) })
    }

    /// Create a second session with the same state, within the same budget.
    pub fn try_clone(&mut self) -> Result<Session> {
        let mut pointer = null_mut();
        self.call(|s, error| unsafe { sys::thimble_session_clone(s, &mut pointer, error) })?;
        Ok(Session::own(pointer, &self.0.model))
    }

    /// The original positions that a KV head still holds, ascending.
    pub fn kept(&mut self, layer: u32, kv_head: u32) -> Result<Vec<i32>> {
        let session = self.0.pointer;
        two_calls(0, |positions, capacity, count, error| unsafe {
            sys::thimble_session_kept(session, layer, kv_head, positions, capacity, count, error)
        })
    }

    /// For each position: the share of heads that still hold it.
    pub fn kept_by_position(&mut self) -> Result<Vec<f32>> {
        let session = self.0.pointer;
        two_calls(0.0, |kept, capacity, count, error| unsafe {
            sys::thimble_session_kept_by_position(session, kept, null_mut(), capacity, count, error)
        })
    }

    /// For each position: the attention that the last token paid to it. Needs `Options::watch`.
    pub fn attended_by_position(&mut self) -> Result<Vec<f32>> {
        let session = self.0.pointer;
        two_calls(0.0, |attended, capacity, count, error| unsafe {
            sys::thimble_session_kept_by_position(session, null_mut(), attended, capacity, count, error)
        })
    }

    /// For each position: the share of heads that have it in the store of evicted entries and not in the pool.
    pub fn stored_by_position(&mut self) -> Result<Vec<f32>> {
        let session = self.0.pointer;
        two_calls(0.0, |stored, capacity, count, error| unsafe {
            sys::thimble_session_stored_by_position(session, stored, capacity, count, error)
        })
    }

    pub fn set_sampler(&mut self, sampler: &Sampler) -> Result<()> {
        self.call(|s, error| unsafe { sys::thimble_session_set_sampler(s, &sampler.raw, error) })
    }

    /// Adds a number to the logits of these tokens before one is sampled, until the next call.
    pub fn set_bias(&mut self, biases: &[(i32, f32)]) -> Result<()> {
        let (tokens, values): (Vec<i32>, Vec<f32>) = biases.iter().copied().unzip();
        let count = tokens.len() as u64;
        self.call(|s, error| unsafe {
            sys::thimble_session_set_bias(s, tokens.as_ptr(), values.as_ptr(), count, error)
        })
    }

    /// From now on, the generated tokens form a text of the grammar, which begins with the next one. `None`: any token may
    /// come.
    pub fn set_grammar(&mut self, grammar: Option<&Grammar>) -> Result<()> {
        let pointer = grammar.map_or(std::ptr::null(), |grammar| grammar.pointer as *const _);
        self.call(|s, error| unsafe { sys::thimble_session_set_grammar(s, pointer, error) })
    }

    /// The memory of the session.
    pub fn memory(&mut self) -> Result<Memory> {
        let mut memory = zeroed::<Memory>();
        memory.struct_size = size_of::<Memory>() as u32;
        self.call(|s, error| unsafe { sys::thimble_session_memory(s, &mut memory, error) })?;
        Ok(memory)
    }

    /// The options of the session with every default decided, without heads.
    pub fn options(&mut self) -> Result<Options> {
        let mut raw = zeroed::<sys::thimble_session_options>();
        raw.struct_size = size_of::<sys::thimble_session_options>() as u32;
        self.call(|s, error| unsafe { sys::thimble_session_get_options(s, &mut raw, error) })?;
        Ok(Options::reported(raw))
    }

    pub fn stats(&mut self) -> Result<Stats> {
        let mut stats = zeroed::<Stats>();
        stats.struct_size = size_of::<Stats>() as u32;
        self.call(|s, error| unsafe { sys::thimble_session_stats(s, &mut stats, error) })?;
        Ok(stats)
    }

    /// Saves the session to a file, together with `note`.
    pub fn save(&mut self, path: impl AsRef<Path>, note: &[u8]) -> Result<()> {
        let path = c_path(path.as_ref())?;
        self.call(|s, error| unsafe {
            sys::thimble_session_save(s, path.as_ptr(), note.as_ptr().cast(), note.len() as u64, error)
        })
    }

    /// Replaces the state by that of a saved session with the same settings.
    pub fn restore(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        self.call(|s, error| unsafe { sys::thimble_session_restore(s, path.as_ptr(), error) })
    }

    /// Evicts down to `pool` entries per head; returns the bytes that were freed.
    pub fn shrink(&mut self, pool: u32) -> Result<u64> {
        let mut freed = 0;
        self.call(|s, error| unsafe { sys::thimble_session_shrink(s, pool, &mut freed, error) })?;
        Ok(freed)
    }
}

/// A description of a saved session's file, as a JSON object.
pub fn session_file_info(path: impl AsRef<Path>) -> Result<String> {
    let path = c_path(path.as_ref())?;
    // Safety: the path exists during the calls, and the buffer has room for `capacity` bytes.
    utf8(two_calls(0u8, |json, capacity, length, error| unsafe {
        sys::thimble_session_file_info(path.as_ptr(), json.cast(), capacity, length, error)
    })?)
}

/// The note that was passed to `Session::save`.
pub fn session_file_note(path: impl AsRef<Path>) -> Result<Vec<u8>> {
    let path = c_path(path.as_ref())?;
    // Safety: as above.
    two_calls(0u8, |note, capacity, length, error| unsafe {
        sys::thimble_session_file_note(path.as_ptr(), note.cast(), capacity, length, error)
    })
}

/// An answer, piece by piece; `Session::generate` returns it.
pub struct Answer<'a> {
    session: &'a mut Session,
    left: usize,
}

impl Answer<'_> {
    /// The next token's text, which may be empty; None when the answer is over.
    fn piece(&mut self) -> Result<Option<String>> {
        if self.left == 0 {
            return Ok(None);
        }
        let token = self.session.step()?;
        self.left -= 1;
        if self.session.model().token_ends(token) {
            self.left = 0;
            return Ok(None);
        }
        self.session.text(token).map(Some)
    }
}

impl Iterator for Answer<'_> {
    type Item = Result<String>;
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.piece().transpose()? {
                Ok(piece) if piece.is_empty() => continue,
                piece => return Some(piece),
            }
        }
    }
}
