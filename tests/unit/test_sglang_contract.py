"""What we take from SGLang is where the pinned version has it.

When one of these fails after an upgrade, read the sentence: it names what moved. Everything of
SGLang's that we override, wrap or call is listed in engine/runtime/overrides.py.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.metadata
import inspect
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.runtime.overrides import (
    ATTENTION,
    CLIP_VARIABLE,
    FRONTEND_NAMES,
    GENERATE_REQUEST,
    OVERRIDDEN_ATTENTION_METHODS,
    OVERRIDDEN_METHODS,
    SCHEDULER,
    USED_METHODS,
    USED_NAMES,
    USED_REQUEST_ATTRIBUTES,
    VERIFY_SAMPLING,
)

# Importing SGLang takes a quarter of a minute on two idle cores, and it warns of missing GPUs.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

REPOSITORY = Path(__file__).resolve().parents[2]
LOOK = "look in engine/runtime/overrides.py for who needs it"


def pinned_version() -> str:
    """The version of SGLang in pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (pin,) = [item for item in project["dependencies"] if item.startswith("sglang")]
    name, _, version = pin.partition("==")
    assert (name, bool(version)) == ("sglang", True), f"sglang must be pinned with ==, not {pin!r}"
    return version


def resolve(dotted: str) -> Any:
    """The object of a dotted name; fails with a sentence that says how far the name leads."""
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        here = ".".join(parts[:position])
        if not hasattr(found, part) and inspect.ismodule(found):
            try:
                importlib.import_module(f"{here}.{part}")
            except ModuleNotFoundError as error:
                if error.name != f"{here}.{part}":
                    raise
        if not hasattr(found, part):
            pytest.fail(
                f"{dotted} has moved: SGLang {importlib.metadata.version('sglang')} has no "
                f"{part!r} in {here}; {LOOK}"
            )
        found = getattr(found, part)
    return found


@pytest.fixture(scope="module")
def scheduler() -> type:
    """SGLang's own scheduler class."""
    found = resolve(SCHEDULER)
    assert isinstance(found, type)
    return found


@pytest.fixture(scope="module")
def frame_scheduler() -> type:
    """Ours."""
    from engine.runtime.frame_scheduler import FrameScheduler

    return FrameScheduler


def test_the_installed_sglang_is_the_pinned_one() -> None:
    installed = importlib.metadata.version("sglang")
    assert installed == pinned_version(), (
        f"sglang {installed} is installed and pyproject.toml pins {pinned_version()}: run "
        "`make setup`, or change the pin after this whole file passes"
    )


@pytest.mark.parametrize("dotted", [*USED_NAMES, *FRONTEND_NAMES])
def test_a_name_that_we_use_is_where_it_was(dotted: str) -> None:
    resolve(dotted)


@pytest.mark.parametrize("name", [*OVERRIDDEN_METHODS, *USED_METHODS])
def test_a_method_that_we_override_or_call_is_still_one_of_the_scheduler(
    scheduler: type, name: str
) -> None:
    method = getattr(scheduler, name, None)
    assert callable(method), (
        f"SGLang's Scheduler has no method {name!r} any more: search for it in {SCHEDULER} and "
        f"the mixins beside it; {LOOK}"
    )


def test_our_scheduler_is_a_subclass_and_overrides_exactly_what_is_listed(
    scheduler: type, frame_scheduler: type
) -> None:
    assert issubclass(frame_scheduler, scheduler)
    ours = {name for name, value in vars(frame_scheduler).items() if inspect.isfunction(value)}
    overridden = {name for name in ours if hasattr(scheduler, name)} - {"__init__"}
    unlisted, idle = overridden - set(OVERRIDDEN_METHODS), set(OVERRIDDEN_METHODS) - overridden
    assert not unlisted, (
        f"FrameScheduler overrides {sorted(unlisted)} of SGLang's Scheduler and "
        "OVERRIDDEN_METHODS does not say so: list it, or give our own method another name"
    )
    assert not idle, f"OVERRIDDEN_METHODS lists {sorted(idle)}, which FrameScheduler lacks"


