import torch


def column_shard(weight, rank, size):
    if weight.shape[0] % size:
        raise ValueError(f"{weight.shape[0]} outputs cannot be divided among {size} ranks")
    return weight.chunk(size)[rank]


def row_shard(weight, rank, size):
    return column_shard(weight.T, rank, size).T


def mlp(x, up, down, rank, size, all_reduce):
    hidden = (x @ column_shard(up, rank, size).T).relu()
    return all_reduce(hidden @ row_shard(down, rank, size).T)


def heads_of(num_heads, num_kv_heads, rank, size):
    number, share = num_heads // size, num_heads // num_kv_heads
    first, last = rank * number, (rank + 1) * number - 1
    return range(first, last + 1), range(first // share, last // share + 1)


def ring_all_reduce(x, rank, size, send, receive):
    pieces = [piece.clone() for piece in x.tensor_split(size)]
    for step in range(size - 1):
        send(pieces[(rank - step) % size])
        pieces[(rank - step - 1) % size] += receive()
    for step in range(size - 1):
        send(pieces[(rank + 1 - step) % size])
        pieces[(rank - step) % size] = receive()
    return torch.cat(pieces)


def argmax_of_parts(parts):
    values, tokens = zip(*(part.max(dim=1) for part in parts), strict=True)
    best = torch.stack(values).argmax(dim=0)
    width = parts[0].shape[1]
    return torch.stack(tokens).gather(0, best[None])[0] + best * width
