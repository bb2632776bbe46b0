"""The services beside the server: set up by default; what goes wrong costs a warning only."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import launch
from core.channel import check_address
from engine.runtime import flags
from graphs import __main__ as graphs_main
from predictor import __main__ as predictor_main

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence


class FakeProbe:
    """Takes the addresses that the real one takes, and connects to nothing."""

    def __init__(self, address: str) -> None:
        check_address(address)


class FakeService:
    """Notes what it would start."""

    made: list[FakeService]

    def __init__(
        self,
        _name: str,
        command: Sequence[str],
        make_probe: Callable[[], Any],
        _clock: Any,
        _say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command = list(command)
        self.environment = environment
        self.calls: list[str] = []
        make_probe()
        FakeService.made.append(self)

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]

    def tick(self) -> None:
        self.calls.append("tick")

    def stop(self) -> None:
        self.calls.append("stop")


OTHER = {"predictor": "graphs", "graphs": "predictor"}
TITLES = {"predictor": "length predictor", "graphs": "graphs process"}
PROBES = {"predictor": "PredictorProbe", "graphs": "GraphsProbe"}
PARSERS = {"predictor": predictor_main._parser, "graphs": graphs_main._parser}
OWN_FLAGS = {"predictor": ("--length-quantile", "0.8"), "graphs": ("--program-timeout", "80")}


@pytest.fixture(params=["predictor", "graphs"], autouse=True)
def name(request: pytest.FixtureRequest) -> str:
    """The service that a test is about; the other one is off."""
    chosen: str = request.param
    Chosen.name = chosen
    return chosen


class Chosen:
    name = "predictor"


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the user is told; nothing is started, and the state is no one's own."""
    lines: list[str] = []
    FakeService.made = []
    monkeypatch.setattr(launch, "SupervisedService", FakeService)
    for probe in PROBES.values():
        monkeypatch.setattr(launch, probe, FakeProbe)
    monkeypatch.setattr(launch, "_say", lines.append)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lines


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that is as short as a user's."""
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def long_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def args_of(*argv: str) -> argparse.Namespace:
    """Of a command line with the other service off and NAME in flags as the service's."""
    own = [flag.replace("NAME", Chosen.name) for flag in argv]
    return launch._parse(["--model", "demo", f"--{OTHER[Chosen.name]}", "off", *own])[0]


def services_of(*argv: str) -> launch.Services:
    return launch.Services(args_of(*argv), "/models/demo")


def folder_of(services: launch.Services) -> Path:
    """Of the socket that the server is told of."""
    flag, address = services.server_flags
    assert flag == f"--{Chosen.name}-address"
    return Path(address.removeprefix("ipc://")).parent


def assert_serves_without(services: launch.Services, said: list[str]) -> None:
    """A warning, a server that knows, and nothing left to look after."""
    assert services.server_flags[:2] == [f"--{Chosen.name}", "off"]
    assert len(said) == 1
    assert f"without the {TITLES[Chosen.name]}" in said[0]
    assert FakeService.made == []
    settings = flags.own_settings(args_of(*services.server_flags))
    assert getattr(settings, f"{Chosen.name}_address") == ""
    services.tick()
    services.stop()


# As it should be ----------------------------------------------------------------------------------


def test_by_default_server_and_service_meet_in_a_folder_of_this_user_alone(
    short_tmp: Path, said: list[str], name: str
) -> None:
    services = services_of()
    folder = folder_of(services)
    assert folder.parent == short_tmp
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (service,) = FakeService.made
    assert service.command[:3] == [sys.executable, "-m", name]
    assert [f"--{name}-address", service.option("--address")] == services.server_flags
    assert service.option("--owned-folder") == str(folder)
    assert service.option("--parent") == str(os.getpid())
    assert said == []
    services.stop()


@pytest.mark.parametrize("argv", [(), ("--NAME-address", "tcp://127.0.0.1:5999")])
@pytest.mark.parametrize("state", ["", "none", "/var/lib/mine"])
def test_the_service_understands_its_command(
    short_tmp: Path, argv: tuple[str, ...], state: str, name: str
) -> None:
    services = services_of(*argv, "--NAME-state", state, *OWN_FLAGS[name])
    (service,) = FakeService.made
    understood = PARSERS[name]().parse_args(service.command[3:])
    own = understood.quantile if name == "predictor" else understood.program_timeout
    assert own == float(OWN_FLAGS[name][1])
    assert understood.parent == os.getpid()
    assert check_address(understood.address) == understood.address
    assert (understood.state_dir is None) == (state == "none")
    services.stop()


def test_the_server_understands_its_flags(short_tmp: Path, name: str) -> None:
    services = services_of()
    settings = flags.own_settings(args_of(*services.server_flags))
    assert getattr(settings, f"{name}_address") == FakeService.made[0].option("--address")
    services.stop()


def test_an_address_of_ones_own_is_used_as_it_is_and_no_folder_is_made(
    short_tmp: Path, said: list[str]
) -> None:
    services = services_of("--NAME-address", "tcp://127.0.0.1:5999")
    (service,) = FakeService.made
    assert service.option("--address") == "tcp://127.0.0.1:5999"
    assert "--owned-folder" not in service.command
    assert services.server_flags == []
    assert list(short_tmp.iterdir()) == []
    assert said == []


