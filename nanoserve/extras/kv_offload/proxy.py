"""Who sends a request to the producer first, and then to the consumer?

A proxy, for clients that know nothing of the two. On one machine, in three terminals:

    $ nanoserve serve --port 8100 --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_producer", "kv_connector_extra_config": {"cpu_bytes_to_use": 4000000000,
        "secondary_tiers": [{"type": "p2p"}]}}'
    $ nanoserve serve --port 8200 --kv-transfer-config '... "kv_role": "kv_consumer" ...'
    $ python -m nanoserve.extras.kv_offload.proxy --prefill localhost:8100 --decode localhost:8200
    $ curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{...}'

    client --- request ---> proxy --- max_tokens 1, remote_decoder -----> producer
                              |  <--- kv_transfer_params ---------------------+
                              +------ request, kv_transfer_params ------> consumer
    client <-- its answer, as it comes -------------------------------------+

Several servers of each kind (--prefill A B --decode C D E) take turns; each producer on one machine
needs a "port" of its own in its tier. If a producer does not answer, the consumer computes the
prompt. (A prompt may take a producer minutes; so it is asked for its /health before, and one that
hangs is left alone for a while.) All other paths, such as /v1/models, are the consumer's.

Left out: encryption, choosing the server that has the least to do.

vLLM: examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py (V1).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any

from nanoserve.logger import configure_logging, init_logger

logger = init_logger(__name__)

GENERATES = ("/v1/completions", "/v1/chat/completions")
PASSED_ON = ("Authorization", "Content-Type", "X-Request-Id", "traceparent", "tracestate")
SENT_BACK = ("Content-Type", "Content-Length", "Cache-Control", "X-Request-Id", "Retry-After")
# What would make the prefill longer, or its answer larger.
SHORT = {"max_tokens": 1, "min_tokens": 0, "n": 1, "stream": False, "logprobs": None}
LONG = ("stream_options", "best_of", "top_logprobs", "echo")
MAX_BODY = 2**26  # bytes
PATIENCE = 5.0  # seconds that a producer has to answer /health
PAUSE = 10.0  # seconds in which a producer that hangs is not asked
SILENCE = 600.0  # seconds without a byte, after which a server counts as dead


class Proxy(ThreadingHTTPServer):
    """Serves in a thread for each connection."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], prefill: Sequence[str], decode: Sequence[str]
    ) -> None:
        """prefill, decode: host:port of the servers. Raises OSError if the address is in use."""
        super().__init__(address, Handler)
        self.producers, self.consumers = cycle(prefill), cycle(decode)  # next() needs no lock
        self.paused: dict[str, float] = {}  # producers that hang -> when to ask again

    def check_answers(self, producer: str) -> None:
        """Raise OSError or HTTPException if a producer is not there, or hangs."""
        now = time.monotonic()
        if now < self.paused.get(producer, now):
            raise TimeoutError(f"{producer} hangs")
        with closing(connect(producer, PATIENCE)) as connection:
            try:
                connection.request("GET", "/health")
                connection.getresponse()
            except TimeoutError:
                self.paused[producer] = time.monotonic() + PAUSE
                raise


