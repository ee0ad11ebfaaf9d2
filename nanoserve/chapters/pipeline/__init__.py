"""How do several processes divide the layers of a model, and all compute at once?

    LLM(model, pipeline_parallel_size=2)

Each stage has some of the layers and sends its hidden states to the next one. As many steps are in
flight as there are stages. Two stages, and two steps, A and B, each with half of the sequences:

    rank 0     launch A | launch B | sample A, launch A | sample B, launch B | ...
    layers     [ A ]      [ B ]                [ A ]                [ B ]
    stage 1               [ A ]                [ B ]                [ A ]

The last stage has the logits; the scheduler, the grammars and the users' callables are on rank 0.
So rank 0 launches a step, and samples when the step is read. A sequence with a token in flight
waits, because stage 0 must know the token.

    parts.py   what changes in the engine: more steps in flight, an even share of the sequences each
    model.py   a stage's share of a model
    state.py   what the stages say to each other

Left out: prompt logprobs (they need hidden states of the last stage), models that transformers
runs, several schedulers (V0's virtual engines).

vLLM: vllm/worker/model_runner.py, vllm/engine/llm_engine.py (V0); vllm/v1/worker/gpu_worker.py,
step_with_batch_queue in vllm/v1/engine/core.py (V1).
"""
