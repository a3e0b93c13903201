"""thimble.h in ctypes: the structs, the constants, and the functions of libthimble, as declared in the header."""
from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
import sys
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, List, Tuple

ABI = 14  # THIMBLE_ABI that this file was written for; a library with a larger number works too

CONSTANTS = {
    "THIMBLE_ABI": ABI,
    "THIMBLE_TOKENIZE_ADD_BOS": 1, "THIMBLE_TOKENIZE_PARSE_SPECIAL": 2, "THIMBLE_DETOKENIZE_SPECIAL": 1,
    "THIMBLE_CHAT_ADD_ASSISTANT": 1,
    "THIMBLE_DEFAULT": 0xFFFFFFFF, "THIMBLE_RECALL_ALL": 0xFFFFFFFF,
    "THIMBLE_OK": 0, "THIMBLE_INVALID_ARGUMENT": 10, "THIMBLE_UNSUPPORTED": 11, "THIMBLE_IO": 20, "THIMBLE_FORMAT": 21,
    "THIMBLE_MISMATCH": 22, "THIMBLE_BUDGET": 30, "THIMBLE_OUT_OF_MEMORY": 31, "THIMBLE_CONTEXT_FULL": 40,
    "THIMBLE_CANNOT_REWIND": 41, "THIMBLE_INTERRUPTED": 50, "THIMBLE_BUSY": 51, "THIMBLE_DEVICE_LOST": 60,
    "THIMBLE_NOT_FINITE": 61, "THIMBLE_INTERNAL": 90,
    "THIMBLE_RETENTION_DEFAULT": -1, "THIMBLE_RETENTION_NONE": 0, "THIMBLE_RETENTION_WINDOW": 1,
    "THIMBLE_RETENTION_RANDOM": 2, "THIMBLE_RETENTION_LOCRET": 3, "THIMBLE_RETENTION_KEYDIFF": 4,
    "THIMBLE_RETENTION_TOVA": 5, "THIMBLE_RETENTION_REREAD": 6, "THIMBLE_RETENTION_ADORE": 7,
    "THIMBLE_RETENTION_MIX": 8,
    "THIMBLE_RETAIN_PER_HEAD": 0, "THIMBLE_RETAIN_LAYER": 1,
    "THIMBLE_SELECTION_DENSE": 0, "THIMBLE_SELECTION_TOKENSELECT": 1, "THIMBLE_SELECTION_QUEST": 2,
    "THIMBLE_VOTE_AUTO": 0, "THIMBLE_VOTE_LAYER": 1, "THIMBLE_VOTE_GROUP": 2,
    "THIMBLE_POSITIONS_LIST": 0, "THIMBLE_POSITIONS_ORIGINAL": 1,
    "THIMBLE_KV_F16": 0, "THIMBLE_KV_Q8_0": 1, "THIMBLE_KV_Q4_0": 2,
    "THIMBLE_SCALE_NONE": 0, "THIMBLE_SCALE_SQRT": 1,
    "THIMBLE_DRAFT_NONE": 0, "THIMBLE_DRAFT_LOOKUP": 1, "THIMBLE_DRAFT_MODEL": 2, "THIMBLE_DRAFT_MTP": 3,
}

LogFn = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class thimble_error(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("code", c_int32), ("bytes_missing", c_uint64), ("message", c_char * 496)]


class thimble_device_info(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("total_bytes", c_uint64), ("free_bytes", c_uint64),
                ("name", c_char * 32), ("description", c_char * 192)]


class thimble_model_options(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("log", LogFn), ("log_user", c_void_p)]


class thimble_model_info(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("has_weights", c_uint32), ("has_tokenizer", c_uint32), ("layers", c_uint32),
                ("d_model", c_uint32), ("heads", c_uint32), ("kv_heads", c_uint32), ("head_dim", c_uint32),
                ("d_ff", c_uint32), ("vocab", c_uint32), ("context_length", c_uint32), ("bos", c_int32), ("eos", c_int32),
                ("files", c_uint32), ("parameters", c_uint64), ("file_bytes", c_uint64), ("kv_bytes_per_token", c_uint64),
                ("architecture", c_char * 32), ("name", c_char * 96), ("quantization", c_char * 16),
                ("chat_format", c_char * 32), ("chat_problem", c_char * 224), ("experts", c_uint32),
                ("experts_per_token", c_uint32), ("window", c_uint32), ("window_layers", c_uint32)]


