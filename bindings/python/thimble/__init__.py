"""Read texts far longer than memory with a language model, inside a byte budget.

    import thimble

    with thimble.Model("model.gguf") as model:
        with model.session(thimble.Options(budget_bytes=64 << 20, retention="window", pool=1024)) as session:
            session.feed(model.tokenize(text, bos=True))
            for piece in session.generate(64):
                print(piece, end="", flush=True)

Calls that fail raise ThimbleError. thimble.h documents the calls; names here are those of the header.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import threading
from ctypes import byref, c_float, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union

from . import _c
from ._c import ThimbleError

__all__ = ["Device", "Grammar", "Heads", "Memory", "Model", "ModelInfo", "Options", "Sampler", "Session", "Stats", "ThimbleError",
           "build_info", "devices", "session_file_info", "session_file_note", "version"]

Path = Union[str, "os.PathLike[str]"]
_T = TypeVar("_T")


def version() -> str:
    """The version of the library, "0.1.0"."""
    return str(_c.lib.thimble_version().decode())


def build_info() -> str:
    """What was built into the library, for bug reports."""
    return str(_c.lib.thimble_build_info().decode())


# ---- values, with the header's fields ----


@dataclasses.dataclass(frozen=True)
class Device:
    name: str
    description: str
    total_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    has_weights: int
    has_tokenizer: int
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    context_length: int
    bos: int
    eos: int
    files: int
    parameters: int
    file_bytes: int
    kv_bytes_per_token: int
    architecture: str
    name: str
    quantization: str
    chat_format: str
    chat_problem: str
    experts: int
    experts_per_token: int
    window: int
    window_layers: int


@dataclasses.dataclass(frozen=True)
class Memory:
    pool: int
    capacity: int
    chunk: int
    budget: int
    weights: int
    shared: int
    pool_bytes: int
    view: int
    workspace: int
    io: int
    fixed: int
    total: int
    allocated: int
    dense_bytes_per_token: int
    mapped: int
    mapped_resident: int
    host_tables: int
    largest_position: int
    selection_pays: int
    states: int
    state_slots: int
    draft: int
    streamed: int
    store: int
    store_file: int
    finer_layers: int
    recall_bytes: int


@dataclasses.dataclass(frozen=True)
class Stats:
    entries: int
    position: int
    waiting: int
    evicted: int
    evictions: int
    generated: int
    selected: int
    cache_hits: int
    cache_misses: int
    prefill_tokens: int
    prefill_seconds: float
    decode_seconds: float
    prefill_bytes: float
    prefill_flop: float
    decode_bytes: float
    decode_flop: float
    saturated: int
    stored: int
    recalled: int


def _value(kind: Type[_T], struct: ctypes.Structure) -> _T:
    def field(name: str) -> Any:
        value = getattr(struct, name)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    return kind(**{f.name: field(f.name) for f in dataclasses.fields(kind)})


def _filled(kind: Type[_T], struct: Any, name: str, *before: Any) -> _T:
    value = struct(struct_size=ctypes.sizeof(struct))
    _c.call(name, *before, byref(value))
    return _value(kind, value)


@dataclasses.dataclass
class Options:
    """Options of a session: thimble_session_options. None is the header's default."""

    budget_bytes: Optional[int] = None
    retention: Optional[str] = None  # "none", "window", "random", "locret", "keydiff", "tova", "reread", "adore", "mix"
    pool: Optional[int] = None
    heads: Optional["Heads"] = None
    device: Optional[str] = None  # "auto", "cpu", "cuda:0", "vulkan:0"
    threads: Optional[int] = None
    retain_scope: Optional[str] = None  # "per_head", "layer"
    chunk: Optional[int] = None
    stabilizers: Optional[int] = None
    local: Optional[int] = None
    protect_init: Optional[int] = None
    max_new: Optional[int] = None
    selection: Optional[str] = None  # "dense", "tokenselect", "quest"
    select_k: Optional[int] = None
    select_init: Optional[int] = None
    select_local: Optional[int] = None
    select_theta: Optional[float] = None
    vote: Optional[str] = None  # "auto", "layer", "group"
    vote_scale: Optional[str] = None  # "none", "sqrt"
    vote_window: Optional[int] = None
    select_prefill: Optional[int] = None
    positions: Optional[str] = None  # "list", "original"
    context: Optional[int] = None
    seed: Optional[int] = None
    select_page: Optional[int] = None
    dense_layers: Optional[int] = None
    watch: Optional[int] = None
    rebuild: Optional[int] = None
    rebuild_every: Optional[int] = None
    draft: Optional[str] = None  # "none", "lookup", "model", "mtp"
    draft_model: Optional["Model"] = None  # for "model"
    draft_tokens: Optional[int] = None
    recall_format: Optional[str] = None  # "f16", "q8_0", "q4_0"
    recall_mem_bytes: Optional[int] = None
    recall: Union[int, str, None] = None  # or "all"
    recall_every: Optional[int] = None
    recall_prefill: Optional[int] = None
    recall_disk_bytes: Optional[int] = None
    key_format: Optional[str] = None  # the same
    value_format: Optional[str] = None  # the same


