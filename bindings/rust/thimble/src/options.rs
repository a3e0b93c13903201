//! Options of sessions, samplers and chats, with the header's defaults. Methods named like the fields set them.
use std::ffi::{CStr, CString};
use std::mem::size_of;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use crate::{c_text, sys, zeroed, Error, Heads, Model, Result};

macro_rules! choices {
    ($($(#[$doc:meta])* $name:ident { $($choice:ident = $value:ident),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            #[repr(i32)]
            pub enum $name { $($choice = sys::$value),* }
        )*
    };
}

choices! {
    /// Which entries stay when a pool is over its size.
    Retention {
        Default = THIMBLE_RETENTION_DEFAULT, None = THIMBLE_RETENTION_NONE, Window = THIMBLE_RETENTION_WINDOW,
        Random = THIMBLE_RETENTION_RANDOM, Locret = THIMBLE_RETENTION_LOCRET, Keydiff = THIMBLE_RETENTION_KEYDIFF,
        Tova = THIMBLE_RETENTION_TOVA, Reread = THIMBLE_RETENTION_REREAD, Adore = THIMBLE_RETENTION_ADORE,
        Mix = THIMBLE_RETENTION_MIX,
    }
    RetainScope { PerHead = THIMBLE_RETAIN_PER_HEAD, Layer = THIMBLE_RETAIN_LAYER }
    /// Which entries a generated token attends to.
    Selection {
        Dense = THIMBLE_SELECTION_DENSE, TokenSelect = THIMBLE_SELECTION_TOKENSELECT, Quest = THIMBLE_SELECTION_QUEST,
    }
    Vote { Auto = THIMBLE_VOTE_AUTO, Layer = THIMBLE_VOTE_LAYER, Group = THIMBLE_VOTE_GROUP }
    VoteScale { None = THIMBLE_SCALE_NONE, Sqrt = THIMBLE_SCALE_SQRT }
    /// Where guesses of the next tokens come from.
    Draft { None = THIMBLE_DRAFT_NONE, Lookup = THIMBLE_DRAFT_LOOKUP, Model = THIMBLE_DRAFT_MODEL, Mtp = THIMBLE_DRAFT_MTP }
    /// How the pool or the store has keys and values.
    KvFormat { F16 = THIMBLE_KV_F16, Q8_0 = THIMBLE_KV_Q8_0, Q4_0 = THIMBLE_KV_Q4_0 }
    Positions { List = THIMBLE_POSITIONS_LIST, Original = THIMBLE_POSITIONS_ORIGINAL }
}

// Methods that set a field of the C struct and return the options.
macro_rules! setters {
    ($($name:ident: $type:ty),* $(,)?) => {
        $(pub fn $name(mut self, $name: $type) -> Self { self.raw.$name = $name as _; self })*
    };
}

/// Options of a session.
#[derive(Clone)]
pub struct Options {
    pub(crate) raw: sys::thimble_session_options,
    device: Option<CString>,
    heads: Option<Heads>,
    draft_model: Option<Model>,
}

// Safety: only `for_model` sets the pointers in `raw`, to objects that this struct owns.
unsafe impl Send for Options {}
unsafe impl Sync for Options {}

impl Default for Options {
    fn default() -> Self {
        let mut raw = zeroed::<sys::thimble_session_options>();
        // Safety: the struct has the size that is given.
        unsafe { sys::thimble_session_options_init(&mut raw, size_of::<sys::thimble_session_options>() as u32) };
        Options { raw, device: None, heads: None, draft_model: None }
    }
}

impl Options {
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        budget_bytes: u64, retention: Retention, pool: u32, threads: u32, retain_scope: RetainScope, chunk: u32,
        stabilizers: u32, local: u32, protect_init: u32, max_new: u32, selection: Selection, select_k: u32, select_init: u32,
        select_local: u32, select_theta: f32, vote: Vote, vote_scale: VoteScale, vote_window: u32, select_prefill: u32,
        positions: Positions, context: u32, seed: u32, select_page: u32, dense_layers: u32, watch: u32,
        rebuild: u32, rebuild_every: u32, draft: Draft, draft_tokens: u32,
        recall_format: KvFormat, recall_mem_bytes: u64, recall: u32, recall_every: u32, recall_disk_bytes: u64, key_format: KvFormat,
        value_format: KvFormat, recall_prefill: u32,
    }

    /// "auto", "cpu", "cuda:0", "vulkan:0". Text after a NUL character is ignored.
    pub fn device(mut self, device: &str) -> Self {
        let name: Vec<u8> = device.bytes().take_while(|&byte| byte != 0).collect();
        self.device = CString::new(name).ok();
        self
    }

    /// All options as numbers; `device`, `heads` and `draft_model` are null.
    pub fn fields(&self) -> &sys::thimble_session_options {
        &self.raw
    }

    /// A trained retainer of the session's model.
    pub fn heads(mut self, heads: &Heads) -> Self {
        self.heads = Some(heads.clone());
        self
    }

    /// The smaller model that drafts, with `Draft::Model`.
    pub fn draft_model(mut self, model: &Model) -> Self {
        self.draft_model = Some(model.clone());
        self
    }

    /// A copy of options that a session reports.
    pub(crate) fn reported(mut raw: sys::thimble_session_options) -> Options {
        // Safety: the session owns the name, which ends with a NUL character.
        let device = (!raw.device.is_null()).then(|| unsafe { CStr::from_ptr(raw.device) }.to_owned());
        (raw.device, raw.progress, raw.progress_user) = (null(), null(), null_mut());
        Options { raw, device, heads: None, draft_model: None }
    }

    /// These options with their pointers set.
    pub(crate) fn for_model(&self, model: &Model) -> Result<Options> {
        let mut options = self.clone();
        if let Some(heads) = &options.heads {
            if !Arc::ptr_eq(&heads.0.model, &model.0) {
                return Err(Error::invalid("these heads were opened for another model"));
            }
            options.raw.heads = heads.0.pointer;
        }
        options.raw.draft_model = options.draft_model.as_ref().map_or(null(), |model| model.0.pointer as *const _);
        // Cloning a CString changes its address; moving it does not.
        options.raw.device = options.device.as_ref().map_or(null(), |name| name.as_ptr());
        Ok(options)
    }
}

