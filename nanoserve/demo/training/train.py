"""python -m nanoserve.demo.training.train: make the demo model from nothing, in one command.

    corpus (generated)  ->  tokenizer  ->  rows, one batch per step  ->  Qwen3, 1.25M parameters
                                                                     ->  a Hugging Face folder

Same seed, same machine: same weights. A run that was interrupted (Ctrl-C) is continued by
`--resume`, and ends with the weights of an uninterrupted run. Two cores of a CPU with bfloat16
products need 50 minutes if other work runs beside it; a GPU is used if there is one.

Row lengths follow a curriculum: short rows until the model has learnt to copy, then also rows of up
to 2048 tokens, and more of the long rows from step 2600 on. Learning rates: warm-up, constant,
linear decay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from tqdm import tqdm

from nanoserve.demo.training.corpus import IM_END, IM_START
from nanoserve.demo.training.data import Batch, Batches, train_tokenizer
from nanoserve.demo.training.model import ModelShape, Muon, TrainingQwen3

# Tools as Hermes and Qwen write them. The corpus has none: the model calls one only if it must.
CHAT_TEMPLATE = r"""{%- if tools -%}
{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
{{ 'To call a function, write\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\nFunctions:' }}
{%- for tool in tools -%}{{ '\n' + tool | tojson }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '\n' if message.content or not loop.first }}
{{- '<tool_call>\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

ROW_LENGTHS = (128, 256, 512, 1024, 2048)
ROW_STAGES = (  # from which step on, which share of the steps has rows of which length
    (0, (1, 0, 0, 0, 0)),
    (640, (0, 45, 22, 25, 8)),
    (2600, (0, 35, 10, 15, 40)),
)


@dataclass(frozen=True)
class Plan:
    """Everything the weights depend on, besides the code."""

    steps: int = 6600
    seed: int = 0
    tokens_per_step: int = 4096
    matrix_lr: float = 0.02  # Muon, matrices inside the blocks
    other_lr: float = 0.004  # AdamW, embedding and norms
    warmup_steps: int = 100
    decay_share: float = 0.45  # of the steps, at the end
    tokenizer_documents: int = 20_000
    longest_row: int = 2048
    shape: ModelShape = field(default_factory=ModelShape)

    def lr_factor(self, step: int) -> float:
        """Linear from 0 to 1, constant, linear to almost 0 at the last step."""
        decay_steps = max(1.0, self.steps * self.decay_share)
        warmup = (step + 1) / (self.warmup_steps + 1)
        return min(1.0, warmup, max(0.01, (self.steps - step) / decay_steps))

    def row_lengths(self) -> list[int]:
        """The row length of every step."""
        rng = random.Random(f"lengths {self.seed}")
        lengths = []
        for step in range(self.steps):
            shares = next(s for first, s in reversed(ROW_STAGES) if step >= first)
            length = rng.choices(ROW_LENGTHS, shares)[0]
            lengths.append(min(length, self.longest_row))
        return lengths


class Trainer:
    """A model, its optimisers and the number of steps it has seen; `advance` takes one more."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        self.plan, self.device = plan, device
        self.model = TrainingQwen3(plan.shape, dtype, plan.seed).to(device)
        self.muon = Muon(self.model.hidden_matrices(), plan.matrix_lr)
        self.adam = torch.optim.AdamW(
            self.model.other_parameters(), plan.other_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = 0
        self.seconds = 0.0  # spent training, over all interruptions
        self.loss = 0.0  # running mean

    def advance(self, batch: Batch) -> float:
        """One optimiser step; returns the loss of this batch."""
        started = time.perf_counter()
        ids, weights = batch.ids.to(self.device), batch.weights.to(self.device)
        loss = self.model.loss(ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.other_parameters(), 1.0)
        factor = self.plan.lr_factor(self.step)
        peaks = [(self.muon, self.plan.matrix_lr), (self.adam, self.plan.other_lr)]
        for optimizer, peak in peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        value = loss.item()
        self.loss = value if self.step == 1 else 0.98 * self.loss + 0.02 * value
        self.seconds += time.perf_counter() - started
        return value

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        state = {
            "plan": asdict(self.plan),
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "progress": (self.step, self.seconds, self.loss),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise ValueError(
                f"{path} belongs to another run: {state['plan']}; this one is {asdict(self.plan)}."
                " Give the same --steps and --seed, or delete the file to start anew."
            )
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds, self.loss = state["progress"]


def run(
    trainer: Trainer,
    tokenizer: Tokenizer,
    checkpoint: Path | None = None,
    *,
    stop_at: int | None = None,
    save_every: int = 200,
    workers: int = 0,
) -> None:
    """Train from trainer.step to the end of the plan (or to `stop_at`)."""
    plan, end = trainer.plan, stop_at or trainer.plan.steps
    batches = Batches(tokenizer, plan.row_lengths(), plan.tokens_per_step, plan.seed)
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=range(trainer.step, end),
        num_workers=workers,
        prefetch_factor=8 if workers else None,
    )
    with tqdm(total=plan.steps, initial=trainer.step, unit="step", desc="train") as bar:
        for batch in loader:
            trainer.advance(batch)
            bar.update()
            speed = trainer.step * plan.tokens_per_step / trainer.seconds
            bar.set_postfix_str(f"loss {trainer.loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            if checkpoint and (trainer.step % save_every == 0 or trainer.step == end):
                trainer.save(checkpoint)


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """config.json; the rope base stands in it twice, where old and new readers look for it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def export(trainer: Trainer, tokenizer: Tokenizer, output: Path) -> None:
    """Write the Hugging Face folder; the weights last, and all at once."""
    output.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": hf_config(trainer.plan.shape),
        "generation_config.json": {"eos_token_id": [2, 0], "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": IM_END,
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": [IM_START],
            "clean_up_tokenization_spaces": False,
            "model_max_length": trainer.plan.shape.max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
        "training.json": {
            "plan": asdict(trainer.plan),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "tokens": trainer.step * trainer.plan.tokens_per_step,
            "minutes": round(trainer.seconds / 60, 1),
            "loss": round(trainer.loss, 4),
            "device": str(trainer.device),
        },
    }
    for name, content in files.items():
        (output / name).write_text(json.dumps(content, indent=1) + "\n")
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (output / "tokenizer.json").write_text(compact, encoding="utf-8")
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in trainer.model.state_dict().items()
    }
    part = output / "model.safetensors.part"
    part.write_bytes(serialise(weights, metadata={"format": "pt"}))
    os.replace(part, output / "model.safetensors")


def pick_device() -> tuple[torch.device, torch.dtype]:
    """A GPU if there is one; bfloat16 matrix products wherever the hardware has them."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.device("cpu"), torch.bfloat16 if has_bf16 else torch.float32


def make_parser(
    description: str, plan: type[Any], output: str, checkpoint: str, every: int
) -> argparse.ArgumentParser:
    """The arguments of any training. `plan` has the default steps and seed; a checkpoint is written
    every so many steps."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(output),
        help="the folder to write (default: %(default)s; what is in use stays as it is)",
    )
    parser.add_argument("--steps", type=int, default=plan.steps)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(checkpoint),
        help=f"written every {every} steps (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    return parser


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.resume and not arguments.checkpoint.exists():
        parser.error(f"--resume needs a checkpoint, and there is no file {arguments.checkpoint}")
    return arguments


def parse_arguments() -> argparse.Namespace:
    title = "Train the demo model from scratch."
    parser = make_parser(title, Plan, "demo-model", "demo-training.pt", 200)
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile (no g++)")
    return read_arguments(parser)


def main() -> None:
    arguments = parse_arguments()
    plan = replace(Plan(), steps=arguments.steps, seed=arguments.seed)
    device, dtype = pick_device()
    if device.type == "cpu":
        print(f"training on the CPU in {dtype}, {torch.get_num_threads()} threads")
    tokenizer = train_tokenizer(plan.shape.vocab_size, plan.tokenizer_documents, plan.seed)
    trainer = Trainer(plan, device, dtype)
    if arguments.resume:
        trainer.load(arguments.checkpoint)
    if device.type == "cpu" and not arguments.no_compile:
        trainer.model.compile_blocks()
    run(trainer, tokenizer, arguments.checkpoint, workers=1 if device.type == "cpu" else 4)
    export(trainer, tokenizer, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
