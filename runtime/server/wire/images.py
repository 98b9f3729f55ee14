"""Image blocks of a prompt: how many tokens an image of some pixels takes.

Source: Kimi K3 serving spec §1.9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3c.errors import ConfigError
from k3c.runtime.server.wire.segments import (
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    Segment,
)

PATCH, MERGED = 14, 28  # pixels of a patch's side, and of the square that becomes one token
MAX_PATCHES, MAX_SIDE = 65536, 7168


@dataclass(frozen=True)
class ImageSize:
    """What an image becomes; all pairs are width and height but `grid_hw`.

    Attributes:
        resized: Pixels after scaling.
        padded: Pixels with zeros to the right and below, multiples of 28.
        grid_hw: Patches, rows first.
        tokens: Tokens in the prompt.
    """

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid_hw: tuple[int, int]
    tokens: int


def image_size(width: int, height: int) -> ImageSize:
    """Return what an image of so many pixels becomes.

    Raises:
        ConfigError: It has no pixels.
    """
    if width < 1 or height < 1:
        raise ConfigError(f"an image of {width} x {height} pixels", "image")
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(MAX_PATCHES / patches), MAX_SIDE / width, MAX_SIDE / height)
    resized = tuple(min(max(1, math.floor(side * scale)), MAX_SIDE) for side in (width, height))
    padded = tuple(-(-side // MERGED) * MERGED for side in resized)
    grid = (padded[1] // PATCH, padded[0] // PATCH)
    return ImageSize((resized[0], resized[1]), (padded[0], padded[1]), grid, grid[0] * grid[1] // 4)


def image_block(width: int, height: int) -> Segment:
    """Return the block of an image of so many original pixels, after its orientation is applied."""
    pads = MEDIA_PAD * image_size(width, height).tokens
    text = f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{pads}{MEDIA_END}"
    return Segment("image", text)