class thimble_chat_options(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("flags", c_uint32), ("format", c_char_p), ("source", c_char_p),
                ("source_length", c_uint64), ("messages", c_void_p), ("message_count", c_uint64),
                ("messages_json", c_char_p), ("messages_json_length", c_uint64), ("variables", c_char_p),
                ("variables_length", c_uint64), ("held", c_uint64), ("time", c_int64)]


class thimble_session_options(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("device", c_char_p), ("heads", c_void_p),
                ("budget_bytes", c_uint64), ("retention", c_int32), ("retain_scope", c_int32), ("pool", c_uint32),
                ("chunk", c_uint32), ("stabilizers", c_uint32), ("local", c_uint32), ("protect_init", c_uint32),
                ("max_new", c_uint32), ("selection", c_int32), ("select_k", c_uint32), ("select_init", c_uint32),
                ("select_local", c_uint32), ("select_theta", c_float), ("vote", c_int32), ("vote_scale", c_int32),
                ("vote_window", c_uint32), ("select_prefill", c_uint32), ("positions", c_int32), ("context", c_uint32),
                ("seed", c_uint32), ("progress", c_void_p), ("progress_user", c_void_p), ("select_page", c_uint32),
                ("dense_layers", c_uint32), ("watch", c_uint32), ("rebuild", c_uint32),
                ("rebuild_every", c_uint32), ("draft", c_int32), ("draft_tokens", c_uint32), ("recall_format", c_int32),
                ("draft_model", c_void_p), ("recall_mem_bytes", c_uint64), ("recall", c_uint32),
                ("recall_every", c_uint32), ("recall_disk_bytes", c_uint64), ("key_format", c_int32),
                ("value_format", c_int32), ("recall_prefill", c_uint32), ("reserved", c_uint32)]


class thimble_memory(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("pool", c_uint32), ("capacity", c_uint32), ("chunk", c_uint32),
                ("budget", c_uint64), ("weights", c_uint64), ("shared", c_uint64), ("pool_bytes", c_uint64),
                ("view", c_uint64), ("workspace", c_uint64), ("io", c_uint64), ("fixed", c_uint64), ("total", c_uint64),
                ("allocated", c_uint64), ("dense_bytes_per_token", c_uint64), ("mapped", c_uint64),
                ("mapped_resident", c_uint64), ("host_tables", c_uint64), ("largest_position", c_uint32),
                ("selection_pays", c_uint32), ("states", c_uint64), ("state_slots", c_uint64),
                ("draft", c_uint64), ("streamed", c_uint64), ("store", c_uint64),
                ("store_file", c_uint64), ("finer_layers", c_uint32), ("reserved", c_uint32),
                ("recall_bytes", c_uint64)]


class thimble_sampler_options(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("temperature", c_float), ("top_k", c_uint32), ("top_p", c_float),
                ("min_p", c_float), ("repeat_penalty", c_float), ("repeat_last", c_uint32), ("reserved", c_uint32),
                ("seed", c_uint64), ("presence_penalty", c_float), ("frequency_penalty", c_float)]


class thimble_stats(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("entries", c_uint32), ("position", c_uint64), ("waiting", c_uint64),
                ("evicted", c_uint64), ("evictions", c_uint64), ("generated", c_uint64), ("selected", c_uint64),
                ("cache_hits", c_uint64), ("cache_misses", c_uint64), ("prefill_tokens", c_uint64),
                ("prefill_seconds", c_double), ("decode_seconds", c_double), ("prefill_bytes", c_double),
                ("prefill_flop", c_double), ("decode_bytes", c_double), ("decode_flop", c_double), ("saturated", c_uint64),
                ("stored", c_uint64), ("recalled", c_uint64)]


