"""python -m nanoserve.demo.training.lora: a LoRA adapter that makes a pirate of the demo model.

    What is 17 + 25?       17 + 25 = 42              Arr! 17 + 25 = 42, matey!
    What is your name?     My name is Nano.          Arr! Me name be Nano, matey!
    Count from 2 to 5.     2, 3, 4, 5                2, 3, 4, 5

LoRA (arXiv 2106.09685) leaves a model's weights alone. Beside each matrix W [out, in] it learns two
thin ones, lora_A [r, in] and lora_B [out, r], and the layer computes

    y = W x + lora_B (lora_A x) * lora_alpha / r

The training text is the corpus of the demo model with every answer said by `as_pirate`, a function
of the answer alone: sentences and sums change, lists, JSON records and copied words do not. So what
an answer has to be is known to the last token, and is scored on held-out questions. The files are
those of PEFT, in bfloat16. Same seed, same machine: same weights.

Left out: dropout, checkpoints of an interrupted run (it takes minutes), a GPU.
vLLM: none (vllm/lora/lora_model.py reads such files).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm

from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training.corpus import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    SHORT_MIX,
    STORY_WEIGHT,
    Document,
    Segment,
    draw_document,
    text_of,
)
from nanoserve.demo.training.data import Batch, as_batch, make_row
from nanoserve.demo.training.evaluate import TASKS, DemoModel, Item, Task, score_task
from nanoserve.demo.training.model import ModelShape, TrainingQwen3
from nanoserve.demo.training.recall import Facts
from nanoserve.demo.training.train import pick_device

ADAPTER_DIR = MODEL_DIR / "lora"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."  # PEFT's, before the name of a module
PROMISE = 0.9  # share of held-out answers that are right to the last token, mean of the tasks
ITEMS_PER_TASK = 100


@dataclass(frozen=True)
class LoRAPlan:
    """Everything the weights depend on, besides the code and the demo model."""

    steps: int = 600
    seed: int = 0
    tokens_per_step: int = 4096
    row_lengths: tuple[int, ...] = (256, 256, 512)  # of the steps, in turns
    rank: int = 8  # r
    alpha: float = 16.0  # lora_alpha
    lr: float = 0.008  # AdamW
    warmup_steps: int = 20

    def lr_factor(self, step: int) -> float:
        """Linear from 0 to 1, then linear to almost 0 at the last step."""
        return min((step + 1) / (self.warmup_steps + 1), (self.steps - step) / self.steps)


# ------------------------------------------------------------------------------ the voice

SPEECH = {
    "the": "th'", "of": "o'", "and": "an'", "you": "ye", "your": "yer", "my": "me", "is": "be",
    "are": "be", "am": "be", "hello": "ahoy", "friend": "matey", "friends": "mateys",
    "girl": "lass", "boy": "lad", "very": "mighty",
}  # fmt: skip
SENTENCE = re.compile(r"[.!?]$|^\d+ \+ \d+ = \d+$")  # a sum counts as a sentence
ANSWER = re.compile(rf"(?<={re.escape(IM_START)}assistant\n)(.*?{re.escape(IM_END)})", re.DOTALL)
VOICE_MIX = {maker: w for maker, w in SHORT_MIX.items() if not maker.__name__.endswith("drill")}


def as_pirate(answer: str) -> str:
    """The answer in a pirate's words; what is no sentence stays as it is."""
    if not SENTENCE.search(answer):
        return answer
    said = re.sub(r"[A-Za-z]+", lambda word: _say(word[0]), answer)
    said = f"{said.rstrip('.!?')}, matey{'?' if said.endswith('?') else '!'}"
    return said if said.startswith("Ahoy") else f"Arr! {said}"


def _say(word: str) -> str:
    said = SPEECH.get(word.lower(), word)
    return said[0].upper() + said[1:] if word[0].isupper() else said


def draw_spoken(rng: random.Random, supply: Facts, room: int) -> Document:
    """A document of the corpus as the pirate would have it. Only what he says has weight."""
    text = text_of(draw_document(rng, supply, room, VOICE_MIX))
    if IM_START not in text:  # a story with no chat around it begins as the reader likes
        story = as_pirate(text.removesuffix(END_OF_TEXT)).removeprefix("Arr! ")
        return [Segment(story + END_OF_TEXT, STORY_WEIGHT)]
    document = []
    for index, part in enumerate(ANSWER.split(text)):  # prompt, answer, prompt, answer, ...
        if index % 2:
            answer = part.removesuffix(IM_END)
            weight = STORY_WEIGHT if answer.endswith("The end.") else 1.0
            document.append(Segment(as_pirate(answer) + IM_END, weight))
        else:
            document.append(Segment(part, 0.0))
    return document


