"""How ranks share the model: the mesh that the user names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from k3c.errors import ConfigError

Share = Literal["replicated", "sharded"]
_WHERE = "--mesh"
AXES: tuple[str, ...] = ("tp", "ep", "dp", "pp")
_SHORT = re.compile(r"(T|TE|DE|E|D|P)P(\d+)")


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
        return tuple((axis, self.size(axis)) for axis in AXES if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        """Return the ranks along an axis."""
        return {"tp": self.tp, "ep": self.ep, "dp": self.dp, "pp": self.pp}[axis]

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.dp

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return where a rank stands along every axis."""
        group, tp = divmod(rank, self.tp)
        pp, dp = divmod(group, self.dp)
        ep = dp * self.tp + tp if self.ep > 1 else 0
        return {"tp": tp, "dp": dp, "pp": pp, "ep": ep}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks, in order, that a rank works with along an axis, itself among them.

        Along ep these are all ranks of its stage, if they share the experts; along any other axis
        those that differ from it there alone.
        """
        own, moved = self.coordinates(rank), ("tp", "dp") if axis == "ep" else (axis,)
        if self.size(axis) == 1:
            return (rank,)
        kept = [name for name in ("tp", "dp", "pp") if name not in moved]
        places = ((other, self.coordinates(other)) for other in range(self.ranks))
        return tuple(other for other, place in places if all(place[a] == own[a] for a in kept))

    def __str__(self) -> str:
        """Return the mesh as the command line takes it."""
        later = "".join(f",{a}={n}" for a, n in (("dp", self.dp), ("pp", self.pp)) if n > 1)
        return f"tp={self.tp},ep={self.ep}{later}"


def parse_mesh(text: str, latent: str = "replicated") -> Mesh | None:
    """Return the mesh of a text like `tp=8,dp=9,ep=72` or `TEP16`; None where it has one rank.

    Args:
        text: Axes and sizes, an axis that is not there has size 1; or the field's short names,
            joined by x: TP8 shares heads and columns of all experts; EP8 makes all ranks of a
            stage share the experts, and must be all of them; TEP8 is TP8 with EP8; DP9 and PP2 are
            groups with requests of their own and pipeline stages; DEP8 is DP8 with EP8. A name
            with DP shares the experts over all ranks of a stage: TP8xDP9 is tp=8,dp=9,ep=72. Empty:
            one rank.
        latent: `replicated` or `sharded`.

    Raises:
        ConfigError: An axis or a size is wrong, or the axes do not go together.
    """
    sizes = _short(text) or _sizes(text)
    stage = sizes["tp"] * sizes["dp"]
    if sizes["ep"] not in (1, stage):
        hint = f"ep runs over the ranks of tp and dp: ep={stage} or ep=1"
        raise ConfigError(f"ep={sizes['ep']} with tp={sizes['tp']},dp={sizes['dp']}", _WHERE, hint)
    if latent not in ("replicated", "sharded"):
        raise ConfigError(f"found {latent!r}", "--latent", "replicated or sharded")
    share: Share = "sharded" if latent == "sharded" else "replicated"
    mesh = Mesh(sizes["tp"], sizes["ep"], sizes["dp"], sizes["pp"], share)
    return mesh if mesh.ranks > 1 else None


def _one_rank() -> dict[str, int]:
    return dict.fromkeys(AXES, 1)


def _sizes(text: str) -> dict[str, int]:
    """Return the sizes of a text of axes."""
    sizes = _one_rank()
    named: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = word.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            hint = f"write it as tp=16,ep=16 or TEP16; the axes are {', '.join(AXES)}"
            raise ConfigError(f"found {word!r}", _WHERE, hint)
        if axis in named:
            raise ConfigError(f"axis {axis} twice in {text!r}", _WHERE, "name each axis once")
        named.add(axis)
        sizes[axis] = int(size)
    return sizes


def _short(text: str) -> dict[str, int] | None:
    """Return the sizes of a name such as TEP16 or TP8xPP2; None: it is none."""
    words = [_SHORT.fullmatch(word) for word in re.split("[x\u00d7+]", text)]
    if not all(words):
        return None
    sizes = _one_rank()
    named: set[str] = set()
    for found in filter(None, words):
        name, size = found[1], int(found[2])
        axes = {"TE": ("tp", "ep"), "DE": ("dp", "ep")}.get(name, (f"{name.lower()}p",))
        if size < 1 or named & set(axes):
            what = f"an axis twice in {text!r}" if size else f"found {text!r}"
            raise ConfigError(what, _WHERE, "write it as TEP16, TP8xPP2 or TP8xDP9xEP72")
        named |= set(axes)
        sizes |= dict.fromkeys(axes, size)
    if "dp" in named and "ep" not in named:
        # Groups that share nothing would be deployments of their own.
        sizes["ep"] = sizes["tp"] * sizes["dp"]
    return sizes