STRUCTS = [thimble_error, thimble_device_info, thimble_model_options, thimble_model_info, thimble_chat_options,
           thimble_session_options, thimble_memory, thimble_sampler_options, thimble_stats]

_status, _handle, _handles, _error = c_int32, c_void_p, POINTER(c_void_p), POINTER(thimble_error)
_count, _ids = POINTER(c_uint64), POINTER(c_int32)

# Name, result, arguments.
FUNCTIONS: List[Tuple[str, Any, List[Any]]] = [
    ("thimble_version", c_char_p, []),
    ("thimble_abi_version", c_uint32, []),
    ("thimble_build_info", c_char_p, []),
    ("thimble_status_name", c_char_p, [_status]),
    ("thimble_device_count", _status, [POINTER(c_uint32), _error]),
    ("thimble_device_get", _status, [c_uint32, POINTER(thimble_device_info), _error]),
    ("thimble_model_options_init", None, [POINTER(thimble_model_options), c_uint32]),
    ("thimble_model_open", _status, [c_char_p, POINTER(thimble_model_options), _handles, _error]),
    ("thimble_model_free", None, [_handle]),
    ("thimble_model_get_info", _status, [_handle, POINTER(thimble_model_info), _error]),
    ("thimble_heads_open", _status, [_handle, c_char_p, _handles, _error]),
    ("thimble_heads_free", None, [_handle]),
    ("thimble_heads_retention", c_int32, [_handle]),
    ("thimble_tokenize", _status, [_handle, c_char_p, c_uint64, c_uint32, _ids, POINTER(c_uint64), c_uint64, _count, _error]),
    ("thimble_detokenize", _status, [_handle, _ids, c_uint64, c_uint32, c_char_p, c_uint64, _count, _error]),
    ("thimble_token_ends", c_int32, [_handle, c_int32]),
    ("thimble_chat_options_init", None, [POINTER(thimble_chat_options), c_uint32]),
    ("thimble_chat_render", _status, [_handle, POINTER(thimble_chat_options), c_char_p, c_uint64, _count, _error]),
    ("thimble_retention_name", c_char_p, [c_int32]),
    ("thimble_selection_name", c_char_p, [c_int32]),
    ("thimble_session_options_init", None, [POINTER(thimble_session_options), c_uint32]),
    ("thimble_session_plan", _status, [_handle, POINTER(thimble_session_options), POINTER(thimble_memory), _error]),
    ("thimble_session_largest_pool", _status, [_handle, POINTER(thimble_session_options), POINTER(c_uint32), _error]),
    ("thimble_session_create", _status, [_handle, POINTER(thimble_session_options), _handles, _error]),
    ("thimble_session_free", None, [_handle]),
    ("thimble_session_feed", _status, [_handle, _ids, c_uint64, _error]),
    ("thimble_session_flush", _status, [_handle, _error]),
    ("thimble_session_step", _status, [_handle, _ids, _error]),
    ("thimble_session_accept", _status, [_handle, c_int32, _error]),
    ("thimble_session_logits", _status, [_handle, POINTER(POINTER(c_float)), POINTER(c_uint32), _error]),
    ("thimble_session_score", _status, [_handle, _ids, c_uint64, POINTER(c_float), _error]),
    ("thimble_session_text", _status, [_handle, c_int32, c_char_p, c_uint64, _count, _error]),
    ("thimble_session_rewind", _status, [_handle, c_uint64, _error]),
    ("thimble_session_clone", _status, [_handle, _handles, _error]),
    ("thimble_session_reset", _status, [_handle, _error]),
    ("thimble_session_interrupt", None, [_handle]),
    ("thimble_session_kept", _status, [_handle, c_uint32, c_uint32, _ids, c_uint64, _count, _error]),
    ("thimble_session_stored_by_position", _status, [_handle, POINTER(c_float), c_uint64, _count, _error]),
    ("thimble_session_kept_by_position", _status, [_handle, POINTER(c_float), POINTER(c_float), c_uint64, _count, _error]),
    ("thimble_sampler_options_init", None, [POINTER(thimble_sampler_options), c_uint32]),
    ("thimble_session_set_sampler", _status, [_handle, POINTER(thimble_sampler_options), _error]),
    ("thimble_session_set_bias", _status, [_handle, _ids, POINTER(c_float), c_uint64, _error]),
    ("thimble_grammar_create_json_schema", _status, [_handle, c_char_p, c_uint64, _handles, _error]),
    ("thimble_grammar_create_regex", _status, [_handle, c_char_p, c_uint64, _handles, _error]),
    ("thimble_grammar_create_gbnf", _status, [_handle, c_char_p, c_uint64, _handles, _error]),
    ("thimble_grammar_free", None, [_handle]),
    ("thimble_session_set_grammar", _status, [_handle, _handle, _error]),
    ("thimble_session_memory", _status, [_handle, POINTER(thimble_memory), _error]),
    ("thimble_session_get_options", _status, [_handle, POINTER(thimble_session_options), _error]),
    ("thimble_session_stats", _status, [_handle, POINTER(thimble_stats), _error]),
    ("thimble_session_save", _status, [_handle, c_char_p, c_char_p, c_uint64, _error]),
    ("thimble_session_restore", _status, [_handle, c_char_p, _error]),
    ("thimble_session_file_info", _status, [c_char_p, c_char_p, c_uint64, _count, _error]),
    ("thimble_session_file_note", _status, [c_char_p, c_char_p, c_uint64, _count, _error]),
    ("thimble_session_shrink", _status, [_handle, c_uint32, _count, _error]),
]