class Handler(BaseHTTPRequestHandler):
    """One request of a client."""

    server: Proxy

    def do_GET(self) -> None:
        self.forward(None)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            message = f"Content-Length is {length!r:.80}; allowed: up to {MAX_BODY} bytes."
            self.refuse(413 if length.isdecimal() else 411, message)
            return
        body = self.rfile.read(int(length))
        if self.path.split("?")[0] in GENERATES:
            body = self.prefill(body)
        self.forward(body)

    def prefill(self, body: bytes) -> bytes:
        """Let a producer compute the prompt. The body for the consumer: unchanged if that did not
        work, for whatever reason."""
        producer = next(self.server.producers)
        try:
            request = json.loads(body)
            kv_request_id = uuid.uuid4().hex
            short = {key: value for key, value in request.items() if key not in LONG} | SHORT
            if "max_completion_tokens" in short:
                short["max_completion_tokens"] = 1
            short["kv_transfer_params"] = {"remote_decoder": {"kv_request_id": kv_request_id}}
            self.server.check_answers(producer)
            response = self.ask(producer, json.dumps(short).encode())
            answer = json.loads(response.read(MAX_BODY))
            if response.status != 200:
                return body  # the consumer says what is wrong with it
            params = answer.get("kv_transfer_params")
            return json.dumps({**request, "kv_transfer_params": params}).encode()
        except (OSError, HTTPException, ValueError, AttributeError, RecursionError) as error:
            what = error or type(error).__name__
            logger.warning(f"no prefill at {producer}, the consumer computes it: {what!s:.200}")
            return body

    def forward(self, body: bytes | None) -> None:
        """Send the request to a consumer, and its answer to the client, as it comes. A stream that
        breaks off has an error as its last event, as it would look like a whole one without."""
        consumer = next(self.server.consumers)
        try:
            response = self.ask(consumer, body)
        except (OSError, HTTPException) as error:
            self.refuse(502, f"The server at {consumer} does not answer ({error!s:.200}).")
            return
        self.send_response(response.status)
        for name in SENT_BACK:
            if (value := response.headers.get(name)) is not None:
                self.send_header(name, value)
        self.end_headers()
        try:
            while data := response.read1(2**16):
                self.wfile.write(data)
        except (OSError, HTTPException):  # one of the two has gone
            self.close_connection = True
            if "event-stream" in response.headers.get("Content-Type", ""):
                message = f"The server at {consumer} has ended. What it sent is not complete."
                event = f"\n\ndata: {json.dumps(describe(502, message))}\n\ndata: [DONE]\n\n"
                with suppress(OSError):  # it was the client
                    self.wfile.write(event.encode())
        finally:
            response.close()

    def ask(self, address: str, body: bytes | None) -> HTTPResponse:
        """The answer of a server, whose connection ends with it."""
        connection = connect(address, SILENCE)
        sent = {name: value for name in PASSED_ON if (value := self.headers.get(name))}
        headers = {**sent, "Connection": "close"}
        try:
            connection.request(self.command, self.path, body, headers)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error."""
        data = json.dumps(describe(status, message)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def connect(address: str, timeout: float) -> HTTPConnection:
    host, _, port = address.rpartition(":")
    return HTTPConnection(host, int(port), timeout=timeout)


def describe(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": "ProxyError", "param": None, "code": status}}


def read_address(text: str) -> str:
    """host:port. Raises argparse's error for anything else."""
    host, _, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as localhost:8100.")
    return f"{host}:{port}"


def main(arguments: list[str] | None = None) -> int:
    """Serve until Ctrl-C. The exit status: 130, or 1 if it cannot listen there."""
    parser = argparse.ArgumentParser(
        prog="python -m nanoserve.extras.kv_offload.proxy",
        description="One address for servers that compute prompts and servers that decode.",
    )
    servers: dict[str, Any] = {"nargs": "+", "required": True, "type": read_address}
    servers["metavar"] = "HOST:PORT"
    parser.add_argument("--prefill", **servers, help="servers with the kv_role kv_producer")
    parser.add_argument("--decode", **servers, help="servers with the kv_role kv_consumer")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="(%(default)s; 0: a free one)")
    args = parser.parse_args(arguments)
    configure_logging()
    try:
        server = Proxy((args.host, args.port), args.prefill, args.decode)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        where = f"{args.host}, port {args.port}"
        print(f"cannot listen at {where}: {why}. Give another --host or --port.", file=sys.stderr)
        return 1
    with server as proxy:
        print(f"The proxy is at http://{args.host}:{proxy.server_port} (Ctrl-C ends it).")
        sys.stdout.flush()
        try:
            proxy.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
