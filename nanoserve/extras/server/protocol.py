"""What may a client ask for?

    {"prompt": "Once", "max_tokens": 5, "top_k": 3, "min_tokens": 9}       bytes
    -> read_request: CompletionRequest              is it JSON? the type of each field
    -> to_sampling_params: SamplingParams           min_tokens is 9, more than max_tokens 5

Each field has OpenAI's name, or vLLM's if OpenAI has none. Plain fields are checked here. Lists and
dicts are checked by those who use them (SamplingParams, inputs.py): they stop at the first bad
item, and a list may have a million. Types are strict, as OpenAI's are: "5" is no number. (vLLM
takes it for one.)

What about a name that is no field? vLLM ignores it and says so in its debug log, which no client
sees. That is right for fields of other servers: some clients send them to every server. But a
client that misspells `temperature` gets other answers than it asked for. So there are three cases.
A name that is nearly one of ours is an error: "did you mean temperature?". One of vLLM's or
OpenAI's that would change the answer, and that nanoserve does not have, is an error, too, unless
its value changes nothing: REFUSED has those of the server, MISSING those of SamplingParams. Any
other is ignored, with a line in the log.

Left out: images and audio.

vLLM: vllm/entrypoints/openai/protocol.py (V0); vllm/entrypoints/openai/: completion/protocol.py,
chat_completion/protocol.py; vllm/entrypoints/serve/: engine/protocol.py, tokenize/protocol.py;
vllm/entrypoints/pooling/: embed/protocol.py, scoring/protocol.py (V1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.beam_search import BeamSearchParams
from nanoserve.extras.server.response_format import (
    read_response_format,
    read_structured_outputs,
)
from nanoserve.extras.server.responses import ErrorResponse
from nanoserve.inputs import prompt_to_seq
from nanoserve.logger import init_logger, warning_once
from nanoserve.sampling_params import FIELDS, MISSING, RANGES, RequestOutputKind, SamplingParams

logger = init_logger(__name__)
Json = dict[str, Any]

MAX_PROMPTS = 1024  # of one request: vLLM's limit
MAX_INPUTS = 2048  # of one request for vectors: OpenAI's limit
MAX_CHOICES = RANGES["n"][2]
MAX_UNKNOWN = 64  # names of one request that are no fields

# Types of fields that are checked where they are used. Clients read the schema.
TEXT: Json = {"type": "string"}
INT: Json = {"type": "integer", "minimum": 0}
OBJECT: Json = {"type": "object"}
NULL: Json = {"type": "null"}
BIAS: Json = {"type": "object", "additionalProperties": {"type": "number"}}


def _list_of(schema: Json) -> Json:
    return {"type": "array", "items": schema}


Prompt = Annotated[
    Any,
    WithJsonSchema({"anyOf": [TEXT, _list_of(TEXT), _list_of(INT), _list_of(_list_of(INT)), NULL]}),
]
Object = Annotated[Any, WithJsonSchema({"anyOf": [OBJECT, NULL]})]
Objects = Annotated[Any, WithJsonSchema({"anyOf": [_list_of(OBJECT), NULL]})]
Texts = Annotated[Any, WithJsonSchema({"anyOf": [_list_of(TEXT), NULL]})]
TextOrTexts = Annotated[Any, WithJsonSchema({"anyOf": [TEXT, _list_of(TEXT), NULL]})]
TextOrObject = Annotated[Any, WithJsonSchema({"anyOf": [TEXT, OBJECT, NULL]})]
TokenIds = Annotated[Any, WithJsonSchema({"anyOf": [_list_of(INT), NULL]})]
LogitBias = Annotated[Any, WithJsonSchema({"anyOf": [BIAS, NULL]})]

# Fields of OpenAI's API and of vLLM that change nothing in the answers of a text model.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "verbosity", "session_id"),
    *("include_reasoning", "return_token_offsets", "mm_payload", "return_mm_kwargs"),
}
# Fields that would change the answer: the values that change nothing, and what to do. Those of
# MISSING are of the same kind; SamplingParams checks them.
Refusal = tuple[tuple[Any, ...], str]
OLD_GRAMMAR: Refusal = ((None,), "vLLM has replaced it by structured_outputs; use that")
NO_MEDIA: Refusal = ((None, {}), "nanoserve takes text and token ids only; leave it out")
NO_CUT: Refusal = ((None,), "prompts are never cut; send the part that shall be read")
NO_CUT_OR_0: Refusal = ((None, 0), "texts are never cut; send the beginning")
REFUSED: dict[str, Refusal] = {
    "suffix": ((None, ""), "no model here fills in the middle; leave it out"),
    "prompt_embeds": NO_MEDIA,
    "mm_processor_kwargs": NO_MEDIA,
    "media_io_kwargs": NO_MEDIA,
    "audio": NO_MEDIA,
    "modalities": ((None, ["text"]), "nanoserve answers with text only; leave it out"),
    **dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc"), NO_CUT_OR_0),
    "instruction": ((None,), "write it before the text"),
    "padding": ((None, "do_not_pad"), "nothing is padded that a client sees; leave it out"),
    "truncate_prompt_tokens": NO_CUT,
    "truncation_side": NO_CUT,
    "early_stopping": ((None, False), "a beam search has its own rule for the end; leave it out"),
    "ec_transfer_params": ((None,), "nanoserve has no encoders; leave it out"),
    "functions": ((None,), "OpenAI has replaced it by tools; use them"),
    "function_call": ((None, "none"), "OpenAI has replaced it by tool_choice; use that"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
        OLD_GRAMMAR,
    ),
    "logits_processors": ((None, []), "a server runs no functions of its clients; leave it out"),
}


# -- requests --


class OpenAIBaseModel(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="allow", strict=True)

    def check(self) -> None:
        """Raise ValueError for a name that is not known, and for fields that contradict each other
        or ask for what is not here."""
        extra, unknown = self.model_extra or {}, []
        for name, value in extra.items():
            if name in REFUSED and value not in REFUSED[name][0]:
                _raise(name, value, f"{name} is {brief(value)}, and {REFUSED[name][1]}.")
            if name not in REFUSED and name not in IGNORED and name not in MISSING:
                unknown.append(name)
        if len(unknown) > MAX_UNKNOWN:
            message = f"{len(unknown)} fields are not known; allowed: up to {MAX_UNKNOWN}."
            _raise(unknown[0], None, f"{message} The first is {brief(unknown[0])}.")
        known = [*type(self).model_fields, *IGNORED, *REFUSED, *MISSING] if unknown else []
        for name in unknown:
            near = find_similar(name, known)
            if near is not None:
                _raise(name, None, f"there is no field {brief(name)}. Did you mean {near!r}?")
        if unknown:
            text = "requests have fields that are not known here: they are ignored. "
            warning_once(logger, text + "NANOSERVE_LOGGING_LEVEL=DEBUG names them.")
            logger.debug("ignored fields of a request: %s", brief(unknown))


def find_similar(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: of ten letters, one may be wrong or missing."""
    plain = _plain(name)
    for each in known:
        other = _plain(each)
        if abs(len(plain) - len(other)) <= 2 and (
            plain == other or SequenceMatcher(None, plain, other).ratio() >= 0.9
        ):
            return each
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _raise(name: str, value: Any, message: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=name, value=value)


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    _raise(name, value, f"{name} is {brief(value)}; allowed: {allowed}.")


