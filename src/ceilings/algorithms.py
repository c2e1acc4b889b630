r"""The table of the thirteen losses: what is sampled, what the update is in expectation, and two ways to compute it.

Each `Row` holds the loss as code (`Row.loss`, for `ceilings.exact_updates.expected_update`) and its form derived
without it (`Row.form`, from `ceilings.method_forms`). The words of the table are fields of the same row, so that page,
tests and figure speak of one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ceilings import losses, method_forms
from ceilings.advantages import advantages
from ceilings.batches import EnumeratedBatch, enumerated_batch
from ceilings.exact_updates import Case, Draw, Loss
from ceilings.gradient_forms import Form, response_form

__all__ = ["ROWS", "Row", "entries", "row_of", "table"]


@dataclass(frozen=True)
class Row:
    r"""One method in the table.

    Parameters
    ----------
    key, name
        As in `ceilings.methods.METHODS`, and as it is printed.
    source
        What the check draws: ``"policy"``, ``"behaviour"``, ``"pairs"`` of the behaviour policy with ties dropped,
        ``"successes"`` of the policy (batches with at least one), or ``"data"``, the teacher's responses.
    count
        Responses a batch; None for `Case.size`.
    loss
        The loss of one batch.
    form
        The same in expectation, derived without the loss.
    sampled, signal, direction, centred, update, ceiling, voided
        The words of the table.
    blind
        Whether a coin for a reward leaves an update: "" if it leaves none, else what it follows.
    """

    key: str
    name: str
    source: str
    count: int | None
    loss: Loss
    form: Callable[[Case], Form]
    sampled: str
    signal: str
    direction: str
    centred: str
    update: str
    ceiling: str
    voided: str
    blind: str = ""

    @property
    def drawn(self) -> str:
        """Its name and the law that its responses come from."""
        return f"{self.name}, from {self.sampled}"


def row_of(key: str) -> Row:
    """Row of a method.

    Parameters
    ----------
    key
        One of `ceilings.methods.METHODS`.

    Returns
    -------
    Row
        The row.

    Raises
    ------
    ValueError
        If there is none.
    """
    for row in ROWS:
        if row.key == key:
            return row
    raise ValueError(f"there is no row {key!r}: use one of {', '.join(row.key for row in ROWS)}")


def table(columns: dict[str, str]) -> str:
    """Table of the thirteen in Markdown.

    Parameters
    ----------
    columns
        Heading of each column, and the field of `Row` that it shows.

    Returns
    -------
    str
        One line a method.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(str(getattr(row, field)) for field in columns.values()) + " |" for row in ROWS
    ]
    return "\n".join(lines)


def entries(heading: str, first: str, labelled: dict[str, str]) -> str:
    """Two columns in MyST, the name and the rest on lines of their own: it fits a telephone.

    Parameters
    ----------
    heading
        Of the second column.
    first
        Field of `Row` on its first line.
    labelled
        Word before each further line, and the field of `Row` that follows it.

    Returns
    -------
    str
        One row a method.
    """
    lines = ["```{list-table}", ":header-rows: 1", "", "* - Loss", f"  - {heading}"]
    for row in ROWS:
        lines += [f"* - {row.name}", f"  - {getattr(row, first)}"]
        for word, field in labelled.items():
            lines += ["", f"    *{word}:* {getattr(row, field)}"]
    return "\n".join([*lines, "```"])