@pytest.mark.parametrize(
    "argv",
    [
        ("--NAME", "off"),
        ("--NAME", "external", "--NAME-address", "tcp://127.0.0.1:5999"),
        ("--policy", "sglang"),
    ],
    ids=["off", "external", "stock"],
)
def test_where_no_service_of_ours_is_wanted_there_is_none(
    short_tmp: Path, said: list[str], argv: tuple[str, ...]
) -> None:
    services = services_of(*argv)
    assert services.server_flags == FakeService.made == said == list(short_tmp.iterdir()) == []
    services.tick()
    services.stop()


def test_models_keep_their_states_apart(short_tmp: Path, tmp_path: Path, name: str) -> None:
    names = ["/models/a", "/models/b", "/other/a", "org/a", "../..", "\udcff", "x" * 5000, ""]
    for model in names:
        launch.Services(args_of(), model).stop()
    folders = [Path(service.option("--state-dir")) for service in FakeService.made]
    assert len(set(folders)) == len(names)
    assert {folder.parent for folder in folders} == {tmp_path / "cache" / "jitserve" / name}
    assert max(len(folder.name) for folder in folders) < 100


def test_it_is_looked_after_and_stopped_and_its_folder_goes(short_tmp: Path) -> None:
    services = services_of()
    folder = folder_of(services)
    (folder / Chosen.name).write_bytes(b"")
    services.tick()
    services.tick()
    services.stop()
    assert FakeService.made[0].calls == ["tick", "tick", "stop"]
    assert list(short_tmp.iterdir()) == []


def test_a_folder_that_is_gone_already_is_no_trouble(short_tmp: Path) -> None:
    services = services_of()
    folder_of(services).rmdir()
    services.stop()


# As it should not be ------------------------------------------------------------------------------


def test_where_the_folder_for_temporary_files_has_too_long_a_path_tmp_is_used(
    long_tmp: Path, said: list[str]
) -> None:
    services = services_of()
    folder = folder_of(services)
    try:
        assert folder.parent == Path("/tmp")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert list(long_tmp.iterdir()) == []
        assert said == []
        assert len(FakeService.made) == 1
    finally:
        services.stop()
    assert not folder.exists()


def test_a_path_that_is_too_long_in_bytes_only_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="é" * 40, dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        services = services_of()
        try:
            assert folder_of(services).parent == Path("/tmp")
            assert list(Path(folder).iterdir()) == []
            assert said == []
        finally:
            services.stop()


@pytest.mark.parametrize("is_long", [False, True])
def test_where_no_folder_can_be_made_the_server_runs_without(
    said: list[str], monkeypatch: pytest.MonkeyPatch, *, is_long: bool
) -> None:
    folder = "/no/such/folder" + "/x" * 100 * is_long
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert_serves_without(services_of(), said)
    assert folder in said[0]


def test_where_not_even_tmp_can_be_written_to_the_server_runs_without(
    long_tmp: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp

    def refuse(*args: Any, **options: Any) -> str:
        if options.get("dir") == "/tmp":
            raise PermissionError(13, "Permission denied", "/tmp")
        return make(*args, **options)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert_serves_without(services_of(), said)
    assert list(long_tmp.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("no address"), OSError(24, "Too many open files")])
def test_where_nobody_can_listen_to_it_the_server_runs_without_and_the_folder_goes(
    short_tmp: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_address: str) -> None:
        raise error

    monkeypatch.setattr(launch, PROBES[Chosen.name], refuse)
    assert_serves_without(services_of(), said)
    assert str(error) in said[0]
    assert list(short_tmp.iterdir()) == []


def test_without_a_home_the_server_runs_without(
    short_tmp: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(launch.Path, "home", nowhere)
    assert_serves_without(services_of(), said)
    assert list(short_tmp.iterdir()) == []


def test_an_address_of_ones_own_that_fails_costs_the_service_and_not_the_server(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_address: str) -> None:
        raise ValueError("cannot connect")

    monkeypatch.setattr(launch, PROBES[Chosen.name], refuse)
    argv = ["--NAME-address", "tcp://somewhere:5999"]
    services = services_of(*argv)
    assert len(said) == 1
    # The server reads the user's flags with ours behind them.
    flags.own_settings(args_of(*argv, *services.server_flags))


def test_both_services_run_beside_one_server(short_tmp: Path, name: str) -> None:
    services = launch.Services(launch._parse(["--model", "demo"])[0], "/models/demo")
    assert [service.command[2] for service in FakeService.made] == ["predictor", "graphs"]
    addresses = [service.option("--address") for service in FakeService.made]
    settings = flags.own_settings(launch._parse(["--model", "demo", *services.server_flags])[0])
    assert [settings.predictor_address, settings.graphs_address] == addresses
    assert len(set(addresses)) == 2
    services.stop()
    assert list(short_tmp.iterdir()) == []
