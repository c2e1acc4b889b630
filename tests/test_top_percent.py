"""What a tail of ceilings gives to noise, the same model in other coordinates, other readings of a top set, and the
experiment that lays them side by side."""

import itertools
import math

import pytest
import torch
from torch import nn

from ceilings.experiments import top_percent
from ceilings.experiments._start import Shape, Start
from ceilings.policies import AutoregressivePolicy
from ceilings.prefix_tree import enumeration
from ceilings.puzzles import END
from ceilings.rescaling import RescaledSteps, power_scales
from ceilings.results import load
from ceilings.storage import StoredWeights, stored
from ceilings.testing import assert_at_most, assert_equal, assert_within_standard_errors
from ceilings.tied_overlaps import overlap_interval
from ceilings.top_overlap import (
    half_normal_survival,
    lognormal_scales,
    pareto_limit,
    pareto_scales,
    product_overlap,
    spread_for_overlap,
)
from ceilings.top_readings import overlap_within_tensors, relative_change, tied_at_cut
from ceilings.update_rules import flat_parameters, make_rule

TINY = Shape(length=1, letters=4, width=8, depth=1, heads=2, pretrain_steps=40, prompts=2, samples=4)


@pytest.fixture(scope="module")
def known():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield top_percent._Known(top_percent._begin(TINY, 0), top_percent.Config(seeds=(0,), steps=1, shape=TINY))
    torch.set_num_threads(before)


def exponential(levels):
    return (-levels).exp()


def lognormal(spread):
    return lambda levels: torch.special.ndtr(-levels.log() / spread)


def two_humps(levels):
    """Half of the noise near 1, half near 30."""
    return (lognormal(0.1)(levels) + lognormal(0.1)(levels / 30)) / 2


@pytest.mark.claim("prop-top-overlap")
@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0])
def test_halves_of_two_normal_numbers_overlap_as_the_arcsine_says(ratio):
    """Logarithms of c and of the product are normal with correlation r; a quadrant holds 1/4 + asin(r)/2π."""
    r = ratio / math.hypot(ratio, 1)
    expected = 0.5 + math.asin(r) / math.pi
    found = product_overlap(lognormal_scales(0.4 * ratio, 40_000), lognormal(0.4), share=0.5)
    assert abs(found - expected) < 1e-4


@pytest.mark.claim("prop-top-overlap")
def test_the_integral_over_a_grid_of_its_own():
    """Gaussian noise under log-normal ceilings at 5 %: Simpson's rule over z, the level by Newton's method."""
    tau, share = 1.3, 0.05
    z = torch.linspace(-10, 10, 40_001, dtype=torch.float64)
    simpson = torch.ones_like(z)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    mass = simpson * (-z.square() / 2).exp() / math.sqrt(2 * math.pi) * (z[1] - z[0]) / 3
    cut = float(torch.special.ndtri(torch.tensor(1 - share, dtype=torch.float64)))
    level = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    for _ in range(50):
        miss = mass @ torch.erfc(level * (-tau * z).exp() / math.sqrt(2)) - share
        level = (level - miss / torch.autograd.grad(miss, level)[0]).detach().requires_grad_()
    # A new grid that begins at the cut, so that no cell is cut in two.
    above = torch.linspace(cut, 10, 40_001, dtype=torch.float64)
    weight = simpson * (-above.square() / 2).exp() / math.sqrt(2 * math.pi) * (above[1] - above[0]) / 3
    expected = weight @ torch.erfc(level.detach() * (-tau * above).exp() / math.sqrt(2)) / share
    assert abs(product_overlap(lognormal_scales(tau), share=share) - float(expected)) < 1e-5