def _pairwise(batch: EnumeratedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and lengths of the better and of the worse response."""
    logs, lengths = batch.sequence_log_probs, batch.lengths
    return logs[:1], logs[1:], lengths[:1], lengths[1:]


def _reinforce(_: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    return losses.reinforce_loss(b.log_probs, b.mask, advantages(draw.rewards, [0] * len(draw.rows)))


def _rloo(_: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    return losses.rloo_loss(b.log_probs, b.mask, draw.rewards, [0] * len(draw.rows))


def _grpo(_: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    return losses.grpo_loss(b.log_probs, b.mask, draw.rewards, [0] * len(draw.rows))


def _dr_grpo(case: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    longest = case.policy.max_len
    return losses.dr_grpo_loss(b.log_probs, b.mask, draw.rewards, [0] * len(draw.rows), max_length=longest)


def _ppo(case: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    signal = advantages(draw.rewards, [0] * len(draw.rows))
    return losses.ppo_loss(b.log_probs, b.mask, signal, case.old.token_log_probs[draw.rows])


def _dpo(case: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    held = case.old.token_log_probs.sum(1)[draw.rows]
    return losses.dpo_loss(*_pairwise(b)[:2], held[:1], held[1:], beta=0.5)


def _kto(case: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    held = case.old.token_log_probs.sum(1)[draw.rows]
    return losses.kto_loss(b.sequence_log_probs, held, draw.rewards >= 1, case.point, beta=0.5)


def _orpo(_: Case, b: EnumeratedBatch, __: Draw) -> Tensor:
    return losses.orpo_loss(*_pairwise(b), odds_weight=0.5)


def _simpo(_: Case, b: EnumeratedBatch, __: Draw) -> Tensor:
    return losses.simpo_loss(*_pairwise(b), beta=2.0, margin=1.0)


def _prime(case: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    return losses.prime_loss(
        b.log_probs, b.mask, case.token_rewards[draw.rows], draw.rewards, [0] * len(draw.rows)
    )


def _rejection(_: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    return losses.rejection_sampling_loss(b.log_probs, b.mask, draw.rewards >= 1)


def _supervised(_: Case, b: EnumeratedBatch, __: Draw) -> Tensor:
    return losses.supervised_loss(b.log_probs, b.mask)


def _distillation(case: Case, b: EnumeratedBatch, draw: Draw) -> Tensor:
    there = enumerated_batch(case.policy, case.teacher_theta).take(draw.rows)
    return losses.reverse_kl_loss(b.laws, there.laws, b.mask)


def _scaled(factor: Callable[[Case], float]) -> Callable[[Case], Form]:
    """Form of a multiple of the reward, centred, with the score."""
    return lambda case: response_form(
        case.law.probs, factor(case) * (case.rewards - case.law.probs @ case.rewards), case.law.scores
    )


def _of_pairs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the forms of ORPO and SimPO take."""
    mean = case.law.token_log_probs.sum(1) / case.law.lengths
    return case.old.probs, case.law.scores, mean, case.law.lengths, case.rewards


def _successes(case: Case) -> Form:
    kept = case.law.probs * (case.rewards >= 1)
    return method_forms.supervised_form(case.law, kept / kept.sum())


#: The table, in the order of `ceilings.methods.METHODS`.
ROWS: Final = (
    Row(
        "reinforce",
        "REINFORCE",
        "policy",
        None,
        _reinforce,
        _scaled(lambda case: (case.size - 1) / case.size),
        sampled=r"$\pi$",
        signal=r"$R - b$",
        direction="$s$",
        centred="the score",
        update=r"$\Cov_\pi(R, s)$; times $\frac{N-1}{N}$ if $b$ is the batch's mean",
        ceiling=r"$\sigma(R)\sqrt{F_{ii}}$",
        voided="a second step on the batch; samples of another law without centring",
    ),
    Row(
        "rloo",
        "RLOO",
        "policy",
        None,
        _rloo,
        _scaled(lambda case: 1.0),
        sampled=r"$\pi$",
        signal="$R$ − mean of the others",
        direction="$s$",
        centred="the group",
        update=r"$\Cov_\pi(R, s)$ for every $G$",
        ceiling=r"$\sigma(R)\sqrt{F_{ii}}$",
        voided="a second step on the batch",
    ),
    Row(
        "grpo",
        "GRPO",
        "policy",
        None,
        _grpo,
        lambda case: method_forms.grpo_form(case.law, case.rewards, case.size),
        sampled=r"$\pi$",
        signal=r"$(R - \bar R)/\hat\sigma$",
        direction=r"$s/\lvert y\rvert$",
        centred="the group",
        update=r"$\Cov_\pi(a, s/\lvert y\rvert)$, $a = \E[A \mid y]$",
        ceiling=r"$\sqrt{\frac{G-1}{G} P_{\mathrm{nd}}\,\E[s_i^2/\lvert y\rvert^2]}$",
        voided=r"dividing by the group's deviation voids $\sigma(R)\sqrt{F_{ii}}$; dividing by $\lvert y\rvert$ voids "
        "the sum over tokens and may reverse the sign",
    ),
    Row(
        "dr_grpo",
        "Dr. GRPO",
        "policy",
        None,
        _dr_grpo,
        _scaled(lambda case: (case.size - 1) / case.size / case.policy.max_len),
        sampled=r"$\pi$",
        signal=r"$(R - \bar R)/L$",
        direction="$s$",
        centred="the group",
        update=r"$\frac{G-1}{GL}\Cov_\pi(R, s)$",
        ceiling=r"$\frac{G-1}{GL}\sigma(R)\sqrt{F_{ii}}$",
        voided="a second step on the batch; a clip changes the signal",
    ),
    Row(
        "ppo",
        "PPO, clipped",
        "behaviour",
        None,
        _ppo,
        lambda case: method_forms.ppo_form(case.old, case.law, case.rewards, case.size, epsilon=0.2),
        sampled=r"$\mu$",
        signal=r"$(R - \bar R)/$tokens of the batch, 0 where clipped",
        direction=r"$r_t s_t$",
        centred="$r_t s_t$, at each prefix",
        update=r"$\sum_t \E_\mu \Cov_\mu(\tilde c_t, r_t s_t \mid y_{<t})$",
        ceiling=r"$\sum_t \E_\mu[\sigma(\tilde c_t)\,\sigma(r_t s_{t,i})]$",
        voided=r"nothing; but the clip voids the ceiling of $c_t$, the signal before it was clipped",
        blind="the clip's pull",
    ),
    Row(
        "dpo",
        "DPO",
        "pairs",
        None,
        _dpo,
        lambda case: method_forms.dpo_form(
            case.old.probs, case.law.scores, case.log_ratios, case.rewards, beta=0.5
        ),
        sampled=r"pairs of $\mu$",
        signal=r"wins − losses − leash, times $\beta/P$",
        direction="$s$",
        centred="the pair",
        update=r"$\Cov_\mu(c, s)$",
        ceiling=r"$\beta\sqrt{\E[w^2]}\sqrt{2F^\mu_{ii}/P}$",
        voided=r"leaving out $P$ where ties are dropped; $F$ of $\pi$ where $\mu \ne \pi$",
        blind="the leash",
    ),
    Row(
        "kto",
        "KTO",
        "behaviour",
        2,
        _kto,
        lambda case: method_forms.kto_form(
            case.old.probs,
            case.law.scores,
            case.log_ratios,
            case.rewards >= 1,
            case.point,
            beta=0.5,
            desirable_weight=1.0,
            undesirable_weight=1.0,
        ),
        sampled=r"$\mu$",
        signal=r"$\pm\lambda\beta$ $v(1-v)$",
        direction="$s$",
        centred="**nothing**",
        update=r"**not a covariance**: $\Cov_\mu(c, s) + \E_\mu[c]\,\E_\mu[s]$",
        ceiling=r"$\sigma_\mu(c)\,\sigma_\mu(s_i)$, of the first term only",
        voided=r"$\E_\mu[c] \ne 0$ where $\mu \ne \pi$; a reference point that moves adds $-\E_\mu[c]\,\nabla z$",
    ),
    Row(
        "orpo",
        "ORPO",
        "pairs",
        None,
        _orpo,
        lambda case: method_forms.orpo_form(*_of_pairs(case), odds_weight=0.5),
        sampled=r"pairs of $\mu$",
        signal=r"wins − losses; weight of the odds; 1",
        direction=r"$d = s/\lvert y\rvert$; $d/(1-\bar p)$; $d$",
        centred="the pair, twice; the 1 by **nothing**",
        update=r"**not a covariance**: two of them, and $\frac12\E[d + d']$",
        ceiling="the sum of theirs, of the two covariances only",
        voided="the likelihood of the chosen, whatever is chosen",
        blind="the pair's likelihood",
    ),
    Row(
        "simpo",
        "SimPO",
        "pairs",
        None,
        _simpo,
        lambda case: method_forms.simpo_form(*_of_pairs(case), beta=2.0, margin=1.0),
        sampled=r"pairs of $\mu$",
        signal=r"$\frac{2\beta}{P}\E'[\varepsilon w]$",
        direction=r"$s/\lvert y\rvert$",
        centred="the pair",
        update=r"$\Cov_\mu(c, s/\lvert y\rvert)$",
        ceiling=r"$\sigma_\mu(c)\,\sigma_\mu(s_i/\lvert y\rvert)$",
        voided="nothing; but $w$ prefers even odds to the reward",
        blind="even odds",
    ),
    Row(
        "prime",
        "PRIME",
        "policy",
        None,
        _prime,
        lambda case: method_forms.prime_form(case.law, case.rewards, case.token_rewards, case.size),
        sampled=r"$\pi$",
        signal="outcome and rewards to go, less the others', over the batch's tokens",
        direction="$s_t$",
        centred="the score, at each prefix",
        update=r"$\sum_t \E \Cov(c_t, s_t \mid y_{<t})$",
        ceiling=r"$\sum_t \E[\sigma(c_t)\,\sigma(s_{t,i})]$",
        voided=r"nothing; but the learned reward voids $\sigma(R)\sqrt{F_{ii}}$, and a clip changes the signal",
        blind="the learned reward",
    ),
    Row(
        "rejection_sampling",
        "rejection sampling",
        "successes",
        None,
        _rejection,
        _successes,
        sampled=r"$\pi$, successes kept",
        signal=r"$R/p$",
        direction="$s$",
        centred="the score",
        update=r"$\Cov_\pi(R, s)/p$",
        ceiling=r"$\sqrt{(1-p)/p}\,\sqrt{F_{ii}}$",
        voided="keeping each distinct success once",
    ),
    Row(
        "supervised",
        "SFT",
        "data",
        2,
        _supervised,
        lambda case: method_forms.supervised_form(case.law, case.teacher.probs),
        sampled="$q$",
        signal=r"$q/\pi$",
        direction="$s$",
        centred=r"the score, under $\pi$",
        update=r"$\Cov_\pi(q/\pi, s)$",
        ceiling=r"$\sqrt{\chi^2(q\Vert\pi)}\,\sqrt{F_{ii}}$",
        voided=r"nothing; for foreign text $\chi^2$ is huge",
        blind="the data",
    ),
    Row(
        "distillation",
        "distillation",
        "policy",
        2,
        _distillation,
        lambda case: method_forms.distillation_form(case.law, case.teacher),
        sampled=r"$\pi$",
        signal=r"$-\log(\pi/\pi_T)$ of the token",
        direction="$s_t$",
        centred="the score, at each prefix",
        update=r"$\sum_t \E \Cov(c_t, s_t \mid y_{<t})$",
        ceiling=r"$\sum_t \E[\sigma(c_t)\,\sigma(s_{t,i})]$",
        voided=r"nothing; but with prefixes held the update is not $-\nabla\KL$ of whole responses",
        blind="the teacher",
    ),
)