class StreamOptions(OpenAIBaseModel):
    """What a stream sends beside the tokens."""

    include_usage: bool | None = False  # a last chunk with the numbers of tokens
    continuous_usage_stats: bool | None = False  # and in every chunk the numbers so far
    include_obfuscation: bool | None = False  # OpenAI's; changes nothing here


class GenerationRequest(OpenAIBaseModel):
    """What completions and chat completions have in common. None: the model's own recommendation,
    if it has one, else OpenAI's default."""

    model: str | None = None  # a name of /v1/models; None: the model that is served
    n: int | None = 1  # completions of each prompt
    best_of: int | None = None  # of so many completions, the n likeliest are given
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: TokenIds = None
    bad_words: Texts = None
    seed: int | None = None
    stop: TextOrTexts = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: int | None = 0
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = False  # n is the number of beams; see BEAM_FIELDS
    length_penalty: float | None = 1.0  # of a beam search
    echo: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: Object = None  # text, json_object, json_schema or structural_tag
    structured_outputs: Object = None  # the fields of StructuredOutputsParams
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs "token_id:12", not the text
    add_special_tokens: bool | None = True  # the tokenizer's own, such as BOS
    priority: int | None = 0  # low is early, if the scheduling policy is "priority"
    cache_salt: str | None = None
    request_id: str | None = None  # of the answer's id; the header X-Request-Id comes first
    vllm_xargs: Object = None  # SamplingParams.extra_args
    kv_transfer_params: Object = None  # see extras/kv_offload/peer.py

    def check(self) -> None:
        super().check()
        if self.stream_options is not None:
            self.stream_options.check()
            if not self.stream:
                _raise("stream_options", None, "stream_options are for stream=true only.")
        if self.stream and self.prompt_logprobs:
            _refuse("prompt_logprobs", self.prompt_logprobs, "None or 0 if stream is true")
        if self.best_of is not None and not self.num_choices <= self.best_of <= MAX_CHOICES:
            allowed = f"n ({self.num_choices}) or more, up to {MAX_CHOICES}"
            _refuse("best_of", self.best_of, allowed)
        if self.stream and self.num_samples > self.num_choices:
            _refuse("best_of", self.best_of, f"n ({self.num_choices}) if stream is true")
        read_response_format(self.response_format)
        if self.use_beam_search:
            self.check_beam_search()

    def check_beam_search(self) -> None:
        """Raise ValueError for fields that a beam search does not know."""
        fields = type(self).model_fields
        for name in (*SHARED, "best_of", "stream", "kv_transfer_params"):
            value = getattr(self, name)
            if name not in BEAM_FIELDS and value is not None and value != fields[name].default:
                _raise(name, value, f"{name} is {brief(value)}: not with use_beam_search.")

    @property
    def form(self) -> Json:
        """Fields of StructuredOutputsParams: the form that an answer must have; {}: any. Raises
        ValueError or TypeError."""
        asked = read_structured_outputs(self.structured_outputs)
        return asked | read_response_format(self.response_format)

    @property
    def num_choices(self) -> int:
        """Completions of each prompt that the client gets."""
        return 1 if self.n is None else self.n

    @property
    def num_samples(self) -> int:
        """Completions of each prompt that the engine makes."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Logprobs of each token that the client gets, beside the token's own; None: none."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As num_logprobs, of the prompt's tokens."""
        return self.prompt_logprobs

    def to_sampling_params(
        self, recommended: Mapping[str, Any], max_tokens: int | None
    ) -> SamplingParams:
        """recommended: the model's generation_config.json. Without structured_outputs: see
        Reply.make_form. Raises ValueError or TypeError."""
        default = SamplingParams.from_generation_config(recommended)
        params = {name: getattr(default, name) for name in RECOMMENDED}
        params |= {name: getattr(self, name) for name in SHARED if getattr(self, name) is not None}
        extra = self.model_extra or {}
        params |= {name: extra[name] for name in MISSING if name in extra}
        params |= {"n": self.num_samples, "logprobs": self.num_logprobs, "max_tokens": max_tokens}
        params["prompt_logprobs"] = self.num_prompt_logprobs
        params.pop("structured_outputs", None)
        if self.num_samples > self.num_choices and self.num_logprobs is None:
            params["logprobs"] = 0  # to know which are the likeliest
        if params["temperature"] == 0:
            params["n"] = self.num_choices  # best_of: they are all the same
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        extra_args = self.vllm_xargs
        if self.kv_transfer_params is not None and isinstance(extra_args, (Mapping, type(None))):
            extra_args = {**(extra_args or {}), "kv_transfer_params": self.kv_transfer_params}
        return SamplingParams.from_optional(**params, extra_args=extra_args, output_kind=kind)

    def to_beam_search_params(self, max_tokens: int) -> BeamSearchParams:
        """Raises ValueError."""
        given = {name: getattr(self, name) for name in BEAM_FIELDS if name != "n"}
        given = {name: value for name, value in given.items() if value is not None}
        return BeamSearchParams(self.num_choices, max_tokens, **given)


