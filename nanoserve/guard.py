"""What may a checkpoint's chat template and tokenizer cost?

Both are programs of whoever made the checkpoint. A template is Jinja, whose sandbox bounds what it
can reach, but neither its time nor its memory. A tokenizer is a chain of replacements and regular
expressions, which have the same two problems:

    {{ 'a' * 10**10 }}    {% for a in range(99999) %}{% for b in range(99999) %} ...    (x+x+)+y

Here nothing can stop them, as they run in one call of C or Rust. So they run in another process:

    render_chat ------ template, messages -----> a process of the Guard     seconds: SECONDS
                <----- text, or an error -------  (main, below)             memory:  MEGABYTES
                                                                            text:    CHARACTERS

The process is started by the first chat, takes half a second to start, and ends with the engine. At
a limit it is killed, the request gets an error, and the next one gets a new process. The text is
what `tokenizer.apply_chat_template` of the installed transformers returns: the process calls it.
The template of the demo model is ours, and is rendered here.

Nearly all tokenizers are of a few forms, whose time and memory grow with the text and not faster
(`is_linear`). They are called directly. Any other one is called in the process of the Guard. The
checks of a tokenizer's files (`check_files`) hold only while nobody writes to the folder, because
transformers reads the files again.

Left out: a limit of memory on macOS and Windows, which have none for a process (the limits of time
and text hold); a process of its own for each of several threads (they take turns).

vLLM: vllm/entrypoints/chat_utils.py (V0), vllm/renderers/hf.py (V1), where rendering
may have a limit of time, after which its thread works on.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import inspect
import json
import marshal
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanoserve.checkpoint import check_is_file, parse_json, read_bytes, transformers_lock
from nanoserve.config import DEMO_MODEL
from nanoserve.exceptions import Caught, VLLMValidationError, brief, describe_error
from nanoserve.inputs import as_python, find_content_format
from nanoserve.interrupts import is_from_signal, suppress, unless_signal

SECONDS = 5  # for one text: rendered, or tokenized
MEGABYTES = 512  # MiB of address space for one text, beside what the process has at its start
CHARACTERS = 2**24  # of one text
START_SECONDS = 60  # to start the process, or to read a tokenizer in it
START_MEGABYTES = 2048  # to read a tokenizer
ERROR_CHARACTERS = 2000  # of an error's message
REPLY_BYTES = 8 * CHARACTERS  # of one line of the process

FILE_NAMES = (  # what the names of these files begin with
    *("added_tokens", "chat_template", "config", "merges", "preprocessor", "processor"),
    *("sentencepiece", "special_tokens", "spiece", "tokenizer", "vocab"),
)
FILE_BYTES = 64 * 2**20  # of each file that a tokenizer is read from
FILE_ITEMS = 8_000_000  # commas and brackets of a JSON file; large ones have 2 million
LONGEST_PIECE = 1024  # characters of a Unigram vocabulary's piece
NUM_PARTS = 64  # normalizers, pre-tokenizers, decoders, ...
NUM_ADDED = 20_000  # added tokens of a usual tokenizer
MAX_GROWTH = 100  # characters that one character of a text may become


class GuardError(Exception):
    """What a template or tokenizer raised in the Guard's process, or the limit that ended it."""


