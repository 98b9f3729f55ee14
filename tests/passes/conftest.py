"""Collect the `.k3t` cases: one text file each, before and after a pass.

    pass: fuse_kda
    why: one sentence
    refused: a refusal's text that must be reported (optional)
    catalogue: templates of tests/support/fake_layouts.py (optional)
    mesh: as --mesh takes it, then `latent=sharded` and the like, with ` + ` between (optional)
    == before
    <IR>
    == after                     or  == unchanged: <refusal>   or  == error: <Class> [line N]
    <IR>

`make bless CASE=<file>` rewrites the part below `== after`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from k3c import errors
from k3c.ir.graph import Module
from k3c.ir.rewrite import RewriteLog
from k3c.ir.text import parse, show
from k3c.ir.verify import verify
from k3c.passes.context import PassContext
from k3c.passes.pipeline import PIPELINE, Pass, run_pass
from k3c.targets.mesh import Mesh, parse_mesh
from tests.support.fake_layouts import TARGET, catalogue
from tests.support.meaning import assert_ranks_compute_the_same, assert_same_meaning

_SECTION = re.compile(r"^== (before|after|unchanged|error)(?:: (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One case: header fields, the IR before, and what must come of it."""

    header: dict[str, str]
    before: str
    kind: str
    argument: str
    after: str

    @property
    def step(self) -> Pass:
        """The pass under test."""
        return next(p for p in PIPELINE if self.header["pass"] == p.NAME)

    def context(self) -> PassContext:
        """A context with the case's catalogue and an empty log."""
        return PassContext(
            TARGET, catalogue(self.header.get("catalogue", "")), RewriteLog(), self.mesh
        )

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the case names."""
        axes, *shares = self.header.get("mesh", "").split(" + ")
        mesh = parse_mesh(axes)
        return mesh and replace(mesh, **dict(share.split("=") for share in shares))


def read_case(text: str) -> Case:
    """Split a case's text."""
    head, *parts = _SECTION.split(text)
    header = dict(line.split(": ", 1) for line in head.strip().splitlines())
    assert set(header) <= {"pass", "why", "refused", "catalogue", "mesh"}, (
        f"header {sorted(header)}"
    )
    (_, _, before), (kind, argument, after) = parts[:3], parts[3:]
    return Case(header, before.lstrip("\n"), kind, argument or "", after.lstrip("\n"))


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> pytest.Collector | None:
    return CaseFile.from_parent(parent, path=file_path) if file_path.suffix == ".k3t" else None


class CaseFile(pytest.File):
    """A file with one case."""

    def collect(self):
        yield CaseItem.from_parent(self, name="cases")


class CaseItem(pytest.Item):
    """Runs a case."""

    def runtest(self) -> None:
        case = read_case(self.path.read_text())
        if os.environ.get("K3C_BLESS") and Path(os.environ["K3C_BLESS"]).resolve() == self.path:
            self._bless(case)
        elif case.kind == "error":
            check_error(case)
        else:
            check_rewrite(case)

    def _bless(self, case: Case) -> None:
        assert case.kind == "after", "only an `after` part can be rewritten"
        after = show(case.step.run(parse(case.before), case.context()))
        head = self.path.read_text().partition("== after\n")[0]
        self.path.write_text(f"{head}== after\n{after}")

    def reportinfo(self):
        return self.path, 0, f"{self.path.parent.name}: {self.path.stem}"

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, AssertionError | errors.K3CError):
            return f"{self.path}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)


def check_rewrite(case: Case) -> None:
    """Check text, refusals, round trip, idempotence and meaning of a case."""
    before, ctx = parse(case.before), case.context()
    assert show(before) == case.before, f"the before part is not as show prints it:\n{show(before)}"
    verify(before)
    after = case.step.run(before, ctx)
    wanted = case.after if case.kind == "after" else case.before
    assert show(after) == wanted, f"after {case.step.NAME}:\n{show(after)}"
    reasons = [str(r.refusal) for r in ctx.log.refused]
    for reason in filter(None, (case.argument, case.header.get("refused"))):
        assert any(reason in r for r in reasons), f"refusals {reasons}, want {reason!r}"
    verify(after)
    assert parse(show(after)) == after
    assert_idempotent(case, after)
    if case.mesh is None:
        assert_same_meaning(before, after)
    else:
        assert_ranks_compute_the_same(before, after, case.mesh)


def assert_idempotent(case: Case, after: Module) -> None:
    """Check that a second run changes nothing."""
    again = case.step.run(after, case.context())
    assert show(again) == show(after), f"a second run gives:\n{show(again)}"


def check_error(case: Case) -> None:
    """Check the class and the line of an error of the parser, the verifier or the pass."""
    name, _, line = case.argument.partition(" ")
    with pytest.raises(getattr(errors, name)) as caught:
        run_pass(case.step, _verified(case.before), case.context())
    assert line in str(caught.value), f"found {caught.value}"


def _verified(text: str) -> Module:
    module = parse(text)
    verify(module)
    return module
