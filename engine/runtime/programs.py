"""Between SGLang's requests, the graphs process and the frame manager.

Reports the calls of programs as they arrive and end, and hands the frame manager what is
expected of the programs then. Nothing here waits: without the graphs process a program goes by
what the frame manager knows of it.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from core.clock import Clock
from core.names import hash_of_program, name_hash
from core.slo import CompoundSlo, RequestTerms, program_of
from engine.outlooks import as_expected
from engine.runtime import arrivals
from graphs.client import GraphsClient
from graphs.links import PrefixLinks, prefix_hashes
from graphs.protocol import Outlook
from graphs.shape import Call, Pace
from scheduler.frame import FrameManager

MAX_PROGRAMS = 10_000
FORGOTTEN_AT_ONCE = 64
MAX_NAMED_CALLS = 4096
"""Names of a program that are kept; a call of a longer one has a number instead."""
ROLE_MARK = "#"
"""What stands before it in a node's name is its role."""


class _Program:
    """A program as far as this scheduler process has seen it."""

    __slots__ = ("heard_s", "is_closed", "is_final", "keys", "links", "names", "nodes", "num_told")

    def __init__(self, tenant: str, program_id: str) -> None:
        self.names = (tenant, program_id)
        self.keys: dict[str, int] = {}
        """Nodes of its live requests by the id under which the frame manager knows them."""
        self.nodes: set[int] = set()
        self.heard_s = 0.0
        self.num_told = 0
        """Calls that the graphs process has been told of from here."""
        self.is_final = False
        """No call of it will follow."""
        self.is_closed = False
        """Its client has said so."""
        self.links = PrefixLinks()


