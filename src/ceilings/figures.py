"""Figures of the book: one style file, fixed colours, and the house plot of gradient against ceiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "STYLE", "draw_roof", "house_plot", "null_rows", "small_panels", "tightness_histogram"]

STYLE: Final = str(files("ceilings").joinpath("book.mplstyle"))

#: One colour for one meaning, across the book.
COLOURS: Final = {
    "gradient": "#0072B2",
    "ceiling": "#D55E00",
    "null": "#999999",
    "forced": "#009E73",
    "second": "#CC79A7",
    "third": "#E69F00",
}


def house_plot(
    ax: Axes, ceiling: Tensor, gradient: Tensor, label: str | None = None, colour: str = COLOURS["gradient"]
) -> None:
    r"""Draw :math:`|g_i|` against its ceiling, log-log, under the roof y = x.

    Parameters
    ----------
    ax
        Axes to draw on; a second call adds a second cloud under the same roof.
    ceiling
        :math:`\sigma(R) \sqrt{F_{ii}}`; entries that are zero are left out.
    gradient
        :math:`g_i`; entries below a thousandth of the smallest ceiling are drawn on the lower edge.
    label
        Legend entry of the cloud.
    colour
        Colour of the cloud.

    Shapes
    ------
    ceiling (D,), gradient (D,).

    Raises
    ------
    ValueError
        If the shapes differ, an entry is not finite, or no ceiling is positive.
    """
    if ceiling.shape != gradient.shape:
        raise ValueError(f"ceiling has shape {tuple(ceiling.shape)} and gradient {tuple(gradient.shape)}")
    if not bool(torch.isfinite(ceiling).all() and torch.isfinite(gradient).all()):
        raise ValueError(
            "a ceiling or gradient is NaN or infinite: it would be left out of the figure in silence"
        )
    positive = ceiling > 0
    if not bool(positive.any()):
        raise ValueError("every ceiling is zero: there is nothing to plot on a logarithmic axis")
    x, y = ceiling[positive].detach(), gradient[positive].abs().detach()
    low, high, top = float(x.min()) / 3, float(x.max()) * 3, float(torch.maximum(x, y).max()) * 3
    first = ax.get_xscale() != "log"
    if not first:  # a second cloud widens the axes, so that none of it falls outside
        low, high, top = min(low, ax.get_xlim()[0]), max(high, ax.get_xlim()[1]), max(top, ax.get_ylim()[1])
    floor = low * 1e-3
    ax.plot(x, y.clamp_min(floor), ".", color=colour, alpha=0.6, markeredgewidth=0, markersize=6, label=label)
    if first:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(r"ceiling $\sigma(R)\,\sqrt{F_{ii}}$  [R]/[θ]")
        ax.set_ylabel(r"gradient $|g_i|$  [R]/[θ]")
    ax.set_xlim(low, high)
    ax.set_ylim(floor, top)
    draw_roof(ax)


def draw_roof(ax: Axes) -> None:
    """Draw y = x and shade the side above it, which a bounded quantity cannot reach.

    Parameters
    ----------
    ax
        Axes with the bound across and the bounded quantity up, limits already set. A second call, after the limits
        have changed, draws the roof anew.
    """
    for artist in [a for a in (*ax.lines, *ax.collections) if a.get_gid() == "roof"]:
        artist.remove()
    low, high = ax.get_xlim()
    top = ax.get_ylim()[1]
    (line,) = ax.plot([low, high], [low, high], color=COLOURS["ceiling"], lw=1.5, zorder=1)
    shade = ax.fill_between(
        [low, high], [low, high], [top * 10] * 2, color=COLOURS["ceiling"], alpha=0.10, lw=0
    )
    line.set_gid("roof")
    shade.set_gid("roof")
    ax.set_xlim(low, high)
    ax.set_ylim(top=top)


def tightness_histogram(
    ax: Axes, tightness: Tensor, label: str | None = None, colour: str = COLOURS["gradient"], bins: int = 40
) -> None:
    r"""Draw the distribution of tightness over parameters, each parameter weighing the same.

    Parameters
    ----------
    ax
        Axes to draw on.
    tightness
        :math:`|\rho_i|`; undefined entries (NaN) are left out.
    label
        Legend entry.
    colour
        Colour of the curve.
    bins
        Number of bins on [0, 1].

    Shapes
    ------
    tightness (D,).

    Raises
    ------
    ValueError
        If no entry is defined, or one lies outside [0, 1].
    """
    values = tightness[~torch.isnan(tightness)].detach()
    if len(values) == 0:
        raise ValueError("no tightness is defined: the reward is constant or every ceiling is zero")
    if bool(((values < 0) | (values > 1)).any()):
        raise ValueError("a tightness lies outside [0, 1]: pass the absolute value of the correlation")
    counts = torch.histc(values, bins=bins, min=0, max=1) / len(values)
    edges = torch.linspace(0, 1, bins + 1)
    ax.stairs(counts.numpy(), edges.numpy(), color=colour, label=label, lw=1.8)
    ax.set_xlabel(r"tightness $|\rho_i|$")
    ax.set_ylabel("share of parameters")
    ax.set_xlim(0, 1)


def null_rows(ax: Axes, rows: Mapping[str, Tensor], results: Mapping[str, float], chance: float) -> None:
    """Draw results among their null models: one row of dots for each null, a diamond where a result belongs to it.

    Parameters
    ----------
    ax
        Axes to draw on.
    rows
        Draws of each null model by name, the first at the top; a row of five draws or more also gets the interval
        of its middle 90 %.
    results
        What was measured, by the name of the row that is its null model; a row may have none.
    chance
        What sets drawn at random would give.

    Shapes
    ------
    each row (draws,).

    Raises
    ------
    ValueError
        If there is no row, one is empty, or a result has no row of its own.
    """
    if not rows or any(len(draws) == 0 for draws in rows.values()):
        raise ValueError("a row of null models is empty: a result cannot be read without its nulls")
    if strangers := set(results) - set(rows):
        raise ValueError(
            f"no null model is given for {sorted(strangers)}: a result cannot be read without its nulls"
        )
    # A diamond is hollow, so that it hides none of the dots that it is to be read against.
    style = {"marker": "D", "mec": COLOURS["gradient"], "mfc": "none", "mew": 1.8}
    diamond: dict[str, Any] = style | {"ms": 7.5, "ls": ""}
    for y, (name, draws) in enumerate(reversed(list(rows.items()))):
        values = draws.detach().double()
        if len(values) >= 5:
            low, high = torch.quantile(values, torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
            ax.barh(y, high - low, left=low, height=0.5, color=COLOURS["null"], alpha=0.35, lw=0)
        ax.plot(values, [y] * len(values), "o", color=COLOURS["null"], ms=4)
        if name in results:
            ax.plot([results[name]], [y], **diamond)
    ax.plot([], [], label="measured", **diamond)
    ax.plot([], [], "o", color=COLOURS["null"], ms=4, label="null model")
    ax.axvline(chance, color="#444444", lw=0.8, ls=":", label="chance")
    ax.set_yticks(range(len(rows)), list(rows)[::-1])
    ax.legend(loc="lower right")


def small_panels(names: Sequence[str], height: float, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """Small panels on the same axes, narrow enough that their words can be read on a telephone.

    Parameters
    ----------
    names
        What each panel shows, written in its upper left corner.
    height
        Of the figure, in inches.
    columns
        Panels a row.

    Returns
    -------
    tuple
        The figure, and one axes a name; the lowest of each column carries the ticks' labels.

    Raises
    ------
    ValueError
        If there is no name or no column.
    """
    import matplotlib.pyplot as plt

    if not names or columns < 1:
        raise ValueError(f"{len(names)} panels in {columns} columns: give at least one of each")
    rows = -(-len(names) // columns)
    fig, grid = plt.subplots(rows, columns, figsize=(4.8, height), sharex=True, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for k, ax in enumerate(axes):
        ax.set_visible(k < len(names))
        if k < len(names):
            ax.annotate(names[k], (0.05, 0.95), xycoords="axes fraction", va="top", fontsize=8.5)
            ax.tick_params(labelbottom=k + columns >= len(names))
    return fig, axes[: len(names)]
