"""What an operator plugs in by its dotted path: a goodput objective, a fairness function."""

import importlib
from typing import Any

import numpy as np

from scheduler import fairness
from scheduler.config import SchedulerConfig
from scheduler.objective import GoodputObjective, built_in_objective


class CustomError(ValueError):
    """A dotted path leads nowhere, or to something that cannot do the work.

    ``setting`` is the name of the setting in ``SchedulerConfig``.
    """

    def __init__(self, setting: str, complaint: str) -> None:
        super().__init__(complaint)
        self.setting = setting


def load(config: SchedulerConfig) -> dict[str, Any]:
    """Keyword arguments of ``FrameManager`` for what ``config`` names by dotted paths.

    Raises:
        CustomError: what is named cannot be imported or does not answer as it must.
    """
    found: dict[str, Any] = {}
    try:
        is_built_in = built_in_objective(config.goodput) is not None
    except ValueError as error:
        raise CustomError("goodput", str(error)) from error
    if not is_built_in:
        found["objective"] = _objective(config.goodput)
    if config.fairness_function:
        found["fair"] = fairness.users(_fair_function(config.fairness_function))
    return found


def _objective(path: str) -> GoodputObjective:
    takes = "takes token, request, weights as 1:2, or a dotted path (package.module:name)"
    found = _find("goodput", path, takes)
    try:
        objective: GoodputObjective = found() if isinstance(found, type) else found
    except Exception as error:
        raise CustomError("goodput", f"{path!r} cannot be made: {error}") from error
    sample = np.array([10.0, 200.0])
    for method in ("answer_value", "stream_value"):
        _try_out(
            "goodput", path, f"{method}(a, b)", getattr(objective, method, None), sample, sample
        )
    return objective


def _fair_function(path: str) -> Any:
    setting = "fairness_function"
    found = _find(setting, path, "takes a dotted path (package.module:name)")
    _try_out(setting, path, "function(service)", found, np.array([0.0, 200.0]))
    return found


def _find(setting: str, path: str, takes: str) -> Any:
    module_name, colon, name = path.partition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise CustomError(setting, f"{takes}, got {path!r}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise CustomError(setting, f"{path!r} cannot be loaded: {error}") from error
    return found


def _try_out(
    setting: str, path: str, call: str, method: Any, *samples: "np.ndarray[Any, Any]"
) -> None:
    """It must answer arrays with an array of numbers of their shape."""
    if not callable(method):
        raise CustomError(setting, f"{path!r} has no {call}")
    try:
        answer = np.asarray(method(*samples), dtype=np.float64)
    except Exception as error:
        raise CustomError(setting, f"{path!r}: {call} fails on arrays: {error}") from error
    if answer.shape != samples[0].shape:
        raise CustomError(
            setting, f"{path!r}: {call} gives shape {answer.shape}, not that of its arguments"
        )
    if not np.isfinite(answer).all():
        raise CustomError(setting, f"{path!r}: {call} gives {answer.tolist()}, not finite numbers")
