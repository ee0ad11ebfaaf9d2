import numpy as np
import torch

from nanoserve.model_runner import ModelRunner
from nanoserve.sampler import ChosenTokens


def apply_min_p(logits, min_p):
    probs = logits.softmax(dim=-1)
    limit = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probs < limit, -torch.inf)


def apply_top_k_top_p(logits, top_k, top_p):
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1])
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    is_late = (before >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0)
    ordered = ordered.masked_fill(is_late, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)


def draw(probs, uniform):
    total = probs.double().cumsum(dim=-1)
    return torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)[:, 0]


def noise(seed, branch, position):
    mixed = 0
    for each in (seed, branch, position):
        mixed = (mixed + each + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return (mixed >> 11) * 2.0**-53


def choose(logits, batch):
    top, tokens = logits.max(dim=-1)
    if not batch.is_greedy:
        is_greedy = batch.temperature < 1e-5
        scaled = logits / batch.temperature.masked_fill(is_greedy, 1)[:, None]
        if batch.min_p is not None:
            scaled = apply_min_p(scaled, batch.min_p)
        if batch.top_k is not None or batch.top_p is not None:
            rows = len(logits)
            off_k = torch.full((rows,), logits.shape[1])
            top_k = off_k if batch.top_k is None else batch.top_k
            top_p = torch.ones(rows) if batch.top_p is None else batch.top_p
            scaled = apply_top_k_top_p(scaled, top_k, top_p)
        drawn = draw(scaled.softmax(dim=-1), batch.uniform)
        tokens = torch.where(is_greedy, tokens, drawn)
    return ChosenTokens(tokens, top.isfinite())


class MyRunner(ModelRunner):
    def load_model(self):
        model = super().load_model()
        self.choose = choose
        return model


def noise_of(seeds, branches, positions):
    rows = zip(seeds, branches, positions, strict=True)
    return np.array([noise(int(seed), int(branch), int(place)) for seed, branch, place in rows])
