"""The screen, the JSON and the comparison of answers, with and without a terminal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from k3c.errors import ArtifactError, ConfigError
from k3c.planner.answer import Interval, KindTime, Speed, answer_from_json, answer_json
from k3c.planner.compare import compare, comparison_json, parse_side, show_comparison
from k3c.planner.planning import plan_model
from k3c.planner.problem import PlanOptions
from k3c.planner.screen import COLUMNS, LINES, render, show

K3 = Path(__file__).parents[1] / "data/configs/kimi-k3-config.json"
SPEED = Speed(
    64, 4608, Interval(88_900, 76_100, 110_000), Interval(13_200, 11_600, 15_800),
    Interval(75_900, 63_300, 86_200), Interval(135_000, 112_600, 153_200),
    Interval(4130, 3340, 5000),
    tuple(KindTime(f"kind_{n}", 5000 - n, 4000) for n in range(12)), (), "s" * 300,
)  # fmt: skip


@pytest.fixture(scope="module")
def answer():
    return plan_model(K3, PlanOptions("gb300-nvl72", mesh="TEP16", max_num_seqs=1024))


def crowded(answer):
    """An answer with everything that a screen may have, each as long as it gets."""
    change = replace(answer.changes[0], effect="word " * 60)
    stage = answer.stages[0]
    lines = tuple(replace(stage.lines[0], name=f"line_{n}", note="n" * 200) for n in range(12))
    choices = tuple(replace(answer.choices[0], why="w" * 300) for _ in range(4))
    return replace(
        answer, speed=(SPEED,), changes=(change,) * 3, warnings=("w" * 300,) * 9,
        stages=(replace(stage, lines=lines),) * 2, choices=choices,
        candidates=answer.candidates * 8,
    )  # fmt: skip


def test_a_screen_has_at_most_40_lines_of_100_columns(answer):
    for shown in (answer, replace(answer, speed=(SPEED,)), crowded(answer)):
        lines = render(shown).plain.rstrip("\n").split("\n")
        assert len(lines) <= LINES
        assert max(map(len, lines)) <= COLUMNS


def test_the_screen_says_what_was_asked_what_is_missing_and_what_would_work(answer):
    text = render(answer).plain
    words = " ".join(text.split())
    for part in ("1,024 requests of 8,192 tokens", "TEP16 of gb300-nvl72", "largest legal",
                 "at least", "1M tokens 27.0 GiB", "experts 84.2 GiB", "mla_pages"):  # fmt: skip
        assert part in words, part
    assert f"--max-num-seqs {answer.capacity.max_num_seqs}: fits" in words


def test_error_bars_stand_beside_the_numbers(answer):
    words = " ".join(render(replace(answer, speed=(SPEED,))).plain.split())
    assert "first token 88.9 ms (76.1 ms..110 ms)" in words
    assert "135.0 (112.6..153.2) per GPU" in words


def test_without_a_terminal_or_with_no_color_there_is_no_escape_code(answer, capsys, monkeypatch):
    show(answer)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Console(force_terminal=True, width=COLUMNS)
    with plain.capture() as caught:
        plain.print(render(answer), end="")
    assert "\x1b[3" not in caught.get()


def test_an_answer_is_read_back_as_it_was_written_and_twice_the_same(answer):
    text = answer_json(answer)
    assert answer_from_json(text, "a.json") == answer
    assert answer_json(answer_from_json(text, "a.json")) == text
    again = plan_model(K3, PlanOptions("gb300-nvl72", mesh="TEP16", max_num_seqs=1024))
    assert answer_json(again) == text


def test_a_damaged_answer_is_refused(answer):
    data = json.loads(answer_json(answer))
    del data["verdict"]
    with pytest.raises(ArtifactError, match="verdict is missing"):
        answer_from_json(json.dumps(data), "a.json")


def test_a_side_is_a_machine_a_mesh_and_options():
    found = parse_side("h200-x2@TEP2+max-num-seqs=3+latent=sharded", PlanOptions("gb300"))
    assert (found.target, found.mesh) == ("h200-x2", "TEP2")
    assert (found.max_num_seqs, found.latent) == (3, "sharded")
    assert parse_side("@TP8", PlanOptions("gb300-nvl72")).target == "gb300-nvl72"


@pytest.mark.parametrize(
    ("side", "word"),
    [
        ("h200+foo=1", "foo=1"),
        ("h200+max-num-seqs=many", "expected a number"),
        ("h200+latent", "latent"),
    ],
)
def test_a_wrong_side_is_refused(side, word):
    with pytest.raises(ConfigError, match=word):
        parse_side(side, PlanOptions("gb300"))


def test_two_answers_stand_side_by_side_with_what_changes(tmp_path, capsys):
    options = PlanOptions("gb300-nvl72", max_num_seqs=1024)
    first = compare(K3, ("@TEP16", "@TEP16+max-model-len=16384"), options)
    assert [a.request.max_model_len for a in first] == [8192, 16384]
    (tmp_path / "a.json").write_text(answer_json(first[0]))
    sides = (str(tmp_path / "a.json"), "@TEP16+max-model-len=16384")
    assert compare(K3, sides, options) == first
    show_comparison(first)
    out = capsys.readouterr().out
    assert max(map(len, out.split("\n"))) <= 100
    (row,) = [line for line in out.split("\n") if "mla_pages" in line]
    assert row.split() == ["mla_pages", "216.0", "GiB", "432.0", "GiB", "x2.00"]
    both = json.loads(comparison_json(first))
    assert both["b"]["request"]["max_model_len"] == 16384


def test_a_file_that_is_not_there_and_a_side_without_a_model_are_refused():
    with pytest.raises(ConfigError, match="no such file"):
        compare(K3, ("no.json", "no.json"), PlanOptions(""))
    with pytest.raises(ConfigError, match="no model"):
        compare(None, ("gb300", "gb300"), PlanOptions(""))
