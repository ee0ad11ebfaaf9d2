"""How do ranks and replicas get onto the machines of a cluster?

Ray runs on every machine of a cluster, knows what is free, and starts Python objects in processes
of their own where it is: actors. It does two things here.

*Ranks.* One model, on several machines. Each rank but rank 0 is an actor; what ranks say to each
other in a step does not pass through Ray:

    LLM(tensor_parallel_size=3, distributed_executor_backend="ray")

    machine A    this process: rank 0     bundle 0        machine B    rank 2: RankActor    bundle 2
                 rank 1: RankActor        bundle 1

*Replicas.* Several engines behind one address, by Ray Serve, which has the port, watches the
replicas, and starts one again that has ended:

    nanoserve serve --data-parallel-size 2

    client --> Ingress: reads the body --> PrefixRouter: which replica? --> Replica: engine and app

    parts.py      the option
    executor.py   ranks as actors of a placement group
    serve.py      replicas
    router.py     which of them knows the beginning of a prompt?

Left out: Ray's compiled graphs (gloo and nccl carry the steps), a Ray Client ("ray://..."), more
replicas for more load. Several GPUs and several machines have not been tried.

vLLM: vllm/executor/ray_gpu_executor.py (V0); vllm/v1/executor/ray_executor.py,
CoreEngineActorManager in vllm/v1/engine/utils.py (0.32).
"""
