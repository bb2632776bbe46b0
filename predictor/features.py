"""What can be known of an answer's length before it begins, as a short row of numbers.

``cues_of`` reads the body of a request where its text is (the HTTP process) and keeps
numbers only: counts, flags and hashes of words. ``feature_row`` joins them with what the
engine knows (tokens, sampling parameters). Texts are looked at in a bounded window, so the
cost does not grow with the prompt.
"""

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

HEAD_CHARS = 900
TAIL_CHARS = 300
"""Of the last message of the user only its beginning and its end are looked at."""
MAX_PIECES = 64
"""Messages, from the last, that are looked at."""
MAX_WORDS = 48
"""Hashed words that are kept of a prompt."""
WORD_BUCKETS = 2048
CUES_VERSION = 1
"""Rises whenever the same prompt gives other numbers than before."""
MAX_VALUE = 1e6
MAX_TOKENS_TOLD = 1 << 20
"""A limit above this is none."""

_WORD = re.compile(r"\d{1,3}(?:,\d{3})+|[a-z0-9']+|[^\x00-\x7f]")
_FENCE = "```"

_TASKS: dict[str, str] = {
    "code": "code function python javascript java sql html css script program class method "
    "implement debug compile algorithm regex bash api def return rust golang cpp",
    "math": "calculate solve equation prove integral derivative probability sum compute "
    "theorem geometry algebra percent average",
    "list": "list bullet bullets items enumerate top outline",
    "translate": "translate translation french spanish german chinese japanese",
    "summarize": "summarize summary summarise tldr abstract",
    "long_form": "essay story article blog report novel speech chapter review post",
    "verse": "poem haiku lyrics song limerick rap verse rhyme",
    "letter": "email letter mail cover memo resume",
    "explain": "explain describe discuss elaborate analyze why how",
    "steps": "step steps reasoning think carefully process",
    "choice": "yes no true false choose classify which option label correct answer",
    "edit": "rewrite edit paraphrase rephrase grammar fix convert extract replace",
    "json": "json xml yaml csv schema",
    "table": "table markdown column columns rows",
    "brief": "short brief briefly concise concisely single only just one quick",
    "thorough": "detailed long comprehensive thorough thoroughly depth complete full extensive",
    "compare": "compare contrast difference differences versus between",
    "plan": "plan design create generate write develop propose schedule itinerary",
    "fact": "what when who where whose name",
    "role": "act pretend imagine roleplay assume you're",
}
_UNITS: dict[str, str] = {
    "words": "word words",
    "sentences": "sentence sentences line lines",
    "paragraphs": "paragraph paragraphs section sections page pages stanza stanzas",
    "items": "item items bullet bullets point points example examples step steps idea ideas way "
    "ways tip tips reason reasons question questions option options part parts name names fact "
    "facts thing things",
}
_LIMITS: dict[str, str] = {
    "least": "least more minimum over exceed",
    "most": "most less fewer under within maximum max limit",
}
_NUMBERS = {
    word: float(number)
    for number, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
        ]
    )
} | {"a": 1.0, "an": 1.0, "single": 1.0, "twenty": 20.0, "fifty": 50.0, "hundred": 100.0}


