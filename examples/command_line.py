"""The command line of the examples: an endpoint, one run, and what came of it."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from engine.runtime.frontend import JITEndpoint

Run = Callable[[JITEndpoint, int], dict[str, Any]]


def arguments(description: str | None) -> argparse.Namespace:
    """What every example takes; ``description`` is its docstring."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for all of it")
    parser.add_argument("--seed", type=int, default=0, help="chooses the task")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def show(run: Run, description: str | None) -> None:
    """Run an example once and print it."""
    asked = arguments(description)
    # The demo model speaks ChatML, which SGLang's frontend cannot tell from its name.
    endpoint = JITEndpoint(asked.url, deadline=asked.deadline, chat_template_name="chatml")
    report(run(endpoint, asked.seed), is_json=asked.json)


def report(result: dict[str, Any], *, is_json: bool) -> None:
    """Print the task, the answer, and what the server says of them."""
    if is_json:
        print(json.dumps(result))
        return
    print(f"{result['task']}\n\n{result['answer'].strip()}\n")
    outcome = result["outcome"]
    if outcome is None:
        print("The server did not say how the program went.")
        return
    # The outcome of a whole program, or of its last call with the program in it.
    tokens = outcome.get("program", outcome)
    verdict = "in time" if outcome["met"] else "too late"
    print(
        f"{tokens['calls']} calls, {verdict}: {tokens['goodput_tokens']} of "
        f"{tokens['tokens']} tokens in time"
    )
