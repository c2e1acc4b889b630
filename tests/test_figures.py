"""Figures are read back from their artists: what is drawn is what was given, and none of it falls outside."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from ceilings.figures import COLOURS, STYLE, house_plot, null_rows, small_panels, tightness_histogram

F64 = torch.float64


def vector(*values):
    return torch.tensor(values, dtype=F64)


@pytest.fixture
def ax():
    """Axes without a display."""
    with mpl.rc_context():
        plt.switch_backend("Agg")
        figure, axes = plt.subplots()
        yield axes
        plt.close(figure)


def clouds(ax):
    return [line for line in ax.lines if line.get_gid() != "roof"]


def roof(ax):
    return [line for line in ax.lines if line.get_gid() == "roof"], [
        c for c in ax.collections if c.get_gid() == "roof"
    ]


def inside(ax):
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for line in clouds(ax):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert (x > left).all() and (x < right).all() and (y >= bottom).all() and (y < top).all()


def test_the_house_plot_draws_the_absolute_gradient_under_the_line_of_equality(ax):
    ceiling, gradient = vector(1.0, 0.1, 2.0), vector(0.5, -0.1, 0.0)
    house_plot(ax, ceiling, gradient, label="g")
    (cloud,) = clouds(ax)
    assert np.asarray(cloud.get_xdata()).tolist() == [1.0, 0.1, 2.0]
    y = np.asarray(cloud.get_ydata())
    assert y[:2].tolist() == [0.5, 0.1] and y[2] == pytest.approx(ax.get_ylim()[0])
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "[R]/[θ]" in ax.get_xlabel() and "[R]/[θ]" in ax.get_ylabel()
    (line,), (shade,) = roof(ax)
    assert (
        np.asarray(line.get_xdata()).tolist() == np.asarray(line.get_ydata()).tolist() == list(ax.get_xlim())
    )
    vertices = shade.get_paths()[0].vertices
    assert (vertices[:, 1] >= vertices[:, 0] * (1 - 1e-12)).all()  # only the forbidden side is shaded
    inside(ax)


def test_a_second_cloud_lies_inside_the_axes_under_one_roof(ax):
    house_plot(ax, vector(1.0, 2.0), vector(0.5, 0.1))
    house_plot(ax, vector(1e-4, 50.0), vector(1e-5, 40.0), colour=COLOURS["second"])
    assert len(clouds(ax)) == 2
    inside(ax)
    (line,), (shade,) = roof(ax)
    assert np.asarray(line.get_xdata()).tolist() == list(ax.get_xlim())


def test_a_second_smaller_cloud_does_not_narrow_the_axes(ax):
    house_plot(ax, vector(1e-4, 50.0), vector(1e-5, 40.0))
    house_plot(ax, vector(1.0, 2.0), vector(0.5, 0.1))
    inside(ax)


def test_a_violation_would_be_seen(ax):
    house_plot(ax, vector(1.0), vector(100.0))
    inside(ax)


def test_dead_parameters_are_left_out(ax):
    house_plot(ax, vector(0.0, 1.0), vector(0.0, 0.5))
    assert np.asarray(clouds(ax)[0].get_xdata()).tolist() == [1.0]


@pytest.mark.parametrize(
    ("ceiling", "gradient", "message"),
    [
        (vector(1.0, 2.0), vector(1.0), r"ceiling has shape \(2,\) and gradient \(1,\)"),
        (vector(0.0, 0.0), vector(0.0, 0.0), "every ceiling is zero"),
        (vector(1.0, float("nan")), vector(0.5, 0.5), "NaN or infinite"),
        (vector(1.0, 2.0), vector(0.5, float("nan")), "NaN or infinite"),
        (vector(1.0, float("inf")), vector(0.5, 0.5), "NaN or infinite"),
    ],
)
def test_a_house_plot_of_nothing_is_refused(ax, ceiling, gradient, message):
    with pytest.raises(ValueError, match=message):
        house_plot(ax, ceiling, gradient)


def test_the_histogram_gives_every_defined_parameter_the_same_weight(ax):
    tightness_histogram(ax, vector(0.05, 0.15, 0.15, 1.0, float("nan")), bins=10)
    (stairs,) = ax.patches
    counts, edges, _ = stairs.get_data()
    assert counts.tolist() == [0.25, 0.5, 0, 0, 0, 0, 0, 0, 0, 0.25]
    assert edges.tolist() == pytest.approx([k / 10 for k in range(11)])
    assert ax.get_xlim() == (0, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (vector(float("nan")), "no tightness is defined"),
        (vector(), "no tightness"),
        (vector(-0.5, 0.5), "absolute value"),
    ],
)
def test_a_histogram_of_nothing_is_refused(ax, values, message):
    with pytest.raises(ValueError, match=message):
        tightness_histogram(ax, values)


def test_every_meaning_has_its_own_colour_and_the_style_file_is_found():
    assert len(set(COLOURS.values())) == len(COLOURS)
    with mpl.rc_context():
        plt.style.use(STYLE)
        assert mpl.rcParams["figure.constrained_layout.use"] and mpl.rcParams["savefig.dpi"] == 150


def test_null_rows_draw_every_null_and_each_result_in_its_row(ax):
    rows = {"many": torch.linspace(0.1, 0.3, 24), "one": torch.tensor([0.2])}
    null_rows(ax, rows, results={"many": 0.25}, chance=0.01)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["one", "many"]  # first row at the top
    dots = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert sorted(len(line.get_xdata()) for line in dots) == [1, 24]
    (bar,) = ax.patches  # one draw has no interval
    assert [bar.get_x(), bar.get_x() + bar.get_width()] == pytest.approx([0.11, 0.29], abs=1e-6)
    assert bar.get_y() < 1 < bar.get_y() + bar.get_height()
    (result,) = [line for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert (list(result.get_xdata()), list(result.get_ydata())) == ([0.25], [1])
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"measured", "null model", "chance"}


def test_null_rows_refuse_a_result_without_nulls(ax):
    for rows in ({}, {"none": torch.zeros(0)}):
        with pytest.raises(ValueError, match="cannot be read without its nulls"):
            null_rows(ax, rows, {}, 0.01)
    with pytest.raises(ValueError, match=r"no null model is given for \['tea'\]"):
        null_rows(ax, {"coffee": torch.zeros(3)}, {"tea": 0.5}, 0.01)


def test_small_panels_name_each_and_label_the_lowest_of_each_column(ax):
    figure, panels = small_panels(["a", "b", "c", "d"], 3.0)
    assert [panel.texts[0].get_text() for panel in panels] == ["a", "b", "c", "d"]
    assert [panel.get_visible() for panel in figure.axes] == [True] * 4 + [False] * 2
    labelled = [panel.xaxis.get_major_ticks()[0].label1.get_visible() for panel in panels]
    assert labelled == [False, True, True, True]
    plt.close(figure)


@pytest.mark.parametrize(("names", "columns"), [([], 3), (["a"], 0)])
def test_no_panel_is_refused(names, columns):
    with pytest.raises(ValueError, match="give at least one of each"):
        small_panels(names, 2.0, columns)