class ProgramWatch:
    """The programs of one scheduler process.

    Args:
        client: None where no graphs process is used, or another rank tells it.
        now_s: the time by which all ranks decide.
        model: the name of the served model.
    """

    def __init__(
        self,
        frames: FrameManager,
        client: GraphsClient | None,
        now_s: Callable[[], float],
        *,
        model: str,
    ) -> None:
        self._timeout_s = frames.config.program_timeout_s
        self._frames = frames
        self._client = client
        self._now_s = now_s
        self._model = name_hash(model)
        self._programs: OrderedDict[int, _Program] = OrderedDict()
        """By hash; the longest quiet first."""
        self._cancelled: OrderedDict[int, float] = OrderedDict()
        """Programs whose calls are refused, by when they were cancelled."""
        self.is_used = True
        """Whether the frame manager is told; the graphs process learns in any case."""
        self.num_outlooks = 0
        self._was_alive = False

    def arrived(self, key: str, req: Req, terms: RequestTerms) -> bool:
        """A request was queued for the first time; False where its program is cancelled."""
        slo = _call_of(terms)
        if slo is None or arrivals.max_output_tokens(req) == 0:
            return True
        program_hash = hash_of_program(terms.tenant, slo.program_id)
        if self._is_cancelled(program_hash):
            return False
        program = self._program(program_hash, terms.tenant, slo.program_id)
        call = self._call(program, key, req, slo, terms.arrival_s)
        program.keys[key] = call.node
        program.is_final |= slo.final
        program.num_told += 1
        if self._client is not None:
            self._client.arrived(
                program_hash,
                call,
                opened_s=terms.arrival_s - slo.program_age_s,
                deadline_at_s=terms.arrival_s + slo.deadline_s,
                application=name_hash(terms.tenant, slo.application or "-"),
                tenant=name_hash("tenant", terms.tenant),
                is_final=slo.final,
            )
        return True

    def ended(self, key: str, req: Req, terms: RequestTerms) -> None:
        """A request is over, however it ended."""
        program_id = program_of(terms)
        if not program_id:
            return
        program_hash = hash_of_program(terms.tenant, program_id)
        program = self._programs.get(program_hash)
        node = None if program is None else program.keys.pop(key, None)
        if program is None or node is None:
            return
        output_tokens = len(req.output_ids)
        program.links.ended(node, output_tokens)
        self._hear(program_hash, program)
        if self._client is not None:
            self._client.finished(
                program_hash,
                node,
                output_tokens,
                at_s=self._now_s(),
                has_failed=_has_failed(req),
                cached_tokens=min(max(req.cached_tokens, 0), len(req.origin_input_ids)),
            )
        if _has_failed(req) and not program.is_closed:
            # If it was to be the last, another one may follow.
            program.is_final = False
        if program.is_final and not program.keys:
            del self._programs[program_hash]

    def closed(self, program_hash: int, *, is_cancelled: bool) -> list[str]:
        """A program is over by its client's word; the keys of its live requests."""
        if is_cancelled:
            # Calls of it may be on their way here still.
            self._cancelled[program_hash] = self._now_s()
            while len(self._cancelled) > MAX_PROGRAMS:
                self._cancelled.popitem(last=False)
        program = self._programs.get(program_hash)
        if program is None:
            return []
        self._frames.program_closed(*program.names, is_cancelled=is_cancelled)
        if self._client is not None:
            self._client.closed(program_hash, is_cancelled=is_cancelled)
        program.is_final = program.is_closed = True
        if not program.keys:
            del self._programs[program_hash]
        return list(program.keys)

    def listen(self) -> tuple[Outlook, ...]:
        """Tell what has happened; what the graphs process has sent since the last call."""
        client = self._client
        if client is None:
            return ()
        found = client.poll(self._pace() if client.has_news else Pace())
        was_alive, self._was_alive = self._was_alive, client.is_alive()
        if was_alive and not self._was_alive:
            # What it last said grows old: programs go by what is seen of them.
            found += tuple(Outlook(name, 1 << 30, 0, is_known=False) for name in self._programs)
        return found

    def take(self, outlooks: tuple[Outlook, ...]) -> None:
        """Use what has come in: here, or from the rank that asks."""
        for outlook in outlooks:
            program = self._programs.get(outlook.program)
            if program is None or outlook.num_calls < program.num_told:
                # Gone, or another call has arrived since: what is said of it comes next.
                continue
            self.num_outlooks += 1
            if self.is_used:
                self._frames.expect(*program.names, as_expected(outlook))

    def use(self, *, is_used: bool) -> None:
        """Let the frame manager have outlooks, or leave it to itself from now on."""
        self.is_used = is_used

    def state(self) -> dict[str, Any]:
        """For whoever looks at the server."""
        client = self._client
        return {
            "is_used": self.is_used,
            "is_alive": client is not None and client.is_alive(),
            "num_outlooks": self.num_outlooks,
            "num_programs": len(self._programs),
            "num_live": sum(bool(program.keys) for program in self._programs.values()),
            "channel": {} if client is None else client.counters(),
        }

    def _program(self, program_hash: int, tenant: str, program_id: str) -> _Program:
        program = self._programs.get(program_hash)
        if program is None:
            program = self._programs[program_hash] = _Program(tenant, program_id)
        self._hear(program_hash, program)
        self._forget_quiet(program.heard_s)
        return program

    def _hear(self, program_hash: int, program: _Program) -> None:
        self._programs.move_to_end(program_hash)
        program.heard_s = self._now_s()

    def _is_cancelled(self, program_hash: int) -> bool:
        """As the HTTP process has it: after the time-out the id is free again."""
        since_s = self._cancelled.get(program_hash)
        if since_s is None:
            return False
        if self._now_s() - since_s < self._timeout_s:
            return True
        del self._cancelled[program_hash]
        return False

    def _forget_quiet(self, now_s: float) -> None:
        """Forget the programs that are over without a word, and of too many the quietest."""
        for program_hash, program in list(islice(self._programs.items(), FORGOTTEN_AT_ONCE)):
            is_many = len(self._programs) > MAX_PROGRAMS
            if now_s - program.heard_s < self._timeout_s and not is_many:
                return
            if not program.keys:
                del self._programs[program_hash]

    def _call(self, program: _Program, key: str, req: Req, slo: CompoundSlo, at_s: float) -> Call:
        node = name_hash("node", slo.node)
        is_many = len(program.nodes) >= MAX_NAMED_CALLS
        if not node or is_many or node in program.nodes:
            # Without a name, or one of several answers to one call.
            node = name_hash("request", key, str(self._frames.num_arrived))
        if not is_many:
            program.nodes.add(node)
        input_tokens = len(req.origin_input_ids)
        known = tuple(name_hash("node", parent) for parent in slo.parents)
        if not slo.node:
            hashes = prefix_hashes(req.origin_input_ids)
            known = known or program.links.arrived(node, hashes, input_tokens)
        return Call(
            node=node,
            role=name_hash("role", _role_of(slo)),
            model=self._model,
            parents=known,
            tools=tuple(name_hash("tool", tool) for tool in slo.tools),
            input_tokens=input_tokens,
            at_s=at_s,
        )

    def _pace(self) -> Pace:
        """What work costs now, with as many together as run now."""
        model = self._frames.step_time
        _, decode_s, _, prefill_s, _ = model.coefficients
        num = max(self._frames.num_running, 1)
        return Pace(prefill_s, model.pace_s(num, num * self._frames.mean_context_tokens), decode_s)


def _call_of(terms: RequestTerms) -> CompoundSlo | None:
    """What makes a request a call of a program; None where it is none."""
    if isinstance(terms.slo, CompoundSlo):
        return terms.slo
    if terms.closes_program:
        # Streamed to whoever reads it: of the program it is the last call.
        return CompoundSlo(0.0, terms.closes_program, final=True)
    return None


def _role_of(slo: CompoundSlo) -> str:
    return slo.node.partition(ROLE_MARK)[0]


def connect(address: str, clock: Clock, timeout_s: float) -> GraphsClient | None:
    """A client of the graphs process at ``address``; None for no address."""
    return GraphsClient(address, clock, timeout_s=timeout_s) if address else None


def _has_failed(req: Req) -> bool:
    return req.finished_reason is None or isinstance(req.finished_reason, FINISH_ABORT)
