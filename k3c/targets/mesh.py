"""How ranks share the model: the mesh that the user names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from k3c.errors import ConfigError

Share = Literal["replicated", "sharded"]
_WHERE = "--mesh"
_LATER = {"dp": "data", "pp": "pipeline"}
_SHORT = re.compile(r"(T|TE|DE)P(\d+)")


@dataclass(frozen=True)
class Mesh:
    """Ranks that run one program, each on its part of the weights.

    Rank = (pipeline stage * dp + data-parallel index) * tp + tp index: ranks that share heads are
    neighbours.

    Attributes:
        tp: Ranks that share heads, columns and the vocabulary.
        ep: Ranks that share the routed experts: all of a stage, or 1: each has columns of all.
        dp: Groups of `tp` ranks of a stage that hold requests of their own.
        pp: Pipeline stages.
        latent: Whether the latent projections of the routed experts are shared over tp.
        shared: Whether the shared experts are.
        vocabulary: Whether embedding and head are.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    latent: Share = "replicated"
    shared: Share = "sharded"
    vocabulary: Share = "sharded"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    @property
    def latent_sharded(self) -> bool:
        """Whether the latent projections are shared."""
        return self.latent == "sharded"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes as the IR names them."""
        return tuple((axis, size) for axis, size in (("tp", self.tp), ("ep", self.ep)) if size > 1)

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return where a rank stands along every axis."""
        group, tp = divmod(rank, self.tp)
        pp, dp = divmod(group, self.dp)
        ep = dp * self.tp + tp if self.ep > 1 else 0
        return {"tp": tp, "dp": dp, "pp": pp, "ep": ep}

    def __str__(self) -> str:
        """Return the mesh as the command line takes it."""
        later = "".join(f",{a}={n}" for a, n in (("dp", self.dp), ("pp", self.pp)) if n > 1)
        return f"tp={self.tp},ep={self.ep}{later}"


def parse_mesh(text: str, latent: str = "replicated") -> Mesh | None:
    """Return the mesh of a text like `tp=16,ep=16` or `TEP16`; None where it has one rank.

    Args:
        text: Axes and sizes, an axis that is not there has size 1; or the field's short name: TP8
            shares columns of all experts, TEP8 the experts. Empty: one rank.
        latent: `replicated` or `sharded`.

    Raises:
        ConfigError: An axis or a size is wrong, or the axes do not go together.
    """
    sizes = _short(text) or {"tp": 1, "ep": 1}
    words = [] if _SHORT.fullmatch(text) else text.split(",")
    for word in filter(None, (part.strip() for part in words)):
        axis, _, size = word.partition("=")
        if axis in _LATER:
            raise _not_yet(axis)
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"found {word!r}", _WHERE, "write it as tp=16,ep=16")
        sizes[axis] = int(size)
    if sizes["ep"] not in (1, sizes["tp"]):
        hint = f"ep runs over the ranks of tp: ep={sizes['tp']} or ep=1"
        raise ConfigError(f"ep={sizes['ep']} with tp={sizes['tp']}", _WHERE, hint)
    if latent not in ("replicated", "sharded"):
        raise ConfigError(f"found {latent!r}", "--latent", "replicated or sharded")
    share: Share = "sharded" if latent == "sharded" else "replicated"
    return Mesh(tp=sizes["tp"], ep=sizes["ep"], latent=share) if sizes["tp"] > 1 else None


def _not_yet(axis: str) -> ConfigError:
    what = f"mesh axis {axis}: {_LATER[axis]} parallelism is not supported yet"
    return ConfigError(what, _WHERE, "use tp and ep, as in tp=16,ep=16")


def _short(text: str) -> dict[str, int] | None:
    """Return the sizes of a short name; None: it is none."""
    found = _SHORT.fullmatch(text)
    if found is None:
        return None
    kind, ranks = found[1], int(found[2])
    if kind == "DE":
        raise _not_yet("dp")
    if ranks < 1:
        raise ConfigError(f"found {text!r}", _WHERE, "write it as TEP16 or tp=16,ep=16")
    return {"tp": ranks, "ep": ranks if kind == "TE" else 1}
