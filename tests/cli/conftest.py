"""The command line in this process: for commands that fail before they open any library."""

import sys

import pytest

from k3c import cli
from tests.support.tiny_checkpoint import write_toy


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs `k3c ARGS` and returns exit code, stdout and stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["k3c", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as exc:
            code = exc.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refuse(run):
    """Return a function that runs `k3c ARGS`, expects one error line, and returns it."""

    def refuse(code, kind, *args):
        found, out, err = run(*args)
        assert found == code, err
        assert out == ""
        # Progress lines end in "..." or in seconds; the error is the last line and the only one.
        lines = err.rstrip("\n").split("\n")
        assert lines[-1].startswith(f"error[{kind}]: "), err
        assert sum(line.startswith("error") for line in lines) == 1, err
        assert "Traceback" not in err
        return lines[-1]

    return refuse


@pytest.fixture
def toy(tmp_path):
    """A model directory that a test may damage."""
    folder = tmp_path / "toy"
    write_toy(folder)
    return folder
