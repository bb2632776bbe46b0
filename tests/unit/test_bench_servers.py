"""A benchmark's server is emptied between turns, once what was given up has ended."""

from __future__ import annotations

import httpx
import pytest

from bench import servers


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a flush is answered, in order; the last of them for ever."""
    codes: list[int] = []

    def post(url: str, **_: object) -> httpx.Response:
        code = codes.pop(0) if len(codes) > 1 else codes[0]
        return httpx.Response(code, request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx, "post", post)
    monkeypatch.setattr(servers, "POLL_S", 0.0)
    return codes


def test_a_flush_waits_until_nothing_is_live(answers: list[int]) -> None:
    answers += [400, 400, 200]
    servers.flush("http://server")
    assert answers == [200]


@pytest.mark.parametrize("code", [400, 500])
def test_a_flush_that_goes_on_failing_is_an_error(answers: list[int], code: int) -> None:
    answers.append(code)
    with pytest.raises(httpx.HTTPStatusError):
        servers.flush("http://server", limit_s=0.0)
