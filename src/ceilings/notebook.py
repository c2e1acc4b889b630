"""The first line of every chapter: one state of the random generators, threads, printing and figures."""

from __future__ import annotations

import warnings

import torch

__all__ = ["setup"]


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
