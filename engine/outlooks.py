"""What the graphs process says of a program, in the scheduler's words."""

from graphs.protocol import Outlook
from scheduler.programs import ProgramOutlook


def as_expected(outlook: Outlook) -> ProgramOutlook | None:
    """None: nothing that is known fits the program (any more)."""
    if not outlook.is_known:
        return None
    return ProgramOutlook(
        future_input_tokens=outlook.input_tokens,
        future_output_tokens=outlook.output_tokens,
        future_stage_tokens=outlook.stage_tokens,
        future_spread_tokens=outlook.spread_tokens,
        future_tool_s=outlook.tool_s,
        stage_due_s=outlook.stage_due_s,
        future_new_tokens=outlook.new_tokens,
        next_call_s=outlook.next_call_s,
        next_input_tokens=outlook.next_input_tokens,
    )
