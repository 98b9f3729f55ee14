"""Every exception that k3c raises on purpose, and the exit code of each.

An error says what is wrong with both numbers, where, and what to do. The command line prints it on
one line; a traceback only with `--debug`.
"""

from __future__ import annotations


class K3CError(Exception):
    """Base of all k3c errors.

    Args:
        what: What is wrong, with the value found and the value expected.
        where: File, tensor, line or option that it was found in; empty when there is none.
        hint: What the user can do about it; empty when there is nothing to add.
    """

    exit_code = 1

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        """Store the three parts and build the one-line message."""
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The error on one line: what, where and hint."""
        where = f" ({self.where})" if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.what}{where}{hint}"


class ConfigError(K3CError):
    """A wrong request: configuration, option, target, output path, prompt or token id."""

    exit_code = 2


class ParseError(K3CError):
    """IR text or a user's input file does not parse."""

    exit_code = 2


class CheckpointError(K3CError):
    """A checkpoint is damaged, incomplete or does not match its configuration."""

    exit_code = 4


class ArtifactError(K3CError):
    """An artifact is damaged, foreign, newer than this runtime, or hostile."""

    exit_code = 4


class PlanError(K3CError):
    """No memory plan satisfies the limits."""

    exit_code = 3


class PlacementError(K3CError):
    """The model does not fit the mesh or the topology."""

    exit_code = 3


class CapacityError(K3CError):
    """No page, slot or queue place is free now; the caller may retry."""

    exit_code = 3


class DeviceFault(K3CError):
    """The device, its driver, the disk or a tool failed."""

    exit_code = 5


class ExportError(K3CError):
    """The model could not be exported to the IR."""


class VerifyError(K3CError):
    """A module breaks a rule of the IR."""


class PassError(K3CError):
    """A pass broke its contract."""


class CodegenError(K3CError):
    """No kernel template can implement a node, or its build failed."""
