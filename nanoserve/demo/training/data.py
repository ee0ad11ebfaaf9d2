"""From documents to rows of tokens: the tokenizer, and one batch for every training step.

The batch of a step is a function of (seed, step) and of nothing else, so that a run resumed at step
700 sees exactly what an uninterrupted run sees, and no row is ever shown twice.

The tokenizer is a byte-level BPE with three rules for where words are cut, all of them for a small
model's sake: every digit stands alone (sums, codes), a space is never glued to a digit, nor to a
capital letter: ' Mia', '"Mia' and 'Mia' hold one and the same token, so copying a name is copying
tokens. vLLM has no counterpart: it only serves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from nanoserve.demo.training.corpus import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    SHORT_MIX,
    Document,
    Maker,
    draw_document,
    mix_for,
    text_of,
)
from nanoserve.demo.training.recall import Facts

SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]  # ids 0, 1, 2
WORD = r"\p{N}|\p{Lu}+\p{Ll}*| ?\p{Ll}+|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(vocab_size: int, num_documents: int, seed: int) -> Tokenizer:
    """A byte-level BPE trained on documents of the corpus itself; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=3,
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain_texts(num_documents, seed), trainer)
    return tokenizer


def plain_texts(count: int, seed: int) -> Iterator[str]:
    """Documents without their special tokens."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        text = text_of(draw_document(rng, Facts(rng), 256, SHORT_MIX))
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        yield text


Row = tuple[list[int], list[float]]  # token ids, and how much the loss cares about each


def encode_document(tokenizer: Tokenizer, document: Document) -> Row:
    """Token ids, and for each the weight of the segment its last character lies in."""
    encoding = tokenizer.encode(text_of(document))
    segment_ends = np.cumsum([len(segment.text) for segment in document])
    token_ends = np.array([end for _, end in encoding.offsets])
    weights = np.array([segment.weight for segment in document])
    return encoding.ids, weights[np.searchsorted(segment_ends, token_ends)].tolist()


def make_row(
    tokenizer: Tokenizer, rng: random.Random, length: int, draw: Maker | None = None
) -> Row:
    """`length` + 1 tokens of whole documents, the last one cut off at the end of the row. `draw`
    makes a document; without, they come from the mixture for this length."""
    draw = draw or partial(draw_document, mix=mix_for(length))
    supply, ids, weights = Facts(rng), list[int](), list[float]()
    while len(ids) <= length:
        room = length - len(ids)
        new_ids, new_weights = encode_document(tokenizer, draw(rng, supply, max(room, 48)))
        if len(new_ids) > room + 64 and len(ids) < 0.8 * length:
            continue  # it would lose its end, which is often the question
        ids += new_ids
        weights += new_weights
    return ids[: length + 1], weights[: length + 1]


@dataclass(frozen=True)
class Batch:
    """Rows of one length; row position t predicts token t + 1 with weight t + 1."""

    ids: Tensor  # [rows, length + 1], int64
    weights: Tensor  # [rows, length + 1], float32


def as_batch(rows: Iterable[Row]) -> Batch:
    ids, weights = zip(*rows, strict=True)
    return Batch(torch.tensor(ids), torch.tensor(weights))


class Batches(Dataset[Batch]):
    """Index = training step. `lengths[step]` is the row length, `tokens / length` the row count."""

    def __init__(self, tokenizer: Tokenizer, lengths: list[int], tokens: int, seed: int) -> None:
        self.tokenizer, self.lengths = tokenizer, lengths
        self.tokens, self.seed = tokens, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"batch {self.seed} {step}")
        length = self.lengths[step]
        num_rows = max(1, self.tokens // length)
        return as_batch(make_row(self.tokenizer, rng, length) for _ in range(num_rows))
