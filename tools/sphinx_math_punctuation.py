"""Keep an inline formula and the comma after it on one line.

A browser may break a line beside a formula, which it takes for a picture, even where the next character is a comma
or a closing bracket. A post-transform puts the two into a span that does not break.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

__all__ = ["MathPunctuation", "setup"]

_OPENING = re.compile(r"[(\[“‘]+$")
_CLOSING = re.compile(r"^[.,;:!?)\]’”…]+")


class MathPunctuation(SphinxPostTransform):
    """Wrap inline formulas together with the punctuation that touches them."""

    default_priority = 700

    def run(self, **kwargs: Any) -> None:
        """Go through the inline formulas of the page."""
        for formula in list(self.document.findall(nodes.math)):
            parent = formula.parent
            place = parent.index(formula)
            before = parent[place - 1] if place else None
            after = parent[place + 1] if place + 1 < len(parent) else None
            opening = _OPENING.search(before.astext()) if isinstance(before, nodes.Text) else None
            closing = _CLOSING.search(after.astext()) if isinstance(after, nodes.Text) else None
            if opening is None and closing is None:
                continue
            span = nodes.inline("", "", classes=["nobreak"])
            parts: list[nodes.Node] = [span]
            first, last = place, place + 1
            if opening is not None and before is not None:
                span += nodes.Text(opening.group())
                parts.insert(0, nodes.Text(before.astext()[: opening.start()]))
                first -= 1
            span += formula.deepcopy()
            if closing is not None and after is not None:
                span += nodes.Text(closing.group())
                parts.append(nodes.Text(after.astext()[closing.end() :]))
                last += 1
            parent[first:last] = [p for p in parts if not isinstance(p, nodes.Text) or p.astext()]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform.

    Parameters
    ----------
    app
        The build.

    Returns
    -------
    dict
        That pages may be read and written side by side.
    """
    app.add_post_transform(MathPunctuation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
