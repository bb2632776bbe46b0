"""What `bench profiles` reads, fits and replays, on small inputs of known answers."""

from pathlib import Path

import pytest

from bench import profile_checks, profile_load, profiles
from bench.profile_load import Asked
from engine.simulator.steps import LinearSteps, Step

SPLITWISE = (
    "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,"
    "tensor_parallel\n"
)
TENTH = LinearSteps(constant_s=0.1)


def test_a_request_alone_takes_a_step_per_token() -> None:
    load = [Asked(1.0, 100, 5, 0.0, 0.0)]
    (ours,) = profile_load.replay(load, TENTH, 1000)
    assert ours.ttft_s == pytest.approx(0.1)
    assert ours.e2e_s == pytest.approx(0.5)
    assert ours.tpot_s == pytest.approx(0.1)


def test_a_prompt_beyond_the_budget_takes_several_steps() -> None:
    (ours,) = profile_load.replay([Asked(0.0, 5000, 1, 0.0, 0.0)], TENTH, 10_000)
    assert ours.ttft_s == ours.e2e_s == pytest.approx(0.3)


def test_without_room_the_later_request_waits_or_starts_again() -> None:
    waits = [Asked(0.0, 80, 10, 0.0, 0.0), Asked(0.01, 80, 10, 0.0, 0.0)]
    first, second = profile_load.replay(waits, TENTH, 100)
    assert first.e2e_s == pytest.approx(1.0)
    assert second.ttft_s == pytest.approx(1.1 - 0.01)
    again = [Asked(0.0, 45, 20, 0.0, 0.0), Asked(0.01, 45, 20, 0.0, 0.0)]
    first, second = profile_load.replay(again, TENTH, 100)
    assert first.e2e_s == pytest.approx(2.0)
    assert second.e2e_s > 2.0


def test_errors_of_the_profile_itself_are_0_and_its_fields_are_found() -> None:
    wanted = {"bandwidth_share": 0.5, "layer_s": 80e-6}
    points = [
        point._replace(measured_s=profile_checks._profile_s(point, wanted))
        for point in profile_checks.gpt_fast()
    ]
    assert profile_checks.errors(points, wanted)[1:] == (0, 0, 0)
    start = {"bandwidth_share": 0.9, "layer_s": 20e-6}
    found = profile_checks.fit(points, start, {})
    assert found == pytest.approx(wanted, rel=0.1)


def test_splitwise_rows_become_points(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    rows = [
        "llama2-70b,a100-80gb,512,2,128,400,60,8000,2",
        "llama2-70b,a100-80gb,512,2,128,402,62,8100,2",
        "llama2-70b,a100-80gb,512,2,128,404,64,8200,2",
        "llama2-70b,h100-80gb,512,64,128,360,42,83000,2",
        "llama2-70b,h100-80gb-pcap,512,2,128,400,60,8000,2",
        "llama2-70b,a100-80gb,512,2,256,400,60,8000,2",
        "bloom-176b,a100-80gb,512,2,128,400,60,8000,8",
    ]
    path.write_text(SPLITWISE + "\n".join(rows) + "\n")
    (prefill,), (decode,) = profile_checks.splitwise(path)
    assert prefill.step == Step(0, 0, 0, 1024, 2 * 512 * 513 // 2)
    assert prefill.measured_s == pytest.approx(0.402)
    assert decode.step == Step(2, 2 * (512 + 64), 0, 0)
    assert decode.measured_s == pytest.approx(0.062)


@pytest.mark.parametrize("flag", ["--splitwise", "--vllm"])
def test_a_file_that_is_none_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text("model,run\nllama2-70b,a\n")
    assert profiles.main([flag, str(path)]) == 2
    assert f"profiles: {path}" in capsys.readouterr().err


def test_without_files_the_profiles_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiles.main(["--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "llama-3.1-70b on 4 x h200" in out
    assert "gpt-fast mixtral-8x7b decode" in out
    assert (tmp_path / "out.json").exists()
