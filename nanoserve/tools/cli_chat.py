"""nanoserve chat: talk with a model in the terminal.

    > What is 17 + 25?
    17 + 25 = 42                          printed token by token; Ctrl-C stops the answer
    > /system You are a pirate.           a system prompt, and a new conversation
    > /reset                              a new conversation
    > /exit                               or Ctrl-D, or Ctrl-C twice

The engine runs in this process. Each turn sends the whole conversation again; the prefix cache has
computed all of it but the last question, as `--stats` shows:

    first token after 9 ms, 11 tokens in 0.05 s (228 tok/s); prompt 62 tokens, 48 of them cached

Without a terminal each line of standard input is a question of one conversation:

    printf 'My name is Mia.\\nWhat is my name?\\n' | nanoserve chat

A LoRA adapter speaks in place of the model alone: --lora-path nanoserve/demo/lora.

Left out: chats through a server (vLLM's --url).

vLLM: vllm/entrypoints/cli/openai.py: ChatCommand (V1).
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanoserve import LLM, RequestOutput, SamplingParams, __version__
from nanoserve.arg_utils import load_chat_template
from nanoserve.tools import cli

if TYPE_CHECKING:
    from nanoserve.extras.lora import LoRARequest

HELP = """\
/reset          begin a new conversation
/system TEXT    set the system prompt and begin a new conversation; without TEXT: remove it
/stats          show statistics after each answer, or stop showing them
/help           this list
/exit           leave (also Ctrl-D, or Ctrl-C twice)
Ctrl-C          stop the answer
A line that ends with \\ goes on in the next, and lines that are pasted are one question. The arrow
keys bring earlier lines back."""


@dataclass
class Chat:
    """One conversation at a time.

    Invariant: between two calls, messages alternate: every question has an answer.
    """

    llm: LLM
    params: SamplingParams
    system_prompt: str | None = None
    show_stats: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    lora_request: LoRARequest | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)  # without the system prompt
    has_failed: bool = False  # a question had no answer

    def handle(self, line: str) -> None:
        """Do what a line says: a command, or a question."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "/exit" | "/quit" | "/bye":
                raise cli.Leave
            case "/help" | "/?":
                cli.note(HELP)
            case "/reset" | "/clear":
                self.messages.clear()
                cli.note("[new conversation]")
            case "/system":
                self.system_prompt = rest.strip() or None
                self.messages.clear()
                done = "set" if self.system_prompt else "removed"
                cli.note(f"[system prompt {done}; new conversation]")
            case "/stats":
                self.show_stats = not self.show_stats
                cli.note(f"[statistics {'on' if self.show_stats else 'off'}]")
            case _ if command.startswith("/") and command[1:].isalpha():
                cli.note(f"[no command {command}; /help lists them]")
            case _:
                self.ask(line)

    def ask(self, question: str) -> None:
        """Print the answer as it comes. A question without an answer is forgotten."""
        stats, answer, num_messages = cli.Stats(), "", len(self.messages)
        last: RequestOutput | None = None
        try:
            self.messages.append({"role": "user", "content": question})
            prompts, lora_request = [self.tokenize()], self.lora_request
            stream: Any = self.llm.stream(prompts, self.params, lora_request=lora_request)
            with closing(stream) as outputs:  # closed before its end, it aborts the request
                for last in outputs:
                    stats.count(last)
                    answer += last.outputs[0].text
                    cli.write(last.outputs[0].text)
            cli.write("\n")
        except KeyboardInterrupt:
            if not cli.is_interactive():
                raise
            cli.write("\n")
            cli.note("[stopped]")
        except ValueError as error:  # refused at the door
            cli.note(f"[{error}]")
            self.has_failed = True
        finally:
            del self.messages[num_messages + bool(answer) :]
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
        if last is not None:
            self.tell_about(last, stats)

    def tokenize(self) -> list[int]:
        """Token ids of the conversation. Raises ValueError if it leaves no room for an answer."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        processor = self.llm.engine.input_processor
        options = {**self.template_options, "add_generation_prompt": True}
        text = processor.render_chat([*system, *self.messages], options)
        token_ids = processor.tokenize(text, add_special_tokens=False)
        if len(token_ids) >= self.room:
            what = "This conversation" if len(self.messages) > 1 else "This question"
            raise ValueError(
                f"{what} has {len(token_ids)} tokens, and the engine holds {self.room} with the "
                "answer. /reset begins a new conversation; or ask for less."
            )
        return token_ids

    def check_template(self) -> None:
        """Raise ValueError if the model cannot chat, before the first question is typed."""
        question = [{"role": "user", "content": "?"}]
        self.llm.engine.input_processor.render_chat(question, self.template_options)

    @property
    def room(self) -> int:
        """Tokens that a conversation can have, the last answer included."""
        processor = self.llm.engine.input_processor
        return min(processor.max_model_len, processor.kv_capacity)

    def tell_about(self, last: RequestOutput, stats: cli.Stats) -> None:
        """Notes below an answer: why it ended, if not by itself, and statistics."""
        completion = last.outputs[0]
        if completion.finish_reason == "error":
            cli.note(f"[failed: {completion.stop_reason}]")
            self.has_failed = True
        elif completion.finish_reason == "length":
            is_full = len(last.prompt_token_ids) + stats.num_tokens >= self.room
            why = f"the conversation has reached {self.room} tokens; /reset begins a new one"
            cli.note(f"[{why}]" if is_full else "[cut off by --max-tokens]")
        if self.show_stats:
            cli.note(f"[{stats.describe_one()}]")


def make_parser() -> cli.Parser:
    parser = cli.Parser("nanoserve chat", "[options]", "Talk with a model in the terminal.")
    add = parser.add_argument
    add("-q", "--quick", metavar="MESSAGE", help="print the answer to one message, and leave")
    add("--system-prompt", metavar="TEXT", help="how the model shall answer")
    add("--stats", action="store_true", help="statistics after each answer")
    add("--chat-template", metavar="FILE",
        help="a Jinja template, or a file with one, in place of the model's own")  # fmt: skip
    add("--chat-template-kwargs", type=json_object, default={}, metavar="JSON",
        help="""for the chat template, such as '{"enable_thinking": false}'""")  # fmt: skip
    cli.add_option_args(parser, without=("n", "logprobs", "prompt_logprobs"), max_tokens=None)
    return parser


def json_object(text: str) -> dict[str, Any]:
    """'{"a": 1}' -> {"a": 1}."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object.")
    if taken := {"conversation", "messages", "tokenize"} & set(value):
        raise argparse.ArgumentTypeError(f"it holds {min(taken)!r}, which chat sets itself.")
    return value


