"""The one measure of closeness: largest difference over largest magnitude."""

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return max|got - want| / max|want|; NaN in either makes it NaN."""
    got, want = got.double(), want.double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))
