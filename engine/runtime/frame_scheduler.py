"""SGLang's scheduler with the frame manager in charge of what runs.

``FrameScheduler`` replaces SGLang's ``Scheduler`` in every scheduler process. Each loop of
SGLang asks ``get_new_batch_prefill`` for a batch to prefill; there we tick the
``FrameManager``, carry out its plan on the running batch, and let SGLang prefill what the
plan admits. Everything else (prefix cache, chunking, overlap, streaming, grammars) is
SGLang's own code.
"""

import contextlib
import logging
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import (
    AbortReq,
    GetInternalStateReqOutput,
    SetInternalStateReqOutput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan, Req, ScheduleBatch
from sglang.srt.runtime_context import get_parallel

from core.clock import MonotonicClock
from engine.runtime import arrivals, batches, custom, forecasts, programs
from engine.runtime.drops import REASON_CANCELLED, drop_message
from engine.runtime.forecasts import Forecasts
from engine.runtime.kv_swap import KvSwap, can_swap
from engine.runtime.programs import ProgramWatch
from engine.runtime.settings import (
    KNOB_CANCEL_PROGRAM,
    KNOB_END_PROGRAM,
    KNOB_FORCE_MOVES,
    KNOB_FORECASTS,
    KNOB_OUTLOOKS,
    KNOB_POLICY,
    Settings,
    from_environment,
)
from engine.runtime.step_timer import StepTimer
from graphs.client import GraphsClient
from graphs.protocol import Outlook
from predictor.client import NO_NEWS, News, PredictorClient
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, FramePlan, PlanKind
from scheduler.policies import POLICIES
from scheduler.step_time import StepObservation

logger = logging.getLogger(__name__)


class ClockTick(msgspec.Struct, frozen=True):
    """Rank 0's time and step durations, broadcast so that every rank decides alike."""

    now_s: float
    steps: tuple[StepObservation, ...]
    news: News = NO_NEWS
    """What the predictor has sent to rank 0, which alone asks it."""
    outlooks: tuple[Outlook, ...] = ()
    """What the graphs process has."""


def _is_movable(req: Req) -> bool:
    """Whether a request may be parked or preempted at all.

    One that is about to end would only end later; beam members share rows and a session
    owns its row, so theirs cannot be taken (SGLang aborts a beam group instead).
    """
    is_ending = req.finished() or req.to_finish is not None
    return not is_ending and req.beam_group is None and req.session is None


class FrameScheduler(sglang_scheduler.Scheduler):  # type: ignore[misc]  # SGLang is untyped
    """The adapter between SGLang's event loop and the pure frame manager."""

    # SGLang's own attributes that we read and write.
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    last_batch: ScheduleBatch | None
    chunked_req: Req | None

    def __init__(self, server_args: Any, port_args: Any) -> None:
        settings = from_environment()
        if settings is None:
            raise RuntimeError("the frame scheduler was started without its settings")
        self._settings: Settings = settings
        self._clock = MonotonicClock()
        self._tick: ClockTick | None = None
        self._frames = FrameManager(settings.scheduler, **custom.load(settings.scheduler))
        self._parked: ScheduleBatch | None = None
        self._reqs: dict[str, Req] = {}
        """Live SGLang requests by the id under which the frame manager knows them."""
        self._unwanted: set[str] = set()
        """Live requests that their client has cancelled."""
        self._admissions: tuple[str, ...] = ()
        self._num_run: int | None = None
        """How many the last plan lets run together; None before the first."""
        self._was_prefill = False
        self._abort_only: str | None = None
        self._may_have_vanished = False
        self._is_window_open = False
        """The waiting queue is cut down to what is admitted: it does not show every request."""
        self._steps_since_forced_move = 0
        self._force_moves_every = settings.force_moves_every
        self._swap: KvSwap | None = None
        super().__init__(server_args, port_args)
        self._timer = StepTimer(self._clock, is_synchronous=self.device == "cpu")
        share = settings.max_batch and max(settings.max_batch // max(server_args.dp_size, 1), 1)
        is_forecasting = bool(settings.predictor_address)
        self._forecasts = Forecasts(
            self._frames,
            self._connect(server_args),
            forecasts.token_classes(self.tokenizer) if is_forecasting else None,
        )
        self._programs = ProgramWatch(
            self._frames,
            self._connect_graphs(),
            self._now_s,
            model=server_args.served_model_name or server_args.model_path,
        )
        self._swap = self._make_swap()
        self._max_batch: int = min(share or self.max_running_requests, self.max_running_requests)

    def _make_swap(self) -> KvSwap | None:
        # Ranks would measure other times, and then decide differently.
        is_alone = get_parallel().tp_size == 1
        pools = (self.tree_cache, self.token_to_kv_pool_allocator)
        if not (self._settings.kv_swap_bytes and is_alone and can_swap(*pools)):
            return None
        most = self._settings.kv_swap_bytes
        return KvSwap(*pools, self.req_to_token_pool, self._clock, most)

    def _connect(self, server_args: Any) -> PredictorClient | None:
        if get_parallel().tp_rank != 0:
            return None
        model = server_args.served_model_name or server_args.model_path
        return forecasts.connect(self._settings.predictor_address, model, self._clock)

    def _connect_graphs(self) -> GraphsClient | None:
        if get_parallel().tp_rank != 0:
            return None
        timeout_s = self._settings.scheduler.program_timeout_s
        return programs.connect(self._settings.graphs_address, self._clock, timeout_s)

    # Time.

    def _now_s(self) -> float:
        return self._tick.now_s if self._tick is not None else self._clock.now_s()

    def _poll_timeout_aborts(self) -> list[Any]:
        """SGLang's waiting timeout, for requests that have not started yet, and our clock tick."""
        with self._only_fresh_requests_waiting():
            local: list[Any] = super()._poll_timeout_aborts()
        if get_parallel().tp_size > 1:
            news, outlooks = self._forecasts.listen(), self._programs.listen()
            local.append(ClockTick(self._clock.now_s(), self._timer.take(), news, outlooks))
        return local

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for recv_req in recv_reqs:
            if isinstance(recv_req, ClockTick):
                self._tick = recv_req
                self._forecasts.take(recv_req.news)
                self._programs.take(recv_req.outlooks)
                for step in recv_req.steps:
                    self._frames.observe_step(step)
        super().process_input_requests([r for r in recv_reqs if not isinstance(r, ClockTick)])
        # The loop is alive: say so now and not when a long prefill has ended.
        while self.return_health_check_ipcs and self._timer.is_making_progress():
            self.maybe_send_health_check_signal()

    # Arrivals and ends.

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:  # noqa: FBT001
        """A new request, or one that comes back after it lost its KV.

        One that comes back keeps its arrival order and is not subject to the queue limit:
        its client has already been given tokens.
        """
        key = getattr(req, "frame_key", None)
        if key is None or key not in self._reqs:
            num_waiting = len(self.waiting_queue)
            super()._add_request_to_queue(req, is_retracted)
            if self.waiting_queue and self.waiting_queue[-1] is req:
                self._register(req)
            if len(self.waiting_queue) != num_waiting + 1:
                self._forget_vanished()
            return
        record = self._frames.get(key)
        if record is not None and record.holds_kv:
            self._frames.preempted(key)
        req.storage_prefetch_retry_attempts = 0
        req.storage_prefetch_last_match_len = None
        req.staged_prefetch_plan = None
        self.waiting_queue.append(req)
        req.time_stats.set_wait_queue_entry_time()

    def _register(self, req: Req) -> None:
        key = req.rid
        # A client may reuse the id of a request whose last step is still in flight.
        while key in self._reqs:
            key += "'"
        req.frame_key = key
        self._reqs[key] = req
        terms = arrivals.terms_of(req, self._settings.slo.default, self._now_s())
        trusts = self._settings.trusts_known_lengths
        self._frames.arrive(
            key, terms, **arrivals.arrival_arguments(req, trusts_known_lengths=trusts)
        )
        self._forecasts.arrived(key, req, terms)
        if not self._programs.arrived(key, req, terms):
            self._end_waiting(key, REASON_CANCELLED, RequestState.ABORTED)
            return
        if arrivals.has_answer_begun(req):
            self._frames.answer_began(key)

    def _forget(self, key: str, state: RequestState) -> None:
        record = self._frames.get(key)
        self._frames.ended(key, state)
        if self._swap is not None:
            self._swap.forget(key)
        req = self._reqs.pop(key, None)
        if req is not None:
            self._forecasts.ended(key, req)
            if record is not None:
                self._programs.ended(key, req, record.terms)

    def _forget_vanished(self, running_batch: ScheduleBatch | None = None) -> None:
        """Close the records of requests that SGLang ended on a path of its own.

        ``running_batch``: where a pass has rearranged the running batch and SGLang does not
        know yet.
        """
        if self._is_window_open:
            return
        self._may_have_vanished = False
        reqs = list(self._present_reqs()) + ([] if running_batch is None else running_batch.reqs)
        present = {getattr(req, "frame_key", None) for req in reqs}
        for key in [key for key in self._reqs if key not in present]:
            self._forget(key, RequestState.ABORTED)

    def _present_reqs(self) -> Iterator[Req]:
        yield from self.waiting_queue
        yield from self.running_batch.reqs
        if self._parked is not None:
            yield from self._parked.reqs
        if self.last_batch is not None:
            yield from self.last_batch.reqs
        if self.cur_batch_for_debug is not None:
            yield from self.cur_batch_for_debug.reqs
        for batch, _ in self.result_queue:
            yield from batch.reqs
        if self.chunked_req is not None:
            yield self.chunked_req

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        super().process_batch_result(batch, result)
        self._timer.step_processed(batch)
        if get_parallel().tp_size == 1:
            for step in self._timer.take():
                self._frames.observe_step(step)
        for req in batch.reqs:
            key = getattr(req, "frame_key", None)
            if key is None or key not in self._reqs:
                continue
            if req.finished():
                is_abort = isinstance(req.finished_reason, FINISH_ABORT)
                self._frames.progressed(key, len(req.output_ids))
                self._forget(key, RequestState.ABORTED if is_abort else RequestState.FINISHED)
            else:
                self._frames.progressed(key, len(req.output_ids))
                self._forecasts.progressed(key, len(req.output_ids))
                if req.require_reasoning and arrivals.has_answer_begun(req):
                    self._frames.answer_began(key)

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        self._timer.step_launched(batch)
        result = super().run_batch(batch, *args, **kwargs)
        self._timer.step_returned(batch)
        return result

    # The plan, carried out.

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        now_s = self._now_s()
        if get_parallel().tp_size == 1:
            self._forecasts.take(self._forecasts.listen())
            self._programs.take(self._programs.listen())
        self._admit_ready_grammars()
        if self._unwanted:
            self._end_unwanted()
        if self._parked is not None:
            self._parked.filter_batch()
            running_batch = self._resume_the_ending(running_batch)
        in_flight = self._just_prefilled()
        moved: set[str] = set()
        if self._may_have_vanished:
            self._forget_vanished(running_batch)
        plan = self._frames.tick(now_s, self._capacity())
        if plan is not None:
            if plan.kind is PlanKind.FRAME:
                # SGLang ends requests on paths of its own: time-outs, prompts that never fit.
                self._forget_vanished(running_batch)
            running_batch = self._carry_out(plan, running_batch, in_flight, moved)
        if self._force_moves_every:
            running_batch = self._force_moves(running_batch, in_flight, moved)
        # SGLang clears this flag only where a request leaves; we change the batch elsewhere too.
        running_batch.batch_is_full = False
        if not self._frames.may_prefill(
            now_s, len(running_batch.reqs), was_prefill=self._was_prefill
        ):
            self._was_prefill = False
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        next_plan = self._prefill(running_batch, moved, now_s)
        self._was_prefill = next_plan.batch_to_run is not None
        if next_plan.batch_to_run is None and next_plan.running_batch.is_empty():
            # What was to run cannot start now; who rests must not wait for it.
            next_plan.running_batch = self._resume_best(next_plan.running_batch)
        return next_plan

    def _resume_best(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        """As many parked requests as may run, those last to give up their KV first."""
        if self._parked is None:
            return running_batch
        order = self._frames.victims(self._now_s(), self._capacity())
        return self._resume(tuple(reversed(order)), running_batch)

    def _admit_ready_grammars(self) -> None:
        """Queue the requests whose grammar is compiled, before the plan is made.

        SGLang does it while it prefills, where the plan could not rank them any more.
        """
        if self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)

    def _capacity(self) -> EngineCapacity:
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        return EngineCapacity(
            max_batch=self._max_batch,
            free_kv_tokens=int(free),
            total_kv_tokens=int(self.max_total_num_tokens),
            free_slots=int(self.req_to_token_pool.available_size()),
            swap_token_s=None if self._swap is None else self._swap.token_s,
        )

    def _just_prefilled(self) -> set[str]:
        """Requests whose prefill result may still be in flight: they are not moved this step."""
        last = self.last_batch
        if last is None or not last.forward_mode or not last.forward_mode.is_extend():
            return set()
        return {getattr(req, "frame_key", "") for req in last.reqs}

    def _carry_out(
        self,
        plan: FramePlan,
        running_batch: ScheduleBatch,
        in_flight: set[str],
        moved: set[str],
    ) -> ScheduleBatch:
        """Do the plan's moves; what cannot be moved in this step stays as it is."""
        for ending in plan.drop:
            self._end_waiting(ending.request_id, ending.reason, RequestState.DROPPED)
        for ending in plan.cancel:
            self._cancel(ending.request_id, ending.reason)
        self._preempt(set(plan.preempt) - in_flight, running_batch, moved)
        self._park(set(plan.park) - in_flight, running_batch)
        running_batch = self._resume(plan.resume, running_batch)
        self._admissions = plan.admit
        self._num_run = plan.num_run
        return running_batch

    def _places(self, running_batch: ScheduleBatch) -> int:
        """How many more may run together, by the last plan and the engine's limit."""
        limit = self._max_batch if self._num_run is None else min(self._num_run, self._max_batch)
        return max(limit - len(running_batch.reqs), 0)

    def _preempt(self, keys: set[str], running_batch: ScheduleBatch, moved: set[str]) -> None:
        """Take the KV of running or parked requests and queue them again."""
        if not keys:
            return
        for batch in (running_batch, self._parked):
            if batch is None:
                continue
            leaving = [req for req in batch.reqs if req.frame_key in keys and _is_movable(req)]
            batch.filter_batch(reqs_to_exclude=leaving)
            for req in leaving:
                if self._swap is not None:
                    self._swap.save(req.frame_key, req)
                batches.release_kv(req, self.tree_cache)
                self._add_request_to_queue(req, is_retracted=True)
                # Its last step may be in flight: SGLang drops that result only until the
                # request is prefilled again, so not in this same step.
                moved.add(req.frame_key)
        if self._parked is not None and self._parked.is_empty():
            self._parked = None

    def _park(self, keys: set[str], running_batch: ScheduleBatch) -> None:
        indices = batches.indices_where(
            running_batch, lambda req: req.frame_key in keys and _is_movable(req)
        )
        if not indices:
            return
        piece = batches.split_off(running_batch, indices)
        for req in piece.reqs:
            self._frames.parked(req.frame_key)
        self._parked = batches.join(self._parked, piece)

    def _resume(self, keys: tuple[str, ...], running_batch: ScheduleBatch) -> ScheduleBatch:
        if self._parked is None or not keys:
            return running_batch
        wanted = set(keys)
        indices = batches.indices_where(self._parked, lambda req: req.frame_key in wanted)
        indices = indices[: self._places(running_batch)]
        return self._resume_at(indices, running_batch)

    def _resume_at(self, indices: list[int], running_batch: ScheduleBatch) -> ScheduleBatch:
        if self._parked is None or not indices:
            return running_batch
        piece = batches.split_off(self._parked, indices)
        for req in piece.reqs:
            if req.frame_key in self._reqs:
                self._frames.resumed(req.frame_key)
        if self._parked.is_empty():
            self._parked = None
        return batches.join(running_batch, piece)

    def _resume_the_ending(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        """A parked request that must end needs one more step, as every running one does."""
        parked = self._parked
        if parked is None:
            return running_batch
        if parked.is_empty():
            self._parked = None
            return running_batch
        indices = batches.indices_where(parked, lambda req: req.to_finish is not None)
        return self._resume_at(indices, running_batch)

    def _force_moves(
        self, running_batch: ScheduleBatch, in_flight: set[str], moved: set[str]
    ) -> ScheduleBatch:
        """Testing: park one request and preempt another now and then, whatever the policy says."""
        self._steps_since_forced_move += 1
        if self._steps_since_forced_move < self._force_moves_every:
            return running_batch
        self._steps_since_forced_move = 0
        if self._parked is not None:
            running_batch = self._resume_at([0], running_batch)
        movable = [
            req.frame_key
            for req in running_batch.reqs
            if req.frame_key not in in_flight and not arrivals.is_pinned(req) and not req.finished()
        ]
        if len(movable) >= 2:
            self._park({movable[0]}, running_batch)
        if len(movable) >= 3:
            self._preempt({movable[-1]}, running_batch, moved)
            self._admissions = (movable[-1], *self._admissions)
        return running_batch

    def _prefill(
        self, running_batch: ScheduleBatch, moved: set[str], now_s: float
    ) -> NextBatchPlan:
        """Let SGLang prefill what the plan admits, in its order, as far as there is room."""
        room = self._places(running_batch) - (self.chunked_req is not None)
        admitted = self._admissible(moved)[:room] if room > 0 else []
        if self._swap is not None:
            for req in admitted:
                self._swap.restore(req.frame_key, self._frames.step_time.prefill_s(1))
        held = self.waiting_queue
        if admitted:
            chosen = {id(req) for req in admitted}
            held = [req for req in held if id(req) not in chosen]
        self.waiting_queue = admitted
        self._is_window_open = True
        try:
            next_plan = super().get_new_batch_prefill(running_batch)
        finally:
            self._is_window_open = False
            self.waiting_queue = held + self.waiting_queue
        if next_plan.batch_to_run is not None:
            for req in next_plan.batch_to_run.reqs:
                record = self._frames.get(getattr(req, "frame_key", ""))
                if record is not None and not record.holds_kv:
                    self._frames.started(req.frame_key, now_s)
                    if self._swap is not None:
                        self._swap.forget(req.frame_key)
        return next_plan

    def _admissible(self, moved: set[str]) -> list[Req]:
        """Requests that the plan admits and that wait, in its order."""
        admitted = []
        for key in self._admissions:
            record = self._frames.get(key)
            if record is not None and not record.holds_kv and key not in moved:
                admitted.append(self._reqs[key])
        if not admitted:
            return admitted
        # One that SGLang has ended meanwhile must not come back.
        waiting = {id(req) for req in self.waiting_queue}
        return [req for req in admitted if id(req) in waiting]

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        """Under KV pressure give up the KV that the policy values least, parked first."""
        if not self._reqs_finishing_inflight(batch) and not batch.check_decode_mem():
            moved: set[str] = set()
            for key in self._frames.victims(self._now_s(), self._capacity()):
                is_last = len(batch.reqs) == 1 and batch.reqs[0].frame_key == key
                if is_last or batch.check_decode_mem():
                    break
                self._preempt({key}, batch, moved)
        return super().update_running_batch(batch)

    # Ending requests on our own account.

    def _end_waiting(self, key: str, reason: str, state: RequestState) -> None:
        """End a request that holds no KV; its client gets the reason."""
        req = self._reqs.get(key)
        if req is None or req not in self.waiting_queue:
            return
        self.waiting_queue.remove(req)
        self._release_aborted_request(req)
        self.beam_coordinator.retire_group(req)
        finished_reason: dict[str, Any] = {"type": "abort", "message": reason}
        if state is RequestState.DROPPED:
            finished_reason["message"] = drop_message(reason)
            finished_reason["status_code"] = HTTPStatus.SERVICE_UNAVAILABLE
        abort = sglang_scheduler._make_abort_req(req, finished_reason=finished_reason)
        self.send_abort_output(abort, req)
        self._forget(key, state)

    def _cancel(self, key: str, reason: str) -> None:
        """End a started request with what it has."""
        req = self._reqs.get(key)
        record = self._frames.get(key)
        if req is None or record is None:
            return
        if record.state is RequestState.PREEMPTED:
            self._end_waiting(key, reason, RequestState.ABORTED)
        elif req is not self.chunked_req and req.to_finish is None:
            req.to_finish = FINISH_ABORT(reason)

    def _cancel_program(self, program_hash: int) -> None:
        """End all calls of a program, each with what it has."""
        self._unwanted |= set(self._programs.closed(program_hash, is_cancelled=True))
        self._end_unwanted()

    def _end_unwanted(self) -> None:
        """End what its client has cancelled; while its prompt is being chunked it goes on."""
        for key in sorted(self._unwanted):
            record = self._frames.get(key)
            if record is None:
                self._unwanted.discard(key)
            elif record.state is RequestState.WAITING:
                self._end_waiting(key, REASON_CANCELLED, RequestState.ABORTED)
            else:
                self._cancel(key, REASON_CANCELLED)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort exactly the request of that id. SGLang would take it as a prefix of ids."""
        if recv_req.abort_all:
            super().abort_request(recv_req)
        else:
            with self._only_waiting_with(recv_req.rid):
                super().abort_request(recv_req)
        # Looked for before the next plan, once for all aborts that came together.
        self._may_have_vanished = True

    @contextlib.contextmanager
    def _only_waiting_with(self, rid: str) -> Iterator[None]:
        """Hide every request but ``rid`` from SGLang's prefix match."""
        waiting, chunked = self.waiting_queue, self.chunked_req
        grammar = self.grammar_manager.grammar_queue
        hidden_waiting = [req for req in waiting if req.rid != rid]
        hidden_grammar = [req for req in grammar if req.rid != rid]
        self.waiting_queue = [req for req in waiting if req.rid == rid]
        self.grammar_manager.grammar_queue = [req for req in grammar if req.rid == rid]
        self._abort_only = rid
        if chunked is not None and chunked.rid != rid:
            self.chunked_req = None
        try:
            yield
        finally:
            self.waiting_queue = hidden_waiting + self.waiting_queue
            self.grammar_manager.grammar_queue = hidden_grammar + list(
                self.grammar_manager.grammar_queue
            )
            self.chunked_req = chunked
            self._abort_only = None

    def collect_inflight_reqs(self) -> set[Req]:
        reqs: set[Req] = super().collect_inflight_reqs()
        if self._abort_only is None:
            return reqs
        return {req for req in reqs if req.rid == self._abort_only}

    def _collect_inflight_batches(self) -> list[ScheduleBatch | None]:
        return [*super()._collect_inflight_batches(), self._parked]

    def _abort_on_queued_limit(self, recv_req: Req) -> bool:
        with self._only_fresh_requests_waiting():
            return bool(super()._abort_on_queued_limit(recv_req))

    @contextlib.contextmanager
    def _only_fresh_requests_waiting(self) -> Iterator[None]:
        """Hide preempted requests from limits that are meant for those never started."""
        if not self._frames.count(RequestState.PREEMPTED):
            yield
            return
        started = [req for req in self.waiting_queue if req.retraction_count]
        self.waiting_queue = [req for req in self.waiting_queue if not req.retraction_count]
        try:
            yield
        finally:
            self.waiting_queue = started + self.waiting_queue

    def flush_cache(self, *args: Any, **kwargs: Any) -> Any:
        """What is flushed must not come back from a copy, least of all under other weights."""
        if self._swap is not None:
            self._swap.clear()
        return super().flush_cache(*args, **kwargs)

    # SGLang's own bookkeeping, told about parked requests.

    def pause_generation(self, recv_req: Any) -> None:
        if self._parked is not None and recv_req.mode == "retract":
            # A result that came in since the last pass may have ended one of them.
            self._parked.filter_batch()
            every = list(range(len(self._parked.reqs)))
            self.running_batch = self._resume_at(every, self.running_batch)
        super().pause_generation(recv_req)

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        has_parked = self._parked is not None and not self._parked.is_empty()
        return not has_parked and bool(super().is_fully_idle(*args, **kwargs))

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        self.invariant_checker.get_running_batch = self._running_and_parked

    def _running_and_parked(self) -> Any:
        if self._parked is None:
            return self.running_batch
        return SimpleNamespace(reqs=[*self.running_batch.reqs, *self._parked.reqs])

    def get_internal_state(self, recv_req: Any) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        output.internal_state["jitserve"] = self._state()
        return output

    def set_internal_state(self, recv_req: Any) -> SetInternalStateReqOutput:
        """Our knobs, beside SGLang's own. SGLang's route lets any number through to here."""
        knobs = recv_req.server_args
        limits = {
            KNOB_POLICY: len(POLICIES),
            KNOB_FORCE_MOVES: 2**31,
            KNOB_FORECASTS: 2,
            KNOB_OUTLOOKS: 2,
            KNOB_END_PROGRAM: 2**63,
            KNOB_CANCEL_PROGRAM: 2**63,
        }
        if not set(knobs) <= set(limits):
            return super().set_internal_state(recv_req)
        # Not ``in range``: of a fraction that would try every number.
        if not all(
            isinstance(value, int) and 0 <= value < limits[name] for name, value in knobs.items()
        ):
            return SetInternalStateReqOutput(updated=False)
        if KNOB_POLICY in knobs:
            self._frames.use_policy(list(POLICIES)[int(knobs[KNOB_POLICY])])
        if KNOB_FORCE_MOVES in knobs:
            self._force_moves_every = int(knobs[KNOB_FORCE_MOVES])
        if KNOB_FORECASTS in knobs:
            self._forecasts.use(is_used=bool(knobs[KNOB_FORECASTS]))
        if KNOB_OUTLOOKS in knobs:
            self._programs.use(is_used=bool(knobs[KNOB_OUTLOOKS]))
        if KNOB_END_PROGRAM in knobs:
            self._programs.closed(int(knobs[KNOB_END_PROGRAM]), is_cancelled=False)
        if KNOB_CANCEL_PROGRAM in knobs:
            self._cancel_program(int(knobs[KNOB_CANCEL_PROGRAM]))
        return SetInternalStateReqOutput(updated=True)

    def _state(self) -> dict[str, Any]:
        frames = self._frames
        return {
            "policy": frames.policy_name,
            "predictor": self._forecasts.state(),
            "graphs": self._programs.state(),
            "kv_swap": None if self._swap is None else self._swap.state(),
            "force_moves_every": self._force_moves_every,
            "num_running": frames.count(RequestState.RUNNING),
            "num_parked": frames.count(RequestState.PARKED),
            "num_waiting": frames.count(RequestState.WAITING)
            + len(self.grammar_manager.grammar_queue),
            "num_preempted": frames.count(RequestState.PREEMPTED),
            "free_kv_tokens": int(self.token_to_kv_pool_allocator.available_size()),
            "evictable_kv_tokens": int(self.tree_cache.evictable_size()),
            "total_kv_tokens": int(self.max_total_num_tokens),
            "free_request_slots": int(self.req_to_token_pool.available_size()),
            "total_request_slots": int(self.req_to_token_pool.size),
            "max_batch": self._max_batch,
            "num_run_at_most": self._num_run,
            "cutoff": None if frames.policy.tuner is None else frames.policy.tuner.cutoff,
            "arrived": frames.num_arrived,
            "num_parks": frames.num_parks,
            "num_preemptions": frames.num_preemptions,
            "ended": {state.value: count for state, count in frames.num_ended.items()},
            "step_time_coefficients_s": list(frames.step_time.coefficients),
        }
