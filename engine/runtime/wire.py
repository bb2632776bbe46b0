"""How a request's terms and cues travel from the HTTP process to the scheduler process.

SGLang carries ``sampling_params.custom_params`` to the scheduler untouched; two keys of it
are ours. What a client may have put there itself is overwritten or removed.
"""

from typing import Any

import msgspec

from core.slo import RequestTerms
from predictor.features import NO_CUES, Cues

KEY = "jitserve"
CUES_KEY = "jitserve_cues"


def attach(
    sampling_params: dict[str, Any], terms: RequestTerms | None, cues: Cues = NO_CUES
) -> None:
    """Write ``terms`` and ``cues`` into sampling parameters; what is there under our keys goes."""
    custom = sampling_params.get("custom_params")
    custom = dict(custom) if isinstance(custom, dict) else {}
    custom.pop(KEY, None)
    custom.pop(CUES_KEY, None)
    if terms is not None:
        custom[KEY] = msgspec.to_builtins(terms)
    if cues is not NO_CUES:
        custom[CUES_KEY] = msgspec.to_builtins(cues)
    if custom:
        sampling_params["custom_params"] = custom
    else:
        sampling_params.pop("custom_params", None)


def detach(custom_params: Any) -> RequestTerms | None:
    """The terms in a request's custom parameters, if it came through our HTTP layer."""
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return None
    try:
        return msgspec.convert(custom_params[KEY], RequestTerms)
    except msgspec.ValidationError:
        # Only a route that by-passes ``attach`` can bring this; it must not stop the scheduler.
        return None


def cues_in(custom_params: Any) -> Cues:
    """The cues in a request's custom parameters, or none."""
    if not isinstance(custom_params, dict) or CUES_KEY not in custom_params:
        return NO_CUES
    try:
        return msgspec.convert(custom_params[CUES_KEY], Cues)
    except msgspec.ValidationError:
        return NO_CUES
