"""A goodput objective and a fairness function of one's own.

    python launch.py --model demo --goodput examples.objective:PaidTokens \
        --fairness 0.2 --fairness-function examples.objective:newest_tenant_first

Both work on numpy arrays, one value per request, and are tried out when the server starts.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

INPUT_PRICE = 1.0
OUTPUT_PRICE = 4.0


class PaidTokens:
    """A token counts as what it is sold for, if it is in time."""

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        """Of answers that are complete by their deadline."""
        return INPUT_PRICE * input_tokens + OUTPUT_PRICE * output_tokens

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        """Of streams with so many of their tokens in time."""
        return OUTPUT_PRICE * tokens_in_time


def newest_tenant_first(service: Floats) -> Floats:
    """1 for a tenant that has been served nothing, falling with every token that it got."""
    return 1.0 / (1.0 + service / 10_000.0)
