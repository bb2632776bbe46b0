"""Tree of thought: a few next thoughts at a time, each scored, the best one kept.

    python examples/tree_of_thought.py --url http://127.0.0.1:30000 --deadline 60

Forks are the calls that the server runs side by side; every level waits for all of its scores,
so what counts is when the slowest branch of a level is done.
"""

import random
from typing import Any

import msgspec
import sglang as sgl

from engine.runtime.frontend import JITEndpoint

QUESTIONS = (
    "How can a small town save water in summer?",
    "How can a school teach children to cook?",
    "How can a library bring in more readers?",
    "How can two neighbours share one car?",
)
ANGLES = ("what is cheap", "what is quick", "what lasts", "what is fun")
SCORES = ["1", "2", "3", "4", "5"]


@sgl.function
def tree_of_thought(s: Any, question: str, angles: list[str], num_levels: int) -> None:
    """Leaves the answer in the variable ``answer``."""
    s += sgl.system("You think step by step, one short sentence at a time.")
    s += sgl.user(question)
    for _ in range(num_levels):
        branches = s.fork(len(angles))
        for branch, angle in zip(branches, angles, strict=True):
            branch += sgl.assistant(f"Thinking of {angle}, " + sgl.gen("thought", 32, stop="\n"))
            branch += sgl.user("How good is this thought, from 1 to 5?")
            branch += sgl.assistant(sgl.select("score", SCORES))
        # Nothing was read so far, so all branches are under way. Reading waits.
        best = max(branches, key=lambda branch: int(branch["score"]))
        thought = best["thought"]
        branches.join()
        s += sgl.assistant(thought)
        s += sgl.user("Go on.")
    s += sgl.user("Now answer in one sentence: " + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=48))


def run(endpoint: JITEndpoint, seed: int) -> dict[str, Any]:
    """One run; the seed chooses the question, how wide the tree is and how deep."""
    dice = random.Random(seed)
    question = dice.choice(QUESTIONS)
    angles = dice.sample(ANGLES, dice.randint(2, 4))
    state = tree_of_thought.run(
        question, angles, num_levels=dice.randint(1, 3), temperature=0, backend=endpoint
    )
    answer = state["answer"]
    outcome = msgspec.to_builtins(endpoint.outcome_of(state))
    return {"task": question, "answer": answer, "outcome": outcome}


if __name__ == "__main__":
    import command_line  # beside this file

    command_line.show(run, __doc__)