@pytest.mark.claim("prop-top-overlap")
def test_many_draws_agree_with_the_expectation():
    generator = torch.Generator().manual_seed(0)
    for scales in (lognormal_scales(1.1, 50_000), pareto_scales(0.4, 50_000)):
        drawn = torch.stack(
            [
                torch.tensor(
                    overlap_interval(
                        scales * torch.randn(50_000, generator=generator, dtype=torch.float64).abs(), scales
                    )[0]
                )
                for _ in range(40)
            ]
        ).double()
        assert_within_standard_errors(drawn.mean(), product_overlap(scales), drawn.std() / 40**0.5, k=4)


@pytest.mark.claim("prop-top-overlap")
@pytest.mark.parametrize("survival", [half_normal_survival, exponential, two_humps], ids=lambda s: s.__name__)
@pytest.mark.parametrize("scales", [lognormal_scales, pareto_scales], ids=lambda s: s.__name__)
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_a_heavier_tail_never_lowers_the_overlap_and_its_ends_are_chance_and_one(survival, scales, share):
    found = [
        product_overlap(scales(tau, 4000), survival, share)
        for tau in (1e-7, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 60)
    ]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
    assert abs(found[0] - share) < 1e-4 and found[-1] > 0.95


@pytest.mark.claim("prop-top-overlap")
def test_what_never_moves_caps_the_overlap():
    stays = 0.4
    gated = [
        product_overlap(lognormal_scales(tau, 4000), lambda u: (1 - stays) * half_normal_survival(u))
        for tau in (0.5, 2.0, 60.0)
    ]
    assert gated[0] < gated[1] < gated[2] < 1 - stays + 1e-12
    assert abs(gated[2] - (1 - stays)) < 0.02


@pytest.mark.claim("prop-top-overlap")
def test_pareto_limits_by_hand():
    φ = math.exp(-0.5) / math.sqrt(2 * math.pi)  # density of the normal law at 1
    outside = math.erfc(1 / math.sqrt(2))
    # E min(1, x²): 1 outside of ±1, and inside ∫ x² φ = P(|x| < 1) − 2 φ(1).
    assert abs(pareto_limit(2.0) - (outside + (1 - outside) - 2 * φ)) < 1e-14
    # E min(1, |x|/b), b = √(2/π): ∫₀ᵇ 2 x φ(x) dx / b = (1 − e^(−b²/2)) as b √(2/π) = b².
    b = math.sqrt(2 / math.pi)
    inside = 2 / math.sqrt(2 * math.pi) * (1 - math.exp(-(b**2) / 2)) / b
    assert abs(pareto_limit(1.0) - (math.erfc(b / math.sqrt(2)) + inside)) < 1e-14
    for index in (0.5, 1.0, 2.0, 4.0):
        # At 1 % nearly the limit, and below it at 20 % no longer.
        assert abs(product_overlap(pareto_scales(1 / index)) - pareto_limit(index)) < 1e-4
    assert abs(product_overlap(pareto_scales(0.25), share=0.2) - pareto_limit(4.0)) > 1e-3


def test_spread_is_the_inverse_of_the_overlap():
    def scales(tau):
        return lognormal_scales(tau, 5000)

    tau = spread_for_overlap(0.4, scales)
    assert abs(product_overlap(scales(tau)) - 0.4) < 1e-5
    with pytest.raises(ValueError, match=r"no spread between .* gives an overlap of 0\.001"):
        spread_for_overlap(0.001, scales)


def test_impossible_products_are_refused():
    good = torch.ones(10)
    for scales, share in ((torch.zeros(10), 0.1), (good * torch.nan, 0.1), (good, 0.0), (good, 1.1)):
        with pytest.raises(ValueError, match="not positive and finite, or share"):
            product_overlap(scales, share=share)
    with pytest.raises(ValueError, match="zero too often"):
        product_overlap(good, lambda u: 0.2 * half_normal_survival(u), share=0.5)
    with pytest.raises(ValueError, match="index 0: a Pareto tail"):
        pareto_limit(0)


