"""python -m nanoserve.demo.training.drafters: small models that guess what the demo model will say.

Three kinds of guesses for speculative decoding, trained side by side from nothing, in one command.
All see the same rows, and learn to give the demo model's own probabilities (its soft labels):

    draft    a Qwen3 of 0.4M parameters with the same tokenizer       tokens -> next token
    medusa   four heads on the demo model's hidden state of token t   h[t] -> token t+2, ..., t+5
    eagle    one Llama layer that goes on with the hidden states      h[t], token t+1 -> h[t+1]
             (the demo model's embedding and head turn tokens into vectors, and h into tokens)

Half of the steps read the corpus, the other half the demo model's own answers to questions of the
corpus, greedy ones and sampled ones. The result is written in the checkpoint formats that vLLM
reads, with the acceptance that was measured on held-out prompts: how many of three guesses are what
the demo model says greedily, by a plain loop without a KV cache.

Medusa: arXiv 2401.10774. EAGLE: arXiv 2401.15077; as in EAGLE-3 (arXiv 2503.01840), the layer is
also trained on hidden states of its own, which is what it reads from the second guess on.
vLLM: vllm/model_executor/models/: medusa.py, llama_eagle.py (only what reads these files).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training.corpus import IM_START, SHORT_MIX, draw_document, text_of
from nanoserve.demo.training.data import Batch, Row, as_batch, make_row
from nanoserve.demo.training.evaluate import TASKS, DemoModel, story_prompts
from nanoserve.demo.training.model import Block, ModelShape, Muon, TrainingQwen3, project
from nanoserve.demo.training.recall import Facts
from nanoserve.demo.training.train import hf_config, make_parser, pick_device, read_arguments

METHODS = ("draft", "medusa", "eagle")
NUM_DRAFTS = 3  # guesses of one step when acceptance is measured
PROMISES = {"draft": 2.0, "medusa": 1.4, "eagle": 2.4}  # accepted of NUM_DRAFTS, on average
ASSISTANT = f"{IM_START}assistant\n"
ANSWER_MIX = {m: share for m, share in SHORT_MIX.items() if not m.__name__.endswith("drill")}
Drafter = Callable[[list[int]], list[int]]  # the tokens so far -> NUM_DRAFTS guesses


@dataclass(frozen=True)
class DrafterPlan:
    """Everything the weights depend on, besides the code and the demo model."""

    steps: int = 1500
    seed: int = 0
    tokens_per_step: int = 4096
    matrix_lr: float = 0.02  # Muon
    other_lr: float = 0.004  # AdamW
    warmup_steps: int = 50
    num_answers: int = 2048  # of the demo model, to learn from
    answer_length: int = 128  # tokens at most
    num_heads: int = 4  # of Medusa
    head_layers: int = 2  # of each
    draft: ModelShape = field(
        default_factory=lambda: ModelShape(
            hidden_size=96, intermediate_size=288, num_layers=2, num_heads=3, num_kv_heads=1
        )
    )

    def lr_factor(self, step: int) -> float:
        """Linear from 0 to 1, then linear to almost 0 at the last step."""
        warmup = (step + 1) / (self.warmup_steps + 1)
        return min(1.0, warmup, max(0.01, 1.5 * (self.steps - step) / self.steps))

    def row_length(self, step: int) -> int:
        """Short rows first, as long as copying is learnt; then some long ones."""
        if step < self.steps // 5:
            return 128
        return random.Random(f"length {self.seed} {step}").choices((256, 512, 1024), (6, 2, 1))[0]


# ------------------------------------------------------------------------------ the models


class MedusaHeads(nn.Module):
    """Residual blocks on the hidden state, one for each position ahead; the target's own head."""

    def __init__(self, num_heads: int, num_layers: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList(
                        nn.Linear(size, size, bias=False) for _ in range(num_layers)
                    )
                }
            )
            for _ in range(num_heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """[..., size] -> [..., size], to be multiplied by the target's embedding."""
        for layer in self.blocks[head]["layers"]:  # type: ignore[index]
            hidden = hidden + F.silu(project(hidden, layer, dtype=self.dtype).float())
        return hidden


class EagleLayer(nn.Module):
    """What llama_eagle.py of vLLM computes: fc on (embedding, hidden state), then a Llama layer
    without its first norm."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        block = Block(shape, dtype)
        block.input_layernorm = nn.Identity()  # type: ignore[assignment]
        block.self_attn.q_norm = block.self_attn.k_norm = nn.Identity()  # type: ignore[assignment]
        self.layers = nn.ModuleList([block])

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of tokens 1..n [rows, n, size] and of hidden states 0..n-1 -> hidden states 1..n."""
        both = torch.cat((embeddings, hidden), dim=-1)
        x = project(both, self.fc, dtype=self.dtype).float()
        return self.layers[0](x, cos, sin).float()


class Drafters(nn.Module):
    """The demo model, which does not learn, and the three that learn from it."""

    def __init__(self, plan: DrafterPlan, dtype: torch.dtype, folder: Path = MODEL_DIR) -> None:
        super().__init__()
        shape = ModelShape()
        self.plan, self.dtype = plan, dtype
        with torch.random.fork_rng():
            torch.manual_seed(plan.seed)
            self.target = TrainingQwen3(shape, dtype).requires_grad_(False)
            self.target.load_state_dict(load_file(folder / "model.safetensors"))
            self.draft = TrainingQwen3(plan.draft, dtype, plan.seed)
            self.medusa = MedusaHeads(plan.num_heads, plan.head_layers, shape.hidden_size, dtype)
            self.eagle = EagleLayer(shape, dtype)

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden], the demo model's: of its tokens, and its head."""
        return self.target.model.embed_tokens.weight

    def logits(self, hidden: Tensor, embedding: Tensor | None = None) -> Tensor:
        """[..., hidden] -> [..., vocab_size]."""
        weight = self.embedding if embedding is None else embedding
        return F.linear(hidden.to(self.dtype), weight.to(self.dtype)).float()

    def go_on(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """EAGLE: hidden states of tokens 0..n-1 and the ids of 1..n -> those of tokens 1..n."""
        cos, sin = self.target.cos[: ids.shape[1]], self.target.sin[: ids.shape[1]]
        return self.eagle(F.embedding(ids, self.embedding), hidden, cos, sin)

    def losses(self, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Of each method; both arguments are [rows, length + 1]."""
        with torch.no_grad():
            hidden = self.target(ids[:, :-1])
            labels = self.logits(hidden).softmax(dim=-1)  # [rows, length, vocab_size]

        def loss(states: Tensor, ahead: int, embedding: Tensor | None = None) -> Tensor:
            """`states` [rows, n, hidden] at position t speak about token t + ahead."""
            states = states[:, : ids.shape[1] - ahead]
            share = weights[:, ahead : ahead + states.shape[1]].flatten()
            kept = share.nonzero().squeeze(1)
            wanted = labels[:, ahead - 1 : ahead - 1 + states.shape[1]].flatten(0, 1)[kept]
            logits = self.logits(states.flatten(0, 1)[kept], embedding)
            return F.cross_entropy(logits, wanted, reduction="none") @ share[kept] / share.sum()

        own = self.draft.model.embed_tokens.weight
        result = {"draft": loss(self.draft(ids[:, :-1]), 1, own)}
        heads = [loss(self.medusa(hidden, i), i + 2) * 0.8**i for i in range(self.plan.num_heads)]
        result["medusa"] = torch.stack(heads).sum()
        once = self.go_on(ids[:, 1:-1], hidden[:, :-1])  # hidden states 1, 2, ...
        twice = self.go_on(ids[:, 2:-1], once[:, :-1])  # 2, 3, ... from its own 1, 2, ...
        result["eagle"] = loss(once, 2) + 0.5 * loss(twice, 3)
        result["eagle"] += 0.5 * F.smooth_l1_loss(once, hidden[:, 1:])
        return result

    # -- guesses --

    def guess_draft(self, tokens: list[int]) -> list[int]:
        known = list(tokens)
        for _ in range(NUM_DRAFTS):
            hidden = self.draft(torch.tensor([known]))[0, -1]
            known.append(int(self.logits(hidden, self.draft.model.embed_tokens.weight).argmax()))
        return known[len(tokens) :]

    def guess_medusa(self, tokens: list[int]) -> list[int]:
        hidden = self.target(torch.tensor([tokens[:-1]]))[0, -1]
        return [int(self.logits(self.medusa(hidden, i)).argmax()) for i in range(NUM_DRAFTS)]

    def guess_eagle(self, tokens: list[int]) -> list[int]:
        known = list(tokens)
        hidden = self.target(torch.tensor([tokens[:-1]]))
        for _ in range(NUM_DRAFTS):
            after = self.go_on(torch.tensor([known[1:]]), hidden)[:, -1:]
            hidden = torch.cat((hidden, after), dim=1)
            known.append(int(self.logits(after[0, 0]).argmax()))
        return known[len(tokens) :]

    @torch.inference_mode()
    def acceptance(self, method: str, texts: list[tuple[list[int], list[int]]]) -> float:
        """Of NUM_DRAFTS guesses, how many are accepted on average, over all steps of greedy
        decoding. `texts`: pairs of prompt and greedy continuation."""
        guess: Drafter = getattr(self, f"guess_{method}")
        num_steps = num_accepted = 0
        for prompt, output in texts:
            done = 1  # the first token comes from the prompt itself
            while done < len(output):
                expected = output[done : done + NUM_DRAFTS]
                accepted = 0
                for drafted, token in zip(guess(prompt + output[:done]), expected, strict=False):
                    if drafted != token:
                        break
                    accepted += 1
                if len(expected) == NUM_DRAFTS:  # the last steps have less to guess
                    num_steps, num_accepted = num_steps + 1, num_accepted + accepted
                done += accepted + 1
        return num_accepted / num_steps


# ------------------------------------------------------------------------------ the data


@torch.inference_mode()
def generate(
    model: DemoModel, prompts: list[list[int]], max_new_tokens: int, do_sample: bool
) -> list[list[int]]:
    """The demo model's continuations of prompts, up to their end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
    options |= {"top_k": 0} if do_sample else {}
    output: Any = model.model.generate(ids, attention_mask=mask, **options)
    result = []
    for row in output[:, width:].tolist():
        ends = [i for i, token in enumerate(row) if token in (0, 2)]
        result.append(row[: ends[0] + 1] if ends else row)
    return result


def draw_prompt(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """A document of the corpus up to one of its answers, or the beginning of a story."""
    while True:
        text = text_of(draw_document(rng, Facts(rng), 192, ANSWER_MIX))
        *starts, _ = text.split(ASSISTANT)
        if starts:
            text = ASSISTANT.join(starts[: rng.randint(1, len(starts))]) + ASSISTANT
            ids: list[int] = tokenizer.encode(text).ids
        else:
            ids = tokenizer.encode(text).ids[: rng.randint(4, 24)]
        if len(ids) <= 256:
            return ids


def make_answers(model: DemoModel, plan: DrafterPlan, size: int = 128) -> list[list[list[int]]]:
    """[prompt, answer of the demo model] pairs of token ids, half of the answers greedy."""
    rng, tokenizer = random.Random(f"answers {plan.seed}"), model.tokenizer.backend_tokenizer
    prompts = [draw_prompt(rng, tokenizer) for _ in range(plan.num_answers)]
    prompts.sort(key=len)
    torch.manual_seed(plan.seed)
    answers: list[list[list[int]]] = []
    for i in tqdm(range(0, len(prompts), size), desc="answers"):
        batch = prompts[i : i + size]
        outputs = generate(model, batch, plan.answer_length, do_sample=(i // size) % 2 == 1)
        answers += [[prompt, output] for prompt, output in zip(batch, outputs, strict=True)]
    return answers


class DrafterBatches(Dataset[Batch]):
    """Index = step: of the corpus, and of the demo model's answers, in turns."""

    def __init__(
        self, tokenizer: Tokenizer, answers: list[list[list[int]]], plan: DrafterPlan
    ) -> None:
        self.tokenizer, self.answers, self.plan = tokenizer, answers, plan

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> Batch:
        rng, length = random.Random(f"{self.plan.seed} {step}"), self.plan.row_length(step)
        draw = self.draw_answers if step % 2 else self.draw_corpus
        rows = [draw(rng, length) for _ in range(max(1, self.plan.tokens_per_step // length))]
        return as_batch(rows)

    def draw_corpus(self, rng: random.Random, length: int) -> Row:
        return make_row(self.tokenizer, rng, length)

    def draw_answers(self, rng: random.Random, length: int) -> Row:
        """`length` + 1 tokens of prompts, which have no weight, and answers."""
        ids, weights = list[int](), list[float]()
        while len(ids) <= length:
            prompt, answer = rng.choice(self.answers)
            ids += prompt + answer
            weights += [0.0] * len(prompt) + [1.0] * len(answer)
        return ids[: length + 1], weights[: length + 1]


def held_out_texts(
    model: DemoModel, seed: int = 7, longest: int = 128, every: int = 1
) -> list[tuple[list[int], list[int]]]:
    """Held-out prompts of all short tasks, and of stories, with the demo model's greedy answers of
    at most `longest` tokens. `every`: take the first of so many prompts."""
    rng = random.Random(f"held out {seed}")
    tasks = [task for task in TASKS if not task.name.startswith("recall") or "256" in task.name]
    prompts = [
        model.encode(model.prompt(task.draw(rng, model).messages))
        for task in tasks
        for _ in range(2)
    ]
    for kind in ("story, on request", "story, continued"):
        for request, start, _, _ in story_prompts(kind, 4):
            text = start or model.prompt([{"role": "user", "content": request}])
            prompts.append(model.encode(text))
    prompts = prompts[::every]
    outputs = [generate(model, [prompt], longest, do_sample=False)[0] for prompt in prompts]
    return list(zip(prompts, outputs, strict=True))


# ------------------------------------------------------------------------------ training


class DrafterTrainer:
    """The drafters, their optimisers and the number of steps they have seen."""

    def __init__(self, plan: DrafterPlan, dtype: torch.dtype) -> None:
        self.plan, self.drafters = plan, Drafters(plan, dtype)
        modules = [getattr(self.drafters, name) for name in METHODS]
        parameters = {name: p for i, m in enumerate(modules) for name, p in _named(m, METHODS[i])}
        matrices = [p for name, p in parameters.items() if p.ndim == 2 and "embed" not in name]
        self.others = [p for name, p in parameters.items() if p.ndim == 1 or "embed" in name]
        self.muon = Muon(matrices, plan.matrix_lr)
        self.adam = torch.optim.AdamW(
            self.others, plan.other_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step, self.seconds = 0, 0.0
        self.losses = dict.fromkeys(METHODS, 0.0)  # running means

    def advance(self, batch: Batch) -> None:
        """One optimiser step of all three."""
        started = time.perf_counter()
        losses = self.drafters.losses(batch.ids, batch.weights)
        torch.stack(list(losses.values())).sum().backward()  # no parameter is shared
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, peak in ((self.muon, self.plan.matrix_lr), (self.adam, self.plan.other_lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.plan.lr_factor(self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep = 0.98 if self.step else 0.0
        self.losses = {n: keep * self.losses[n] + (1 - keep) * v.item() for n, v in losses.items()}
        self.step += 1
        self.seconds += time.perf_counter() - started

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        state = {
            "plan": asdict(self.plan),
            "drafters": self.drafters.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "progress": (self.step, self.seconds, self.losses),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Raises ValueError for the checkpoint of another plan."""
        state = torch.load(path, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise ValueError(f"{path} belongs to another run: {state['plan']}.")
        self.drafters.load_state_dict(state["drafters"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds, self.losses = state["progress"]


def _named(module: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters()]


def run(
    trainer: DrafterTrainer,
    batches: DrafterBatches,
    checkpoint: Path | None = None,
    every: int = 100,
) -> None:
    """Train from trainer.step to the end of the plan."""
    steps = range(trainer.step, trainer.plan.steps)
    loader = DataLoader(batches, batch_size=None, sampler=steps)
    with tqdm(total=trainer.plan.steps, initial=trainer.step, unit="step", desc="train") as bar:
        for batch in loader:
            trainer.advance(batch)
            bar.update()
            text = ", ".join(f"{name} {loss:.3f}" for name, loss in trainer.losses.items())
            bar.set_postfix_str(text, refresh=False)
            if checkpoint and (trainer.step % every == 0 or trainer.step == trainer.plan.steps):
                trainer.save(checkpoint)


# ------------------------------------------------------------------------------ the files


def configs(plan: DrafterPlan) -> dict[str, dict[str, Any]]:
    """config.json of each method, as vLLM reads it."""
    shape = ModelShape()
    llama = hf_config(shape) | {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "mlp_bias": False,
    }
    medusa = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "num_heads": plan.num_heads,
        "num_hidden_layers": plan.head_layers,
        "medusa_fc_bias": False,
        "original_lm_head": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    return {"draft": hf_config(plan.draft), "medusa": medusa, "eagle": llama}


def weights_of(drafters: Drafters) -> dict[str, dict[str, Tensor]]:
    """The tensors of each method. Medusa's checkpoint has a head; EAGLE shares the target's."""
    medusa = drafters.medusa.state_dict() | {"lm_head.weight": drafters.embedding}
    draft, eagle = drafters.draft.state_dict(), drafters.eagle.state_dict()
    return {"draft": draft, "medusa": medusa, "eagle": eagle}


def export(trainer: DrafterTrainer, output: Path, accepted: dict[str, float]) -> None:
    """Write a folder for each method: weights, config.json, and training.json with the acceptance
    (the mean number of accepted drafts of NUM_DRAFTS, greedy, held-out prompts)."""
    plan, weights = trainer.plan, weights_of(trainer.drafters)
    for method, config in configs(plan).items():
        folder = output / method
        folder.mkdir(parents=True, exist_ok=True)
        if method == "draft":  # a checkpoint that can run alone
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(MODEL_DIR / name, folder / name)
        tensors = {
            name: tensor.to("cpu", torch.bfloat16).contiguous()
            for name, tensor in weights[method].items()
        }
        training = {
            "data": "the demo corpus, and the demo model's greedy and sampled answers to it",
            "plan": asdict(plan),
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            "tokens": trainer.step * plan.tokens_per_step,
            "minutes": round(trainer.seconds / 60, 1),  # of all three together
            "loss": round(trainer.losses[method], 4),
            "accepted_of_3": round(accepted[method], 3),
        }
        for name, content in (("config.json", config), ("training.json", training)):
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")
        part = folder / "model.safetensors.part"
        part.write_bytes(serialise(tensors, metadata={"format": "pt"}))
        os.replace(part, folder / "model.safetensors")


def as_table(folder: Path = MODEL_DIR) -> str:
    """The table of the model card, in Markdown."""
    lines = ["| folder | parameters | accepted of 3 | promise |", "|---|---|---|---|"]
    for method in METHODS:
        training = json.loads((folder / method / "training.json").read_text())
        accepted, parameters = training["accepted_of_3"], training["parameters"]
        lines.append(f"| {method}/ | {parameters:,} | {accepted:.2f} | {PROMISES[method]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    title = "Train drafters for the demo model."
    parser = make_parser(title, DrafterPlan, "demo-drafters", "demo-drafters.pt", 100)
    arguments = read_arguments(parser)
    plan = replace(DrafterPlan(), steps=arguments.steps, seed=arguments.seed)
    _, dtype = pick_device()
    model = DemoModel(MODEL_DIR)
    trainer = DrafterTrainer(plan, dtype)
    if arguments.resume:
        trainer.load(arguments.checkpoint)
    answers = make_answers(model, plan)
    run(
        trainer,
        DrafterBatches(model.tokenizer.backend_tokenizer, answers, plan),
        arguments.checkpoint,
    )
    texts = held_out_texts(model)
    accepted = {method: trainer.drafters.acceptance(method, texts) for method in METHODS}
    export(trainer, arguments.output, accepted)
    print(f"wrote {arguments.output}; accepted of {NUM_DRAFTS} drafts: {accepted}")


if __name__ == "__main__":
    main()