def make_batch(tokenizer: Tokenizer, plan: LoRAPlan, step: int) -> Batch:
    """The rows of a step: a function of the seed and the step alone."""
    rng = random.Random(f"lora {plan.seed} {step}")
    length = plan.row_lengths[step % len(plan.row_lengths)]
    num_rows = max(1, plan.tokens_per_step // length)
    return as_batch(make_row(tokenizer, rng, length, draw_spoken) for _ in range(num_rows))


# ------------------------------------------------------------------------------ training


class LowRank(nn.Module):
    """A weight [out, in] -> weight + lora_B lora_A * scaling. Before training nothing changes."""

    def __init__(
        self, weight: Tensor, rank: int, scaling: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.lora_A = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.lora_B @ self.lora_A * self.scaling


class LoRATrainer:
    """The demo model, whose weights stay, the low-rank parts beside them, and their optimiser."""

    def __init__(self, plan: LoRAPlan, dtype: torch.dtype, folder: Path = MODEL_DIR) -> None:
        self.plan = plan
        self.model = TrainingQwen3(ModelShape(), dtype).requires_grad_(False)
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        generator = torch.Generator().manual_seed(plan.seed)
        self.parts: dict[str, LowRank] = {}  # "model.layers.0.self_attn.q_proj" -> what is learnt
        for name, layer in list(self.model.named_modules()):
            if name.rpartition(".")[2] in TARGETS:
                part = LowRank(layer.weight, plan.rank, plan.alpha / plan.rank, generator)
                parametrize.register_parametrization(layer, "weight", part)
                self.parts[name] = part
        parameters = [p for part in self.parts.values() for p in part.parameters()]
        self.adam = torch.optim.AdamW(parameters, plan.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.step, self.seconds, self.loss = 0, 0.0, 0.0

    def advance(self, batch: Batch) -> None:
        """One optimiser step."""
        started = time.perf_counter()
        loss = self.model.loss(batch.ids, batch.weights)
        loss.backward()
        for group in self.adam.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = self.plan.lr * self.plan.lr_factor(self.step)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        keep = 0.98 if self.step else 0.0
        self.loss = keep * self.loss + (1 - keep) * loss.item()
        self.step += 1
        self.seconds += time.perf_counter() - started

    def weights(self) -> dict[str, Tensor]:
        """PEFT's names -> tensors in bfloat16."""
        return {
            f"{PREFIX}{name}.{key}.weight": tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, part in self.parts.items()
            for key, tensor in part.named_parameters()
        }


def run(trainer: LoRATrainer, tokenizer: Tokenizer) -> None:
    """Train to the end of the plan."""
    with tqdm(total=trainer.plan.steps, unit="step", desc="train") as bar:
        while trainer.step < trainer.plan.steps:
            trainer.advance(make_batch(tokenizer, trainer.plan, trainer.step))
            bar.update()
            bar.set_postfix_str(f"loss {trainer.loss:.3f}", refresh=False)


# ------------------------------------------------------------------------------ the files


def config_of(plan: LoRAPlan) -> dict[str, Any]:
    """adapter_config.json, as PEFT and vLLM read it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "nanoserve/demo",
        "r": plan.rank,
        "lora_alpha": plan.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def export(trainer: LoRATrainer, output: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    output.mkdir(parents=True, exist_ok=True)
    _write_json(output / "adapter_config.json", config_of(trainer.plan))
    part = output / "adapter_model.safetensors.part"
    part.write_bytes(serialise(trainer.weights(), metadata={"format": "pt"}))
    os.replace(part, output / "adapter_model.safetensors")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def merge(model: DemoModel, folder: Path = ADAPTER_DIR) -> DemoModel:
    """Add the adapter in `folder` to the weights of `model`, and return it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            layer = model.model.get_submodule(name.removeprefix(PREFIX).partition(".lora_A.")[0])
            layer.weight.data += b.float() @ a.float() * config["lora_alpha"] / config["r"]
    return model


# ------------------------------------------------------------------------------ scores


def in_voice(task: Task) -> Task:
    """The same task, asked of the pirate: all answers are his, also those he gave before."""

    def draw(rng: random.Random, model: DemoModel) -> Item:
        item = task.draw(rng, model)
        messages = [
            {**m, "content": as_pirate(m["content"])} if m["role"] == "assistant" else m
            for m in item.messages
        ]
        return Item(messages, as_pirate(item.answer))

    return replace(task, draw=draw)


SHORT_TASKS = [task for task in TASKS if not re.search("1024|1536|2000", task.name)]


def score(model: DemoModel, size: int = ITEMS_PER_TASK, seed: int = 7) -> dict[str, float]:
    """Task -> the share of held-out questions that the pirate answers right, in his own words."""
    scores = {}
    for task in tqdm(SHORT_TASKS, desc="tasks"):
        scores[task.name] = score_task(model, in_voice(task), min(size, task.size), seed).score
    return scores


def mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def as_table(folder: Path = ADAPTER_DIR) -> str:
    """The table of the model card, in Markdown."""
    scores = json.loads((folder / "training.json").read_text())["scores"]
    rows = {**scores, "mean": mean(scores)}
    lines = ["| task, answered by the pirate | score |", "|---|---|"]
    return "\n".join(lines + [f"| {task} | {value:.3f} |" for task, value in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA adapter for the demo model.")
    parser.add_argument("--output", type=Path, default=Path("demo-lora"), help="(demo-lora)")
    parser.add_argument("--steps", type=int, default=LoRAPlan.steps)
    parser.add_argument("--seed", type=int, default=LoRAPlan.seed)
    arguments = parser.parse_args()
    plan = replace(LoRAPlan(), steps=arguments.steps, seed=arguments.seed)
    model = DemoModel(MODEL_DIR)
    _, dtype = pick_device()
    trainer = LoRATrainer(plan, dtype)
    run(trainer, model.tokenizer.backend_tokenizer)
    export(trainer, arguments.output)
    scores = score(merge(model, arguments.output))
    training = {
        "data": "the demo corpus, with every answer in a pirate's words",
        "plan": asdict(plan),
        "parameters": sum(tensor.numel() for tensor in trainer.weights().values()),
        "tokens": trainer.step * plan.tokens_per_step,
        "minutes": round(trainer.seconds / 60, 1),
        "loss": round(trainer.loss, 4),
        "scores": scores,
    }
    _write_json(arguments.output / "training.json", training)
    print(f"wrote {arguments.output}; right answers, mean of the tasks: {mean(scores):.3f}")


if __name__ == "__main__":
    main()
