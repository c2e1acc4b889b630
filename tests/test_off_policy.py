"""Two listed laws against exact fractions; what one law cannot say about another is refused."""

from fractions import Fraction
from math import log

import pytest
import torch

from ceilings.off_policy import chi_square_divergence, importance_weights, kl_divergence
from ceilings.testing import assert_equal

P = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4), Fraction(0)]
Q = [Fraction(1, 8), Fraction(5, 8), Fraction(1, 4), Fraction(0)]


def law(fractions):
    return torch.tensor([float(f) for f in fractions], dtype=torch.float64)


def test_weights_and_divergences_are_their_definitions():
    weights = [p / q if q else Fraction(0) for p, q in zip(P, Q, strict=True)]
    assert importance_weights(law(P), law(Q)).tolist() == [float(w) for w in weights]
    assert sum(q * w for q, w in zip(Q, weights, strict=True)) == 1
    chi = sum(q * q / p for p, q in zip(P, Q, strict=True) if p) - 1
    assert_equal(chi_square_divergence(law(Q), law(P)), float(chi), rtol=1e-14)
    kl = sum(float(p) * log(p / q) for p, q in zip(P, Q, strict=True) if p)
    assert_equal(kl_divergence(law(P), law(Q)), kl, rtol=1e-14)


def test_rejection_sampling_costs_one_minus_p_over_p():
    success = P[0] + P[1]
    kept = [P[0] / success, P[1] / success, Fraction(0), Fraction(0)]
    assert_equal(chi_square_divergence(law(kept), law(P)), float((1 - success) / success), rtol=1e-14)


def test_a_kl_divergence_has_the_gradient_of_its_definition():
    z = torch.tensor([0.3, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    probs = z.softmax(0)
    (found,) = torch.autograd.grad(kl_divergence(probs, reference), z)
    reward = (probs / reference).log().detach()
    assert_equal(found, (probs * (reward - probs @ reward)).detach(), rtol=1e-12)


@pytest.mark.parametrize("function", [importance_weights, chi_square_divergence, kl_divergence])
def test_laws_that_do_not_fit_are_refused(function):
    half, certain = law([Fraction(1, 2), Fraction(1, 2)]), law([Fraction(1), Fraction(0)])
    with pytest.raises(ValueError, match="response 1 has probability zero in .* and 0.5 in"):
        function(half, certain)
    with pytest.raises(ValueError, match="sums to 0.5, not 1"):
        function(half, half / 2)
    with pytest.raises(ValueError, match="list the same responses"):
        function(half, law([Fraction(1, 4)] * 4))
