"""How ranks share the model: the mesh that the user names."""

from __future__ import annotations

from dataclasses import dataclass

from k3c.errors import ConfigError

_WHERE = "--mesh"
_LATER = {"dp": "data", "pp": "pipeline"}


@dataclass(frozen=True)
class Mesh:
    """Ranks that run one program, each on its part of the weights.

    Attributes:
        tp: Ranks that share heads, columns and the vocabulary; all ranks.
        ep: Ranks that share the routed experts: the same ranks, or 1: each has columns of all.
        latent_sharded: The latent projections of the routed experts are shared too.
    """

    tp: int
    ep: int
    latent_sharded: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh's axes as the IR names them; all run over the same ranks."""
        return tuple((axis, size) for axis, size in (("tp", self.tp), ("ep", self.ep)) if size > 1)

    def __str__(self) -> str:
        """Return the mesh as the command line takes it."""
        return f"tp={self.tp},ep={self.ep}"


def parse_mesh(text: str, latent: str = "replicated") -> Mesh | None:
    """Return the mesh of a text like `tp=16,ep=16`; None where it has one rank.

    Args:
        text: Axes and sizes; an axis that is not there has size 1. Empty: one rank.
        latent: `replicated` or `sharded`.

    Raises:
        ConfigError: An axis or a size is wrong, or the axes do not go together.
    """
    sizes = {"tp": 1, "ep": 1}
    for word in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = word.partition("=")
        if axis in _LATER:
            what = f"mesh axis {axis}: {_LATER[axis]} parallelism is not supported yet"
            raise ConfigError(what, _WHERE, "use tp and ep, as in tp=16,ep=16")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"found {word!r}", _WHERE, "write it as tp=16,ep=16")
        sizes[axis] = int(size)
    if sizes["ep"] not in (1, sizes["tp"]):
        hint = f"ep runs over the ranks of tp: ep={sizes['tp']} or ep=1"
        raise ConfigError(f"ep={sizes['ep']} with tp={sizes['tp']}", _WHERE, hint)
    if latent not in ("replicated", "sharded"):
        raise ConfigError(f"found {latent!r}", "--latent", "replicated or sharded")
    return Mesh(**sizes, latent_sharded=latent == "sharded") if sizes["tp"] > 1 else None
