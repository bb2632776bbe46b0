"""Decode attention on a CPU for a whole batch, over the KV pool as it lies.

Built by torch's extension loader the first time that somebody asks, for the machine's own vector
width, into ``cache_dir()/kernels``; without a compiler whoever asks goes by torch's own attention.
"""

import hashlib
import logging
import os
import platform
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from engine.demo_model import cache_dir

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_attention.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
HEAD_SIZES = frozenset((16, 32, 64, 80, 96, 128, 256))
"""That the kernel is built for."""
DTYPES = frozenset((torch.float32, torch.bfloat16))
NAME = "jitserve_paged_attention"
OFF_VARIABLE = "JITSERVE_CPU_KERNELS"
"""Set to 0: as if there was no compiler."""


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the kernel is there, built now if need be; says in the log why it is not."""
    if os.environ.get(OFF_VARIABLE) == "0":
        return False
    try:
        _load()
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        logger.warning(
            "no attention kernel for this CPU, decoding falls back to torch's: %s", first_line
        )
        return False
    return True


def _load() -> None:
    """Load what was built before, or build it: where nobody else does, since torch waits for ever
    for the lock of a build that was killed."""
    library = build_dir() / f"{NAME}.so"
    if library.exists():
        torch.ops.load_library(str(library))
        return
    from torch.utils.cpp_extension import load

    library.parent.mkdir(parents=True, exist_ok=True)
    logger.info("building an attention kernel for this CPU: %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        load(
            name=NAME,
            sources=[str(SOURCE)],
            extra_cflags=list(FLAGS),
            build_directory=folder,
            is_python_module=False,
        )
        # Whole or not at all, whoever else is about to do the same.
        os.replace(Path(folder) / library.name, library)


def build_dir() -> Path:
    """One per source, torch and CPU: what is built is good for nothing else."""
    what = "\n".join((SOURCE.read_text(), " ".join(FLAGS), torch.__version__, _cpu()))
    return cache_dir() / "kernels" / hashlib.blake2b(what.encode(), digest_size=8).hexdigest()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def supports(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``decode`` can take them, of shapes as there."""
    return (
        query.shape[-1] in HEAD_SIZES
        and keys.shape == values.shape
        and keys.shape[-1] == query.shape[-1]
        and query.dtype == keys.dtype == values.dtype
        and query.dtype in DTYPES
        and keys.stride(-1) == values.stride(-1) == 1
    )


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int = -1,
) -> None:
    """Softmax(q K' scale) V for one token of each request, into ``out``.

    Args:
        query: (requests, heads, head size), contiguous, float32 or bfloat16.
        keys, values: (slots, key-value heads, head size), of the same type.
        table: (rows, most tokens), int32: the slot of each token.
        rows: (requests,) the request's row of the table.
        lengths: (requests,) tokens that it has, the new one included.
        out: as ``query``.
        window_tokens: only so many of the last ones; negative: all.

    Raises RuntimeError for shapes and types that do not fit together.
    """
    torch.ops.jitserve.paged_decode(
        query,
        keys,
        values,
        table,
        rows.to(torch.int64).contiguous(),
        lengths.to(torch.int64).contiguous(),
        out,
        scale,
        window_tokens,
    )
