"""SGLang's frontend language on this server: every run of an ``sgl.function`` is a program.

    import sglang as sgl
    from engine.runtime.frontend import JITEndpoint, tool

    endpoint = JITEndpoint("http://127.0.0.1:30000", deadline=60)
    state = answer.run(question="…", backend=endpoint)  # any sgl.function, as it is
    print(state["answer"], endpoint.outcome_of(state))

The calls of one run share a program and its deadline, and say which answers they needed: the
server can then see how far the program is and what is still to come.
"""

import copy
import functools
import json
import logging
import ssl
import sys
import traceback
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from types import FrameType
from typing import Any

import msgspec
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.choices import ChoicesDecision
from sglang.lang.interpreter import ProgramStateGroup
from sglang.lang.ir import SglCommitLazy, SglFunction, SglGen, SglSelect

from core.slo import OnMiss
from core.terms import MAX_NAME_CHARS, MAX_TIME_S, is_text, shown
from engine.runtime.program_run import CallError, Place, ProgramRun, key_of

__all__ = ["CallError", "JITEndpoint", "RunOutcome", "tool"]

logger = logging.getLogger(__name__)

END_ROUTE, CANCEL_ROUTE = "/slo/programs/end", "/slo/programs/cancel"
CLOSE_TIMEOUT_S = 5.0
"""How long the server may take to hear that a program is over; nobody waits for it meanwhile."""


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run of a program went, as the server says."""

    program_id: str
    calls: int
    tokens: int
    """Input and output of all calls."""
    goodput_tokens: int
    """Those that count."""
    met: bool
    """Whether the program was done by its deadline."""
    deadline: float | None
    """Seconds from its first call."""
    elapsed_s: float


class JITEndpoint(RuntimeEndpoint):  # type: ignore[misc]  # SGLang is untyped
    """A backend for ``sgl.function`` programs, with one deadline for all calls of a run.

    Nothing else about a program changes. Beside SGLang's own behaviour:

    * A call that fails leaves a ``CallError`` with its state: reading what was not answered
      raises it, and so does joining a failed fork. Without a thread the call itself raises it.
    * The server is told in the background when a run is over, or that it failed.

    Args:
        base_url, api_key, verify, chat_template_name: as of ``RuntimeEndpoint``.
        deadline: seconds from a program's first call by which all of it should be done; the
            server has a default.
        on_miss: ``"finish"`` or ``"cancel"``: what becomes of calls after the deadline.
        waiting_time: seconds; a call that has not been started by then is dropped.
        user: the tenant.
        application: programs of one application are taken to be alike. By default the name of
            the ``sgl.function``.

    Raises:
        ValueError: an argument is not what it may be; the message begins with its name.
        CallError: the server does not let us in.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        deadline: float | None = None,
        on_miss: str | None = None,
        waiting_time: float | None = None,
        user: str | None = None,
        application: str | None = None,
    ) -> None:
        self._terms: dict[str, Any] = {
            "deadline": _seconds("deadline", deadline),
            "on_miss": _choice("on_miss", on_miss),
            "waiting_time": _seconds("waiting_time", waiting_time),
            "user": _name("user", user),
            "application": _name("application", application),
        }
        super().__init__(base_url.rstrip("/"), api_key, verify, chat_template_name)
        # SGLang's server has no such route any more: forks are joined by their text.
        self.support_concate_and_append = False
        self._run: ProgramRun | None = None
        self.place = Place()

    @property
    def endpoint(self) -> "JITEndpoint":
        """A backend for one run: SGLang asks for it before each, as it does of its ``Runtime``."""
        application = self._terms["application"] or _function_run_by(sys._getframe(1))
        program_id = uuid.uuid4().hex
        fields = {"program_id": program_id, **self._terms, "application": application}
        backend = self.at(Place())
        backend._run = ProgramRun(
            {name: value for name, value in fields.items() if value is not None},
            functools.partial(self._tell_end, program_id),
        )
        return backend

    def at(self, place: Place) -> "JITEndpoint":
        """The backend that a state has while it stands there."""
        backend = copy.copy(self)
        backend.place = place
        return backend

    @staticmethod
    def outcome_of(state: Any, timeout_s: float | None = None) -> RunOutcome | None:
        """How the run went that ``state`` (or the state it was forked from) came out of.

        Waits until the last call is answered and the server has said; not for use inside the
        program. None if the program failed, or the server could not be asked (the log has why).

        Raises:
            TimeoutError: it is not over after ``timeout_s``.
            ValueError: the state has not run on a ``JITEndpoint``.
        """
        backend = state.stream_executor.backend
        if not isinstance(backend, JITEndpoint) or backend._run is None:
            raise ValueError("state: has not run on a JITEndpoint")
        outcome: RunOutcome | None = backend._run.outcome.result(timeout_s)
        return outcome

    # What SGLang calls. ``s`` is the StreamExecutor of the program or of one of its forks; in
    # the thread of its own that it mostly has, an exception would be lost and could leave the
    # program waiting for ever. So none leaves these methods there: see _answering.

    def generate(self, s: Any, sampling_params: Any) -> Any:
        with self._answering(s):
            return super().generate(s, sampling_params)
        return "", {}

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[Any]:
        with self._answering(s):
            try:
                yield from super().generate_stream(s, sampling_params)
            except KeyError as error:
                raise _error_in_stream(error) from None

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any) -> Any:
        with self._answering(s):
            return super().select(s, choices, temperature, choices_method)
        return ChoicesDecision("", {})

    def commit_lazy_operations(self, s: Any) -> None:
        expression = _expression_of(s)
        if isinstance(expression, _ToolRan):
            if self._run is not None:
                self._run.tool_ran(s, expression.name)
            return
        with self._answering(s):
            super().commit_lazy_operations(s)

    def end_program(self, s: Any) -> None:
        """SGLang lets go of a state: its run returned or failed, it was joined, or forgotten."""
        # We are called by StreamExecutor.end, and that by whom we look for.
        caller = sys._getframe(1).f_back
        owner = None if caller is None else caller.f_locals.get("self")
        if self._run is None or owner is s:
            return
        if isinstance(owner, ProgramStateGroup):
            self._run.join(owner.src_state.stream_executor, s)
        elif key_of(s):
            self._run.meet(s)
        else:
            self._run.end(s, _raised_in(caller))

    def _add_images(self, s: Any, data: Any) -> None:
        """SGLang's last step before each request: what the server should know goes in too."""
        super()._add_images(s, data)
        if self._run is not None:
            expression = _expression_of(s)
            has_answer = not isinstance(expression, SglCommitLazy)
            name = _name_of_call(expression, data)
            data.update(self._run.begin_call(s, name, has_answer=has_answer))

    def _assert_success(self, res: Any) -> None:
        try:
            super()._assert_success(res)
        except RuntimeError as error:
            raise CallError(res.status_code, error.args[0]) from None

    @contextmanager
    def _answering(self, s: Any) -> Iterator[None]:
        """Around the requests of a call: keeps an exception with the state whose call it is."""
        try:
            yield
            if self._run is not None:
                self._run.end_call(s)
        except Exception as error:
            failure = error if isinstance(error, CallError) else CallError(None, repr(error))
            if failure is not error:
                failure.__cause__ = error
            if self._run is None or not s.use_thread:
                raise failure from failure.__cause__
            self._run.fail(s, failure)
            s.error_ = failure
            name = getattr(_expression_of(s), "name", None)
            s.variables = _Unanswered(s.variables, failure, name)
            logger.warning("call_failed program_id=%s error=%s", self._run.program_id, failure)

    def _tell_end(self, program_id: str, how: str) -> RunOutcome | None:
        """The outcome that the server answers with, if it does."""
        body = {"program_id": program_id}
        if self._terms["user"] is not None:
            body["user"] = self._terms["user"]
        try:
            answer = self._post(CANCEL_ROUTE if how == "cancel" else END_ROUTE, body)
            return None if how == "cancel" else msgspec.json.decode(answer, type=RunOutcome)
        except Exception as error:
            # Whatever it is, the program has its answers.
            logger.warning("program_%s_untold %s error=%r", how, body, error)
            return None

    def _post(self, route: str, body: dict[str, str]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.base_url + route, json.dumps(body).encode(), headers)
        context = ssl.create_default_context(cafile=self.verify) if self.verify else None
        with urllib.request.urlopen(request, timeout=CLOSE_TIMEOUT_S, context=context) as answer:
            return bytes(answer.read())