/// How the next token is sampled; by default the most likely one is taken.
#[derive(Clone, Copy)]
pub struct Sampler {
    pub(crate) raw: sys::thimble_sampler_options,
}

impl Default for Sampler {
    fn default() -> Self {
        let mut raw = zeroed::<sys::thimble_sampler_options>();
        // Safety: the struct has the size that is given.
        unsafe { sys::thimble_sampler_options_init(&mut raw, size_of::<sys::thimble_sampler_options>() as u32) };
        Sampler { raw }
    }
}

impl Sampler {
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        temperature: f32, top_k: u32, top_p: f32, min_p: f32, repeat_penalty: f32, repeat_last: u32, seed: u64,
        presence_penalty: f32, frequency_penalty: f32,
    }
}

/// A message of a conversation.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    pub role: &'a str,
    pub content: &'a str,
}

/// How messages become text.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// End where the answer begins; the default.
    pub assistant: bool,
    /// The number of leading messages that the session already holds.
    pub held: u64,
    /// A known format's name instead of the model's template.
    pub format: Option<&'a str>,
    /// A Jinja template to run instead of the model's.
    pub template: Option<&'a str>,
    /// Further variables for the template, a JSON object.
    pub variables: Option<&'a str>,
}

impl Default for Chat<'_> {
    fn default() -> Self {
        Chat { assistant: true, held: 0, format: None, template: None, variables: None }
    }
}

impl Chat<'_> {
    /// Calls `render` with the C options for these messages.
    pub(crate) fn with_c<T>(
        &self,
        messages: &[Message<'_>],
        render: impl FnOnce(&sys::thimble_chat_options) -> Result<T>,
    ) -> Result<T> {
        let objects: Vec<String> = messages
            .iter()
            .map(|message| format!("{{\"role\":{},\"content\":{}}}", quoted(message.role), quoted(message.content)))
            .collect();
        let messages = format!("[{}]", objects.join(","));
        let format = self.format.map(c_text).transpose()?;
        let mut options = zeroed::<sys::thimble_chat_options>();
        // Safety: the struct has the size that is given.
        unsafe { sys::thimble_chat_options_init(&mut options, size_of::<sys::thimble_chat_options>() as u32) };
        options.flags = if self.assistant { sys::THIMBLE_CHAT_ADD_ASSISTANT } else { 0 };
        options.held = self.held;
        options.format = format.as_ref().map_or(null(), |name| name.as_ptr());
        options.messages_json = messages.as_ptr().cast();
        options.messages_json_length = messages.len() as u64;
        if let Some(template) = self.template {
            options.source = template.as_ptr().cast();
            options.source_length = template.len() as u64;
        }
        if let Some(variables) = self.variables {
            options.variables = variables.as_ptr().cast();
            options.variables_length = variables.len() as u64;
        }
        render(&options)
    }
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c < ' ' => json.push_str(&format!("\\u{:04x}", c as u32)),
            c => json.push(c),
        }
    }
    json.push('"');
    json
}