# The fields of which generation_config.json may have another default.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SHARED = tuple(name for name in FIELDS if name in GenerationRequest.model_fields)
BEAM_FIELDS = (
    *("n", "ignore_eos", "temperature", "length_penalty", "include_stop_str_in_output"),
    "skip_special_tokens",
)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: go on where the prompt ends."""

    prompt: Prompt = None  # a text, token ids, or a list of either
    max_tokens: int | None = 16  # None: 16, too, as in vLLM; 0: with echo only
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.prompt is None and "messages" in (self.model_extra or {}):
            _raise("prompt", None, "messages are for /v1/chat/completions; give a prompt here.")
        if self.max_tokens == 0 and not self.echo:
            _refuse("max_tokens", 0, "1 or more, or 0 with echo")
        if self.use_beam_search and self.echo and self.logprobs is not None:
            _raise("echo", True, "echo with logprobs: not with use_beam_search.")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        shows_prompt = self.echo and self.prompt_logprobs is None
        return self.logprobs if shows_prompt else self.prompt_logprobs

    @property
    def prompts(self) -> list[Any]:
        """One entry for each prompt: a string or a list of token ids. Raises ValueError or
        TypeError."""
        return as_prompts("prompt", self.prompt, MAX_PROMPTS)


def as_prompts(name: str, given: Any, most: int) -> list[Any]:
    """One entry for each prompt of a field: a string or a list of token ids. Raises ValueError or
    TypeError."""
    if given is None or given == "":
        _raise(name, None, f"there is no {name}. Give a text, token ids, or a list of them.")
    if isinstance(given, dict):
        raise TypeError(f"{name} must be a text or a list, got {brief(given)}.")
    prompts = prompt_to_seq(given)
    if not 1 <= len(prompts) <= most:
        _raise(name, None, f"{len(prompts)} prompts; allowed: 1 to {most}.")
    for prompt in prompts:
        if not isinstance(prompt, (str, list)):
            raise TypeError(f"a prompt must be a text or token ids, got {brief(prompt)}.")
    return prompts


class PoolingRequest(OpenAIBaseModel):
    """What requests for vectors and for scores have in common."""

    model: str | None = None
    use_activation: bool | None = None  # normalise the vectors; None: as the model does
    add_special_tokens: bool | None = True  # the tokenizer's own, such as CLS and EOS
    priority: int | None = 0  # low is early, if the scheduling policy is "priority"
    cache_salt: str | None = None
    request_id: str | None = None  # of the answer's id; the header X-Request-Id comes first

    def check(self) -> None:
        super().check()
        if "normalize" in (self.model_extra or {}):
            _raise("normalize", None, "vLLM has replaced normalize by use_activation; use that.")


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings: a vector of each input."""

    input: Prompt = None  # a text, token ids, or a list of either
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None  # the first numbers only; for models made for that
    embed_dtype: Literal["float32"] | None = "float32"  # of base64
    endianness: Literal["native", "little"] | None = "native"  # of base64

    def check(self) -> None:
        super().check()
        if self.input is None and "messages" in (self.model_extra or {}):
            _raise("input", None, "messages are not read here; give the text as input.")

    @property
    def prompts(self) -> list[Any]:
        """One entry for each input. Raises ValueError or TypeError."""
        return as_prompts("input", self.input, MAX_INPUTS)


