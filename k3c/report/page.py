"""The report's file: facts as JSON between the parts of a page that lie beside this module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3c.errors import ConfigError
from k3c.files import require_folder, write_text

FOLDER = Path(__file__).parent


def render(facts: dict[str, Any]) -> str:
    """Return the page; equal facts give equal bytes."""
    data = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    # Nothing in the data may end the element that it stands in.
    data = data.replace("<", "\\u003c")
    page = (FOLDER / "page.html").read_text()
    for name in ("page.css", "page.js"):
        page = page.replace(f"/*{name}*/", (FOLDER / name).read_text())
    return page.replace("/*facts*/", data)


def write_report(output: Path, facts: dict[str, Any]) -> int:
    """Write the page under a temporary name, and rename it.

    Returns:
        Its bytes.

    Raises:
        ConfigError: The output exists, or its folder does not.
    """
    require_folder(output)
    if output.exists():
        raise ConfigError("output exists", str(output), "remove it or name another")
    text = render(facts)
    write_text(output, text)
    return len(text.encode())
