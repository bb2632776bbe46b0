"""What the text generated so far says of how much is still to come, from token ids alone.

Tokens are told apart by what their text holds: a line break, a digit, a list marker, a code
fence, the end of a sentence, a word that closes. Nothing of the text is kept.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Classes = npt.NDArray[np.uint8]

WINDOW_TOKENS = 50
MAX_TOKENS_SEEN = 2048
"""Of a longer answer the last so many are looked at."""
GRAM = 4
MAX_PROGRESS = 100.0
"""No feature is larger: shares, flags and logs."""

NEWLINE, DIGIT, MARKER, FENCE, STOP, CLOSING = (1 << bit for bit in range(6))

PROGRESS_FEATURES: tuple[str, ...] = (
    "repeated_share",
    "distinct_share",
    "recent_newlines",
    "newline_rate",
    "log_list_items",
    "recent_digits",
    "is_fence_open",
    "has_fence",
    "recent_closing",
    "recent_stops",
    "log_since_newline",
)
NUM_PROGRESS = len(PROGRESS_FEATURES)

_CLOSING_WORDS = frozenset(
    [
        "conclusion",
        "overall",
        "summary",
        "finally",
        "ultimately",
        "sincerely",
        "regards",
        "therefore",
        "answer",
        "hope",
        "best",
        "thank",
        "thanks",
        "total",
        "result",
    ]
)
# How byte-level and sentencepiece vocabularies spell blanks and line breaks.
_SPELLINGS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})


def classes_of(vocabulary: Mapping[str, int]) -> Classes:
    """The class bits of each token id, shape (largest id + 1,)."""
    classes = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.uint8)
    for token, index in vocabulary.items():
        if index >= 0:
            classes[index] = _class_of(token)
    return classes


def _class_of(token: str) -> int:
    text = token.replace("<0x0A>", "\n").translate(_SPELLINGS)
    word = text.strip()
    return (
        NEWLINE * ("\n" in text)
        | DIGIT * word.isdecimal()
        | MARKER * (word in ("-", "*", "•", "+"))
        | FENCE * ("```" in word)
        | STOP * (word[:1] in (".", "!", "?") and word != "")
        | CLOSING * (word.lower() in _CLOSING_WORDS)
    )


def progress_row(output_ids: Sequence[int], classes: Classes) -> Row:
    """Shape (NUM_PROGRESS,), finite; ids outside the vocabulary count as ordinary words."""
    ids = np.asarray(output_ids[-MAX_TOKENS_SEEN:], dtype=np.int64)
    if not ids.size or not classes.size:
        return np.zeros(NUM_PROGRESS, dtype=np.float32)
    inside = np.where((ids >= 0) & (ids < len(classes)), ids, 0)
    bits = np.where(inside == ids, classes[inside], 0)
    recent = bits[-WINDOW_TOKENS:]
    newlines = (bits & NEWLINE) != 0
    # A marker, or a number, that opens a line.
    opens_line = np.concatenate([[True], newlines[:-1]])
    items = int((opens_line & ((bits & (MARKER | DIGIT)) != 0)).sum())
    fences = int(((bits & FENCE) != 0).sum())
    places = np.flatnonzero(newlines)
    since = len(ids) - 1 - int(places[-1]) if places.size else len(ids)
    count = len(recent)
    return np.array(
        (
            _repeated_share(ids),
            len(np.unique(ids[-WINDOW_TOKENS:])) / count,
            _count(recent, NEWLINE) / count,
            float(newlines.sum()) / len(ids),
            math.log1p(items),
            _count(recent, DIGIT) / count,
            float(fences % 2),
            float(fences > 0),
            float(_count(recent, CLOSING) > 0),
            _count(recent, STOP) / count,
            math.log1p(since),
        ),
        dtype=np.float32,
    )


def _count(bits: npt.NDArray[np.integer], kind: int) -> int:
    return int(((bits & kind) != 0).sum())


def _repeated_share(ids: npt.NDArray[np.int64]) -> float:
    """Share of the last tokens that end a run of ``GRAM`` seen before: an answer that loops."""
    if len(ids) < GRAM + 1:
        return 0.0
    grams = np.zeros(len(ids) - GRAM + 1, dtype=np.int64)
    for shift in range(GRAM):
        grams = grams * 1_000_003 + ids[shift : len(ids) - GRAM + 1 + shift]
    _, first = np.unique(grams, return_index=True)
    is_repeated = np.ones(len(grams), dtype=np.bool_)
    is_repeated[first] = False
    return float(is_repeated[-WINDOW_TOKENS:].mean())
