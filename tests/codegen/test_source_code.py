"""What of a source file counts for the kernels that are made from it."""

from pathlib import Path

import pytest

from k3c.codegen import source_code
from k3c.codegen.kernel_key import KernelRequest, kernel_key
from k3c.codegen.source_code import closure, file_code, file_of
from k3c.codegen.templates.triton.linear_gemm import TEMPLATES as LINEAR_GEMM
from k3c.targets.target import load_target

TEMPLATES = "k3c.codegen.templates."
CODE = '''"""A kernel."""

LIMIT = 4


class Kernel:
    """Adds."""

    def run(self, x):
        """Add x."""
        return x + 1
'''
SAME = {
    "comment": CODE.replace("LIMIT", "# why four\nLIMIT"),
    "trailing comment": CODE.replace("x + 1", "x + 1  # one more"),
    "line break": CODE.replace("x + 1", "(\n            x\n            + 1\n        )"),
    "docstring of the module": CODE.replace("A kernel.", "Another sentence."),
    "docstring of the class": CODE.replace("Adds.", "Adds one."),
    "docstring of the method": CODE.replace('"""Add x."""', '"""Return more."""'),
    "no docstring": CODE.replace('        """Add x."""\n', ""),
}
OTHER = {
    "number": CODE.replace("x + 1", "x + 2"),
    "text that is used": CODE.replace("LIMIT = 4", 'LIMIT = "4"'),
    "name": CODE.replace("LIMIT", "LEAST"),
}


@pytest.fixture
def digest(tmp_path, monkeypatch):
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path / "cache"))

    def of(text):
        file = tmp_path / f"f{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text)
        return file_code(file).digest

    return of


@pytest.mark.parametrize("change", SAME)
def test_comments_layout_and_docstrings_do_not_count(digest, change):
    assert SAME[change] != CODE
    assert digest(SAME[change]) == digest(CODE)


@pytest.mark.parametrize("change", OTHER)
def test_code_counts(digest, change):
    assert digest(OTHER[change]) != digest(CODE)


def test_a_kept_digest_is_the_one_that_parsing_gives(digest):
    parsed = digest(CODE)
    assert digest(CODE) == parsed, "the second comes from the cache: same bytes, another file"


def test_modules_of_which_only_a_number_is_used_count():
    assert TEMPLATES + "tvm.mxfp4_layout" in closure(TEMPLATES + "tvm.mxfp4_decode")
    assert TEMPLATES + "tvm.kda_prefill" not in closure(TEMPLATES + "tvm.linear")


def test_modules_that_are_imported_from_a_package_count_and_the_package_does_not():
    found = closure(TEMPLATES + "triton.route")
    assert {TEMPLATES + "triton.route_kernel", TEMPLATES + "triton.dispatch_kernel"} <= found
    assert not found & {TEMPLATES + "triton", TEMPLATES + "triton.route_map"}


@pytest.mark.parametrize(("more", "same"), [("\n# a comment\n", True), ("\nMORE = 1\n", False)])
def test_a_comment_in_a_template_leaves_its_kernels_keys(tmp_path, monkeypatch, more, same):
    target, request = load_target("gb300"), KernelRequest(LINEAR_GEMM[0], {"BLOCK_M": 64})
    name = TEMPLATES + "triton.linear_gemm_kernel"
    before = kernel_key(request, target)
    changed = tmp_path / "changed.py"
    changed.write_text(file_of(name).read_text() + more)
    files = lambda module: changed if module == name else file_of(module)  # noqa: E731
    monkeypatch.setattr(source_code, "file_of", files)
    fresh = source_code.module_digest.__wrapped__(TEMPLATES + "triton.linear_gemm")
    assert (fresh == source_code.module_digest(TEMPLATES + "triton.linear_gemm")) == same
    assert kernel_key(request, target) == before


def test_equal_numbers_of_different_types_are_different_constants():
    target = load_target("gb300")
    keys = {kernel_key(KernelRequest(LINEAR_GEMM[0], {"x": x}), target) for x in (1, 1.0, True)}
    assert len(keys) == 3


def test_a_file_that_is_not_text_is_told_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        file_code(Path(tmp_path / "missing.py"))