class ScoreRequest(PoolingRequest):
    """POST /v1/score: how near are the texts of each pair? A pair of fields, of PAIRS."""

    queries: Prompt = None
    documents: Prompt = None
    items: Prompt = None  # another name of documents
    text_1: Prompt = None
    text_2: Prompt = None
    data_1: Prompt = None
    data_2: Prompt = None

    @property
    def pairs(self) -> tuple[list[Any], list[Any]]:
        """The texts of both sides. Raises ValueError or TypeError."""
        given = [each for each in ("items", *sum(PAIRS, ())) if getattr(self, each) is not None]
        for one, other in (*PAIRS, ("queries", "items")):
            if set(given) == {one, other}:
                first, second = getattr(self, one), getattr(self, other)
                return as_prompts(one, first, MAX_INPUTS), as_prompts(other, second, MAX_INPUTS)
        allowed = " or ".join(f"{one} and {other}" for one, other in PAIRS)
        _raise("queries", None, f"the request has {given or 'no texts'}; allowed: {allowed}.")


PAIRS = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"))


class ChatTemplateFields(OpenAIBaseModel):
    """A conversation, and how a chat template makes a prompt of it."""

    messages: Objects
    tools: Objects = None
    tool_choice: TextOrObject = None  # None: "auto" if there are tools
    documents: Objects = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None  # None: unless continue_final_message
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False  # beside those of the template
    chat_template: str | None = None  # for servers with --trust-request-chat-template
    chat_template_kwargs: Object = None

    def check(self) -> None:
        super().check()
        if self.add_generation_prompt and self.continue_final_message:
            message = "continue_final_message and add_generation_prompt exclude each other."
            _raise("continue_final_message", True, message)
        for number, message in enumerate(self.messages if isinstance(self.messages, list) else ()):
            if isinstance(message, dict) and "role" not in message:
                _raise("messages", message, f"messages[{number}] has no role, such as 'user'.")
        if self.tools is not None:
            check_tools(self.tools)
        kwargs = self.chat_template_kwargs
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"chat_template_kwargs must be an object, got {brief(kwargs)}.")

    @property
    def own_template(self) -> str | None:
        """The template that the request brings."""
        return self.chat_template or (self.chat_template_kwargs or {}).get("chat_template")

    @property
    def adds_generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def check_tools(tools: Any) -> None:
    """Raise ValueError for what are no tools in OpenAI's form: functions, each with a name of its
    own."""
    if not isinstance(tools, list) or not tools:
        _refuse("tools", tools, "a list of at least one tool, or leave it out")
    names = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            allowed = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
            _raise("tools", tool, f"tools holds {brief(tool)}; allowed: {allowed}.")
        for name, kinds, allowed in TOOL_FIELDS:
            value = function.get(name)
            if not isinstance(value, kinds) or value == "":
                message = f"{name} of a function is {brief(value)}; allowed: {allowed}."
                _raise("tools", tool, message)
        if function["name"] in names:
            _raise("tools", tool, f"tools has two functions called {brief(function['name'])}.")
        names.add(function["name"])