def attributes_of_self(cls: type) -> set[str]:
    """Every name that the code of a class, its bases included, has behind ``self.``."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_attribute and node.value.id == "self":
                names.add(node.attr)
    return names


@pytest.mark.parametrize("name", USED_REQUEST_ATTRIBUTES)
def test_an_attribute_that_we_read_of_a_request_is_still_there(name: str) -> None:
    request = resolve("sglang.srt.managers.schedule_batch.Req")
    assert name in attributes_of_self(request), f"SGLang's Req has no {name!r} any more; {LOOK}"


def test_the_variable_that_bounds_the_kv_kept_free_is_still_read() -> None:
    module = resolve("sglang.srt.managers.schedule_policy")
    assert CLIP_VARIABLE in inspect.getsource(module), (
        f"SGLang does not read {CLIP_VARIABLE} any more: prompts of our plans may never start; "
        f"{LOOK}"
    )


def test_the_attributes_that_we_read_are_still_those_of_the_scheduler(
    scheduler: type, frame_scheduler: type
) -> None:
    own_source = ast.parse(textwrap.dedent(inspect.getsource(frame_scheduler)))
    used, own = set(), set(vars(frame_scheduler))
    for node in ast.walk(own_source):
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id == "self":
            used.add(node.attr)
            if isinstance(node.ctx, ast.Store) and node.attr.startswith("_"):
                own.add(node.attr)
    theirs = attributes_of_self(scheduler) | set(dir(scheduler))
    gone = used - own - theirs
    assert not gone, (
        f"FrameScheduler reads self.{', self.'.join(sorted(gone))}, which SGLang's Scheduler does "
        f"not have any more: search for its new name in {SCHEDULER} and the mixins beside it"
    )
    methods = {name for name in used - own if inspect.isfunction(getattr(scheduler, name, None))}
    unlisted = methods - set(USED_METHODS) - set(OVERRIDDEN_METHODS)
    assert not unlisted, f"list in USED_METHODS that FrameScheduler calls {sorted(unlisted)}"


def named_parameters(method: Any) -> list[str]:
    """The names of a method's parameters, in order, without *args and **kwargs."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in named]