@pytest.mark.claim("prop-top-overlap")
def test_batches_of_an_enumerated_policy_whose_rewards_mean_nothing():
    """Every batch of two: the second moment is the ceiling squared over two, the scale that the proposition takes."""
    generator = torch.Generator().manual_seed(1)
    law = AutoregressivePolicy.random(3, 2, 5, generator, eos=0).enumerate(
        torch.randn(5, generator=generator, dtype=torch.float64)
    )
    p, s = law.probs, law.scores
    r = torch.randn(len(p), generator=generator, dtype=torch.float64)
    signal = (r - p @ r)[:, None, None] * s[None]  # the reward of one response, the score of another
    weight = torch.outer(p, p).flatten()
    x = signal.flatten(0, 1)
    second = torch.einsum("a,b,abd->d", weight, weight, ((x[:, None] + x[None]) / 2).square())
    assert_equal(second, (p @ (r - p @ r).square()) * (p @ s.square()) / 2)


def test_powers_of_ceilings():
    ceilings = torch.logspace(-3, 3, 61, dtype=torch.float64)
    assert torch.equal(power_scales(ceilings, 1), torch.ones(61, dtype=torch.float64))
    flat = power_scales(ceilings, 0) * ceilings
    assert float(flat.max() / flat.min()) <= 2.0 + 1e-9  # half a power of two each way
    for power in (0.0, 0.5, 2.0):
        scales = power_scales(ceilings, power)
        assert torch.equal(scales.log2(), scales.log2().round())
        assert_at_most((scales * ceilings / ceilings**power).log2().abs(), torch.full((61,), 0.5), slack=1e-9)
    with pytest.raises(ValueError, match="a ceiling is zero or not finite"):
        power_scales(torch.tensor([1.0, 0.0]), 2)


