"""A figure that another page drew, with a caption and a text for those who cannot see it.

The directive ``{glued-figure} key`` shows the figure that the chapter ``:doc:`` kept with `glue`. Its options are
``:name:``, by which pages refer to it, and ``:alt:``, which is required; its content is the caption. (The
directive ``{glue}`` of myst_nb shows figures of other pages too, but takes neither.)
"""

from __future__ import annotations

from binascii import a2b_base64
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from myst_nb.ext.glue.crossref import read_glue_cache
from myst_nb.ext.glue.utils import PendingGlueReferenceError, create_pending_glue_ref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

__all__ = ["GluedFigure", "GluedFigureText", "setup"]


class GluedFigure(SphinxDirective):
    """The directive ``{glued-figure}``."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[Any] = {
        "doc": directives.unchanged_required,
        "alt": directives.unchanged_required,
        "name": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Build the figure around a reference that is filled in when every page has been read."""
        if missing := [option for option in ("doc", "alt") if option not in self.options]:
            raise self.error(f"a glued figure needs the option :{missing[0]}:")
        source, line = self.get_source_info()
        document = self.state.document
        try:
            picture = create_pending_glue_ref(document, source, line, self.options["doc"], self.arguments[0])
        except PendingGlueReferenceError as error:
            raise self.error(str(error)) from error
        glued = {"alt": self.options["alt"], "doc": picture.refdoc, "key": picture.key}
        figure = nodes.figure("", picture, align="default", glued=glued)
        caption = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, caption)
        if not caption.children:
            raise self.error("a glued figure needs a caption")
        figure += nodes.caption("", "", *caption.children[0].children)
        self.set_source_info(figure)
        self.add_name(figure)
        return [figure]


class GluedFigureText(SphinxPostTransform):
    """Give a glued figure its file and its text, once myst_nb has put the image node there."""

    default_priority = 6  # myst_nb fills in its references at 5

    def run(self, **kwargs: Any) -> None:
        """Find the images inside glued figures."""
        for figure in self.document.findall(lambda node: isinstance(node, nodes.figure) and "glued" in node):
            glued = figure["glued"]
            for image in figure.findall(nodes.image):
                image["alt"] = glued["alt"]
                # NOTE myst_nb names the file by its contents but writes it only where the chapter shows it too.
                folder = getattr(self.env, "mystnb_config").output_folder  # noqa: B009 - myst_nb adds it
                kept = read_glue_cache(folder, glued["doc"])[glued["key"]]
                builder = self.app.builder
                file = Path(builder.outdir, builder.imagedir, Path(image["uri"]).name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(a2b_base64(kept["data"]["image/png"]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and its transform.

    Parameters
    ----------
    app
        The build.

    Returns
    -------
    dict
        That pages may be read and written side by side.
    """
    app.add_directive("glued-figure", GluedFigure)
    app.add_post_transform(GluedFigureText)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
