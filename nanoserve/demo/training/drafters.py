"""How does a small model learn to guess what a large one will say?

Three kinds of drafters for speculative decoding. Each learns the probabilities of the demo model,
its *target*: the loss is the cross-entropy with the target's soft labels.

    draft_model  a Qwen3 of 2 layers, the same tokenizer       tokens -> next token
    medusa       four heads on the target's last hidden state  h[t] -> token t+2, ..., t+5
    eagle        one Llama layer that goes on with the         h[t], token t+1 -> h[t+1]
                 hidden states (the target's embedding and head turn tokens into vectors, h into
                 logits)

Half of the steps read the corpus, the other half answers of the target itself, which the engine
makes: greedy ones and sampled ones. The files are those that vLLM reads.

Left out: drafters of other shapes than the stored ones.

Medusa: arXiv 2401.10774. EAGLE: arXiv 2401.15077; as in EAGLE-3 (arXiv 2503.01840) the layer also
learns from hidden states of its own, which is what it reads from the second guess on.
vLLM: vllm/model_executor/models/medusa.py, llama_eagle.py (only what reads these files).
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from nanoserve import LLM, SamplingParams
from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training import corpus, train
from nanoserve.demo.training.corpus import IM_START, Document, Segment
from nanoserve.demo.training.data import Batch, text_of
from nanoserve.demo.training.evaluate import held_out_prompts
from nanoserve.demo.training.grammar import Author

NUM_DRAFTS = 3  # guesses of a step when acceptance is measured
PLAN = train.Plan(
    steps=1500, warmup_steps=50, decay_share=0.67,
    stages=((0.0, {128: 1}), (0.2, {256: 6, 512: 2, 1024: 1})),
)  # fmt: skip
NUM_HEADS, NUM_LAYERS = 4, 2  # of Medusa; layers of each head


def soft_loss(head: nn.Module, states: Tensor, ahead: int, batch: Batch, labels: Tensor) -> Tensor:
    """`states` [rows, n, hidden] at position t speak about token t + ahead."""
    states = states[:, : batch.ids.shape[1] - ahead]
    last = ahead + states.shape[1]
    weights = batch.weights[:, ahead:last].flatten()
    kept = weights.nonzero().squeeze(1)
    logits = head(states.flatten(0, 1)[kept]).float()
    wanted = labels[:, ahead - 1 : last - 1].flatten(0, 1)[kept]
    return F.cross_entropy(logits, wanted, reduction="none") @ weights[kept] / weights.sum()


class DraftModel(nn.Module):
    def __init__(self, target: Any) -> None:
        super().__init__()
        self.draft = train.new_model(MODEL_DIR / "draft")

    def loss(self, target: Any, batch: Batch, hidden: Tensor, labels: Tensor) -> Tensor:
        states = self.draft.model(batch.ids[:, :-1]).last_hidden_state
        return soft_loss(self.draft.lm_head, states, 1, batch, labels)


class Medusa(nn.Module):
    """Residual blocks on the hidden state: one stack of layers for each position ahead."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        size = target.config.hidden_size
        self.blocks = nn.ModuleList(nn.Module() for _ in range(NUM_HEADS))
        for block in self.blocks:
            layers = [nn.Linear(size, size, bias=False) for _ in range(NUM_LAYERS)]
            block.layers = nn.ModuleList(layers)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def loss(self, target: Any, batch: Batch, hidden: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        for index, block in enumerate(self.blocks):
            states = hidden
            for layer in block.layers:  # type: ignore[union-attr]
                states = states + F.silu(layer(states))
            loss = soft_loss(target.lm_head, states, index + 2, batch, labels)
            total = total + loss * 0.8**index
        return total


class Eagle(nn.Module):
    """fc on (embedding, hidden state), then a Llama layer without its first norm."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        llama: Any = LlamaModel(LlamaConfig.from_pretrained(MODEL_DIR / "eagle"))
        size = llama.config.hidden_size
        self.fc, self.layers = nn.Linear(2 * size, size, bias=False), llama.layers
        for matrix in self.layers.parameters():
            if matrix.ndim == 2:
                nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        self.layers[0].input_layernorm = llama.norm = nn.Identity()
        self.run_layers = partial(llama.to(train.DEVICE), use_cache=False)

    def go_on(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Of tokens 1..n, and hidden states 0..n-1 -> hidden states 1..n."""
        both = self.fc(torch.cat((embeddings, hidden), dim=-1))
        return self.run_layers(inputs_embeds=both).last_hidden_state

    def loss(self, target: Any, batch: Batch, hidden: Tensor, labels: Tensor) -> Tensor:
        embeddings = target.model.embed_tokens(batch.ids)
        once = self.go_on(embeddings[:, 1:-1], hidden[:, :-1])  # hidden states 1, 2, ...
        twice = self.go_on(embeddings[:, 2:-1], once[:, :-1])  # 2, 3, ... from its own 1, 2, ...
        loss = soft_loss(target.lm_head, once, 2, batch, labels)
        loss = loss + 0.5 * soft_loss(target.lm_head, twice, 3, batch, labels)
        return loss + 0.5 * F.smooth_l1_loss(once.float(), hidden[:, 1:].float())


METHODS = {"draft_model": DraftModel, "medusa": Medusa, "eagle": Eagle}


def write(method: str, folder: Path, drafter: Any, target: Any, tokenizer: Any) -> None:
    """config.json is that of the stored drafter. Medusa has a head of its own in its file."""
    if method == "draft_model":
        train.write_model(folder, drafter.draft, tokenizer)
        return
    folder.mkdir(parents=True, exist_ok=True)
    head = {"lm_head.weight": target.lm_head.weight} if method == "medusa" else {}
    tensors = drafter.state_dict() | head
    weights = {name: each.to("cpu", torch.bfloat16).clone() for name, each in tensors.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(MODEL_DIR / method / "config.json", folder / "config.json")


# ------------------------------------------------------------------------------ the data


def draw_prompt(rng: Author) -> str:
    """A document of the corpus up to one of its answers, or the beginning of a story."""
    document, mark = corpus.draw_document(rng, 192, only=corpus.CHATS), f"{IM_START}assistant\n"
    text = text_of(document)
    *starts, _ = text.split(mark)
    told = "".join(start + mark for start in starts[: rng.randint(1, 6)])
    return told or text[: rng.randint(16, 80)]


def make_answers(folder: Path, seed: int, count: int) -> list[Document]:
    """Prompts, which have no weight, and the target's answers, every second one sampled."""
    rng, documents = Author(f"answers {seed}"), list[Document]()
    prompts = [draw_prompt(rng) for _ in range(count)]
    params = [SamplingParams(temperature=i % 2, max_tokens=128, seed=i) for i in range(count)]
    with LLM(folder) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    for prompt, output in zip(prompts, outputs, strict=True):
        end = corpus.IM_END if IM_START in prompt else corpus.END_OF_TEXT
        answer = output.text + (end if output.finish_reason == "stop" else "")
        documents.append([Segment(prompt, 0.0), Segment(answer, 1.0)])
    return documents


def measure_acceptance(target: Path, method: str, folder: Path, count: int = 2) -> float:
    """Of NUM_DRAFTS guesses, how many the target accepts on average, on held-out prompts (`count`
    of each task), under greedy decoding. In the stream of one request every output is a step."""
    config = {"method": method, "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    accepted, params = list[int](), SamplingParams(temperature=0, max_tokens=128)
    with LLM(target, speculative_config=config) as llm:
        for prompt in held_out_prompts(llm, count):
            lengths = [len(each.outputs[0].token_ids) for each in llm.stream(prompt, params)]
            accepted += [length - 1 for length in lengths[1:-1]]  # the last step has less to guess
    return sum(accepted) / max(1, len(accepted))


def train_drafter(
    method: str, folder: Path, target_folder: Path, plan: train.Plan, num_answers: int = 2048
) -> dict[str, Any]:
    """A drafter for the model in `target_folder`, which has the demo model's shape."""
    torch.manual_seed(plan.seed)
    target, tokenizer = train.load(target_folder)
    drafter: Any = METHODS[method](target.requires_grad_(False)).to(train.DEVICE)
    answers = make_answers(target_folder, plan.seed, num_answers)

    def draw_answer(rng: Author, room: int) -> Document:
        return rng.choice(answers)

    def make(step: int) -> Batch:
        return plan.batch(tokenizer, step, draw_answer if step % 2 else None)

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            hidden = target.model(batch.ids[:, :-1]).last_hidden_state
            labels = target.lm_head(hidden).float().softmax(-1)  # [rows, length, vocab_size]
        return drafter.loss(target, batch, hidden, labels)

    report = train.train(drafter, plan, make, loss)
    write(method, folder, drafter, target, tokenizer)
    report["accepted_of_3"] = round(measure_acceptance(target_folder, method, folder), 3)
    train.write_json(folder / "training.json", report)
    return report
