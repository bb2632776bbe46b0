"""Which tools ran before a call, read from the results that its messages carry."""

from collections.abc import Mapping
from typing import Any

MAX_TOOLS = 64
MAX_NAME_CHARS = 256


def tool_names(body: Mapping[str, Any]) -> list[str]:
    """Names of the tools whose results are new in this call, in order.

    New is what stands behind the model's last answer. Takes the bodies of OpenAI's chat
    completions (messages of role ``tool``, named by the ``tool_calls`` that they answer) and
    responses (``function_call_output``). What is not as it should be is left out: it is for
    the engine to refuse.
    """
    items = body.get("messages")
    if not isinstance(items, list):
        items = body.get("input")
    if not isinstance(items, list):
        return []
    messages = [item for item in items if isinstance(item, dict)]
    results: list[dict[str, Any]] = []
    for message in reversed(messages):
        if _is_answer(message):
            break
        if message.get("role") == "tool" or message.get("type") == "function_call_output":
            results.append(message)
    names = _names_by_call(messages)
    found = [_name_of(result, names) for result in reversed(results)]
    return [name for name in found if name][:MAX_TOOLS]


def _is_answer(message: Mapping[str, Any]) -> bool:
    is_call = message.get("type") == "function_call"
    return message.get("role") == "assistant" or is_call


def _names_by_call(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Names of functions by the id of their call."""
    names: dict[str, Any] = {}
    for message in messages:
        if message.get("type") == "function_call" and isinstance(message.get("call_id"), str):
            names[message["call_id"]] = message.get("name")
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")
    return names


def _name_of(result: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    call_id = result.get("tool_call_id", result.get("call_id"))
    name = names.get(call_id) if isinstance(call_id, str) else None
    name = name or result.get("name")
    if not isinstance(name, str):
        return ""
    # Half of a surrogate pair is a string to JSON and to nobody else.
    return name[:MAX_NAME_CHARS].encode("utf-8", "replace").decode()
