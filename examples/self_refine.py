"""Self-refine: a draft, then criticism and a better draft until the critic is content.

    python examples/self_refine.py --url http://127.0.0.1:30000 --deadline 60

How many calls there will be nobody knows beforehand: that is what makes a shared deadline hard.
"""

import random
from typing import Any

import msgspec
import sglang as sgl

from engine.runtime.frontend import JITEndpoint

TOPICS = ("a bicycle", "a lighthouse", "a kitchen garden", "an old bridge", "a night train")
WISHES = ("shorter", "friendlier", "more exact", "livelier", "easier to read")
PRAISE = ("good", "great", "clear", "well", "effective", "beautiful")
MAX_ROUNDS = 6


@sgl.function
def self_refine(s: Any, topic: str, wishes: list[str]) -> int:
    """Leaves the last draft in ``draft``; returns how many rounds it took.

    The critic has some wishes. A critique that praises the draft strikes one of them off, and
    when none is left the draft is good.
    """
    s += sgl.system("You are a careful writer. Be brief.")
    s += sgl.user(f"Describe {topic} in two sentences.")
    s += sgl.assistant(sgl.gen("draft", max_tokens=48))
    left = list(wishes)
    num_rounds = 0
    while left and num_rounds < MAX_ROUNDS:
        num_rounds += 1
        s += sgl.user(f"Is this {left[0]} than you would expect? Say what is good and what is not.")
        s += sgl.assistant(sgl.gen("critique", max_tokens=24))
        # Reading a variable waits for it: the loop goes on by what the model has said.
        if any(word in s["critique"].lower() for word in PRAISE):
            left.pop(0)
        wish = left[0] if left else "perfect"
        s += sgl.user(f"Write it again, {wish}.")
        s += sgl.assistant(sgl.gen("draft", max_tokens=48))
    return num_rounds


def run(endpoint: JITEndpoint, seed: int) -> dict[str, Any]:
    """One run; the seed chooses the topic and what the critic wishes for."""
    dice = random.Random(seed)
    topic = dice.choice(TOPICS)
    wishes = dice.sample(WISHES, dice.randint(0, len(WISHES)))
    state = self_refine.run(topic, wishes, temperature=0, backend=endpoint)
    draft = state["draft"]
    outcome = msgspec.to_builtins(endpoint.outcome_of(state))
    task = f"{topic}, in {state.ret_value} rounds"
    return {"task": task, "answer": draft, "outcome": outcome}


if __name__ == "__main__":
    import command_line  # beside this file

    command_line.show(run, __doc__)
