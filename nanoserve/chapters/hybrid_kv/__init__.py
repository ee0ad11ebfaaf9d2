"""Why keep blocks that no token will look at again?

In many models most layers have a sliding window: a query sees the last 512 keys, say, and no
others. Only every fourth or sixth layer sees the whole text. The core keeps the blocks of all
layers until a sequence ends, because a block holds the keys of all of them. Here layers with the
same attention form groups, and each group has a block table of its own, over one pool:

    LLM(disable_hybrid_kv_cache_manager=False)

    a chat of 12 blocks, three of four layers with a window of two blocks

    group 0, full      1 2 3 4 5 6 7 8 9 10 11 12        12 blocks
    group 1, window    . . . . . . . . . .  13 14         2, and so in groups 2 and 3
                                                         18 blocks of one layer each; without
                                                         groups they were 12 blocks of four

A block behind the window is freed before the next step is scheduled. It stays in the prefix cache
until it is taken. If all layers have the same attention there is one group; a model without windows
then runs as without the chapter, with one block less: the null block.

The name of the option is vLLM's, where it is resolved to False for models with windows. Here the
core is what runs unless you say False. vLLM's names: GroupManager is SingleTypeKVCacheManager,
HybridBlockManager is KVCacheCoordinator, a KVCacheGroup is a KVCacheGroupSpec.

    groups.py    which layers share a table, and how many blocks a sequence needs
    managers.py  who owns which block: one BlockManager a group, over one pool
    parts.py     what changes in the engine

Left out: layers whose keys differ in size, drafters with layers of their own, states of Mamba
layers, further levels of the prefix cache.

vLLM: vllm/v1/core/kv_cache_coordinator.py, single_type_kv_cache_manager.py (0.32; V0 has none).
"""
