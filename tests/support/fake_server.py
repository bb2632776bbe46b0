"""What programs need of a server, in this process: it notes every body that it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answer = tuple[int, Any]


class FakeServer:
    """Answers calls with ``ok`` and says of a program what it was sent of it.

    ``script``: what to answer to a call in place of that, or None; it may block.
    """

    def __init__(self) -> None:
        self.calls: list[Body] = []
        self.closed: list[tuple[str, Body]] = []
        """Ends and cancels: the last part of the route, and the body."""
        self.num_calls_at_close: list[int] = []
        self.script: Callable[[Body], Answer | None] = lambda body: None
        self.close_status = 200
        self.something_came = threading.Condition()
        self.url = ""

    def nodes(self) -> list[str]:
        """The calls in the order in which they came."""
        return [call["node"] for call in self.calls]

    def parents(self) -> dict[str, set[str]]:
        """Of each call."""
        return {call["node"]: set(call["parents"]) for call in self.calls}

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Until something that came makes it true."""
        with self.something_came:
            assert self.something_came.wait_for(is_true, 30), (self.calls, self.closed)

    def answer(self, path: str, body: Body) -> Answer:
        """The status and the JSON for a request."""
        if path in ("/generate", "/v1/chat/completions"):
            with self.something_came:
                self.calls.append(body)
                self.something_came.notify_all()
            scripted = self.script(body)
            return (200, answer_to(body)) if scripted is None else scripted
        if path.startswith("/slo/programs/"):
            with self.something_came:
                self.closed.append((path.rpartition("/")[2], body))
                self.num_calls_at_close.append(len(self.calls))
                self.something_came.notify_all()
            return self.close_status, self._outcome(body["program_id"])
        return 200, {"model_path": "fake", "status": "ok"}

    def _outcome(self, program_id: str) -> Body:
        calls = [call for call in self.calls if call.get("program_id") == program_id]
        return {
            "program_id": program_id,
            "calls": len(calls),
            "tokens": 10 * len(calls),
            "goodput_tokens": 10 * len(calls),
            "met": True,
            "deadline": calls[0].get("deadline") if calls else None,
            "elapsed_s": 0.5,
        }


def answer_to(body: Body) -> Any:
    """As SGLang answers: one text, a list with the log-probabilities of the prompts, a chat."""
    if "messages" in body:
        message = {"role": "assistant", "content": " ok"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        program = {"calls": 1, "tokens": 10, "goodput_tokens": 10}
        slo = {"type": "compound", "met": True, "program": program}
        identity = {"id": "1", "object": "chat.completion", "created": 1, "model": "fake"}
        return {**identity, "choices": [choice], "metadata": {"slo": slo}}
    if isinstance(body.get("text"), list) or "input_ids" in body:
        prompts = body.get("text", body.get("input_ids"))
        # The first choice is the likeliest.
        rows = [[[-0.1 - index, 5, "x"], [-0.1 - index, 6, "y"]] for index in range(len(prompts))]
        metas = [{"input_token_logprobs": row, "output_token_logprobs": []} for row in rows]
        return [{"text": "", "meta_info": meta} for meta in metas]
    return {"text": " ok", "meta_info": {"id": "1", "prompt_tokens": 4, "completion_tokens": 1}}


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply(json.loads(raw or b"{}"))

    def _reply(self, body: Body) -> None:
        status, value = self.server.fake.answer(self.path, body)
        is_stream = bool(body.get("stream")) and status == 200
        raw = json.dumps(value).encode()
        if is_stream:
            raw = b"data: " + raw + b"\n\ndata: [DONE]\n\n"
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests' output is for failures."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, fake: FakeServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake


@contextmanager
def running() -> Iterator[FakeServer]:
    """A fake server that listens until the block ends."""
    fake = FakeServer()
    with _HttpServer(fake) as http:
        fake.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake
        finally:
            http.shutdown()
            thread.join()
