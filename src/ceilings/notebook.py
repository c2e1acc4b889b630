"""What chapters share: one state of generators, threads, printing and figures; commands run as in a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["report_part", "setup", "terminal"]


def setup(seed: int = 0, threads: int = 1, dtype: torch.dtype = torch.float64) -> None:
    """Make a notebook repeatable.

    Sets the global seed (a guard only: chapters pass explicit generators), the number of threads, the default
    dtype, deterministic algorithms, four printed digits, and the figure style and format of the book.

    Parameters
    ----------
    seed
        Global seed of torch.
    threads
        Threads for one operation; 1 where the order of summation matters.
    dtype
        Default floating-point type.
    """
    import matplotlib.pyplot as plt
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    from ceilings.figures import STYLE

    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(True)
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=100)
    warnings.filterwarnings("ignore", message="IProgress not found")
    plt.style.use(STYLE)
    # NOTE a tight bounding box changes the image size with the labels; metadata would carry the library's version.
    set_matplotlib_formats("png", bbox_inches=None, metadata={"Software": None})


def terminal(line: str, folder: str | os.PathLike[str] = ".", code: int = 0) -> None:
    """Run a command of this library and print what a terminal would show.

    Parameters
    ----------
    line
        The command line, beginning with ``ceilings``.
    folder
        Where to run it.
    code
        The exit code that it must have.

    Raises
    ------
    ValueError
        If the line does not begin with ``ceilings``.
    RuntimeError
        If the command ends with another code; the message holds what it said.

    Notes
    -----
    Expected times differ from run to run and are left out. Long lines are wrapped.
    """
    from ceilings import cli

    program, *arguments = shlex.split(line)
    if program != "ceilings":
        raise ValueError(f"{line!r} is no command of this library: begin it with `ceilings`")
    text = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        found = cli.main(arguments)
    rows = re.sub(r"time about .*", "time about …", text.getvalue()).splitlines()
    shown = "\n".join([f"$ {line}", *(textwrap.fill(row, 92, subsequent_indent="  ") for row in rows)])
    if found != code:
        raise RuntimeError(f"{shown}\nended with code {found} and not {code}")
    print(shown)


def report_part(page: str | os.PathLike[str], title: str) -> Any:
    """One section of a ``report.html``, to be shown in a chapter.

    Parameters
    ----------
    page
        The file.
    title
        Heading of the section, which is left out: the caption says it.

    Returns
    -------
    IPython.display.HTML
        The section; the style of the book knows its classes.

    Raises
    ------
    ValueError
        If the page has no such section.
    """
    from IPython.display import HTML

    text = Path(page).read_text(encoding="utf-8")
    found = re.search(rf"<h2>{re.escape(title)}</h2>(.*?)</section>", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no section {title!r}: name one of its headings")
    return HTML(f'<div class="report-part">{found[1]}</div>')
