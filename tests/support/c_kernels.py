"""A kernel library in C with the ABI of the compiled kernels: tests the driver without TVM."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <stdint.h>
typedef struct { int32_t type_index, padding; union { int64_t i; void *p; } v; } Any;
typedef int (*Task)(int32_t, void *, void *);
__attribute__((weak)) int (*__TVMBackendParallelLaunch)(Task, void *, int);
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

typedef struct { float *x, *y; int64_t rows, add; } Frame;

static int scale(int32_t task, void *env, void *data) {
  Frame *f = data;
  for (int64_t i = task; i < f->rows; i += 2) f->y[i] = 2 * f->x[i] + f->add;
  return 0;
}

/* y[rows] = 2 x[rows] + add, in two parallel tasks */
int __tvm_ffi_scale(void *self, Any *a, int32_t n, Any *result) {
  if (n != 4 || a[0].type_index != 4 || a[1].type_index != 4 || a[2].type_index != 1) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "scale takes x, y, rows, add");
    return -1;
  }
  Frame f = {a[0].v.p, a[1].v.p, a[2].v.i, a[3].v.i};
  return __TVMBackendParallelLaunch(scale, &f, 2);
}

int __tvm_ffi_silent_failure(void *self, Any *a, int32_t n, Any *result) { return 7; }

/* what the plan of test_executor says: arena -> io, once for each of two layers */
int __tvm_ffi_entry(void *self, Any *spaces, int32_t n, Any *result) {
  if (n != 5) return -1;
  for (int layer = 0; layer < 2; ++layer) {
    Any a[4] = {{4, 0}, {4, 0}, {1, 0}, {1, 0}};
    a[0].v.p = (char *)spaces[1].v.p;
    a[1].v.p = (char *)spaces[4].v.p + 64 * layer + 128;
    a[2].v.i = 5;
    a[3].v.i = 10 * (layer + 1);
    if (__tvm_ffi_scale(0, a, 4, result)) return -1;
  }
  return 0;
}
"""


def tvm_library_folder(folder: Path) -> Path:
    """Make a folder with links to the two TVM C libraries, found without importing either."""
    folder.mkdir()
    for package, name in (("tvm_ffi", "libtvm_ffi.so"), ("tvm", "libtvm_runtime.so")):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed: pip install 'k3c-compiler[cpu]'")
        (folder / name).symlink_to(Path(spec.origin).parent / "lib" / name)
    return folder


def build_kernels(folder: Path, libraries: Path) -> Path:
    """Compile the library of this file."""
    return compile_c(folder, SOURCE, libraries)


def compile_c(folder: Path, text: str, libraries: Path) -> Path:
    """Compile C text into `folder / "kernels.so"`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on the PATH")
    source, made = folder / "kernels.c", folder / "kernels.so"
    source.write_text(text)
    link = [f"-L{libraries}", "-ltvm_ffi"]
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), *link]
    subprocess.run(command, check=True, capture_output=True)
    return made