def _index(groups: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for index, words in enumerate(groups.values()):
        for word in words.split():
            found[word] = (*found.get(word, ()), index)
    return found


_TASK_OF = _index(_TASKS)
_UNIT_OF = {word: index[0] for word, index in _index(_UNITS).items()}
_LIMIT_OF = {word: index[0] for word, index in _index(_LIMITS).items()}

TEXT_FEATURES: tuple[str, ...] = (
    "has_text",
    "log_messages",
    "log_user_turns",
    "has_system",
    "log_last_chars",
    "log_all_chars",
    "log_assistant_chars",
    "log_lines",
    "question_marks",
    "digit_share",
    "non_ascii_share",
    "code_fences",
    "ends_in_question",
    *(f"log_asked_{name}" for name in _UNITS),
    *(f"is_{name}" for name in _LIMITS),
    *(f"task_{name}" for name in _TASKS),
    "log_tools",
    "is_tool_forced",
    "wants_json",
    "log_schema_chars",
    "has_media",
)
ENGINE_FEATURES: tuple[str, ...] = (
    "log_input_tokens",
    "log_max_tokens",
    "log_min_tokens",
    "temperature",
    "top_p",
    "has_penalty",
    "has_stop",
    "has_grammar",
    "is_streamed",
    "is_thinking",
    "is_latency",
    "is_program",
)
FEATURES: tuple[str, ...] = (*TEXT_FEATURES, *ENGINE_FEATURES)
"""Names of the columns of a feature row, in order."""
NUM_FEATURES = len(FEATURES)
_NO_TEXT = (0.0,) * len(TEXT_FEATURES)


class Cues(msgspec.Struct, frozen=True, array_like=True):
    """What the text of a prompt says of its answer, as numbers.

    Attributes:
        values: one number for each of ``TEXT_FEATURES``.
        words: hashes of its words, each below ``WORD_BUCKETS``.
    """

    values: tuple[float, ...] = _NO_TEXT
    words: tuple[int, ...] = ()


NO_CUES = Cues()


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine knows of a request when it arrives."""

    input_tokens: int
    max_output_tokens: int
    min_output_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    has_penalty: bool = False
    has_stop: bool = False
    has_grammar: bool = False
    is_streamed: bool = False
    is_thinking: bool = False
    is_latency: bool = False
    is_program: bool = False


def feature_row(cues: Cues, facts: EngineFacts) -> Row:
    """Shape (NUM_FEATURES,), finite whatever came in."""
    known = (
        _log(facts.input_tokens),
        _log(min(facts.max_output_tokens, MAX_TOKENS_TOLD)),
        _log(facts.min_output_tokens),
        _within(facts.temperature),
        _within(facts.top_p),
        facts.has_penalty,
        facts.has_stop,
        facts.has_grammar,
        facts.is_streamed,
        facts.is_thinking,
        facts.is_latency,
        facts.is_program,
    )
    text = cues.values if len(cues.values) == len(TEXT_FEATURES) else _NO_TEXT
    row = np.nan_to_num(np.array(text + known, dtype=np.float64), nan=0.0)
    return np.clip(row, -MAX_VALUE, MAX_VALUE).astype(np.float32)


def cues_of(body: Mapping[str, Any]) -> Cues:
    """The cues in a decoded request body of any generation route; never raises.

    Chat (``messages``), completions (``prompt``), responses (``input``, ``instructions``) and
    SGLang's own route (``text``). A body without text gives ``NO_CUES``.
    """
    try:
        return _read(body)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError, OverflowError):
        # What a client sent is SGLang's to refuse; here it only means that nothing is known.
        return NO_CUES


def _read(body: Mapping[str, Any]) -> Cues:
    pieces, has_media = _pieces(body)
    if not pieces:
        return NO_CUES
    last = next((text for role, text in reversed(pieces) if role == "user"), pieces[-1][1])
    window = last
    if len(last) > HEAD_CHARS + TAIL_CHARS:
        window = last[:HEAD_CHARS] + "\n" + last[-TAIL_CHARS:]
    lowered = window.lower()
    words: list[str] = _WORD.findall(lowered)
    num_chars = max(len(window), 1)
    turns = [role for role, _ in pieces]
    answers = [len(text) for role, text in pieces if role == "assistant"]
    tasks = [0.0] * len(_TASKS)
    for word in _TASK_OF.keys() & set(words):
        for index in _TASK_OF[word]:
            tasks[index] += 1.0
    is_ascii = window.isascii()
    values = (
        1.0,
        _log(len(pieces)),
        _log(turns.count("user")),
        float("system" in turns),
        _log(len(last)),
        _log(sum(len(text) for _, text in pieces)),
        _log(answers[-1] if answers else 0),
        _log(last.count("\n", 0, 1 << 16)),
        float(min(window.count("?"), 5)),
        sum(map(window.count, "0123456789")) / num_chars,
        0.0 if is_ascii else 1.0 - len(window.encode("ascii", "ignore")) / num_chars,
        float(min(window.count(_FENCE), 4)),
        float(window.rstrip().endswith("?")),
        *_asked(words),
        *tasks,
        *_format(body),
        float(has_media),
    )
    return Cues(values, _hashes(words))


def _pieces(body: Mapping[str, Any]) -> tuple[list[tuple[str, str]], bool]:
    """(role, text) of the last messages in order, and whether there is more than text."""
    source = body.get("messages") or body.get("input") or body.get("prompt") or body.get("text")
    pieces: list[tuple[str, str]] = []
    has_media = bool(body.get("image_data") or body.get("audio_data") or body.get("video_data"))
    instructions = body.get("instructions")
    if isinstance(instructions, str):
        pieces.append(("system", instructions))
    if isinstance(source, str):
        pieces.append(("user", source))
    elif isinstance(source, list) and len(source) > 1 and isinstance(source[0], str):
        # Several prompts in one body: what one asks for says nothing of the others.
        return [], has_media
    for item in source[-MAX_PIECES:] if isinstance(source, list) else ():
        if isinstance(item, str):
            pieces.append(("user", item))
        elif isinstance(item, dict):
            text, more = _content(item.get("content"))
            has_media = has_media or more
            role = item.get("role")
            role = role if isinstance(role, str) else "user"
            pieces.append(("system" if role == "developer" else role, text))
    return pieces, has_media


def _content(content: Any) -> tuple[str, bool]:
    if isinstance(content, str):
        return content, False
    parts = content[:MAX_PIECES] if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    kept = [text for text in texts if isinstance(text, str)]
    return "\n".join(kept), len(kept) < len(parts)


def _asked(words: Sequence[str]) -> list[float]:
    """How much is asked for in numbers ("in 300 words", "five bullet points"), and the limits."""
    asked = [0.0] * len(_UNITS)
    limits = [0.0] * len(_LIMITS)
    for index, word in enumerate(words):
        unit = _UNIT_OF.get(word)
        if unit is not None:
            for before in words[max(index - 3, 0) : index]:
                digits = before.replace(",", "")
                number = float(digits[:6]) if digits.isdecimal() else _NUMBERS.get(before)
                if number is not None:
                    asked[unit] = max(asked[unit], number)
        elif word in _LIMIT_OF:
            limits[_LIMIT_OF[word]] = 1.0
    return [*map(_log, asked), *limits]


def _format(body: Mapping[str, Any]) -> tuple[float, float, float, float]:
    tools = body.get("tools")
    choice = body.get("tool_choice")
    is_forced = choice == "required" or isinstance(choice, dict)
    # The Responses API has it in ``text``, where SGLang's own route has the prompt.
    text = body.get("text")
    wanted = body.get("response_format") or (text.get("format") if isinstance(text, dict) else None)
    params = body.get("sampling_params")
    schema: Any = params.get("json_schema") if isinstance(params, dict) else None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_schema" and isinstance(wanted, dict):
        schema = wanted.get("json_schema", wanted)
    if isinstance(schema, dict):
        inner = schema.get("schema", schema)
        properties = inner.get("properties") if isinstance(inner, dict) else None
        size = 16 * len(properties) if isinstance(properties, dict) else 16
    else:
        size = min(len(schema), 1 << 16) if isinstance(schema, str) else 0
    wants_json = bool(size) or kind in ("json_object", "json_schema")
    num_tools = len(tools) if isinstance(tools, list) else 0
    return _log(num_tools), float(is_forced), float(wants_json), _log(size)


def _hashes(words: Sequence[str]) -> tuple[int, ...]:
    """Buckets of the first distinct words, the opening phrase included."""
    opening = [" ".join(words[:2]), " ".join(words[:3])] if len(words) > 2 else []
    distinct: Iterable[str] = dict.fromkeys([*opening, *words[: 2 * MAX_WORDS]])
    kept = list(distinct)[:MAX_WORDS]
    return tuple([zlib.crc32(word.encode("utf-8", "ignore")) % WORD_BUCKETS for word in kept])


def _log(value: float) -> float:
    return math.log1p(min(max(value, 0), 1 << 62))


def _within(value: float) -> float:
    """A float, also of an integer that is too large for one."""
    return float(min(max(value, -MAX_VALUE), MAX_VALUE))
