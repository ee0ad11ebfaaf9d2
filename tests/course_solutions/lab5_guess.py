import torch

from nanoserve.chapters.speculative.proposer import Proposer


def find_ngram(token_ids, least, longest):
    tokens = token_ids.tolist()
    for number in range(min(longest, len(tokens) - 1), least - 1, -1):
        for end in range(number, len(tokens)):
            if tokens[end - number : end] == tokens[-number:]:
                return end
    return None


class MyProposer(Proposer):
    def propose_one(self, seq_id, token_ids, most):
        config = self.config
        end = find_ngram(token_ids, config.prompt_lookup_min, config.prompt_lookup_max)
        return [] if end is None else token_ids[end : end + most].tolist()


def verify(drafts, sampled):
    for number, draft in enumerate(drafts):
        if sampled[number] != draft:
            return list(sampled[: number + 1])
    return list(sampled)


def rejection_sample(p, q, drafts, accept, recover):
    column = drafts[:, None]
    stays = accept < (p.gather(1, column) / q.gather(1, column))[:, 0]
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, p).double().cumsum(dim=1)
    drawn = torch.searchsorted(rest, recover[:, None] * rest[:, -1:], right=True)[:, 0]
    return torch.where(stays, drafts, drawn)