# Options that are words here and numbers in C, with the prefix of the constants.
_WORDS = {"retention": "THIMBLE_RETENTION_", "selection": "THIMBLE_SELECTION_", "retain_scope": "THIMBLE_RETAIN_",
          "vote": "THIMBLE_VOTE_", "vote_scale": "THIMBLE_SCALE_", "positions": "THIMBLE_POSITIONS_",
          "draft": "THIMBLE_DRAFT_", "recall_format": "THIMBLE_KV_", "key_format": "THIMBLE_KV_",
          "value_format": "THIMBLE_KV_"}


@contextlib.contextmanager
def _c_options(options: Optional[Options], model: "Model") -> Iterator[_c.thimble_session_options]:
    """The C struct for a call."""
    options = options or Options()
    struct = _c.initialised(_c.thimble_session_options)
    with contextlib.ExitStack() as lent:
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if value is not None:
                setattr(struct, field.name, _c_value(field.name, value, model, lent))
        yield struct


def _word(name: str, number: int) -> str:
    """The word of an option's number."""
    prefix = _WORDS[name]
    return next(constant[len(prefix):].lower() for constant, value in _c.CONSTANTS.items()
                if constant.startswith(prefix) and value == number)


def _c_value(name: str, value: Any, model: "Model", lent: contextlib.ExitStack) -> Any:
    if name in _WORDS:
        constant = _WORDS[name] + value.upper()
        if constant not in _c.CONSTANTS:
            raise ValueError(f"{name} cannot be {value!r}")
        return _c.CONSTANTS[constant]
    if name == "recall" and value == "all":
        return _c.CONSTANTS["THIMBLE_RECALL_ALL"]
    if name == "heads":
        if value.model is not model:
            raise ValueError("these heads were opened for another model")
        return lent.enter_context(value._lent())
    if name == "draft_model":
        return lent.enter_context(value._lent())
    return value.encode() if isinstance(value, str) else value

@dataclasses.dataclass
class Sampler:
    """thimble_sampler_options. None is the header's default; by default the most likely token is taken."""

    temperature: Optional[float] = None
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    min_p: Optional[float] = None
    repeat_penalty: Optional[float] = None
    repeat_last: Optional[int] = None
    seed: Optional[int] = None
    presence_penalty: Optional[float] = None
    frequency_penalty: Optional[float] = None


# ---- handles ----


