"""How every picture here is drawn: SVG with text as text, the same bytes for the same rows."""

from __future__ import annotations

from typing import Any


def svg_pyplot(program: str) -> Any:
    """matplotlib's pyplot, set up for such pictures; `program` names who wants it where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(f"{program}: matplotlib: expected to be installed (pip install fretwork[plot])") from None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fretwork", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot

    return pyplot
