"""What a comparison says in words: small, sparse, low-rank, each with its number and the caveat that applies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ceilings.readable import number, percent
from ceilings.tally import GRIDS

__all__ = ["caveats", "verdict"]

# Where the words change. They are conventions: the numbers stand beside them.
_SMALL: Final = 0.01
_SPARSE: Final = 0.1
_LOW_RANK: Final = 0.5
_DIRECTIONS: Final = "8"


def verdict(base: Mapping[str, Any], tuned: Mapping[str, Any]) -> list[str]:
    """Whether a change is small, sparse, low-rank.

    Parameters
    ----------
    base
        What the base is.
    tuned
        The numbers about one fine-tune.

    Returns
    -------
    list
        Three sentences.
    """
    total = tuned["total"]
    if not total["changed"]["equality"]:
        same = f"every one of the {total['parameters']:,} compared numbers is equal in {_formats(tuned)}"
        return [
            f"Small: nothing changed; {same}.",
            "Sparse: there is no change to be sparse.",
            "Low-rank: there is no change to have a rank.",
        ]
    return [_small(base, tuned), _sparse(tuned), _low_rank(tuned)]


def _small(base: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    """The sentence on size."""
    size = tuned["total"]["relative_size"]
    if size is None:
        return "Small: undefined, since every weight of the base is zero."
    word = "yes" if size < _SMALL else "no"
    # NOTE what a tie repeats is in the norm once.
    tied = " with tied matrices counted once" if base["tied"] else ""
    return (
        f"Small: {word}; the change is {percent(size, 3)} as long as the weights (‖τ‖/‖θ‖, both rounded to "
        f"{_formats(tuned)}{tied}), which says nothing on how many weights carry it."
    )


def _sparse(tuned: Mapping[str, Any]) -> str:
    """The sentence on counts."""
    total = tuned["total"]
    shares = total["changed_share"]
    word = "yes" if shares["equality"] < _SPARSE else "no"
    if tuned["median_step"] is None:
        return (
            f"Sparse in {_formats(tuned)}: {word}; {percent(shares['equality'], 3)} of the numbers changed, all of "
            "them to or from infinity or NaN, so the changes have no size."
        )
    hidden = total["could_not_show"] / total["unchanged"] if total["unchanged"] else 0.0
    energy = total["energy_share"]["0.01"]
    return (
        f"Sparse in {_formats(tuned)}: {word}; {percent(shares['equality'], 3)} of the numbers changed "
        f"({percent(shares['absolute'], 3)} by more than 1e-5, {percent(shares['relative'], 3)} by more than a "
        f"thousandth of themselves) and the top 1\u00a0% of the entries hold "
        f"{percent(sum(energy) / 2, 3) if energy else 'none'} of the squared change, but {percent(hidden, 3)} of the "
        f"unchanged could not have shown a step of the median size seen ({number(tuned['median_step'], 2)}), so the "
        "count is one of this number format and tolerance."
    )


def _low_rank(tuned: Mapping[str, Any]) -> str:
    """The sentence on directions."""
    spectrum = tuned["total"]["spectrum"]
    if spectrum is None:
        return "Low-rank: not measured, since no matrix changed or singular values were not asked for."
    share, chance = (spectrum[key][_DIRECTIONS] for key in ("top_energy", "random_top_energy"))
    word = "yes" if share >= _LOW_RANK else "no"
    if chance >= _LOW_RANK:
        word = "cannot be told of matrices so small"
    return (
        f"Low-rank: {word}; {_DIRECTIONS} directions a matrix hold {percent(share, 3)} of its squared change (at most "
        f"{percent(chance, 3)} for random changes of these shapes) and the mean stable rank is "
        f"{number(spectrum['stable_rank'])} where random gives {number(spectrum['random_stable_rank'])}; rounding to "
        f"{_formats(tuned)} adds a full-rank part, so the rank itself would say nothing."
    )


def caveats(base: Mapping[str, Any], tuned: Mapping[str, Any]) -> list[str]:
    """What to know before the numbers are used.

    Parameters
    ----------
    base
        What the base is.
    tuned
        The numbers about one fine-tune, and what it is.

    Returns
    -------
    list
        Sentences.
    """
    matching, total = tuned["matching"], tuned["total"]
    sentences = [_rules(tuned)]
    if base["quantised"]:
        sentences.append(
            f"BASE is quantised ({base['quantised']}) and was de-quantised to float32; these numbers are what a "
            "trainer starts from, and rounding them to another format is a change of its own: here both sides are "
            f"rounded to {_formats(tuned)}."
        )
    if set(base["formats"]) != set(tuned["formats"]):
        sentences.append(
            f"BASE is stored as {', '.join(base['formats'])} and TUNED as {', '.join(tuned['formats'])}; both were "
            f"rounded to the coarser format, {_formats(tuned)}, so that a mere change of format is no change."
        )
    if matching["coverage"] < 1:
        sentences.append(
            f"Only {percent(matching['coverage'])} of the base's parameters were compared; the rest has no partner."
        )
    if total["bits_only"]:
        sentences.append(
            f"{total['bits_only']:,} numbers differ in their bits and count as unchanged: zeros of either sign are "
            "equal, and so are NaN of any payload."
        )
    if total["non_finite"]:
        sentences.append(
            f"{total['non_finite']:,} numbers changed to, from or between infinity and NaN; they count as changed by "
            "every rule and are left out of all sizes."
        )
    if total["could_not_show"]:
        sentences.append(
            "That unchanged weights could not have shown a step supposes that training began at the stored numbers of "
            "BASE; a hidden copy that began between two of them can show a smaller one."
        )
    return [*sentences, *base["notes"], *tuned["notes"], *matching["notes"]]


def _rules(tuned: Mapping[str, Any]) -> str:
    """Why the three rules differ, or do not."""
    coarse = all(GRIDS[code][0] <= 8 for code in tuned["compared_in"])
    beside = (
        f"In {_formats(tuned)} neighbouring numbers differ by more than a thousandth, so equality and the relative "
        "rule coincide by construction (subnormal numbers included): they are one piece of evidence, not two. "
        if coarse
        else ""
    )
    return (
        f"{beside}The absolute rule is blind to changes of small weights, however large in proportion, and the "
        "relative rule to small changes of large weights: where the rules differ, they differ about which weights "
        "count."
    )


def _formats(tuned: Mapping[str, Any]) -> str:
    """Number formats of the comparison, the commonest first."""
    compared = tuned["compared_in"]
    return " and ".join(sorted(compared, key=lambda code: -compared[code]))
