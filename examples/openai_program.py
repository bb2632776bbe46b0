"""A program of several calls with the plain ``openai`` client: an id, and the last call says so.

    python examples/openai_program.py --url http://127.0.0.1:30000 --deadline 60

``program_id`` alone is enough. ``node`` and ``parents`` say which answers a call needed, and
the server knows the tools from the messages that carry their results.
"""

import random
import uuid
from typing import Any

from openai import OpenAI

WEATHER = {"Oslo": "snow, -4 °C", "Lisbon": "sun, 19 °C", "Mumbai": "rain, 28 °C"}


def run(client: OpenAI, seed: int, deadline_s: float | None = None) -> dict[str, Any]:
    """One run; the seed chooses the town."""
    town = random.Random(seed).choice(sorted(WEATHER))
    program: dict[str, Any] = {"program_id": uuid.uuid4().hex, "application": "packing"}
    if deadline_s is not None:
        program["deadline"] = deadline_s  # the first call sets it for all

    def call(messages: list[Any], max_tokens: int, **fields: Any) -> Any:
        return client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={**program, **fields},
        )

    messages: list[Any] = [{"role": "user", "content": f"What does one need to know of {town}?"}]
    plan = call(messages, 32, node="plan").choices[0].message.content or ""

    # An agent's model would ask for the tool itself; the demo model is too small for that.
    request = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages += [
        {"role": "assistant", "content": plan, "tool_calls": [request]},
        {"role": "tool", "tool_call_id": "1", "content": WEATHER[town]},
        {"role": "user", "content": "What should one pack? One sentence."},
    ]
    # The last call ends the program; without it, POST /slo/programs/end does.
    answer = call(messages, 48, node="answer", parents=["plan"], final=True)
    content = answer.choices[0].message.content
    return {"task": f"Packing for {town}", "answer": content, "outcome": answer.metadata["slo"]}


if __name__ == "__main__":
    import command_line  # beside this file

    asked = command_line.arguments(__doc__)
    with OpenAI(base_url=f"{asked.url}/v1", api_key="none") as client:
        result = run(client, asked.seed, asked.deadline)
    command_line.report(result, is_json=asked.json)