class Guard:
    """A process in which a checkpoint's programs run, each call under limits. Starts with the first
    call. Any thread may call it; the calls take turns.

    Invariant: a call returns or raises within its time, and leaves no process that still works on
    it. The process ends with close(), with the Guard, and with the process that started it.
    """

    module = "nanoserve.guard"  # what the process runs

    def __init__(self, backend: Any | None = None, own_template: str | None = None) -> None:
        """backend: a tokenizer of the tokenizers library, which the process is to have, too;
        own_template: one that came with this package, and so is rendered here, in no process."""
        self.backend, self.own_template = backend, own_template
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None  # one that waits for its next call
        self._end_last: Callable[[], object] = bool  # ends the last process that was started
        self._is_closed = False
        self._last_format: tuple[Any, str] = (None, "string")

    def __reduce__(self) -> Any:
        return Guard, (self.backend, self.own_template)  # a copy gets a process of its own

    def render(self, tokenizer: Any, messages: list[Any], options: dict[str, Any]) -> str:
        """The text that tokenizer.apply_chat_template makes of these messages. Raises GuardError;
        other errors for tools that are functions without type hints or docstrings."""
        if isinstance(tools := options.get("tools"), (list, tuple)):
            options = {**options, "tools": [as_schema(tool) for tool in tools]}
        chat_template = getattr(tokenizer, "chat_template", None)  # one, or several by name
        if self._is_own(options.get("chat_template") or chat_template):
            messages, options = as_plain((messages, options))
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)
        args = (chat_template, tokenizer.special_tokens_map, messages, options)
        return self.call("render", *as_plain(args))

    def find_content_format(self, chat_template: Any, given: str) -> str:
        """inputs.find_content_format, which reads the template. Raises ValueError as it does, and
        RuntimeError after close()."""
        self._check_open()
        if given != "auto" or not isinstance(chat_template, str) or self._is_own(chat_template):
            return find_content_format(chat_template, given)
        last_template, content_format = self._last_format
        if last_template != chat_template:
            try:
                content_format = self.call("find_content_format", chat_template)
            except GuardError as error:
                message = f"the chat template cannot be read: {error}."
                raise VLLMValidationError(message) from error
            self._last_format = chat_template, content_format
        return content_format

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Raises GuardError."""
        return self.call("encode", text, add_special_tokens)

    def call(self, task: str, *args: Any) -> Any:
        """The result of a method of Programs. Raises GuardError if it raises or reaches a limit."""
        if self._pid != os.getpid():  # a fork: the process and the lock belong to the parent
            self._lock, self._process, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            self._check_open()  # it may have waited for a long call
            process, self._process = self._process, None
            if process is None or process.poll() is not None:  # it may have been killed meanwhile
                process = self._start()
            reply = _ask(process, task, *args)
            self._process = process  # it waits for its next call
        return _result(reply)

    def _start(self) -> subprocess.Popen[bytes]:
        """A new process that is ready for its first call."""
        if not sys.executable:
            raise GuardError("it needs a process of its own, and sys.executable is empty")
        here = ""
        with suppress(OSError):  # the working directory may have been deleted
            here = os.getcwd()
        folders = [entry or here for entry in sys.path if isinstance(entry, str)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "PYTHONSAFEPATH": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=here or os.sep,
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # on Windows
            )
            self._end_last()
            self._end_last = weakref.finalize(self, _end, process, self._pid)
            _result(_ask(process, "start", *self.start_args()))
        except unless_signal(GuardError, OSError) as error:
            command = brief(sys.executable)
            raise GuardError(f"its process ({command}) does not start: {error}") from error
        return process

    def start_args(self) -> tuple[Any, ...]:
        """What the process is told first."""
        return (None if self.backend is None else self.backend.to_str(),)

    def _is_own(self, chat_template: Any) -> bool:
        return self.own_template is not None and chat_template == self.own_template

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed; build a new LLM.")

    def close(self) -> None:
        """End the process, after a call that is running. Later calls raise RuntimeError."""
        self._is_closed = True
        self.end_process()

    def end_process(self) -> None:
        """End the process. The next call starts another one."""
        with self._lock:
            self._end_last()
            self._process = None


def _result(reply: dict[str, Any]) -> Any:
    if "error" in reply:
        raise GuardError(reply["error"])
    return reply["result"]


def _ask(process: subprocess.Popen[bytes], task: str, *args: Any) -> dict[str, Any]:
    """Send a call and wait for its reply. If there is none (the time is over, the process has
    ended, Ctrl-C), end the process and raise."""
    assert process.stdin is not None and process.stdout is not None
    is_start = task in ("start", "read")
    seconds = START_SECONDS if is_start else SECONDS
    megabytes = START_MEGABYTES if is_start else MEGABYTES
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    line, message = b"", marshal.dumps((task, args, seconds, megabytes))
    try:
        timer.start()
        with suppress(OSError):  # the process has ended: there is no reply to read
            process.stdin.write(len(message).to_bytes(8, "little") + message)
            process.stdin.flush()
        line = process.stdout.readline(REPLY_BYTES)
        timer.cancel()
        timer.join()  # either it has killed the process, or it never will
    finally:
        timer.cancel()
        if is_late.is_set() or not line.endswith(b"\n"):
            _end(process, os.getpid())
    if is_late.is_set():
        raise GuardError(f"it takes more than {seconds} seconds")
    if not line.endswith(b"\n"):
        raise GuardError(
            f"its process ended with exit status {process.returncode} and without a reply; its "
            f"limit is {megabytes} MiB of memory"
        )
    return json.loads(line.decode("utf-8", "surrogatepass"))


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    """End a process that process `pid` started; nothing happens in a fork of that one."""
    if os.getpid() != pid:
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            assert pipe is not None
            pipe.close()
    process.wait()


def as_plain(value: Any) -> Any:
    """The same value made of Python's own strings, numbers, lists, tuples and dicts. Raises
    VLLMValidationError for what is none of these: transformers would write "<its type>"."""
    value = as_python(value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enum, for example
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {as_plain(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [as_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # a pydantic model
        return as_plain(value.model_dump())
    raise VLLMValidationError(
        f"it is given a value of type {type(value).__name__}; allowed: strings, numbers, lists, "
        "tuples and dicts. Give a list of the items, or str(value)"
    )


def as_schema(tool: Any) -> Any:
    """The JSON schema of a tool that is a function; any other tool as it is."""
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        return tool
    with transformers_lock:
        from transformers.utils import get_json_schema

    return get_json_schema(tool)


# -- reading a tokenizer --


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, with a Guard of its own as `tokenizer.guard`. If its form is not
    one of the usual ones, its encode() is called in the Guard's process.

    Raises ValueError for files that are too large or special, or a tokenizer that is none, or that
    is not backed by the `tokenizers` library.
    """
    guard, is_checked = Guard(), False
    try:
        is_usual = check_files(folder)
        is_checked = True
        if not is_usual:
            guard.call("read", str(folder))
            guard.end_process()  # what it holds is not needed
        tokenizer = _from_pretrained(folder)
        tokenizer.guard = guard
        if folder.resolve() == DEMO_MODEL.resolve():
            guard.own_template = tokenizer.chat_template
        limit = getattr(tokenizer, "model_max_length", 0)
        if not isinstance(limit, (int, float)):
            raise ValueError(
                f"tokenizer_config.json: model_max_length is {brief(limit)}; allowed: a number"
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and not is_linear(backend):
            guard.backend = backend
            guard.encode("Hello")
            tokenizer.encode = functools.partial(_encode, tokenizer)
    except BaseException as error:
        guard.close()
        is_panic = type(error).__name__ == "PanicException"  # of Rust; a BaseException
        if is_from_signal(error) or not (is_panic or isinstance(error, Exception)):
            raise
        why = str(error) if type(error) is ValueError else " ".join(describe_error(error).split())
        why = why.removesuffix(". Copy it again.")
        if is_checked and is_of_config(folder, error):
            raise ValueError(
                f"{folder / 'config.json'} is refused by transformers ({why}). Correct the file, "
                "or copy it again."
            ) from error
        raise ValueError(  # of many types, with one meaning: no tokenizer
            f"no tokenizer can be read from {folder} ({why}). Copy its files again, or give the "
            "folder of another one as tokenizer."
        ) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"{type(tokenizer).__name__} in {folder} is not backed by the tokenizers library, and "
            "incremental detokenization needs that library. Save it as a tokenizer.json."
        )
    return tokenizer


