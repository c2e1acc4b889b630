"""Numbers for a reader: no more digits than they deserve."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["SUPERSCRIPT", "number", "percent", "signed", "with_error"]

#: Digits and minus as exponents, for `str.translate`.
SUPERSCRIPT: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """Number for a reader.

    Parameters
    ----------
    value
        The number, or None for one that is undefined.
    digits
        Significant digits.

    Returns
    -------
    str
        Plain where that is short, otherwise with a power of ten; a dash for None.
    """
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPT)}"


def percent(share: float, digits: int = 4) -> str:
    """Share for a reader.

    Parameters
    ----------
    share
        The share; 1 means all.
    digits
        Significant digits at most.

    Returns
    -------
    str
        Hundredths, with the sign.
    """
    hundredths = 100 * share
    shown = f"{hundredths:.{digits}g}" if hundredths < 10**digits - 0.5 else f"{hundredths:.0f}"
    return f"{shown}\u00a0%"


def signed(value: float | None, digits: int = 3) -> str:
    """Number that may be negative, for a reader.

    Parameters
    ----------
    value, digits
        As in `number`.

    Returns
    -------
    str
        With a minus sign as wide as a plus.
    """
    return number(value, digits).replace("-", "−")


def with_error(value: float | None, error: float | None, separator: str = " ± ") -> str:
    """Number and its standard error, for a reader.

    Parameters
    ----------
    value
        The number, or None for one that is undefined.
    error
        Its standard error; None for a number that has none.
    separator
        What stands between the two.

    Returns
    -------
    str
        Both to the second digit of the error: what follows it says nothing.
    """
    if value is None or not error:
        return signed(value)
    places = max(0, 1 - math.floor(math.log10(error)))
    rounded = round(value, places) + 0.0  # no minus before a zero
    return f"{rounded:.{places}f}{separator}{error:.{places}f}".replace("-", "−")