@pytest.mark.parametrize("name", ["__init__", *OVERRIDDEN_METHODS])
def test_an_overriding_method_takes_the_parameters_of_the_one_it_overrides(
    scheduler: type, frame_scheduler: type, name: str
) -> None:
    theirs, ours = getattr(scheduler, name), getattr(frame_scheduler, name)
    their_names, our_names = named_parameters(theirs), named_parameters(ours)
    if name == "__init__":
        our_names = our_names[:3]
        their_names = their_names[:3]
    assert our_names == their_names[: len(our_names)], (
        f"Scheduler.{name} now takes {inspect.signature(theirs)} and FrameScheduler.{name} names "
        f"{our_names}: SGLang passes arguments by name, so ours must be called alike"
    )
    rest = [
        parameter
        for parameter in list(inspect.signature(theirs).parameters.values())[len(our_names) :]
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    kinds = {parameter.kind for parameter in inspect.signature(ours).parameters.values()}
    passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    assert not rest or passes_on or name == "__init__", (
        f"Scheduler.{name} now takes {[parameter.name for parameter in rest]} too: "
        f"FrameScheduler.{name} must take it and pass it on"
    )


@pytest.mark.parametrize(
    ("dotted", "names"),
    [
        (VERIFY_SAMPLING, ["self", "vocab_size"]),
        (GENERATE_REQUEST, ["self", "obj", "request"]),
        ("sglang.srt.managers.scheduler._make_abort_req", ["req", "finished_reason"]),
        ("sglang.srt.mem_cache.common.release_kv_cache", ["req", "tree_cache"]),
        ("sglang.srt.mem_cache.common.evict_from_tree_cache", ["tree_cache", "num_tokens"]),
        ("sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch", ["self", "other"]),
    ],
)
def test_what_we_wrap_or_call_takes_the_arguments_that_we_give(
    dotted: str, names: list[str]
) -> None:
    parameters = list(inspect.signature(resolve(dotted)).parameters)
    assert parameters[: len(names)] == names, (
        f"{dotted} now takes ({', '.join(parameters)}) and we count on ({', '.join(names)}); {LOOK}"
    )


@pytest.mark.parametrize(
    ("dotted", "name"),
    [
        ("sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch", "keep_indices"),
        ("sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch", "reqs_to_exclude"),
        ("sglang.srt.mem_cache.common.release_kv_cache", "checkpoint"),
        (
            "sglang.srt.entrypoints.http_server.launch_server",
            "run_scheduler_process_func",
        ),
        ("sglang.srt.managers.schedule_batch.NextBatchPlan", "batch_to_run"),
        ("sglang.srt.managers.schedule_batch.NextBatchPlan", "running_batch"),
    ],
)
def test_what_we_pass_by_name_is_still_called_so(dotted: str, name: str) -> None:
    parameters = inspect.signature(resolve(dotted)).parameters
    assert name in parameters, (
        f"{dotted} takes no {name!r} any more but ({', '.join(parameters)}); {LOOK}"
    )


def test_the_entry_points_that_pyproject_names_lead_to_our_plugin() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
        for target in project["entry-points"][group].values():
            module, _, function = target.partition(":")
            assert callable(getattr(importlib.import_module(module), function, None)), (
                f"pyproject.toml gives {target} to {group}, and there is no such function"
            )


def test_the_prefix_of_health_checks_is_the_one_that_the_http_layer_refuses() -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    from engine.runtime.http_layer import HEALTH_CHECK_PREFIX

    assert HEALTH_CHECK_RID_PREFIX == HEALTH_CHECK_PREFIX


# The frontend language: what engine/runtime/frontend.py counts on, tried out on SGLang's own
# backends with nothing of ours in between.

FRONTEND = "look in engine/runtime/frontend.py for what counts on it"


def probe_backend() -> Any:
    """A backend that notes who asks it for what."""
    from sglang.lang.backend.base_backend import BaseBackend

    class Probe(BaseBackend):
        def __init__(self) -> None:
            super().__init__()
            self.asked_with: list[Any] = []
            """What the code that asks for `.endpoint` calls `program`."""
            self.expressions: list[Any] = []
            """What the code that makes a call calls `expr`, beside the state as `self`."""
            self.fork_positions: list[Any] = []
            self.ends: list[tuple[str, Any, BaseException | None]] = []
            """Who lets go of a state: the function, its `self`, an exception on its way."""

        @property
        def endpoint(self) -> Any:
            self.asked_with.append(sys._getframe(1).f_locals.get("program"))
            return self

        def _note(self, s: Any) -> None:
            caller = sys._getframe(2).f_locals
            self.expressions.append(caller["expr"] if caller.get("self") is s else None)
            self.fork_positions.append(s.fork_start_text_pos)

        def generate(self, s: Any, sampling_params: Any) -> Any:
            self._note(s)
            return "", {}

        def commit_lazy_operations(self, s: Any) -> None:
            self._note(s)

        def end_program(self, s: Any) -> None:
            caller = sys._getframe(2)
            error = sys.exception()
            trace = None if error is None else error.__traceback__
            is_passing = trace is not None and trace.tb_frame is caller
            name, owner = caller.f_code.co_name, caller.f_locals.get("self")
            self.ends.append((name, owner, error if is_passing else None))

    return Probe()


def run_program(body: Any, backend: Any) -> Any:
    """Run a function of a state as a program, in this thread but for its forks."""
    function = resolve("sglang.lang.ir.SglFunction")

    def program(s: Any) -> None:
        body(s)

    return function(program).run(backend=backend, use_thread=False)


def gen(name: str) -> Any:
    """SGLang's own expression for a call."""
    return resolve("sglang.lang.ir.SglGen")(name)


def test_a_run_asks_its_backend_for_an_endpoint_and_knows_its_program() -> None:
    probe = probe_backend()
    run_program(lambda s: None, probe)
    assert probe.asked_with, f"run_program does not take backend.endpoint any more; {FRONTEND}"
    assert isinstance(probe.asked_with[-1], resolve("sglang.lang.ir.SglFunction")), (
        f"run_program does not call the function it runs `program` any more; {FRONTEND}"
    )
    num_asked = len(probe.asked_with)
    function = resolve("sglang.lang.ir.SglFunction")(lambda s: None)
    function.run_batch([{}, {}], backend=probe, num_threads=1)
    assert len(probe.asked_with) - num_asked >= 3, (
        f"the runs of run_batch do not each ask for backend.endpoint any more; {FRONTEND}"
    )


def test_a_fork_gets_the_backend_that_its_state_has_and_calls_with_its_expression() -> None:
    probe = probe_backend()

    def body(s: Any) -> None:
        s += gen("a")
        s.stream_executor.backend = after = copy.copy(probe)
        fork = s.fork(1)[0]
        assert fork.stream_executor.backend is after, (
            f"a fork is not given the backend of the state it leaves any more; {FRONTEND}"
        )
        fork += gen("b")
        fork.sync()

    run_program(body, probe)
    assert [getattr(item, "name", None) for item in probe.expressions] == ["a", "b"], (
        f"a call is not made by a method of the state that calls it `expr` any more; {FRONTEND}"
    )
    assert probe.fork_positions[0] is None, f"a first state has a fork's position; {FRONTEND}"
    assert probe.fork_positions[1] is not None, f"a fork has no position any more; {FRONTEND}"


def test_an_expression_derived_from_a_commit_is_executed_as_one() -> None:
    derived = type("Derived", (resolve("sglang.lang.ir.SglCommitLazy"),), {})()
    probe = probe_backend()
    run_program(lambda s: s.stream_executor.submit(derived), probe)
    assert probe.expressions == [derived], (
        f"what comes of SglCommitLazy does not reach commit_lazy_operations; {FRONTEND}"
    )


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_a_join_lets_go_of_its_forks_itself(mode: str) -> None:
    probe = probe_backend()
    states = []

    def body(s: Any) -> None:
        states.append(s)
        s.fork(1).join(mode)

    run_program(body, probe)
    name, group, _ = probe.ends[0]
    assert (name, type(group)) == ("join", resolve("sglang.lang.interpreter.ProgramStateGroup")), (
        f"a join does not end its forks itself any more; {FRONTEND}"
    )
    assert group.src_state is states[0], f"a group does not know whom it came from; {FRONTEND}"


def test_a_run_lets_go_of_its_state_with_what_its_function_raised() -> None:
    calm, broken = probe_backend(), probe_backend()
    try:
        raise OSError
    except OSError:
        run_program(lambda s: None, calm)
    assert calm.ends[0][2] is None, f"an exception from outside passes through a run; {FRONTEND}"

    def body(s: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        run_program(body, broken)
    assert isinstance(broken.ends[0][2], LookupError), (
        f"a run that fails does not end its state while the exception passes; {FRONTEND}"
    )


def test_images_are_added_once_before_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang as sgl

    module = resolve("sglang.lang.backend.runtime_endpoint")
    seen: list[tuple[str, Any]] = []
    row = {"input_token_logprobs": [[-0.1, 1, "x"], [-0.2, 2, "y"]], "output_token_logprobs": []}

    def request(url: str, json: Any = None, stream: bool = False, **options: Any) -> Any:
        if not url.endswith("/generate"):
            return SimpleNamespace(status_code=200, json=lambda: {"model_path": "x"})
        seen.append(("request", json))
        one = {"text": "", "meta_info": {"prompt_tokens": 2}}
        is_batch = "input_ids" in json or isinstance(json["text"], list)
        value = [{"text": "", "meta_info": row}] * 2 if is_batch else one
        return SimpleNamespace(status_code=200, json=lambda: value, iter_lines=lambda **_: [])

    class Endpoint(module.RuntimeEndpoint):  # type: ignore[misc]  # SGLang is untyped
        def _add_images(self, s: Any, data: Any) -> None:
            super()._add_images(s, data)
            seen.append(("images", data))

    monkeypatch.setattr(module, "http_request", request)
    endpoint = Endpoint("http://nowhere")

    def body(s: Any) -> None:
        s += "text" + sgl.gen("a")
        s += sgl.select("b", ["x", "y"], 0.0, sgl.unconditional_likelihood_normalized)
        s.fork(2).join()

    def streamed(s: Any) -> None:
        s += sgl.gen("c")

    run_program(body, endpoint)
    sgl.function(streamed).run(backend=endpoint, stream=True).sync()
    kinds, bodies = [kind for kind, _ in seen], [data for _, data in seen]
    assert kinds == ["images", "request"] * 6, (
        f"a request is not preceded by _add_images any more, or has become two; {FRONTEND}"
    )
    assert all(bodies[at] is bodies[at + 1] for at in range(0, 12, 2)), (
        f"_add_images is not given what is sent any more; {FRONTEND}"
    )


def test_the_server_cannot_join_the_kv_of_forks() -> None:
    server = inspect.getsource(resolve("sglang.srt.entrypoints.http_server"))
    assert "/concate_and_append_request" not in server, (
        "SGLang's server joins forks again: JITEndpoint may leave support_concate_and_append on"
    )


ATTENTION_OPTIONS = {
    "scaling",
    "enable_gqa",
    "causal",
    "is_cross_attn",
    "sliding_window_size",
}
"""Keyword arguments that our attention backend understands or hands on."""


@pytest.mark.parametrize("name", OVERRIDDEN_ATTENTION_METHODS)
def test_attention_is_called_as_ours_takes_it(name: str) -> None:
    from engine.runtime.cpu_attention import PagedCpuAttention

    theirs, ours = getattr(resolve(ATTENTION), name, None), vars(PagedCpuAttention).get(name)
    assert callable(theirs), f"{ATTENTION} has no method {name!r} any more; {LOOK}"
    assert callable(ours), f"OVERRIDDEN_ATTENTION_METHODS lists {name}, which ours lacks"
    their_names, our_names = named_parameters(theirs), named_parameters(ours)
    assert their_names[: len(our_names)] == our_names
    rest = set(their_names[len(our_names) :])
    assert rest == ATTENTION_OPTIONS, (
        f"{ATTENTION}.{name} now takes {sorted(rest)}: see what ours has to do with the new ones"
    )


def test_attention_overrides_exactly_what_is_listed() -> None:
    from engine.runtime.cpu_attention import PagedCpuAttention

    parent = resolve(ATTENTION)
    assert issubclass(PagedCpuAttention, parent)
    ours = {name for name, value in vars(PagedCpuAttention).items() if inspect.isfunction(value)}
    overridden = {name for name in ours if hasattr(parent, name)} - {"__init__"}
    assert overridden == set(OVERRIDDEN_ATTENTION_METHODS)
