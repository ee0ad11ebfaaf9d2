"""How do several engines serve as one?

    $ nanoserve serve --data-parallel-size 2

    client --> front.py --- router.py: which one? ---+--> replica.py: a server, its engine
                  |                                  +--> replica.py: another one
                  +--- supervisor.py: starts them, again if one ends, and ends them

Each replica has all weights, and a KV cache of its own. None knows of another. N of them serve up
to N times as many requests, if each finds in its cache what one engine would have found: that is
the router's task.

Left out: replicas whose layers of experts belong to all (expert parallelism): they have to run
their steps together, as vLLM's do; replicas on other machines.

vLLM: vllm/v1/engine/coordinator.py, vllm/v1/engine/core_client.py DPLBAsyncMPClient (V1). (V0 has
no replicas: its users put a proxy in front of several servers, which is what is done here.)
"""