def main(arguments: list[str]) -> int:
    """Chat until the user leaves. Returns 1 if a question had no answer."""
    parser = make_parser()
    args = parser.parse(arguments)
    lora_request = cli.read_lora(args)
    config, given = cli.read_config(parser, args), cli.read_sampling(parser, args)
    options = dict(args.chat_template_kwargs)
    try:
        if args.chat_template is not None:
            options["chat_template"] = load_chat_template(args.chat_template)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with cli.build_llm(config) as llm:
        params = cli.make_params(llm, given, max_tokens=None)
        chat = Chat(llm, params, args.system_prompt, args.stats, options, lora_request=lora_request)
        chat.check_template()
        if lora_request is not None:  # a bad one, too, is no news after the first question
            llm.engine.lora_manager.add_lora(lora_request)
        if args.quick is not None:
            chat.ask(cli.clean(args.quick))
            return int(chat.has_failed)
        if cli.is_interactive():
            cli.note(f"nanoserve {__version__}, {describe_llm(llm)}. /help lists commands.")
        cli.read_lines(chat.handle)
    return int(chat.has_failed)


def describe_llm(llm: LLM) -> str:
    """For example "demo on cpu, 2048 tokens"."""
    config = llm.engine.config
    return f"{llm.engine.model_config.path.name} on {config.device}, {config.max_model_len} tokens"
