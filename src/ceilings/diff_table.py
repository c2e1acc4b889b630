"""A comparison as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ceilings.readable import number, percent

__all__ = ["lines", "overlap_lines", "side_line"]

_WIDTH: Final = 110
_HEADS: Final = (
    "",
    "parameters",
    "changed",
    ">1e-5",
    ">1e-3 rel.",
    "‖τ‖/‖θ‖",
    "top 1 %",
    "particip.",
    "smallest",
    "stable rank",
    "top 8",
)


def side_line(word: str, side: Mapping[str, Any]) -> str:
    """One side of a comparison.

    Parameters
    ----------
    word
        BASE or TUNED.
    side
        What it is.

    Returns
    -------
    str
        A line.
    """
    formats = ", ".join(
        f"{code} {entry['parameters']:,} in {entry['tensors']}" for code, entry in side["formats"].items()
    )
    files = f"{side['files']} file{'s' if side['files'] != 1 else ''}"
    tied = "".join(f"; {other} is {kept}" for other, kept in list(side["tied"].items())[:2])
    quantised = f"; quantised: {side['quantised']}" if side["quantised"] else ""
    return f"{word:<5} {side['path']}: {side['kind']}, {files}; numbers: {formats}{quantised}{tied}"


def lines(tuned: Mapping[str, Any]) -> list[str]:
    """All that a terminal shows about one fine-tune.

    Parameters
    ----------
    tuned
        The numbers about it.

    Returns
    -------
    list
        Lines.
    """
    found = [_matching(tuned["matching"]), f"compared in {', '.join(tuned['compared_in'])}", ""]
    rows = [_row(kind["kind"], kind) for kind in tuned["kinds"]] + [_row("all", tuned["total"])]
    found += _table(_HEADS, rows)
    found += [
        "",
        "changed: another number in the format of the comparison · top 1 %: share of ‖τ‖² in the 1 % of the entries "
        "that",
        "changed most · particip.: effective share of entries · smallest: changes on the tenth of the weights of "
        "smallest",
        "magnitude (10 % by chance) · top 8: share of ‖τ‖² in 8 directions a matrix",
        "",
    ]
    layers = [layer for layer in tuned["layers"] if layer["layer"] is not None]
    if layers:
        outside = [_row("outside", layer) for layer in tuned["layers"] if layer["layer"] is None]
        found += _table(("layer", *_HEADS[1:]), [_row(str(e["layer"]), e) for e in layers] + outside)
        found.append("")
    cut = tuned["cuts"]["0.01"]
    if cut["to_choose"] < cut["tied"]:
        found.append(
            f"ties: the top 1 % is {cut['size']:,} entries; {cut['above']:,} are above {number(cut['value'])} and "
            f"{cut['tied']:,} at it"
        )
    for word, sentences in (("", tuned["verdict"]), ("note: ", tuned["caveats"])):
        for sentence in sentences:
            found += textwrap.wrap(word + sentence, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        found.append("")
    return found[:-1]


def overlap_lines(overlaps: Iterable[Mapping[str, Any]]) -> list[str]:
    """What several fine-tunes have in common.

    Parameters
    ----------
    overlaps
        The numbers about each pair.

    Returns
    -------
    list
        Lines.
    """
    found = [
        "",
        "overlaps: share of the first set, of the second; by chance; by chance with each tensor's counts",
    ]
    for entry in overlaps:
        first, second = entry["of"]
        sets, top = entry["changed"], entry["top_percent"]
        found.append(f"{first} and {second}")
        found.append(
            f"  changed   {_pair(sets['shares'])}; {_pair(sets['chance'])}; {_pair(sets['chance_per_tensor'])}"
        )
        low, high = top["share"]
        shown = percent(low, 3) if low == high else f"{percent(low, 3)} to {percent(high, 3)}, open by ties"
        found.append(
            f"  top 1 %   {shown}; {percent(top['chance'], 3)}; {percent(top['chance_per_tensor'], 3)}"
        )
    return found


def _pair(shares: Sequence[float | None]) -> str:
    return ", ".join("–" if share is None else percent(share, 3) for share in shares)


def _matching(matching: Mapping[str, Any]) -> str:
    """What was compared."""
    said = f"{matching['tensors']} tensors matched, {percent(matching['coverage'])} of the base's parameters"
    if matching["renamed"]:
        said += f"; {matching['renamed']} without the prefixes of wrappers"
    for key, word in (
        ("added", "only in TUNED"),
        ("removed", "only in BASE"),
        ("other_shape", "of other shape"),
    ):
        if matching[key]:
            shown = ", ".join(entry["name"] for entry in matching[key][:3])
            said += f"; {word}: {shown}{', …' if len(matching[key]) > 3 else ''}"
    for rows in matching["rows"]:
        said += f"; {rows['name']}: {rows['common']:,} rows compared"
        said += f", {rows['added']:,} added" if rows["added"] else ""
        said += f", {rows['removed']:,} removed" if rows["removed"] else ""
    return said


def _row(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table."""
    shares, spectrum = entry["changed_share"], entry["spectrum"]
    top = entry["energy_share"]["0.01"]

    def share(value: float | None) -> str:
        return "–" if value is None else percent(value, 3)

    return (
        name,
        f"{entry['parameters']:,}",
        share(shares["equality"]),
        share(shares["absolute"]),
        share(shares["relative"]),
        share(entry["relative_size"]),
        share(sum(top) / 2 if top else None),
        share(entry["participation_share"]),
        share(entry["smallest_decile_share"]),
        number(spectrum["stable_rank"]) if spectrum else "–",
        share(spectrum["top_energy"]["8"]) if spectrum else "–",
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of their own width; all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if k == 0 else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    ]