class Bowl(nn.Module):
    """A quadratic with a parameter of two shapes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([[0.5], [4.0]], dtype=torch.float64))

    def forward(self):
        return (self.a.square() * torch.tensor([1.0, 3.0, 5.0])).sum() + self.b.prod()


def gradient(model):
    model.zero_grad()
    model().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "sign"])
def test_a_step_in_other_coordinates_is_the_old_one_by_the_chain_rule(rule):
    scales = torch.tensor([1.0, 2.0, 0.5, 4.0, 0.25], dtype=torch.float64)
    model = Bowl()
    stepper = RescaledSteps(model, scales, lambda inner: make_rule(rule, inner, 0.01))
    # The same by hand: φ of its own, the loss at a·φ.
    φ = nn.ParameterList([nn.Parameter(flat_parameters(Bowl()) / scales)])
    other = make_rule(rule, φ, 0.01)
    for _ in range(3):
        stepper.zero_grad()
        model().backward()
        stepper.step()
        θ = φ[0] * scales
        loss = (θ[:3].square() * torch.tensor([1.0, 3.0, 5.0])).sum() + θ[3] * θ[4]
        other.zero_grad()
        loss.backward()
        other.step()
        assert_equal(flat_parameters(model), (φ[0] * scales).detach())
    assert_equal(flat_parameters(stepper.inner), φ[0].detach())


def test_sgd_moves_the_old_coordinates_by_the_square_of_the_factor():
    model, scales = Bowl(), torch.tensor([1.0, 3.0, 0.5, 4.0, 0.2], dtype=torch.float64)
    before, g = flat_parameters(model), gradient(model)
    stepper = RescaledSteps(model, scales, lambda inner: make_rule("sgd", inner, 0.1))
    stepper.zero_grad()
    model().backward()
    stepper.step()
    assert_equal(flat_parameters(model) - before, -0.1 * scales.square() * g)


def test_weights_are_stored_in_the_new_coordinates():
    model, scales = Bowl(), torch.tensor([1.0, 3.0, 0.5, 4.0, 0.2], dtype=torch.float64)
    stepper = RescaledSteps(model, scales, lambda inner: StoredWeights(make_rule("sgd", inner, 0.1), "bf16"))
    inside = flat_parameters(stepper.inner)
    assert torch.equal(inside, stored(flat_parameters(Bowl()) / scales, torch.bfloat16))
    assert torch.equal(flat_parameters(model), scales * inside)  # and the model computes with what is stored
    for wrong in (scales[:4], -scales):
        with pytest.raises(ValueError, match="give one positive number each"):
            RescaledSteps(Bowl(), wrong, lambda inner: make_rule("sgd", inner, 0.1))


def test_top_sets_of_every_tensor_by_trying_all_choices():
    first = torch.tensor([3.0, 3.0, 1.0, 5.0, 9.0, 9.0, 9.0])
    second = torch.tensor([1.0, 7.0, 2.0, 6.0, 4.0, 8.0, 8.0])
    tensors = torch.tensor([0, 0, 0, 0, 1, 1, 1])

    def choices(values, start, size):
        """Every set of so many members that leaves out nothing larger than what it holds."""
        members = range(len(values))
        return [
            {start + i for i in chosen}
            for chosen in itertools.combinations(members, size)
            if min(values[i] for i in chosen)
            >= max((values[i] for i in members if i not in chosen), default=0)
        ]

    found = []
    for a, b in itertools.product(choices(first[:4], 0, 2), choices(second[:4], 0, 2)):
        for c, d in itertools.product(choices(first[4:], 4, 2), choices(second[4:], 4, 2)):
            found.append((len(a & b) + len(c & d)) / 4)
    assert overlap_within_tensors(first, second, tensors, 0.5) == (min(found), max(found)) == (0.5, 1.0)
    with pytest.raises(ValueError, match="not about the same parameters"):
        overlap_within_tensors(first, second, tensors[:4])


def test_relative_changes_and_ties_by_hand():
    change, weights = torch.tensor([-1.0, 0.0, 2.0, 0.0, 1e-3]), torch.tensor([2.0, 4.0, -1.0, 0.0, 0.0])
    found = relative_change(change, weights)
    assert found[:4].tolist() == [0.5, 0.0, 2.0, 0.0] and found[4] == found.max()
    values = torch.tensor([5.0, 4.0, 4.0, 4.0, 1.0, 1.0])
    assert tied_at_cut(values, 2 / 6) == 3 / 2  # one of three ties belongs
    assert tied_at_cut(values, 4 / 6) == 0.0  # all do
    assert tied_at_cut(values, 5 / 6) == 2 / 5


def test_a_first_step_has_the_size_that_was_asked_for(known):
    begin, scales = known.begin, power_scales(known.ceiling, 2)
    before = known.begin.weights
    for rule, power in (("sgd", 2), ("momentum", 2), ("sign", None)):
        if power:  # the step of φ is a·g, that of θ is a²·g
            by_hand = float((scales**power * known.first).square().mean().sqrt())
        else:
            by_hand = float((scales * known.first.sign()).square().mean().sqrt())
        assert abs(top_percent._first_step(known, rule, scales, None) / by_hand - 1) < 1e-9
    model, files, kept = top_percent._trained(known, "sgd", "fp32", scales, 1e-3)
    moved = (flat_parameters(model) - before).square().mean().sqrt()
    assert abs(float(moved) / 1e-3 - 1) < 1e-3  # one step; stored in fp32
    assert_equal(scales * kept, flat_parameters(model))
    assert torch.equal(files, stored(kept, torch.bfloat16))
    assert torch.equal(begin.weights, before)


def test_unscaled_runs_are_the_runs_of_the_chapters_before(known):
    ones = torch.ones_like(known.ceiling)
    rate = 1e-3 / top_percent._first_step(known, "adam", ones, None)
    plain = known.begin.trained(
        lambda model: StoredWeights(make_rule("adam", model, rate), "bf16"), known.config.steps
    )
    model, files, _ = top_percent._trained(known, "adam", "bf16", ones, 1e-3)
    assert torch.equal(flat_parameters(plain), flat_parameters(model))
    assert torch.equal(files, flat_parameters(model))


def test_second_moments_that_may_have_stood_for_the_ceiling(known, monkeypatch):
    begin = known.begin
    generator = begin.generator
    monkeypatch.setattr(begin, "generator", lambda run=0: generator(0))
    assert_equal(top_percent._batch_squares(begin, 1), known.first.square())
    answers, tokens, _, _ = top_percent._squares(begin)
    by_hand = [torch.zeros_like(begin.weights) for _ in range(2)]
    for row, prompt in enumerate(begin.puzzle.prompts):
        law = enumeration(begin.model, prompt, begin.puzzle.max_new_tokens, END)
        for y, prob in zip(law.responses, law.probs.tolist(), strict=True):
            ids = torch.tensor([[*prompt, *y]])
            log_probs = begin.model(ids).log_softmax(-1)[0]
            each = [
                torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(
                            log_probs[len(prompt) + t - 1, token],
                            list(begin.model.parameters()),
                            retain_graph=True,
                        )
                    ]
                )
                for t, token in enumerate(y)
            ]
            by_hand[1] += prob * sum(g.square() for g in each) / len(y)
            if y == tuple(begin.puzzle.answers[row]):
                by_hand[0] += sum(each).square()
    assert_equal(answers, by_hand[0])
    assert_equal(tokens, by_hand[1])


def test_squares_of_a_sample_have_the_fisher_information_as_mean():
    """Many samples of every prompt: both within a few per cent of the exact one, in sum."""
    begin = Start(Shape(**{**TINY.__dict__, "samples": 4000}), 0)
    exact = begin.moments(begin.puzzle).fisher.sum()
    _, _, sequences, positions = top_percent._squares(begin)
    for found in (sequences, positions):
        assert abs(float(found.sum() / (2 * 4000) / exact) - 1) < 0.05


def test_survival_of_a_sample_is_its_share():
    sample = torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    survival = top_percent._survival(sample)
    levels = torch.tensor([0.0, 1.0, 2.5, 4.0, 9.0], dtype=torch.float64)
    assert_equal(survival(levels), torch.tensor([1.0, 0.75, 0.375, 0.0, 0.0], dtype=torch.float64))


def test_the_record_keeps_what_intervals_and_formats_owe():
    record = load("top_percent", top_percent.FULL)
    for rule, storage, power in itertools.product(
        top_percent.FULL.rules, top_percent.FULL.storages, top_percent.FULL.powers
    ):
        cell = record.values[rule][storage][f"{power:g}"]
        low, high = torch.tensor(cell["overlap"], dtype=torch.float64).T
        assert bool((low >= 0).all() and (low <= high).all() and (high <= 1).all())
        # What an optimiser keeps in bf16 is what its file holds.
        assert storage != "bf16" or cell["overlap"] == cell["otherwise stored"]
        assert_at_most((high - low), torch.tensor(cell["tied"], dtype=torch.float64), slack=1e-9)
    for rule in ("sgd", "adam"):
        for size in top_percent.FULL.sizes:
            cell = record.values["size"][rule]["bf16"][f"{size:g}"]
            assert cell["overlap"] == cell["kept"]


@pytest.mark.claim("prop-top-overlap")
def test_noise_in_the_record_follows_the_tail_under_sgd_and_not_under_adam():
    record = load("top_percent", top_percent.FULL)
    predicted = torch.stack([record.tensor("tail", f"{k:g}", "noise") for k in top_percent.FULL.powers])
    found = {
        rule: torch.stack(
            [
                record.tensor(rule, "fp32", f"{k:g}", "noise", "overlap")[:, 0].mean(-1)
                for k in top_percent.FULL.powers
            ]
        )
        for rule in ("sgd", "adam")
    }
    # Its set holds 106: two standard errors of a share near one half are a tenth.
    assert float((found["sgd"] - predicted).abs().max()) < 0.1
    assert float(found["adam"].max()) < 0.1 < float(predicted[1:].min())