class _Handle:
    """Owns a pointer of the library and keeps alive what it needs. It is freed once it is closed and nothing needs it."""

    _free: str

    def __init__(self, pointer: c_void_p, needs: Tuple["_Handle", ...] = ()):
        self._handle: Optional[c_void_p] = pointer
        self._needs = needs
        self._users = 1
        self._closed = False
        self._guard = threading.RLock()  # for this object's fields; never held during a long call
        for needed in needs:  # even if they were closed: the maker of the pointer still holds them
            with needed._guard:
                needed._users += 1

    def _pointer(self) -> c_void_p:
        if self._closed or self._handle is None:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._handle

    def _use(self) -> c_void_p:
        with self._guard:
            self._users += 1
            try:
                return self._pointer()
            except ValueError:
                self._users -= 1
                raise

    @contextlib.contextmanager
    def _lent(self) -> Iterator[c_void_p]:
        """The pointer for a call; it stays valid during the call even if another thread closes this."""
        pointer = self._use()
        try:
            yield pointer
        finally:
            self._drop()

    def _drop(self) -> None:
        with self._guard:
            self._users -= 1
            if self._users:
                return
            pointer, self._handle = self._handle, None
            getattr(_c.lib, self._free)(pointer)
        for needed in self._needs:
            needed._drop()

    def close(self) -> None:
        """Free it. Objects that need it keep it in memory until they are closed too."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._drop()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def _ids(tokens: Sequence[int]) -> Any:
    return (c_int32 * len(tokens))(*tokens)


class Model(_Handle):
    """A model in a GGUF file. Any number of threads and sessions may use one."""

    _free = "thimble_model_free"

    def __init__(self, path: Path):
        self.warnings: List[str] = []  # the library's warnings about the file, one sentence each
        log = _c.LogFn(lambda _, message: self.warnings.append(message.decode("utf-8", "replace")))
        options = _c.initialised(_c.thimble_model_options)
        options.log = log
        pointer = c_void_p()
        _c.call("thimble_model_open", os.fsencode(path), byref(options), byref(pointer))
        super().__init__(pointer)

    def info(self) -> ModelInfo:
        with self._lent() as model:
            return _filled(ModelInfo, _c.thimble_model_info, "thimble_model_get_info", model)

    def tokenize(self, text: Union[str, bytes], bos: bool = False, special: bool = False) -> List[int]:
        """Token ids. `bos` puts BOS first if the model asks for it; `special` turns spelled control tokens into their ids."""
        data = text.encode() if isinstance(text, str) else text
        flags = bos * _c.CONSTANTS["THIMBLE_TOKENIZE_ADD_BOS"] | special * _c.CONSTANTS["THIMBLE_TOKENIZE_PARSE_SPECIAL"]
        count = c_uint64(0)
        # Two calls; ids and offsets share a capacity, so this one is written out.
        with self._lent() as model:
            try:
                _c.call("thimble_tokenize", model, data, len(data), flags, None, None, 0, byref(count))
            except ThimbleError:
                if count.value == 0:
                    raise
            ids = (c_int32 * count.value)()
            _c.call("thimble_tokenize", model, data, len(data), flags, ids, None, count.value, byref(count))
        return list(ids)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of token ids. With `special` control tokens are written as their text, otherwise they are left out."""
        flags = special * _c.CONSTANTS["THIMBLE_DETOKENIZE_SPECIAL"]
        with self._lent() as model:
            return _c.text_of("thimble_detokenize", model, _ids(tokens), len(tokens), flags).decode()

    def token_ends(self, token: int) -> bool:
        """Whether this token ends an answer."""
        with self._lent() as model:
            return bool(_c.lib.thimble_token_ends(model, token))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, assistant: bool = True, held: int = 0,
             format: Optional[str] = None, template: Optional[str] = None,
             variables: Optional[Mapping[str, Any]] = None) -> str:
        """Messages ({"role": ..., "content": ...}) as the model was trained to read them; tokenize with special=True.

        `assistant`: end where the answer begins. `held`: how many of the messages the session already holds. `template`: a Jinja
        template to run instead of the model's. `variables`: further variables for the template.
        """
        def text(value: Optional[str]) -> Tuple[Optional[bytes], int]:
            data = None if value is None else value.encode()
            return data, len(data or b"")

        options = _c.initialised(_c.thimble_chat_options)
        options.flags = assistant * _c.CONSTANTS["THIMBLE_CHAT_ADD_ASSISTANT"]
        options.held = held
        options.format = text(format)[0]
        options.source, options.source_length = text(template)
        options.messages_json, options.messages_json_length = text(json.dumps([dict(m) for m in messages]))
        options.variables, options.variables_length = text(None if variables is None else json.dumps(dict(variables)))
        with self._lent() as model:
            return _c.text_of("thimble_chat_render", model, byref(options)).decode()

    def heads(self, path: Path) -> "Heads":
        """Open the heads (a trained retainer) in this file; ThimbleError MISMATCH if they belong to another model."""
        return Heads(self, path)

    def grammar(self, kind: str, text: Union[str, Mapping[str, Any]]) -> "Grammar":
        """What an answer may be: kind "json_schema" (a mapping or its text), "regex" or "gbnf". Session.set_grammar takes it."""
        return Grammar(self, kind, text if isinstance(text, str) else json.dumps(text))

    def plan(self, options: Optional[Options] = None) -> Memory:
        """The memory of a session with these options."""
        with self._lent() as model, _c_options(options, self) as c_options:
            return _filled(Memory, _c.thimble_memory, "thimble_session_plan", model, byref(c_options))

    def largest_pool(self, options: Optional[Options] = None) -> int:
        """The largest pool that fits options.budget_bytes."""
        pool = c_uint32()
        with self._lent() as model, _c_options(options, self) as c_options:
            _c.call("thimble_session_largest_pool", model, byref(c_options), byref(pool))
        return pool.value

    def session(self, options: Optional[Options] = None) -> "Session":
        """Create a session; all memory that it will ever need is allocated here."""
        pointer = c_void_p()
        with self._lent() as model, _c_options(options, self) as c_options:
            _c.call("thimble_session_create", model, byref(c_options), byref(pointer))
            return Session(self, pointer)


