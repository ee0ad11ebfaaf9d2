"""What else does a program that was written for vLLM ask of an LLM?

Some of vLLM's methods and options change nothing in the engine: they say where a model comes from,
which defaults a request has, or look at the engine from outside. They are here, under vLLM's names:

    llm.enqueue(prompts, params)            -> ["0", "1"]       checked, and kept
    llm.wait_for_completion()               -> [RequestOutput, RequestOutput]

    llm.start_profile(); llm.generate(...); llm.stop_profile()  -> a trace for a browser
    llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))   -> [1213952]

    LLM("Qwen/Qwen3-0.6B", revision="main", download_dir="/data", chat_template="chat.jinja",
        override_generation_config={"temperature": 0.2}, logprobs_mode="processed_logprobs")

Left out: sleep and wake_up (close() frees all memory), functions on other ranks than this process.

vLLM: vllm/entrypoints/llm.py, entrypoints/generate/ (0.32).
"""
