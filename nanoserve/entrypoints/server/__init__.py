"""How does a request come over HTTP to the engine, and its answer back?

    POST /v1/completions {"prompt": "Once", "max_tokens": 5, "stream": true}

    launcher.py      `nanoserve serve`: flags, uvicorn, the end of the server
    api_server.py    the endpoints
    protocol.py      a body -> CompletionRequest -> SamplingParams
    serving.py       AsyncLLM.add_request for each prompt; outputs -> choices, events
    tool_parser.py   calls of tools in a model's text
    errors.py        what an error looks like
    page.py          the page at /, which draws the engine at work

vLLM: vllm/entrypoints/openai/ (V0); vllm/entrypoints/: openai/, serve/, launchers/ (V1).
"""