NONE = type(None)
TOOL_FIELDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("name", (str,), "a text that is not empty"),
    ("parameters", (dict, NONE), "a JSON schema as an object, or leave it out"),
    ("strict", (bool, NONE), "true, false, or leave it out"),
)


TOOL_CHOICES = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


class ChatCompletionRequest(GenerationRequest, ChatTemplateFields):
    """POST /v1/chat/completions: answer the last message of a conversation."""

    max_completion_tokens: int | None = None
    max_tokens: int | None = None  # its older name; None: as many as fit
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    add_special_tokens: bool | None = False  # beside those of the template
    parallel_tool_calls: bool | None = True  # False: one call at most
    return_prompt_text: bool | None = None

    def check(self) -> None:
        super().check()
        most = self.max_completion_tokens
        if most is not None and most < 1:
            _refuse("max_completion_tokens", most, "None, or 1 or more")
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", self.top_logprobs, "0, unless logprobs is true")
        self.check_tool_choice()

    def check_tool_choice(self) -> None:
        """Raise ValueError for a choice that no tool fits, or that contradicts another field."""
        choice, name = self.tool_choice, self.function
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if name is None and choice not in (None, "none", "auto", "required"):
            _refuse("tool_choice", choice, TOOL_CHOICES)
        if choice not in (None, "none") and not names:
            _raise("tool_choice", choice, f"tool_choice is {brief(choice)} without tools.")
        if name is not None and name not in names:
            _refuse("tool_choice", choice, f"a function of tools: {brief(names)}")
        if self.must_call and read_structured_outputs(self.structured_outputs):
            message = "structured_outputs and a tool_choice that needs a call exclude each other."
            _raise("structured_outputs", self.structured_outputs, message)

    @property
    def function(self) -> str | None:
        """The name of the function that tool_choice demands."""
        choice = self.tool_choice if isinstance(self.tool_choice, dict) else {}
        function = choice.get("function") if choice.get("type", "function") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def finds_calls(self) -> bool:
        """May the answer have calls of tools?"""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Must it have one?"""
        return self.tool_choice == "required" or self.function is not None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """max_completion_tokens, or max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: of a prompt, or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects = None
    add_special_tokens: bool | None = None  # None: for a prompt yes, for messages no
    return_token_strs: bool | None = False  # the tokens as the vocabulary writes them, too

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            _raise("prompt", None, "give either prompt (a text) or messages (a conversation).")


class DetokenizeRequest(OpenAIBaseModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


Request = TypeVar("Request", bound=OpenAIBaseModel)


def read_request(cls: type[Request], body: bytes) -> Request:
    """The request in a body. Raises pydantic.ValidationError, ValueError or TypeError."""
    if not body.strip():
        raise VLLMValidationError("the body is empty; it must be a JSON object.")
    request = cls.model_validate_json(body)
    request.check()
    return request


def describe_post(cls: type[OpenAIBaseModel], answer: Any, streams: bool = False) -> Json:
    """What /openapi.json says about an endpoint that reads its body itself: keyword arguments of
    APIRouter.post."""
    schema = cls.model_json_schema()
    parts = schema.pop("$defs", {})
    for field in schema["properties"].values():  # each part is used once: it stands in its place
        for option in field.get("anyOf", ()):
            option.update(parts.get(option.pop("$ref", "").rpartition("/")[2], {}))
    ok: Json = {"model": answer}
    if streams:
        ok["content"] = {"text/event-stream": {}}
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
        "responses": {200: ok, "4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    }