class Heads(_Handle):
    """A trained retainer of a model: Model.heads() opens it, Options.heads takes it."""

    _free = "thimble_heads_free"

    def __init__(self, model: Model, path: Path):
        pointer = c_void_p()
        with model._lent() as needed:
            _c.call("thimble_heads_open", needed, os.fsencode(path), byref(pointer))
            super().__init__(pointer, (model,))
        self.model = model

    @property
    def retention(self) -> str:
        """The retention that the heads serve: "locret", or "keydiff" or "mix" where their training found that better, or "adore"."""
        with self._lent() as heads:
            number = _c.lib.thimble_heads_retention(heads)
        prefix = "THIMBLE_RETENTION_"
        return next(name[len(prefix):].lower() for name, value in _c.CONSTANTS.items()
                    if name.startswith(prefix) and value == number)


class Grammar(_Handle):
    """The texts that a model may generate: Model.grammar() makes one."""

    _free = "thimble_grammar_free"

    def __init__(self, model: Model, kind: str, text: str):
        if kind not in ("json_schema", "regex", "gbnf"):
            raise ValueError(f"kind cannot be {kind!r}")
        pointer, data = c_void_p(), text.encode()
        with model._lent() as needed:
            _c.call(f"thimble_grammar_create_{kind}", needed, data, len(data), byref(pointer))
        super().__init__(pointer)


