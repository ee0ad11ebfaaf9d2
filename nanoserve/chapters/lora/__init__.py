"""How does one model speak in many ways at once?

A LoRA adapter is a few thin matrices that change what a model's linear layers compute: a file of
some megabytes in place of a model of its own. One engine serves many adapters on one copy of the
weights, and requests of different adapters, and of none, are in the same step:

    llm = LLM(enable_lora=True, max_loras=2)
    pirate = LoRARequest("pirate", 1, "nanoserve/demo/lora")
    llm.generate(["Hello", "Hello"], lora_request=[pirate, None])

    on disk            --read_adapter-->   in main memory         --a step-->   in a slot
    any number                             max_cpu_loras, and those             max_loras of them,
                                           of unfinished requests               on the device

    parts.py         what changes in the engine: who waits for a slot, which token has which slot
    layers.py        the products, and the slots on the device
    manager.py       the adapters that are in main memory
    peft_helper.py   what the files of an adapter may say
    request.py       LoRARequest: which adapter a request wants

Drafters know no adapters: a draft is only a guess, and the model with the adapter verifies it.

Left out: adapters of embeddings, heads and experts, DoRA, adapters from the hub, a Triton kernel.

vLLM: vllm/lora/ (V0 and 0.32).
"""

from nanoserve.chapters.lora.request import LoRARequest as LoRARequest
