"""How does a model learn? And: the demo model, from nothing.

    corpus -> tokenizer -> a batch for every step -> Qwen3ForCausalLM -> loss -> Muon and AdamW
                                                                      -> a Hugging Face folder

`train` is the one loop for the model, the drafters and the adapter. Muon makes the update of each
matrix orthogonal (Jordan et al., 2024); embeddings and norms, which are no maps from vectors to
vectors, stay with AdamW. The learning rate warms up, stays, and falls to zero. Row lengths follow a
curriculum: short rows until the model has learnt to copy, then also rows of up to 2,048 tokens.

Left out: checkpoints of an interrupted run, several devices, torch.compile.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training.data import Batch, DrawDocument, make_batch, train_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Stage = tuple[float, dict[int, float]]  # from which share of the steps on, {row length: weight}


@dataclass(frozen=True)
class Plan:
    """What the weights depend on, besides the code."""

    steps: int = 6600
    seed: int = 0
    tokens_per_step: int = 4096
    matrix_lr: float = 0.02  # Muon; 0: AdamW learns the matrices, too
    other_lr: float = 0.004  # AdamW
    warmup_steps: int = 100
    decay_share: float = 0.45  # of the steps, at the end
    stages: tuple[Stage, ...] = (
        (0.0, {128: 1}),
        (0.1, {256: 45, 512: 22, 1024: 25, 2048: 8}),
        (0.4, {256: 35, 512: 10, 1024: 15, 2048: 40}),
    )
    tokenizer_documents: int = 20_000

    def quick(self) -> Plan:
        """About a minute on two CPU cores."""
        small = replace(self, steps=300, tokens_per_step=1024, warmup_steps=20)
        return replace(small, stages=((0.0, {256: 1}),), tokenizer_documents=2000)

    def lr_factor(self, step: int) -> float:
        warmup = (step + 1) / (self.warmup_steps + 1)
        return min(1.0, warmup, (self.steps - step) / (self.steps * self.decay_share))

    def row_length(self, step: int) -> int:
        weights = [lengths for start, lengths in self.stages if step >= start * self.steps][-1]
        rng = random.Random(f"length {self.seed} {step}")
        return rng.choices(list(weights), list(weights.values()))[0]

    def batch(self, tokenizer: Tokenizer, step: int, draw: DrawDocument | None = None) -> Batch:
        seed, length = f"batch {self.seed} {step}", self.row_length(step)
        return make_batch(tokenizer, seed, length, self.tokens_per_step, draw)


def next_token_loss(model: Any, batch: Batch) -> Tensor:
    """The weighted mean. Logits are computed only where the weight is not 0."""
    hidden = model.model(batch.ids[:, :-1]).last_hidden_state.flatten(0, 1)
    targets, weights = batch.ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    kept = weights.nonzero().squeeze(1)
    logits = model.lm_head(hidden[kept]).float()  # [kept, vocab_size]
    losses = F.cross_entropy(logits, targets[kept], reduction="none")
    return losses @ weights[kept] / weights.sum()


def make_optimizers(module: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_matrix = plan.matrix_lr > 0 and parameter.ndim == 2 and "embed" not in name
            kinds[is_matrix].append(parameter)
    muon = partial(torch.optim.Muon, lr=plan.matrix_lr, weight_decay=0.0)
    adam = partial(torch.optim.AdamW, lr=plan.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [make(some) for make, some in ((muon, kinds[True]), (adam, kinds[False])) if some]


def train(
    module: nn.Module,
    plan: Plan,
    make: Callable[[int], Batch],
    loss_of: Callable[[Batch], Tensor],
    show: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Teach the parameters of `module` that want a gradient. `make(step)` is the batch of a step;
    `show()` is called after each quarter. Returns what training.json says of the run."""
    optimizers = make_optimizers(module, plan)

    def backward(step: int) -> float:
        batch = Batch(*(tensor.to(DEVICE) for tensor in make(step)))
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = loss_of(batch)
        loss.backward()
        return loss.item()

    backward(0)  # the first one is slow
    started = time.perf_counter()
    backward(plan.steps // 2)
    minutes = max(1, (time.perf_counter() - started) * 1.1 * plan.steps / 60)
    print(f"{plan.steps:,} steps of {plan.tokens_per_step:,} tokens: about {minutes:.0f} minutes")
    module.zero_grad()
    started, mean = time.perf_counter(), 0.0
    with tqdm(range(plan.steps), unit="step", desc="train") as bar:
        for step in bar:
            loss = backward(step)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = optimizer.defaults["lr"] * plan.lr_factor(step)
                    if isinstance(optimizer, torch.optim.AdamW):
                        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean += (loss - mean) * max(0.02, 2 / (step + 2))
            bar.set_postfix_str(f"loss {mean:.3f}", refresh=False)
            if (step + 1) % max(1, plan.steps // 4) == 0:
                show()
    return {
        "plan": asdict(plan),
        "parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "tokens": plan.steps * plan.tokens_per_step,
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "loss": round(mean, 4),
    }


def new_model(folder: Path = MODEL_DIR, **shape: Any) -> Any:
    """A Qwen3 of the shape that config.json says, or with other numbers of layers, heads, ..."""
    config = json.loads((folder / "config.json").read_text()) | shape
    model: Any = Qwen3ForCausalLM(Qwen3Config(**config)).float()
    for name, parameter in model.named_parameters():
        if "embed" in name:
            nn.init.normal_(parameter, std=0.04)
        elif parameter.ndim == 2:
            adds_to_residual = "o_proj" in name or "down_proj" in name
            std = parameter.shape[1] ** -0.5 * (0.3 if adds_to_residual else 1.0)
            nn.init.normal_(parameter, std=std)
    return model.to(DEVICE)


def load(folder: Path) -> tuple[Any, Tokenizer]:
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(DEVICE), AutoTokenizer.from_pretrained(folder).backend_tokenizer


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def write_model(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """A folder that LLM(folder), vLLM and transformers read, with the stored chat template."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(MODEL_DIR / name, folder / name)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def train_model(folder: Path, plan: Plan, **shape: Any) -> dict[str, Any]:
    """The demo model from nothing, written to `folder`. `shape`: see new_model."""
    torch.manual_seed(plan.seed)
    model = new_model(**shape)
    tokenizer = train_tokenizer(model.config.vocab_size, plan.tokenizer_documents, plan.seed)

    @torch.inference_mode()
    def show() -> None:
        ids = torch.tensor([tokenizer.encode("Once upon a time").ids], device=DEVICE)
        output: Any = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=0)
        tqdm.write(tokenizer.decode(output[0].tolist()))

    make = partial(plan.batch, tokenizer)
    report = train(model, plan, make, partial(next_token_loss, model), show)
    write_model(folder, model, tokenizer)
    write_json(folder / "training.json", report)
    return report
