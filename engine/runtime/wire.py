"""How a request's terms travel from the HTTP process to the scheduler process.

SGLang carries ``sampling_params.custom_params`` to the scheduler untouched; one key of it
is ours. What a client may have put there itself is overwritten or removed.
"""

from typing import Any

import msgspec

from core.slo import RequestTerms

KEY = "jitserve"


def attach(sampling_params: dict[str, Any], terms: RequestTerms | None) -> None:
    """Write ``terms`` into sampling parameters, or take out what is under our key."""
    custom = sampling_params.get("custom_params")
    custom = dict(custom) if isinstance(custom, dict) else {}
    custom.pop(KEY, None)
    if terms is not None:
        custom[KEY] = msgspec.to_builtins(terms)
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