class Session(_Handle):
    """One sequence of tokens and its memory. Model.session() creates it.

    Calls from several threads wait for each other; interrupt() does not wait.
    """

    _free = "thimble_session_free"

    def __init__(self, model: Model, pointer: c_void_p):
        super().__init__(pointer, (model,))
        self.model = model
        self._turn = threading.RLock()  # held during calls
        self._unread = False  # whether part of the prompt may be unread, which takes long to read
        self._stopped_late = False  # an interrupt came after its call had ended; the next call must not fail because of it

    def _call(self, name: str, *arguments: Any) -> None:
        with self._turn:
            try:
                _c.call(name, self._pointer(), *arguments)
            except ThimbleError as error:
                late, self._stopped_late = self._stopped_late, False
                if not late or error.name != "INTERRUPTED":
                    raise
                _c.call(name, self._pointer(), *arguments)

    def _long_call(self, name: str, *arguments: Any) -> None:
        """A call that Ctrl-C, or any other exception of a signal handler, stops.

        Python runs handlers in the main thread and between its own instructions, so calls from there run in a second thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return self._call(name, *arguments)
        failure: List[BaseException] = []
        begun = threading.Lock()  # taken by the thread that makes the call, or by an earlier exception
        done = threading.Event()

        def work() -> None:
            if not begun.acquire(blocking=False):
                return
            try:
                self._call(name, *arguments)
            except BaseException as error:  # handed to the main thread
                failure.append(error)
            finally:
                done.set()

        def wait() -> None:
            while not done.wait(0.1):  # Windows delivers signals only between waits
                pass

        try:
            threading.Thread(target=work, daemon=True).start()  # which waits, too
            wait()
        except BaseException:
            if begun.acquire(blocking=False):
                raise
            self.interrupt()
            while not done.is_set():
                try:
                    wait()
                except BaseException:  # a second Ctrl-C: the call ends soon
                    pass
            self._stopped_late = not any(isinstance(f, ThimbleError) and f.name == "INTERRUPTED" for f in failure)
            raise
        if failure:
            raise failure[0]

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens to the prompt and read every chunk that is complete.

        After ThimbleError INTERRUPTED or KeyboardInterrupt, stats().position tells how many tokens were taken. After
        INTERRUPTED, repeating the same call continues with the rest.
        """
        self._unread = True
        self._long_call("thimble_session_feed", _ids(tokens), len(tokens))

    def flush(self) -> None:
        """End the prompt: read all waiting tokens."""
        self._long_call("thimble_session_flush")
        self._unread = False

    def step(self) -> int:
        """Sample the next token, append it and return it. model.token_ends() tells whether it ends the answer."""
        if self._unread:
            self.flush()
        token = c_int32()
        self._call("thimble_session_step", byref(token))
        return token.value

    def accept(self, token: int) -> None:
        """Like step, with a token that the caller chose."""
        if self._unread:
            self.flush()
        self._call("thimble_session_accept", token)

    def text(self, token: int) -> str:
        """The text of the next token of an answer; bytes of an incomplete code point are held back until it is complete."""
        length = c_uint64(256)
        with self._turn:
            while True:  # the first call with enough room takes the token, so a call that only asks for the length is not possible
                buffer = ctypes.create_string_buffer(capacity := length.value)
                try:
                    _c.call("thimble_session_text", self._pointer(), token, buffer, capacity, byref(length))
                    return ctypes.string_at(buffer, length.value).decode()
                except ThimbleError:
                    if length.value <= capacity:
                        raise

    def generate(self, limit: Optional[int] = None) -> Iterator[str]:
        """The answer, piece by piece, until a token ends it or `limit` tokens were generated."""
        made = 0
        while limit is None or made < limit:
            token = self.step()
            if _c.lib.thimble_token_ends(self.model._handle, token):  # even if it was closed, this session keeps it alive
                return
            made += 1
            piece = self.text(token)
            if piece:
                yield piece

    def logits(self) -> List[float]:
        """The logits of the next token, one for each token of the vocabulary."""
        values, count = ctypes.POINTER(c_float)(), c_uint32()
        with self._turn:  # the session owns them until its next call
            self._call("thimble_session_logits", byref(values), byref(count))
            return values[: count.value]

    def score(self, tokens: Sequence[int]) -> List[float]:
        """Append these tokens; return the natural logarithm of each one's probability given all before it."""
        logprobs = (c_float * len(tokens))()
        self._long_call("thimble_session_score", _ids(tokens), len(tokens), logprobs)
        self._unread = False
        return list(logprobs)

    def rewind(self, position: int) -> None:
        """Forget every token from this position on; ThimbleError CANNOT_REWIND if entries were evicted since."""
        self._call("thimble_session_rewind", position)

    def reset(self) -> None:
        """Return to the state after creation."""
        self._call("thimble_session_reset")

    def clone(self) -> "Session":
        """Create a second session with the same state, within the same budget."""
        pointer = c_void_p()
        with self._turn:
            self._call("thimble_session_clone", byref(pointer))
            twin = Session(self.model, pointer)
            twin._unread = self._unread
        return twin

    def interrupt(self) -> None:
        """Stop the running call, or if there is none the next one, with ThimbleError INTERRUPTED. From any thread or signal handler."""
        with self._guard:
            if self._handle is not None:
                _c.lib.thimble_session_interrupt(self._handle)

    def kept(self, layer: int, kv_head: int) -> List[int]:
        """The original positions that a KV head still holds, ascending."""
        with self._turn:
            buffer, _ = _c.two_calls("thimble_session_kept", lambda n: (c_int32 * n)(), (self._pointer(), layer, kv_head))
        return list(buffer)

    def kept_by_position(self, attended: bool = True) -> Tuple[List[float], List[float]]:
        """For each position: the share of heads that still hold it, and the attention that the last token paid to it.

        The attention needs Options.watch. With attended=False only the first list is computed, and the second is empty.
        """
        count = c_uint64()
        with self._turn:
            name, pointer = "thimble_session_kept_by_position", self._pointer()
            try:
                _c.call(name, pointer, None, None, 0, byref(count))
            except ThimbleError:
                if count.value == 0:
                    raise
            kept = (c_float * count.value)()
            attention = (c_float * (count.value if attended else 0))()
            _c.call(name, pointer, kept, attention if attended else None, count.value, byref(count))
        return list(kept), list(attention)

    def stored_by_position(self) -> List[float]:
        """For each position: the share of heads that have it in the store of evicted entries and not in the pool."""
        with self._turn:
            buffer, _ = _c.two_calls("thimble_session_stored_by_position", lambda n: (c_float * n)(), (self._pointer(),))
        return list(buffer)

    def set_sampler(self, sampler: Sampler) -> None:
        options = _c.initialised(_c.thimble_sampler_options)
        for field in dataclasses.fields(sampler):
            if getattr(sampler, field.name) is not None:
                setattr(options, field.name, getattr(sampler, field.name))
        self._call("thimble_session_set_sampler", byref(options))

    def set_bias(self, biases: dict[int, float]) -> None:
        """Adds a number to the logits of these tokens before one is sampled, until the next call."""
        count = len(biases)
        self._call("thimble_session_set_bias", (c_int32 * count)(*biases), (c_float * count)(*biases.values()), count)

    def set_grammar(self, grammar: Optional[Grammar]) -> None:
        """From now on, the generated tokens form a text of the grammar, which begins with the next one. None: any token may come."""
        with grammar._lent() if grammar else contextlib.nullcontext() as pointer:
            self._call("thimble_session_set_grammar", pointer)

    def memory(self) -> Memory:
        """The memory of the session."""
        with self._turn:
            return _filled(Memory, _c.thimble_memory, "thimble_session_memory", self._pointer())

    def options(self) -> Options:
        """The options of the session with every default decided, without heads."""
        with self._turn:
            options = _filled(Options, _c.thimble_session_options, "thimble_session_get_options", self._pointer())
        return dataclasses.replace(options, **{name: _word(name, getattr(options, name)) for name in _WORDS})

    def stats(self) -> Stats:
        with self._turn:
            return _filled(Stats, _c.thimble_stats, "thimble_session_stats", self._pointer())

    def save(self, path: Path, note: bytes = b"") -> None:
        """Save the session to a file, together with `note`."""
        self._call("thimble_session_save", os.fsencode(path), note, len(note))

    def restore(self, path: Path) -> None:
        """Replace the state by that of a saved session with the same settings."""
        self._call("thimble_session_restore", os.fsencode(path))
        self._unread = True

    def shrink(self, pool: int) -> int:
        """Evict down to `pool` entries per head; returns the bytes that were freed."""
        freed = c_uint64()
        self._call("thimble_session_shrink", pool, byref(freed))
        return freed.value

    def close(self) -> None:
        """Free its memory; waits for a running call."""
        with self._turn:
            super().close()


def devices() -> List[Device]:
    """The devices of this machine; their names are values of Options.device."""
    count = c_uint32()
    _c.call("thimble_device_count", byref(count))
    return [_filled(Device, _c.thimble_device_info, "thimble_device_get", i) for i in range(count.value)]


def session_file_info(path: Path) -> Dict[str, Any]:
    """A description of a saved session's file."""
    info: Dict[str, Any] = json.loads(_c.text_of("thimble_session_file_info", os.fsencode(path)))
    return info


def session_file_note(path: Path) -> bytes:
    """The note that was passed to Session.save()."""
    return _c.text_of("thimble_session_file_note", os.fsencode(path))
