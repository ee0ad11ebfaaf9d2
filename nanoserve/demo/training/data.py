"""How does text become rows of token ids?

The tokenizer is a byte-level BPE, trained on the corpus itself. Words are cut so that a small model
has it easy: every digit stands alone, and a space is never glued to a digit or a capital letter, so
that ' Mia', '"Mia' and 'Mia' hold the same token, and copying a name is copying tokens.

    documents   Tell me a story.|Once upon ...|The end.|   Remember: ...
    row         512 + 1 tokens of documents; the last one is cut off
    batch       4,096 tokens: 8 rows of 512, or 32 of 128

The batch of a step is a function of (seed, step) and of nothing else. No row is shown twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from nanoserve.demo.training.corpus import END_OF_TEXT, IM_END, IM_START, Document, draw_document
from nanoserve.demo.training.grammar import Author

SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]  # ids 0, 1, 2
WORD = r"\p{N}|\p{Lu}+\p{Ll}*| ?\p{Ll}+|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DrawDocument = Callable[[Author, int], Document]
Row = tuple[list[int], list[float]]  # token ids, and how much the loss cares about each


def text_of(document: Document) -> str:
    return "".join(segment.text for segment in document)


def train_tokenizer(vocab_size: int, num_documents: int, seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORD), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=3,
        show_progress=False,
    )
    rng = Author(f"tokenizer {seed}")
    texts = (text_of(draw_document(rng, 256)) for _ in range(num_documents))
    tokenizer.train_from_iterator((re.sub(r"<\|\w+\|>", "", text) for text in texts), trainer)
    return tokenizer


def encode_document(tokenizer: Tokenizer, document: Document) -> Row:
    """Token ids, and for each the weight of the segment in which its last character lies."""
    weights = [segment.weight for segment in document for _ in segment.text]  # of each character
    encoding = tokenizer.encode(text_of(document))
    return encoding.ids, [weights[end - 1] for _, end in encoding.offsets]


def make_row(tokenizer: Tokenizer, rng: Author, length: int, draw: DrawDocument) -> Row:
    """`length` + 1 tokens of documents."""
    ids, weights = list[int](), list[float]()
    rng.used_statements.clear()
    while len(ids) <= length:
        room = length - len(ids)
        new_ids, new_weights = encode_document(tokenizer, draw(rng, max(room, 48)))
        if len(new_ids) > room + 64 and len(ids) < 0.8 * length:
            continue  # it would lose its end, which is often the question
        ids += new_ids
        weights += new_weights
    return ids[: length + 1], weights[: length + 1]


class Batch(NamedTuple):
    """Rows of one length. Token t predicts token t + 1, whose loss has weight t + 1."""

    ids: Tensor  # [rows, length + 1], int64
    weights: Tensor  # [rows, length + 1], float32


def make_batch(
    tokenizer: Tokenizer, seed: str, length: int, tokens: int, draw: DrawDocument | None = None
) -> Batch:
    """tokens / length rows. `draw` makes a document; None: the mixture for this length."""
    rng, draw = Author(seed), draw or partial(draw_document, length=length)
    rows = [make_row(tokenizer, rng, length, draw) for _ in range(max(1, tokens // length))]
    ids, weights = zip(*rows, strict=True)
    return Batch(torch.tensor(ids), torch.tensor(weights))
