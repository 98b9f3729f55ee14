"""Lines by folder, and the files and functions over budget (architecture: 400 and 40 lines)."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("k3c", "passes", "codegen", "runtime", "tests", "perf")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
LONGER = "longer than the budget:"  # a kernel template says so, with the reason, above its function


@dataclass(frozen=True)
class Function:
    """A function and its length."""

    where: str
    lines: int
    excused: bool


def python_files(folder: str) -> list[Path]:
    """Return the Python files of a top folder, links not followed."""
    return sorted(
        path
        for path in (ROOT / folder).rglob("*.py")
        if not any(p.is_symlink() for p in path.parents) and "__pycache__" not in path.parts
    )


def line_count(path: Path) -> int:
    """Return the number of lines of a file."""
    return path.read_text().count("\n")


def functions(path: Path) -> list[Function]:
    """Return the functions of a file; a nested one shares the excuse of the one around it."""
    text = path.read_text()
    lines = text.splitlines()
    found: list[Function] = []

    def visit(node: ast.AST, excused: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            excused = excused or LONGER in "\n".join(lines[max(0, first - 4) : first])
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            found.append(Function(name, length, excused))
        for child in ast.iter_child_nodes(node):
            visit(child, excused)

    visit(ast.parse(text), False)
    return found


def main() -> None:
    """Print the table."""
    print(f"{'folder':<10}{'files':>7}{'lines':>8}{'largest file':>45}")
    for folder in FOLDERS:
        files = python_files(folder)
        if not files:
            continue
        largest = max(files, key=line_count)
        total = sum(map(line_count, files))
        name = f"{largest.relative_to(ROOT)} ({line_count(largest)})"
        print(f"{folder:<10}{len(files):>7}{total:>8}{name:>45}")
    every = [f for folder in FOLDERS for path in python_files(folder) for f in functions(path)]
    longest = max(every, key=lambda f: f.lines)
    print(f"longest function: {longest.where} ({longest.lines} lines)")


if __name__ == "__main__":
    main()
