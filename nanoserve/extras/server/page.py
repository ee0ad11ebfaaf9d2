"""What does a reader with a browser see?

    GET /          a chat, and beside it the engine at work: page.html, one file
    GET /engine    what the engine is doing (watch.py): JSON, or a stream of events with
                   `Accept: text/event-stream`, one message when something has changed

    curl localhost:8000/engine
    curl -N -H "Accept: text/event-stream" localhost:8000/engine

The page loads nothing else, and its Content-Security-Policy lets it run nothing but its own script:
the policy names the script and the style by their SHA-256. The page shows what the model wrote as
text, and `require-trusted-types-for` has the browser refuse to make HTML of it.

/engine?slow_motion=0.2 lets the engine rest for 0.2 seconds after each step, for everybody's
requests, until the stream is closed. Pages of other sites cannot ask for it.

vLLM: none.
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from nanoserve.exceptions import EngineDeadError, brief
from nanoserve.extras.server.errors import HTTPError, describe
from nanoserve.extras.server.watch import INTERVAL, EngineWatch

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState

PAGE = Path(__file__).with_name("page.html")
MOST_WATCHERS = 32
MOST_PAUSE = 1.0  # seconds
LONGEST_SILENCE = 15.0  # seconds, after which a comment shows that the stream is alive


def make_router(state: ServerState) -> APIRouter:
    """The page, and what feeds it."""
    router = APIRouter(include_in_schema=False)
    watch = EngineWatch(state.async_llm, state.model_names[0])
    page = PAGE.read_text("utf-8")
    headers = {
        "Content-Security-Policy": security_policy(page),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @router.get("/")
    async def get_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @router.get("/engine")
    async def get_engine(request: Request) -> Response:
        no_store = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        if "text/event-stream" not in request.headers.get("accept", ""):
            await watch.refresh()
            return Response(watch.message(), media_type="application/json", headers=no_store)
        pause = read_pause(request)
        if watch.num_watchers >= MOST_WATCHERS:
            raise HTTPError(503, f"{MOST_WATCHERS} others watch the engine: try again later.")
        no_store["X-Accel-Buffering"] = "no"  # for a proxy
        events = stream(watch, pause)
        return StreamingResponse(events, media_type="text/event-stream", headers=no_store)

    return router


async def stream(watch: EngineWatch, pause: float) -> AsyncIterator[bytes]:
    """A message when something has changed, until the client goes or the engine takes no more
    requests: then the last message is an error."""
    sent: dict[str, Any] | None = None
    num_sent, sent_at = 0, monotonic()
    with watch.listening(pause):
        while True:
            try:
                await watch.refresh()
            except EngineDeadError as error:
                yield b"data: " + json.dumps(describe(error)).encode() + b"\n\n"
                return
            if watch.state is not sent:
                sent, message = watch.state, watch.message(num_sent)
                num_sent, sent_at = sent["num_steps"], monotonic()
                yield b"data: " + message + b"\n\n"
            elif monotonic() - sent_at > LONGEST_SILENCE:
                yield b": nothing new\n\n"
                sent_at = monotonic()
            await asyncio.sleep(INTERVAL)


def read_pause(request: Request) -> float:
    """slow_motion, in seconds. Raises HTTPError."""
    text = request.query_params.get("slow_motion", "0")
    try:
        pause = float(text)
    except ValueError:
        pause = -1.0
    if not 0 <= pause <= MOST_PAUSE:
        message = f"slow_motion is {brief(text)}: give seconds from 0 to {MOST_PAUSE:g}."
        raise HTTPError(400, message, "slow_motion")
    if pause and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise HTTPError(403, "a page of another site cannot slow the engine down.", "slow_motion")
    return pause


def security_policy(page: str) -> str:
    """The page's Content-Security-Policy: this very script, this very style, this server."""
    sources = {}
    for tag in ("script", "style"):
        parts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = (b64encode(sha256(part.encode()).digest()).decode() for part in parts)
        sources[tag] = " ".join(f"'sha256-{each}'" for each in hashes)
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {sources['script']}",
            f"style-src {sources['style']}",
            "img-src data:",  # the empty icon
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
