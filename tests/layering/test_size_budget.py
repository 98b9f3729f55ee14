"""The size budget of the architecture: files <= 400 lines, functions <= 40, runtime <= 5,000."""

import pytest

from tests.support.size_table import (
    FOLDERS,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    functions,
    line_count,
    python_files,
)

CODE = [f for f in FOLDERS if f != "tests"]


@pytest.mark.parametrize("folder", CODE)
def test_no_file_is_over_budget(folder):
    over = {str(p): n for p in python_files(folder) if (n := line_count(p)) > MAX_FILE_LINES}
    assert not over


@pytest.mark.parametrize("folder", CODE)
def test_no_function_is_over_budget_unless_a_kernel_says_why(folder):
    every = [f for path in python_files(folder) for f in functions(path)]
    over = [f for f in every if f.lines > MAX_FUNCTION_LINES and not f.excused]
    assert not over
    excused = [f for f in every if f.lines > MAX_FUNCTION_LINES and f.excused]
    assert all("codegen/templates/" in f.where for f in excused)


def test_what_serves_stays_small():
    aside = {"server", "measuring"}
    files = [p for p in python_files("runtime") if not aside & set(p.parts)]
    assert files
    assert sum(map(line_count, files)) <= 5000
    without_drivers = [p for p in files if "driver" not in p.parts]
    assert sum(map(line_count, without_drivers)) <= 3000
