"""Our side of the command line, and the file of default SLOs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from core.slo import OnMiss
from core.terms import SloDefaults
from engine.runtime.flags import (
    Parser,
    UsageError,
    add_own_flags,
    check_supported,
    own_settings,
    read_slo_config,
)
from engine.runtime.settings import Settings, SloConfig
from scheduler.config import SchedulerConfig
from scheduler.policies import CANCEL_SUFFIX, POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def parser() -> Parser:
    """Our flags and one of SGLang's."""
    made = Parser(prog="launch.py", allow_abbrev=False)
    add_own_flags(made)
    made.add_argument("--max-running-requests", type=int)
    return made


def settings_of(*argv: str) -> Settings:
    """The settings that these flags describe."""
    return own_settings(parser().parse_args(argv))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the file for `--slo-config`."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "slo.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# Flags --------------------------------------------------------------------------------------------


def test_without_flags_the_settings_are_the_defaults() -> None:
    assert settings_of() == Settings(policy="gmax", scheduler=SchedulerConfig(), slo=SloConfig())


def test_each_flag_reaches_its_setting() -> None:
    settings = settings_of(
        *("--policy", "edf", "--frame-steps", "8", "--frame-seconds", "0.25"),
        *("--length-quantile", "0.5", "--max-decode-pause", "0.1", "--test-force-moves-every", "3"),
        *("--program-timeout", "80"),
    )
    assert settings.policy == "edf"
    assert settings.force_moves_every == 3
    assert settings.scheduler == SchedulerConfig(
        policy="edf",
        frame_steps=8,
        frame_s=0.25,
        length_quantile=0.5,
        max_decode_pause_s=0.1,
        program_timeout_s=80.0,
    )


def test_goodput_and_fairness_reach_their_settings() -> None:
    settings = settings_of(
        *("--goodput", "1:2", "--fairness", "0.25", "--fairness-function", "numpy:negative"),
    )
    assert settings.scheduler == SchedulerConfig(
        goodput="1:2", fairness=0.25, fairness_function="numpy:negative"
    )


@pytest.mark.parametrize("goodput", ["token", "request", "0.5:0"])
@pytest.mark.parametrize("fairness", ["0", "1", "1e-3"])
def test_every_built_in_objective_and_every_share_of_fairness_is_taken(
    goodput: str, fairness: str
) -> None:
    scheduler = settings_of("--goodput", goodput, "--fairness", fairness).scheduler
    assert (scheduler.goodput, scheduler.fairness) == (goodput, float(fairness))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name.endswith(CANCEL_SUFFIX)])
def test_every_cancelling_policy_is_taken_by_its_name(policy: str) -> None:
    settings = settings_of("--policy", policy)
    assert (settings.policy, settings.scheduler.policy) == (policy, policy)
    assert not settings.is_stock


@pytest.mark.parametrize("name", ["sglang+cancel", "+cancel", "gmax+", "gmax+cancel+cancel"])
def test_only_our_policies_have_a_cancelling_variant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings_of("--policy", name)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"invalid choice: {name!r}" in line


def test_the_help_names_every_plain_policy_and_the_suffix_that_cancels() -> None:
    action = next(item for item in parser()._actions if "--policy" in item.option_strings)
    assert action.help is not None
    plain = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
    assert all(name in action.help for name in [*plain, CANCEL_SUFFIX, "sglang"])


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the operator's own, by its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flags_own_prices.py").write_text(
        "class Prices:\n"
        "    def answer_value(self, a, b): return a\n"
        "    def stream_value(self, a, b): return a\n\n"
        "class NeedsPrices(Prices):\n"
        "    def __init__(self, prices): ...\n\n"
        "def broken(service): return service[:1]\n"
    )
    return "flags_own_prices"