class _ToolRan(SglCommitLazy):  # type: ignore[misc]  # SGLang is untyped
    """Queued behind the calls before the tool, so that it is noted after they were made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


@contextmanager
def tool(s: Any, name: str) -> Iterator[None]:
    """Around the work of a tool inside a program: ``with tool(s, "search"): found = search(…)``.

    The next call of the state ``s`` says that the tool ran before it. Does nothing on other
    backends.

    Raises:
        ValueError: the name is empty or too long.
    """
    _name("name", name or "")
    try:
        yield
    finally:
        executor = getattr(s, "stream_executor", None)
        if isinstance(getattr(executor, "backend", None), JITEndpoint):
            s.stream_executor.submit(_ToolRan(name))


class _Unanswered(dict[str, Any]):
    """The variables of a state whose call failed: reading what it did not answer says why."""

    def __init__(self, answered: dict[str, Any], error: CallError, failed: str | None) -> None:
        super().__init__((name, value) for name, value in answered.items() if name != failed)
        self._error = error

    def __missing__(self, name: str) -> Any:
        raise self._error.again()

    def __setitem__(self, name: str, value: Any) -> None:
        """What comes after the failed call is no answer."""


def _expression_of(s: Any) -> Any:
    """What a state is executing: SGLang does not tell its backend, but is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is s and "expr" in frame.f_locals:
            return frame.f_locals["expr"]
        frame = frame.f_back
    return None


