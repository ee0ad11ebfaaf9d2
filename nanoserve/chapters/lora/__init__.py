"""How does one model speak in many ways at once?

A LoRA adapter is a few thin matrices that change what a model's linear layers compute: a file of
some megabytes in place of a model of its own. One engine serves many adapters on one copy of the
weights, and requests of different adapters, and of none, are in the same step:

    llm = LLM(enable_lora=True, max_loras=2)
    pirate = LoRARequest("pirate", 1, "nanoserve/demo/lora")
    llm.generate(["Hello", "Hello"], lora_request=[pirate, None])

    request.py       LoRARequest: which adapter a request wants
    peft_helper.py   what the files of an adapter may say: PEFT's, checked
    parts.py         what changes in scheduler, runner and engine
    manager.py       Slots: which adapters are on the device, and who waits for one
    layers.py        the products, and the slots of adapters on the device

Decided: drafters know no adapters. A draft is only a guess, and the model with the adapter verifies
it, so the tokens are the same. Blocks of the prefix cache are found by the adapter that made them.

vLLM: vllm/lora/ (V0 and V1).
"""

from nanoserve.chapters.lora.request import LoRARequest

__all__ = ["LoRARequest"]