def test_an_objective_of_the_operators_own_is_taken_by_its_path(own_module: str) -> None:
    settings = settings_of("--goodput", f"{own_module}:Prices")
    assert settings.scheduler.goodput == f"{own_module}:Prices"


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        (
            "--goodput",
            "tokens",
            "takes token, request, weights as 1:2, or a dotted path (package.module:name), "
            "got 'tokens'",
        ),
        (
            "--goodput",
            "0:0",
            "weights must be 0 or more and not both 0, and at most a million, got '0:0'",
        ),
        ("--goodput", "math:pi", "'math:pi' has no answer_value(a, b)"),
        (
            "--goodput",
            "no_such_package:mine",
            "'no_such_package:mine' cannot be loaded: No module named 'no_such_package'",
        ),
        (
            "--fairness-function",
            "share",
            "takes a dotted path (package.module:name), got 'share'",
        ),
        ("--fairness-function", "math:pi", "'math:pi' has no function(service)"),
        (
            "--fairness-function",
            "flags_own_prices:broken",
            "'flags_own_prices:broken': function(service) gives shape (1,), "
            "not that of its arguments",
        ),
        ("--fairness", "1.5", "must be between 0 and 1"),
        ("--fairness", "-0.1", "must be between 0 and 1"),
        ("--fairness", "nan", "must be between 0 and 1"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_an_objective_or_a_fairness_that_cannot_work_is_refused_by_the_name_of_its_flag(
    flag: str, value: str, complaint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        settings_of(f"{flag}={value}")
    assert str(caught.value) == f"{flag} {complaint}"


def test_a_class_that_no_object_can_be_made_of_is_refused_by_the_name_of_the_flag(
    own_module: str,
) -> None:
    with pytest.raises(UsageError, match=r"^--goodput 'flags_own_prices:NeedsPrices'"):
        settings_of("--goodput", f"{own_module}:NeedsPrices")


def test_goodput_and_fairness_survive_the_environment(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.runtime import settings as module

    sent = settings_of(
        *("--goodput", f"{own_module}:Prices", "--fairness", "0.5", "--policy", "edf+cancel")
    )
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "placeholder, restored afterwards")
    sent.to_environment()
    assert module.from_environment() == sent


def test_stock_scheduling_is_a_policy_by_name_and_not_one_of_ours() -> None:
    settings = settings_of("--policy", "sglang")
    assert settings.is_stock
    assert settings.scheduler.policy in POLICIES
    assert not settings_of("--policy", "fcfs").is_stock


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.runtime import settings as module

    monkeypatch.delenv(module.ENVIRONMENT_VARIABLE, raising=False)
    assert module.from_environment() is None
    sent = settings_of("--policy", "edf", "--frame-steps", "8")
    monkeypatch.setenv(module.ENVIRONMENT_VARIABLE, "placeholder, restored afterwards")
    sent.to_environment()
    assert module.from_environment() == sent


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--frame-steps", "0", "must be at least 1, got 0"),
        ("--frame-steps", "-3", "must be at least 1, got -3"),
        ("--frame-seconds", "0", "must be a number of seconds above 0"),
        ("--frame-seconds", "nan", "must be a number of seconds above 0"),
        ("--max-decode-pause", "inf", "must be a number of seconds above 0"),
        ("--program-timeout", "0", "must be a number of seconds above 0"),
        ("--program-timeout", "nan", "must be a number of seconds above 0"),
        ("--length-quantile", "1.5", "must be between 0 and 1"),
        ("--max-parked-requests", "-1", "must be 0 or more"),
        ("--test-force-moves-every", "-1", "must be 0 or more"),
        ("--drain-seconds", "-1", "must be a number of seconds, 0 or more"),
        ("--drain-seconds", "nan", "must be a number of seconds, 0 or more"),
        ("--drain-seconds", "inf", "must be a number of seconds, 0 or more"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_flag(
    flag: str, value: str, complaint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        settings_of(f"{flag}={value}")
    assert str(caught.value) == f"{flag} {complaint}"


@pytest.mark.parametrize("value", ["0", "7"])
def test_no_parked_requests_and_no_drain_time_are_allowed(value: str) -> None:
    settings_of("--max-parked-requests", value, "--drain-seconds", value)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--polcy", "gmax"], "unrecognized arguments: --polcy gmax; did you mean --policy?"),
        (["--frame-step=8"], "unrecognized arguments: --frame-step=8; did you mean --frame-steps?"),
        (
            ["--max-runing-requests", "8"],
            "unrecognized arguments: --max-runing-requests 8; did you mean --max-running-requests?",
        ),
        (["--zzz"], "unrecognized arguments: --zzz; --help lists all"),
        (["stray"], "unrecognized arguments: stray; --help lists all"),
    ],
)
def test_an_unknown_flag_ends_in_one_line_with_a_suggestion_where_one_is_close(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"launch.py: error: {complaint}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policy", "psychic"], ("--policy", "'psychic'", "'sglang'", *map(repr, POLICIES))),
        (["--frame-steps", "many"], ("--frame-steps", "'many'")),
    ],
)
def test_a_value_of_the_wrong_kind_ends_in_one_line(
    argv: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)


