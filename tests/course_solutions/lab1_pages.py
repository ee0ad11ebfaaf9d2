from nanoserve.block_manager import BlockManager, BlockPool


class MyPool(BlockPool):
    def allocate(self):
        block_id, _ = self.free_queue.popitem(last=False)
        self.uncache(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id):
        self.free_queue.pop(block_id, None)
        self.ref_counts[block_id] += 1

    def free(self, block_id):
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_queue[block_id] = None
            self.free_queue.move_to_end(block_id, last=self.block_hashes[block_id] is not None)


class MyManager(BlockManager):
    def reset(self):
        super().reset()
        self.pool = MyPool(self.num_blocks)

    def num_blocks_for(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq, cached_blocks):
        needed = self.num_blocks_for(seq.num_tokens) - len(cached_blocks)
        taken = [block for block in cached_blocks if self.pool.ref_counts[block] == 0]
        return needed + len(taken) <= len(self.pool.free_queue)

    def hashes_of(self, seq, num_blocks):
        hashes, size = seq.block_hashes, self.block_size
        for number in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else self.find_hash(None, seq.extra_keys)
            tokens = tuple(seq.token_ids[number * size : (number + 1) * size])
            hashes.append(self.find_hash(parent, tokens))
        return hashes

    def get_computed_blocks(self, seq):
        found = []
        most = (seq.num_tokens - 1) // self.block_size if self.enable_prefix_caching else 0
        for block_hash in self.hashes_of(seq, most)[:most]:
            if block_hash not in self.pool.cached_blocks:
                break
            found.append(self.pool.cached_blocks[block_hash])
        return found

    def free(self, seq):
        for block in reversed(self.block_tables.pop(seq.seq_id, [])):
            self.pool.free(block)
