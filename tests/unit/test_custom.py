"""What an operator plugs in by its dotted path, and what is said of one that cannot work."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from rows import Ask, estimates_of, floats

from core.slo import DeadlineSlo, RequestTerms
from engine.runtime import custom
from engine.runtime.custom import CustomError
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.plan import EngineCapacity
from scheduler.policies import gmax

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD_METHODS = """
    def answer_value(self, input_tokens, output_tokens):
        return 1000.0 / input_tokens

    def stream_value(self, tokens_in_time, all_tokens):
        return tokens_in_time
"""
_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that can be imported; its name, never the same."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"operators_own_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write


def refused(**settings: Any) -> CustomError:
    with pytest.raises(CustomError) as caught:
        custom.load(SchedulerConfig(**settings))
    assert "\n" not in str(caught.value)
    return caught.value


# Goodput objectives -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token", "request", "1:2", "0:1", "0.5:0"])
def test_built_in_objectives_need_nothing_plugged_in(name: str) -> None:
    assert custom.load(SchedulerConfig(goodput=name)) == {}


@pytest.mark.parametrize("name", ["0:0", "-1:2", "nan:1", "1:inf"])
def test_weights_that_cannot_be_are_refused(name: str) -> None:
    error = refused(goodput=name)
    assert error.setting == "goodput"
    assert name in str(error)


def test_a_second_weight_that_is_no_number_is_refused_too() -> None:
    assert refused(goodput="1:nan").setting == "goodput"


@pytest.mark.parametrize("separator", [":", "."])
def test_an_objective_is_found_by_its_dotted_path(
    module: Callable[[str], str], separator: str
) -> None:
    name = module(f"class Prices:{GOOD_METHODS}\nmine = Prices()\n")
    found = custom.load(SchedulerConfig(goodput=f"{name}{separator}mine"))
    assert list(found) == ["objective"]
    assert type(found["objective"]).__name__ == "Prices"
    assert found["objective"].answer_value(floats(10), floats(5)).tolist() == [100.0]


def test_a_class_is_made_an_object_of(module: Callable[[str], str]) -> None:
    name = module(f"class Prices:{GOOD_METHODS}")
    objective = custom.load(SchedulerConfig(goodput=f"{name}:Prices"))["objective"]
    assert objective.stream_value(floats(3), floats(5)).tolist() == [3.0]


def test_a_name_inside_of_a_class_is_found(module: Callable[[str], str]) -> None:
    name = module(f"class Shop:\n    class Prices:{textwrap.indent(GOOD_METHODS, '    ')}")
    assert "objective" in custom.load(SchedulerConfig(goodput=f"{name}:Shop.Prices"))


def test_a_module_is_an_object_with_methods_too(module: Callable[[str], str]) -> None:
    inner = module(
        """
        def answer_value(input_tokens, output_tokens):
            return input_tokens

        def stream_value(tokens_in_time, all_tokens):
            return tokens_in_time
        """
    )
    outer = module(f"import {inner} as prices")
    assert "objective" in custom.load(SchedulerConfig(goodput=f"{outer}:prices"))


def test_whole_numbers_and_lists_are_answers_too(module: Callable[[str], str]) -> None:
    name = module(
        """
        class Prices:
            def answer_value(self, input_tokens, output_tokens):
                return [1, 2]

            def stream_value(self, tokens_in_time, all_tokens):
                return tokens_in_time > 50
        """
    )
    assert "objective" in custom.load(SchedulerConfig(goodput=f"{name}:Prices"))


@pytest.mark.parametrize("path", ["", "tokens", ":", "module:", ":name", "."])
def test_what_is_no_path_is_refused_with_what_it_takes(path: str) -> None:
    error = refused(goodput=path)
    assert error.setting == "goodput"
    assert str(error) == (
        "takes token, request, weights as 1:2, or a dotted path (package.module:name), "
        f"got {path!r}"
    )


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_package.prices:mine", "No module named 'no_such_package'"),
        ("math:prices", "module 'math' has no attribute 'prices'"),
        ("math:pi.prices", "'float' object has no attribute 'prices'"),
        ("math.prices", "module 'math' has no attribute 'prices'"),
        (".prices:mine", ""),
        ("two words:mine", "No module named 'two words'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, complaint: str) -> None:
    error = refused(goodput=path)
    assert error.setting == "goodput"
    assert str(error).startswith(f"{path!r} cannot be loaded: ")
    assert complaint in str(error)


@pytest.mark.parametrize("text", ["1 / 0", "import no_such_package", "def broken("])
def test_a_module_that_cannot_be_imported_is_refused(
    module: Callable[[str], str], text: str
) -> None:
    path = f"{module(text)}:mine"
    assert str(refused(goodput=path)).startswith(f"{path!r} cannot be loaded: ")


def one_bad_method(method: str, body: str) -> str:
    """An objective of which one method does that."""
    other = "stream_value" if method == "answer_value" else "answer_value"
    return f"""
        import numpy as np

        class Prices:
            def {method}(self, a, b):
                {body}

            def {other}(self, a, b):
                return a + b
        """


@pytest.mark.parametrize("method", ["answer_value", "stream_value"])
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return a[0]", "gives shape (), not that of its arguments"),
        ("return a[:1]", "gives shape (1,), not that of its arguments"),
        ("return np.ones((2, 2))", "gives shape (2, 2), not that of its arguments"),
        ("return 1.0", "gives shape (), not that of its arguments"),
        ("raise KeyError('price')", "fails on arrays: 'price'"),
        ("return 1 if a > 5 else 0", "fails on arrays: "),
        ("return None", "gives shape (), not that of its arguments"),
        ("return ['dear', 'cheap']", "fails on arrays: "),
        ("return a * np.nan", "gives [nan, nan], not finite numbers"),
        ("return [1.0, float('inf')]", "gives [1.0, inf], not finite numbers"),
    ],
)
def test_a_method_that_does_not_answer_arrays_with_numbers_is_refused(
    module: Callable[[str], str], method: str, body: str, complaint: str
) -> None:
    path = f"{module(one_bad_method(method, body))}:Prices"
    error = refused(goodput=path)
    assert error.setting == "goodput"
    assert str(error).startswith(f"{path!r}: {method}(a, b) {complaint}")


@pytest.mark.parametrize("method", ["answer_value", "stream_value"])
def test_a_method_that_is_missing_or_none_is_refused(
    module: Callable[[str], str], method: str
) -> None:
    name = module(one_bad_method(method, "return a") + f"\n        Prices.{method} = 5\n")
    assert str(refused(goodput=f"{name}:Prices")) == f"'{name}:Prices' has no {method}(a, b)"
    assert str(refused(goodput="math:pi")) == "'math:pi' has no answer_value(a, b)"


@pytest.mark.parametrize(
    "init", ["def __init__(self, prices): ...", "def __init__(self): raise KeyError('no prices')"]
)
def test_a_class_that_no_object_can_be_made_of_is_refused(
    module: Callable[[str], str], init: str
) -> None:
    name = module(f"class Prices:\n    {init}\n{GOOD_METHODS}")
    error = refused(goodput=f"{name}:Prices")
    assert error.setting == "goodput"
    assert f"{name}:Prices" in str(error)


# Fairness functions -------------------------------------------------------------------------------


def fair_function(path: str) -> Any:
    found = custom.load(SchedulerConfig(fairness_function=path))
    assert list(found) == ["fair"]
    return found["fair"]


def test_without_a_fairness_function_there_is_nothing_to_plug_in() -> None:
    assert custom.load(SchedulerConfig(fairness=0.5)) == {}


def test_a_fairness_function_gets_the_service_of_each_requests_tenant(
    module: Callable[[str], str],
) -> None:
    fair = fair_function(f"{module('def share(service): return service / 1000')}:share")
    asks = (Ask(tenant=0), Ask(tenant=1), Ask(tenant=0))
    estimates = estimates_of(*asks, tenant_service=floats(500, 3000))
    assert fair(estimates).tolist() == [0.5, 1.0, 0.5]  # bounded to 1


def test_an_object_that_can_be_called_is_a_fairness_function(module: Callable[[str], str]) -> None:
    name = module(
        """
        class Share:
            def __call__(self, service):
                return 1.0 / (1.0 + service)

        share = Share()
        """
    )
    fair = fair_function(f"{name}.share")
    assert fair(estimates_of(Ask(), tenant_service=floats(3))).tolist() == [0.25]


def test_one_that_fails_later_leaves_it_to_the_least_served(module: Callable[[str], str]) -> None:
    name = module("def share(service): return service if service.max() < 1000 else 1 / 0")
    fair = fair_function(f"{name}:share")
    asks = (Ask(tenant=0), Ask(tenant=1))
    estimates = estimates_of(*asks, tenant_service=floats(5000, 100))
    assert fair(estimates).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("path", ["share", "module:", ":share"])
def test_what_is_no_path_to_a_function_is_refused(path: str) -> None:
    error = refused(fairness_function=path)
    assert error.setting == "fairness_function"
    assert str(error) == f"takes a dotted path (package.module:name), got {path!r}"


def test_a_path_to_no_function_is_refused() -> None:
    error = refused(fairness_function="no_such_package:share")
    assert error.setting == "fairness_function"
    assert "cannot be loaded" in str(error)
    assert str(refused(fairness_function="math:pi")) == "'math:pi' has no function(service)"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return service.sum()", "gives shape (), not that of its arguments"),
        ("return service[:1]", "gives shape (1,), not that of its arguments"),
        ("raise ValueError('unfair')", "fails on arrays: unfair"),
        ("return None", "gives shape (), not that of its arguments"),
        ("return service * float('nan')", "gives [nan, nan], not finite numbers"),
    ],
)
def test_a_function_that_does_not_answer_arrays_with_numbers_is_refused(
    module: Callable[[str], str], body: str, complaint: str
) -> None:
    path = f"{module('def share(service):' + chr(10) + f'    {body}')}:share"
    error = refused(fairness_function=path)
    assert error.setting == "fairness_function"
    assert str(error).startswith(f"{path!r}: function(service) {complaint}")


def test_a_function_of_two_arguments_is_refused(module: Callable[[str], str]) -> None:
    path = f"{module('def share(service, more): return service')}:share"
    assert "fails on arrays: " in str(refused(fairness_function=path))


# On the frame manager -----------------------------------------------------------------------------


def test_what_is_loaded_is_what_the_frame_manager_takes(module: Callable[[str], str]) -> None:
    name = module(
        f"class Prices:{GOOD_METHODS}\n\ndef share(service):\n    return service / 1000\n"
    )
    config = SchedulerConfig(goodput=f"{name}:Prices", fairness_function=f"{name}:share")
    found = custom.load(config)
    assert sorted(found) == ["fair", "objective"]
    frames = FrameManager(config, **found)
    for request_id, input_tokens in (("dear", 800), ("cheap", 10)):
        terms = RequestTerms(1000.0, DeadlineSlo(50.0))
        frames.arrive(request_id, terms, input_tokens=input_tokens, max_output_tokens=50)
    with patch.object(gmax, "FITTING_LOAD", 0.0):  # What fits goes by its time, whatever its worth.
        plan = frames.tick(1000.0, EngineCapacity(1, 10_000, 10_000, 10))
    assert plan is not None
    assert plan.admit == ("cheap",)


def test_an_error_of_both_names_the_first_and_a_config_is_never_half_loaded() -> None:
    assert refused(goodput="nowhere", fairness_function="nowhere").setting == "goodput"
    assert refused(goodput="token", fairness_function="nowhere").setting == "fairness_function"


def test_the_example_works_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    found = custom.load(
        SchedulerConfig(
            goodput="examples.objective:PaidTokens",
            fairness=0.2,
            fairness_function="examples.objective:newest_tenant_first",
        )
    )
    value = found["objective"].answer_value(np.array([10.0]), np.array([5.0]))
    assert value.tolist() == [30.0]
    assert callable(found["fair"])