def test_the_help_gives_every_flag_of_ours_its_default() -> None:
    ours = next(group for group in parser()._action_groups if group.title == "JITServe")
    assert len(ours._group_actions) >= 9
    for action in ours._group_actions:
        assert action.help is not None
        assert "default: " in action.help, action.option_strings


# The file of default SLOs -------------------------------------------------------------------------


def test_without_a_file_or_with_an_empty_one_the_shipped_defaults_hold(
    written: Callable[[str], Path],
) -> None:
    assert read_slo_config(None) == SloConfig()
    assert read_slo_config(written("")) == SloConfig()
    assert read_slo_config(written("# nothing yet\n")) == SloConfig()


def test_a_file_sets_defaults_per_model_tenant_and_route(written: Callable[[str], Path]) -> None:
    path = written(
        """
        default: {target_ttft: 3, waiting_time: 30}
        models: {small: {target_tbt: 0.1}}
        tenants: {ann: {on_miss: cancel, deadline: 20}}
        routes: {/generate: {streaming_is_latency_sensitive: false}}
        """
    )
    assert read_slo_config(path) == SloConfig(
        default=SloDefaults(target_ttft=3, waiting_time=30),
        models={"small": SloDefaults(target_tbt=0.1)},
        tenants={"ann": SloDefaults(on_miss=OnMiss.CANCEL, deadline=20)},
        routes={"/generate": SloDefaults(streaming_is_latency_sensitive=False)},
    )
    assert settings_of("--slo-config", str(path)).slo == read_slo_config(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("defaults: {deadline: 5}", "Object contains unknown field `defaults`"),
        ("default: {dead_line: 5}", "default: Object contains unknown field `dead_line`"),
        ("default: {deadline: soon}", "default.deadline: Expected `float`, got `str`"),
        ("default: {deadline: true}", "default.deadline: Expected `float`, got `bool`"),
        ("default: {deadline: 0}", "default: deadline: takes a number of seconds above 0"),
        ("default: {waiting_time: -1}", "default: waiting_time: takes a number of seconds above 0"),
        ("default: {deadline: .nan}", "default: deadline: takes a number of seconds above 0"),
        (f"default: {{deadline: 1{'0' * 400}}}", "default.deadline: Number out of range"),
        ("default: {on_miss: explode}", "default.on_miss: Invalid enum value 'explode'"),
        ("default: 5", "default: Expected `object`, got `int`"),
        ("models: {big: {deadline: 0}}", "models.big: deadline: takes a number of seconds above 0"),
        ("models: {big: {deadline: x}}", "models.big.deadline: Expected `float`, got `str`"),
        ("tenants: {ann: {speed: 1}}", "tenants.ann: Object contains unknown field `speed`"),
        ("routes: {/generate: 5}", "routes./generate: Expected `object`, got `int`"),
        ("models: [big]", "models: Expected `object`, got `array`"),
        ("models: {1: {}}", "Expected `str`, got `int` - at `key` in `$.models`"),
        ("- default", "Expected `object`, got `array`"),
        ("[]", "Expected `object`, got `array`"),
        ("false", "Expected `object`, got `bool`"),
        ("default: [", "not valid YAML: line 1: "),
        ("default: {}\n\ttenants: {}", "not valid YAML: line 2: "),
        ("default: !!python/object:os.system {}", "not valid YAML: line 1: could not determine"),
        ("default: {}\nday: 2024-13-45", "not valid YAML: month must be in 1..12"),
        (b"\xff\xfe\x00", "not valid YAML: 'utf-8' codec can't decode"),
        (b"a: \x00", "not valid YAML: unacceptable character"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_with_the_file_and_the_place(
    written: Callable[[str | bytes], Path], text: str | bytes, complaint: str
) -> None:
    path = written(text)
    with pytest.raises(UsageError) as caught:
        settings_of("--slo-config", str(path))
    assert str(caught.value).startswith(f"--slo-config {path}: {complaint}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^--slo-config {tmp_path}/none: No such file"):
        read_slo_config(tmp_path / "none")
    with pytest.raises(UsageError, match=rf"^--slo-config {tmp_path}: Is a directory"):
        read_slo_config(tmp_path)


# What cannot be served yet ------------------------------------------------------------------------


def server_args(**changed: Any) -> SimpleNamespace:
    """SGLang's parsed arguments, as far as they are looked at."""
    plain = {
        "tokenizer_worker_num": 1,
        "speculative_algorithm": None,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "enable_dp_attention": False,
        "enable_priority_scheduling": False,
        "schedule_policy": "fcfs",
        "enable_lora": None,
        "lora_paths": None,
    }
    return SimpleNamespace(**(plain | changed))


UNSUPPORTED = [
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ({"pp_size": 2}, "--pp-size"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"enable_pdmux": True}, "--enable-pdmux"),
    ({"dllm_algorithm": "x"}, "--dllm-algorithm"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"enable_priority_scheduling": True}, "--enable-priority-scheduling"),
    ({"schedule_policy": "lpm"}, "--schedule-policy"),
    ({"enable_lora": True}, "--enable-lora"),
    ({"lora_paths": ["adapter"]}, "--lora-paths"),
    ({"nnodes": 2}, "--nnodes"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_server_is_supported_under_every_policy(policy: str) -> None:
    check_supported(server_args(), settings_of("--policy", policy))


@pytest.mark.parametrize(("changed", "flag"), UNSUPPORTED)
def test_what_our_scheduler_cannot_serve_is_refused_and_stock_scheduling_serves_it(
    changed: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_supported(server_args(**changed), settings_of())
    assert flag in str(caught.value)
    assert str(caught.value).endswith(
        "is not supported with --policy gmax yet; use --policy sglang for SGLang's own scheduler"
    )
    check_supported(server_args(**changed), settings_of("--policy", "sglang"))


@pytest.mark.parametrize("policy", ["gmax", "sglang"])
def test_several_tokenizer_processes_are_refused_under_every_policy(policy: str) -> None:
    with pytest.raises(UsageError, match="--tokenizer-worker-num above 1 is not supported"):
        check_supported(server_args(tokenizer_worker_num=2), settings_of("--policy", policy))


# The services beside the server -------------------------------------------------------------------

each_service = pytest.mark.parametrize("service", ["predictor", "graphs"])


@each_service
def test_a_service_is_on_and_has_no_address_before_it_is_started(service: str) -> None:
    args = parser().parse_args([])
    found = [getattr(args, service + end) for end in ("", "_address", "_state")]
    assert found == ["on", "", ""]
    assert getattr(settings_of(), f"{service}_address") == ""


@each_service
def test_the_address_of_a_service_is_handed_on(service: str) -> None:
    address = "tcp://10.0.0.1:5555"
    found = settings_of(f"--{service}", "external", f"--{service}-address", address)
    assert getattr(found, f"{service}_address") == address


@each_service
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--NAME", "external"], "--NAME external needs --NAME-address"),
        (["--NAME", "off", "--NAME-address", "ipc:///tmp/x"], "makes no sense"),
        (["--NAME-address", "udp://x:1"], "--NAME-address takes ipc://PATH"),
        (["--NAME-address", "tcp://x:0"], "--NAME-address takes ipc://PATH"),
        (["--NAME-address", "ipc://" + "x" * 200], "--NAME-address takes ipc://PATH"),
    ],
)
def test_a_service_that_cannot_be_reached_is_refused(
    service: str, argv: list[str], says: str
) -> None:
    with pytest.raises(UsageError, match=says.replace("NAME", service)):
        settings_of(*[word.replace("NAME", service) for word in argv])


def test_lengths_that_requests_claim_are_believed_in_tests_only() -> None:
    assert not settings_of().trusts_known_lengths
    assert settings_of("--test-known-lengths").trusts_known_lengths


@pytest.mark.parametrize(("text", "num_bytes"), [("0", 0), ("0.5", 1 << 29), ("3", 3 << 30)])
def test_host_memory_for_kv_is_in_gib(text: str, num_bytes: int) -> None:
    assert settings_of("--kv-swap-gib", text).kv_swap_bytes == num_bytes


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e9"])
def test_host_memory_for_kv_is_a_sensible_number(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-swap-gib must be a number from 0 to"):
        settings_of("--kv-swap-gib", text)
