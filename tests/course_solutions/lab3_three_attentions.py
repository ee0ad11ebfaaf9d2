import torch

from nanoserve.attention import AttentionBackend


def definition(query, key, value, scale):
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    score = torch.einsum("qhd,khd->hqk", query, key) * scale
    q, k = query.shape[0], key.shape[0]
    position = torch.arange(k - q, k)[:, None]
    score = score.masked_fill(torch.arange(k) > position, -torch.inf)
    return torch.einsum("hqk,khd->qhd", score.softmax(dim=-1), value)


def sequences(metadata):
    starts = metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens.tolist()
    return zip(starts, starts[1:], lengths, metadata.block_table.tolist(), strict=False)


class MyGather(AttentionBackend):
    def attend(self, query, kv_cache, metadata, *, scale, **_):
        outputs = []
        for start, end, seq_len, table in sequences(metadata):
            blocks = table[: -(-seq_len // kv_cache[0].shape[1])]
            key, value = (cache[blocks].flatten(0, 1)[:seq_len] for cache in kv_cache)
            outputs.append(definition(query[start:end], key, value, scale))
        return torch.cat(outputs)


def add_block(top, total, mixed, score, value):
    new_top = torch.maximum(top, score.amax(dim=-1, keepdim=True))
    safe = new_top.masked_fill(new_top.isinf(), 0)
    weight, factor = (score - safe).exp(), (top - safe).exp()
    total = total * factor + weight.sum(dim=-1, keepdim=True)
    return new_top, total, mixed * factor + weight @ value


class MyOnline(AttentionBackend):
    def attend(self, query, kv_cache, metadata, *, scale, **_):
        outputs = []
        (keys, values), size = kv_cache, kv_cache[0].shape[1]
        repeat = query.shape[1] // keys.shape[2]
        for start, end, seq_len, table in sequences(metadata):
            mine = query[start:end].transpose(0, 1)
            top = torch.full((*mine.shape[:2], 1), -torch.inf)
            total, mixed = torch.zeros_like(top), mine.new_zeros(*mine.shape[:2], values.shape[-1])
            position = torch.arange(seq_len - (end - start), seq_len)[:, None]
            for first in range(0, seq_len, size):
                block, number = table[first // size], min(size, seq_len - first)
                key = keys[block, :number].transpose(0, 1).repeat_interleave(repeat, dim=0)
                value = values[block, :number].transpose(0, 1).repeat_interleave(repeat, dim=0)
                score = mine @ key.mT * scale
                hidden = torch.arange(first, first + number) > position
                score = score.masked_fill(hidden, -torch.inf)
                top, total, mixed = add_block(top, total, mixed, score, value)
            outputs.append((mixed / total).transpose(0, 1))
        return torch.cat(outputs)
