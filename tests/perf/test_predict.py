"""The cost model against figures that it has not seen."""

import tomllib

import pytest

from k3c.planner.efficiency import used_steps
from perf.predict import (
    FIGURES,
    MEDIAN,
    WORST,
    Prediction,
    _check,
    left_out,
    own_prediction,
    own_steps,
    predictions,
    summary,
)


@pytest.fixture(scope="module")
def found():
    return predictions()


def test_predictions_are_as_near_as_they_have_to_be(found):
    for kind in ("public", "ours"):
        result = summary([one for one in found if one.kind == kind])
        assert result["median"] <= MEDIAN, (kind, result)
        assert result["worst"] <= WORST, (kind, result)


def test_error_bars_hold_nearly_all_figures(found):
    inside = summary(found)["within_bar"]
    assert all(one.low < one.us < one.high for one in found)
    assert inside >= 0.85 * len(found)


def test_every_public_figure_is_predicted_or_says_why_not(found):
    figures = tomllib.loads(FIGURES.read_text("utf-8"))["figure"]
    public = [one for one in found if one.kind == "public"]
    assert len(public) + len(left_out()) == len(figures)
    assert len({f["what"] for f in figures}) == len(figures)
    for figure in figures:
        assert figure["source"]
        assert ("predict" in figure) != ("left_out" in figure), figure["what"]


def test_our_fifteen_steps_are_predicted_without_themselves(found):
    names = [step.name for step in own_steps()]
    assert len(names) == 15
    assert {name.split()[0] for name in names} == {"W1", "W1L", "W1S", "W2", "W3"}
    for step in own_steps():
        assert step.name not in own_prediction(step).constants
        whole = own_prediction(step, workload=True).constants
        assert not [name for name in whole if name.split()[0] == step.name.split()[0]]
    assert len(used_steps(frozenset())) == 15


def test_a_constant_of_the_figures_own_source_is_refused():
    mine = Prediction("a", "blog", "public", "ms", 1, 1, 1, 1, ("blog: its table", "another"))
    with pytest.raises(AssertionError, match="its table"):
        _check(mine)
    # Any blog of one engine is the same source.
    other = Prediction("a", "vllm blog 1", "public", "ms", 1, 1, 1, 1, ("vllm blog figure 2",))
    with pytest.raises(AssertionError, match="figure 2"):
        _check(other)