def _name_of_call(expression: Any, data: dict[str, Any]) -> str:
    """A call is named after the variable that it is for; ``select`` makes two or three."""
    if isinstance(expression, SglGen):
        return str(expression.name or "gen")
    if isinstance(expression, SglSelect):
        name = str(expression.name or "select")
        if "input_ids" in data:
            return f"{name}.prior"
        return name if isinstance(data["text"], list) else f"{name}.prefix"
    return "prefix" if isinstance(expression, SglCommitLazy) else "call"


def _function_run_by(frame: FrameType) -> str | None:
    """The name of the ``sgl.function`` that SGLang's ``run_program`` is about to run."""
    program = frame.f_locals.get("program")
    if not isinstance(program, SglFunction):
        return None
    name: str = getattr(program.func, "__name__", "")
    return name[:MAX_NAME_CHARS] or None


def _raised_in(frame: FrameType | None) -> BaseException | None:
    """The exception that is on its way through ``frame``; not one that is handled outside it."""
    error = sys.exception()
    trace = None if error is None else error.__traceback__
    return error if trace is not None and trace.tb_frame is frame else None


def _error_in_stream(error: KeyError) -> Exception:
    """What the server said in an event that has no text, on which SGLang fails."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        event = frame.f_locals.get("data")
        if isinstance(event, dict) and isinstance(event.get("error"), dict):
            status = event["error"].get("code")
            return CallError(status if isinstance(status, int) else 500, event)
    return error


def _seconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_TIME_S:
        takes = f"takes a number of seconds above 0, at most {MAX_TIME_S:.0f}"
        raise ValueError(f"{name}: {takes}, got {shown(value)}")
    return float(value)


def _name(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    is_name = isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARS and is_text(value)
    if not is_name:
        takes = f"takes a string of 1 to {MAX_NAME_CHARS} characters"
        raise ValueError(f"{name}: {takes}, got {shown(value)}")
    return value


def _choice(name: str, value: str | None) -> str | None:
    choices = [choice.value for choice in OnMiss]
    if value is not None and value not in choices:
        raise ValueError(f"{name}: takes {' or '.join(choices)}, got {shown(value)}")
    return value
