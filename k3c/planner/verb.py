"""What `k3c plan` does with its options: plan, print, and an exit code."""

from __future__ import annotations

from pathlib import Path

from k3c.errors import ConfigError, PlanError
from k3c.planner.answer import answer_json
from k3c.planner.planning import plan_model
from k3c.planner.problem import PlanOptions


def run_plan(
    model: Path | None, options: PlanOptions, as_json: bool, sides: tuple[str, str] | None
) -> int:
    """Plan and print.

    Args:
        model: The model; None where two files are compared.
        options: What the user chose.
        as_json: Print JSON instead of a screen.
        sides: Two sides to compare; None: one answer.

    Returns:
        The exit code: 0 where something fits, else that of `PlanError`.

    Raises:
        ConfigError: An option is wrong.
    """
    if sides is not None:
        return _compare(model, options, as_json, sides)
    assert model is not None, "the command line names a model or two sides"
    if not options.target:
        raise ConfigError("no target named", "--target", "e.g. --target gb300-nvl72")
    answer = plan_model(model, options)
    if as_json:
        print(answer_json(answer), end="")
    else:
        from k3c.planner.screen import show

        show(answer)
    return 0 if answer.fits else PlanError.exit_code


def _compare(
    model: Path | None, options: PlanOptions, as_json: bool, sides: tuple[str, str]
) -> int:
    from k3c.planner.compare import compare, comparison_json, show_comparison

    answers = compare(model, sides, options)
    if as_json:
        print(comparison_json(answers), end="")
    else:
        show_comparison(answers)
    return 0 if any(answer.fits for answer in answers) else PlanError.exit_code
