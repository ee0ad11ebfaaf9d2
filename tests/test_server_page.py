"""placeholder"""
import json, itertools
from fastapi import Request
from fastapi.responses import StreamingResponse
from nanoserve import SamplingParams, RequestOutputKind


def add_stand_in(app):
    state = app.state.server
    counter = itertools.count()
    import asyncio

    async def run(prompts, body, prefix, chat):
        rid = f"{prefix}-{next(counter):08x}abcdef"
        params = SamplingParams(max_tokens=body.get("max_tokens", 100), temperature=body.get("temperature", 0.0), output_kind=RequestOutputKind.DELTA, seed=body.get("seed"))
        queue = asyncio.Queue()
        async def one(i, p):
            kw = {"tokenization_kwargs": {"add_special_tokens": False}} if chat else {}
            async for out in state.async_llm.generate(p, params, f"{rid}-{i}" if len(prompts) > 1 else rid, **kw):
                await queue.put((i, out))
            await queue.put(None)
        tasks = [asyncio.create_task(one(i, p)) for i, p in enumerate(prompts)]
        left = len(tasks)
        n = 0
        try:
            while left:
                got = await queue.get()
                if got is None:
                    left -= 1
                    continue
                i, out = got
                c = out.outputs[0]
                n += len(c.token_ids)
                np = len(out.prompt_token_ids or [])
                choice = {"index": i, "finish_reason": c.finish_reason}
                choice |= {"delta": {"content": c.text}} if chat else {"text": c.text}
                yield b"data: " + json.dumps({"id": rid, "choices": [choice]}).encode() + b"\n\n"
            yield b"data: " + json.dumps({"id": rid, "choices": [], "usage": {"prompt_tokens": np, "completion_tokens": n}}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            for t in tasks:
                t.cancel()

    @app.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        return StreamingResponse(run(prompts, body, "cmpl", False), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        text = await state.async_llm.render_chat(body["messages"])
        return StreamingResponse(run([text], body, "chatcmpl", True), media_type="text/event-stream")