def is_of_config(folder: Path, error: BaseException) -> bool:
    """Does config.json alone bring this error? To read a tokenizer, transformers reads it, too."""
    if not (folder / "config.json").is_file():
        return False
    with transformers_lock, Caught() as caught:
        from transformers import AutoConfig

        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return caught.error is not None and str(caught.error) == str(error)


def _from_pretrained(folder: Path | str) -> Any:
    with transformers_lock:
        from transformers import AutoTokenizer  # imports torch, where there is one

        # False: no question on the terminal whether the checkpoint's code may run. It may not.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # As if it had been given: the error for a prompt that is too long says more than this warning.
    said = getattr(tokenizer, "deprecation_warnings", {})
    said["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _encode(tokenizer: Any, text: Any, add_special_tokens: bool = True, **options: Any) -> Any:
    """tokenizer.encode, for a text in the Guard's process."""
    if isinstance(text, str) and not options:
        return tokenizer.guard.encode(text, add_special_tokens)
    return type(tokenizer).encode(tokenizer, text, add_special_tokens=add_special_tokens, **options)


def check_files(folder: Path) -> bool:
    """Raise ValueError for a file of a tokenizer that may not be read: a special one (reading a
    FIFO never ends), one that is too large, a tokenizer.json of too many parts or of long pieces.

    False if the tokenizer is unusual, so that reading it may take long all the same. The process
    of the Guard reads it first then, which bounds the time and the memory.
    """
    is_usual = (folder / "tokenizer.json").exists()  # else transformers has to make one
    for file in [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]:
        is_read = file.suffix == ".jinja" or file.name.startswith(FILE_NAMES)
        is_read &= file.suffix in (".jinja", ".json", ".model", ".txt")
        if file.name == "additional_chat_templates":
            is_read = not file.is_dir()
        if not is_read or not file.exists():  # of another program; a link to nothing
            continue
        check_is_file(file)
        data = read_bytes(file, FILE_BYTES)
        if file.suffix == ".jinja":
            try:
                data.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is no UTF-8: {error}") from error
        if file.suffix != ".json":
            continue
        num_items = data.count(b",") + data.count(b"[") + data.count(b"{")
        if num_items > FILE_ITEMS:
            raise ValueError(f"{file.name} has {num_items} items; allowed: {FILE_ITEMS}")
        if file.name in ("tokenizer.json", "tokenizer_config.json"):
            content = parse_json(file, data)
        if file.name == "tokenizer.json":
            if "model" not in content:
                raise ValueError(f"{file.name} has no model")
            is_usual = check_parts(content) and is_usual
        elif num_items > 8 * NUM_ADDED and not file.name.startswith("vocab"):
            is_usual = False  # an added token of tokenizer_config.json has eight items
    return is_usual


def check_parts(content: dict[str, Any]) -> bool:
    """Raise ValueError for a tokenizer.json of too many parts or of long pieces. False for one of
    the following, which may take much more time or memory to read than its text: another regular
    expression than the usual ones, a Unigram vocabulary, very many added tokens, a normalizer that
    may make these much longer."""
    num_parts, regexes = 0, set[str]()
    todo = [value for key, value in content.items() if key not in ("model", "added_tokens")]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            num_parts += "type" in part
            if "Regex" in part:
                regexes.add(str(part["Regex"]))
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pieces = vocab if isinstance(vocab, list) else []  # of Unigram, with their scores
    longest = max((len(str(item[0])) for item in pieces if item), default=0)
    for what, number, most in (
        ("normalizers, pre-tokenizers and the like", num_parts, NUM_PARTS),
        ("characters in one piece", longest, LONGEST_PIECE),
    ):
        if number > most:
            raise ValueError(f"tokenizer.json has {number} {what}; allowed: {most}")
    return (
        not pieces
        and regexes <= _REGEXES
        and len(content.get("added_tokens") or ()) <= NUM_ADDED
        and _growth(content.get("normalizer") or {}) <= MAX_GROWTH
    )


# -- which tokenizers need no process --

# The regular expressions of the usual tokenizers. Their time is known to be linear: an attempt at a
# match goes back over a run of characters only if another alternative then takes that run. No rule
# decides this for others: a rule would have to be right for all regular expressions.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_REGEXES = {
    # the demo model; GPT-2
    r"\p{N}|\p{Lu}+\p{Ll}*| ?\p{Ll}+|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # GPT-4
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    # GPT-4 in another spelling and Llama 3; Qwen 2 and 3; Qwen 3.5
    rf"{_ENDING}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_ENDING}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_ENDING}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # GPT-4o and Llama 4; Mistral (Tekken) and Nemotron
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    # DeepSeek 3
    *(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    # DeepSeek Coder
    *("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    *(r"\d", " {2,}"),  # others
}

_GROWTH = {  # characters that a normalizer or decoder makes of one, at most
    "BertNormalizer": 8,
    "ByteLevel": 4,
    "Lowercase": 3,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    **dict.fromkeys(("BPEDecoder", "ByteFallback", "CTC", "Fuse", "Metaspace", "Nmt"), 1),
    **dict.fromkeys(("Strip", "StripAccents", "WordPiece"), 1),
}
_PRE_TOKENIZERS = {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"}
_PRE_TOKENIZERS |= {"Metaspace", "Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
_POST_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing"}


def is_linear(backend: Any) -> bool:
    """Is the time and memory of this tokenizer (of the tokenizers library) proportional to its
    text, by a small factor? True for the usual forms; False also for what is not known.

    Raises ValueError if its decoder, which runs for each token, is not.
    """
    decoder = _state(backend.decoder)
    if _growth(decoder) > MAX_GROWTH:
        raise ValueError(
            f"its decoder makes texts much longer, or has a regular expression: {brief(decoder)}"
        )
    added = backend.get_added_tokens_decoder().values()
    return (
        _growth(_state(backend.normalizer)) <= MAX_GROWTH
        and all(map(_splits_linearly, _flat(_state(backend.pre_tokenizer), "pretokenizers")))
        and all(map(_adds_a_few, _flat(_state(backend.post_processor), "processors")))
        and getattr(backend.model, "max_input_chars_per_word", 0) <= 1000  # WordPiece: quadratic
        and not any(token.lstrip for token in added)  # each looks back over all spaces
    )


def _state(part: Any) -> dict[str, Any]:
    """A normalizer, pre-tokenizer, ... as it stands in tokenizer.json."""
    return {} if part is None else json.loads(part.__getstate__())


def _flat(part: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The parts of a Sequence, or the one part."""
    parts = part.get(key)
    return [part] if parts is None else [one for each in parts for one in _flat(each, key)]


def _growth(part: dict[str, Any]) -> float:
    """The number of characters that one character becomes, at most; infinite if not known."""
    for key in ("normalizers", "decoders"):
        if key in part:
            return math.prod(map(_growth, part[key]), start=1.0)  # a float: infinite, not huge
    match part:
        case {"type": "Prepend", "prepend": prepend}:
            return 1 if len(prepend) <= 16 else math.inf
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "pattern": {"Regex": regex}, "content": str(new)}:
            return 1 + len(new) if regex in _REGEXES else math.inf
    return _GROWTH.get(part["type"], math.inf) if part else 1


def _splits_linearly(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "Split", "pattern": {"String": pattern}}:
            return bool(pattern)
        case {"type": "Split", "pattern": {"Regex": regex}}:
            return regex in _REGEXES
    return not part or part["type"] in _PRE_TOKENIZERS


def _adds_a_few(part: dict[str, Any]) -> bool:
    """Does this post-processor repeat no text?"""
    if part.get("type") == "TemplateProcessing":
        return sum("Sequence" in piece for piece in part["single"]) <= 1
    return not part or part["type"] in _POST_PROCESSORS


# -- in the Guard's process --


class Programs:
    """What the process can be asked for, by the names of its methods."""

    def start(self, backend: str | None) -> None:
        """Import what the calls need, so that it does not count as a call's time."""
        sys.modules["torch"] = None  # type: ignore[assignment]  # nothing here needs it
        from tokenizers import Tokenizer
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        self.base = PreTrainedTokenizerBase
        if backend is not None:
            self.tokenizer = Tokenizer.from_str(backend)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def render(
        self, chat_template: Any, special_tokens: Any, messages: Any, options: dict[str, Any]
    ) -> str:
        tokenizer: Any = SimpleNamespace(
            chat_template=chat_template, special_tokens_map=special_tokens
        )
        tokenizer.get_chat_template = functools.partial(self.base.get_chat_template, tokenizer)
        text: Any = self.base.apply_chat_template(tokenizer, messages, tokenize=False, **options)
        if len(text) > CHARACTERS:
            raise ValueError(f"its text has more than {CHARACTERS} characters")
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def find_content_format(self, chat_template: str) -> str:
        return find_content_format(chat_template)

    def read(self, folder: str) -> None:
        """Read a tokenizer, to see that it can be done within the limits."""
        _from_pretrained(folder)


def main(programs: Any) -> None:
    """Answer calls from standard input until it ends: of methods of `programs`, by name. A call is
    8 bytes of length and a marshalled tuple; a reply is a line of JSON, as the other side does not
    trust this one."""
    calls, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed here is no reply
    while header := calls.read(8):
        task, args, seconds, megabytes = marshal.loads(calls.read(int.from_bytes(header, "little")))
        # If the other side is no longer there to end a call.
        faulthandler.dump_traceback_later(seconds + 1, exit=True)
        limit_memory(megabytes)
        try:
            reply = json.dumps({"result": getattr(programs, task)(*args)}, ensure_ascii=False)
        except MemoryError:
            reply = json.dumps({"error": f"it needs more than {megabytes} MiB of memory"})
        except BaseException as error:  # PanicException, too
            reply = json.dumps({"error": str(error)[:ERROR_CHARACTERS]})
        faulthandler.cancel_dump_traceback_later()
        replies.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        replies.flush()


def limit_memory(megabytes: int) -> None:
    """Let this process take so many MiB more of address space than it has now. Linux only."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + megabytes * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


if __name__ == "__main__":
    main(Programs())
