"""The command line: verbs only. Each verb imports what it needs and calls one function.

`app` holds the application and the shared options; a module of this package holds the verbs of one
area. Exit codes: 0 ok, 2 wrong request, 3 does not fit, 4 damaged or foreign data, 5 environment,
1 our own fault.
"""

from __future__ import annotations

import errno
import os
import sys

from k3c.cli import compiling, placement, planning, reporting, running, topology
from k3c.cli.app import app
from k3c.errors import ConfigError, DeviceFault, K3CError

# Importing a module registers its verbs.
AREAS = (compiling, planning, placement, running, reporting, topology)


def _as_k3c_error(exc: BaseException) -> K3CError | None:
    """Return what the user should read for an exception, or None when it is our own fault."""
    if isinstance(exc, K3CError):
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DeviceFault("the disk is full", str(exc.filename or ""), "free space and try again")
    if isinstance(
        exc, PermissionError | IsADirectoryError | NotADirectoryError | FileNotFoundError
    ):
        return ConfigError(exc.strerror or "cannot open", str(exc.filename or ""), "check the path")
    if isinstance(exc, ModuleNotFoundError) and exc.name in {
        "torch",
        "tvm",
        "networkx",
        "jsonschema",
        "safetensors",
    }:
        hint = "pip install 'k3c-compiler[cpu]'; k3c doctor lists what is missing"
        return DeviceFault(f"this verb needs {exc.name}, which is not installed", "", hint)
    return None


def main() -> None:
    """Run the command line; every error ends as one line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`| head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as exc:
        if "--debug" in sys.argv:
            raise
        error = _as_k3c_error(exc)
        if error is None:
            print(f"error[{type(exc).__name__}]: {exc}; rerun with --debug", file=sys.stderr)
            sys.exit(1)
        print(f"error[{type(error).__name__}]: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
