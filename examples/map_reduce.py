"""Map and reduce: a summary of each document side by side, then one of the summaries.

    python examples/map_reduce.py --url http://127.0.0.1:30000 --deadline 60

The reduction cannot begin before the slowest summary is done; the server sees that coming.
"""

import random
from typing import Any

import msgspec
import sglang as sgl

from engine.runtime.frontend import JITEndpoint

DOCUMENTS = (
    "Bees visit flowers for nectar and carry pollen from one to the next. Without them many "
    "fruits would not grow. A hive of honey bees may hold fifty thousand of them in summer.",
    "Salt was once so dear that soldiers were given money for it. It keeps fish and meat from "
    "going bad, and towns grew rich where it was found.",
    "A glacier is a river of ice. It moves a few centimetres a day, grinds the rock under it, "
    "and leaves lakes and round hills behind when it melts.",
    "Paper was made from rags for centuries. When machines learnt to make it from wood, books "
    "and newspapers became cheap, and many more people learnt to read.",
    "Tides rise and fall twice a day because the moon pulls at the sea. In narrow bays the "
    "water can climb by more than ten metres.",
    "Bread rises because yeast turns sugar into gas. The dough holds the gas in small bubbles, "
    "and the heat of the oven makes them firm.",
)


@sgl.function
def map_reduce(s: Any, documents: list[str]) -> None:
    """Leaves the summaries in ``summary`` and the summary of them in ``answer``."""
    s += sgl.system("You write one short sentence.")
    parts = s.fork(len(documents))
    for part, document in zip(parts, documents, strict=True):
        part += sgl.user("Summarise: " + document)
        part += sgl.assistant(sgl.gen("summary", max_tokens=32))
    # After the join each variable of the forks is a list.
    parts.join()
    s += sgl.user("What do these have in common? " + " ".join(s["summary"]))
    s += sgl.assistant(sgl.gen("answer", max_tokens=48))


def run(endpoint: JITEndpoint, seed: int) -> dict[str, Any]:
    """One run; the seed chooses how many documents there are, and which."""
    dice = random.Random(seed)
    documents = dice.sample(DOCUMENTS, dice.randint(2, len(DOCUMENTS)))
    state = map_reduce.run(documents, temperature=0, backend=endpoint)
    answer = state["answer"]
    outcome = msgspec.to_builtins(endpoint.outcome_of(state))
    return {"task": f"{len(documents)} documents", "answer": answer, "outcome": outcome}


if __name__ == "__main__":
    import command_line  # beside this file

    command_line.show(run, __doc__)
