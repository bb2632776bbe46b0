"""Plan and execute: a plan, then a tool for each step, then the answer.

    python examples/plan_and_execute.py --url http://127.0.0.1:30000 --deadline 60

``with tool(s, …)`` tells the server what runs between two calls: while it does, the program
needs no tokens, and next time the server knows how long such a pause is.
"""

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import sglang as sgl

from engine.runtime.frontend import JITEndpoint, tool

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
STEPS = (
    ("{n} boxes hold {m} pens each. How many pens?", "{n} * {m}"),
    ("{n} people came and then {m} more. How many people?", "{n} + {m}"),
    ("Of {n}{m} eggs {m} broke. How many are left?", "{n}{m} - {m}"),
    ("A ticket costs {m}. What do {n} cost?", "{n} * {m}"),
)


def calculate(expression: str) -> float:
    """The value of a sum of whole numbers; raises ValueError for anything else."""

    def value_of(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](value_of(left), value_of(right))
        raise ValueError(f"not a sum: {expression!r}")

    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not a sum: {expression!r}") from None


def expression_in(text: str, otherwise: str) -> str:
    """The first sum that the model wrote; a model as small as the demo's may write none."""
    found = re.search(r"\d{1,6}(?: *[-+*] *\d{1,6})+", text)
    return found.group() if found else otherwise


@sgl.function
def plan_and_execute(s: Any, steps: list[tuple[str, str]]) -> None:
    """Leaves the answer in ``answer``; each step is a question and the sum that answers it."""
    questions = " ".join(question for question, _ in steps)
    s += sgl.system("You are good at sums. Be brief.")
    s += sgl.user("Make a plan for these questions: " + questions)
    s += sgl.assistant(sgl.gen("plan", max_tokens=48))
    for question, expected in steps:
        s += sgl.user(f"{question} Write the sum only.")
        s += sgl.assistant(sgl.gen("step", max_tokens=16, stop="\n"))
        written = expression_in(s["step"], otherwise=expected)
        with tool(s, "calculator"):
            value = calculate(written)
        s += sgl.user(f"The calculator says {written} = {value:g}.")
    s += sgl.user("Now tell me all the results.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=64))


def run(endpoint: JITEndpoint, seed: int) -> dict[str, Any]:
    """One run; the seed chooses how many steps there are, and which."""
    dice = random.Random(seed)
    steps = []
    for question, expression in dice.sample(STEPS, dice.randint(1, len(STEPS))):
        numbers = {"n": dice.randint(2, 9), "m": dice.randint(2, 9)}
        steps.append((question.format(**numbers), expression.format(**numbers)))
    state = plan_and_execute.run(steps, temperature=0, backend=endpoint)
    answer = state["answer"]
    outcome = msgspec.to_builtins(endpoint.outcome_of(state))
    task = " ".join(question for question, _ in steps)
    return {"task": task, "answer": answer, "outcome": outcome}


if __name__ == "__main__":
    import command_line  # beside this file

    command_line.show(run, __doc__)