def _library_path() -> str:
    """$THIMBLE_LIBRARY; otherwise the library next to this file, as in the wheel; otherwise what the system's loader finds."""
    if os.environ.get("THIMBLE_LIBRARY"):
        return os.environ["THIMBLE_LIBRARY"]
    name = "libthimble.dll" if sys.platform == "win32" else "libthimble.so"
    beside = pathlib.Path(__file__).resolve().parent / name
    return str(beside) if beside.exists() else ctypes.util.find_library("thimble") or name


def _load() -> ctypes.CDLL:
    path = _library_path()
    try:
        library = ctypes.CDLL(path)
        library.thimble_abi_version.restype = c_uint32
        abi = library.thimble_abi_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"libthimble cannot be loaded from {path}: {error}; set THIMBLE_LIBRARY to its path") from None
    if abi < ABI:
        raise ImportError(f"{path} has ABI {abi}, this package needs {ABI}: install a newer libthimble")
    for name, result, arguments in FUNCTIONS:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


lib = _load()


class ThimbleError(Exception):
    """A call failed. `code` is its code in thimble.h, `name` its name ("BUDGET"), `bytes_missing` the bytes that a budget lacks."""

    def __init__(self, code: int, message: str, bytes_missing: int = 0):
        super().__init__(message)
        self.code = code
        self.message = message
        self.bytes_missing = bytes_missing

    @property
    def name(self) -> str:
        return str(lib.thimble_status_name(self.code).decode())


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns a status and takes an error after these arguments; raises ThimbleError."""
    error = thimble_error(struct_size=ctypes.sizeof(thimble_error))
    status = getattr(lib, name)(*arguments, byref(error))
    if status:
        raise ThimbleError(status, error.message.decode("utf-8", "replace"), error.bytes_missing)


def two_calls(name: str, make: Callable[[int], Any], before: Tuple[Any, ...]) -> Tuple[Any, int]:
    """Ask a two-call function for the size, then for the elements in a buffer from `make`. Returns buffer and count."""
    count = c_uint64(0)
    try:
        call(name, *before, None, 0, byref(count))
    except ThimbleError:
        if count.value == 0:  # the buffer was not too small
            raise
    buffer = make(count.value)
    call(name, *before, buffer, count.value, byref(count))
    return buffer, count.value


def text_of(name: str, *before: Any) -> bytes:
    """The bytes that a two-call function returns."""
    buffer, count = two_calls(name, ctypes.create_string_buffer, before)
    return ctypes.string_at(buffer, count)


def initialised(struct: Any) -> Any:
    """An options struct with its defaults."""
    options = struct()
    getattr(lib, struct.__name__ + "_init")(byref(options), ctypes.sizeof(struct))
    return options
