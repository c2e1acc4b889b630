"""The faults that `mutate.py` plants: what is broken, where, and which checks must see it.

To add one: a name that says the fault in words, the edits (a file, a text that stands there, what replaces it), and
the check, as arguments of pytest or one of the words of `CHECKS`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageOps

__all__ = ["CHECKS", "FAULTS", "Edit", "Fault"]

# Checks with a name of their own; every other check is a list of arguments of pytest.
CHECKS = {
    "build": "tests/test_book.py -k test_internal_links",
    "links": "tests/test_book.py -k test_internal_links",
    "loaded": "tests/test_book.py -k loaded_from_elsewhere",
    "ledger": "tests/test_claims.py",
    "stored": "tests/test_notebooks.py -k 'identity or asserts'",
}


@dataclass(frozen=True)
class Edit:
    """One change of one file: a text for another, or a function of the whole."""

    file: str
    old: str = ""
    new: str = ""
    change: Callable[[str], str] | None = None

    def __call__(self, text: str) -> str:
        """The file with the fault; a ValueError if there is nothing to change."""
        if self.change is None and self.old not in text:
            raise ValueError(f"{self.file} no longer holds {self.old!r}")
        changed = self.change(text) if self.change else text.replace(self.old, self.new, 1)
        if changed == text:
            raise ValueError(f"the fault changes nothing in {self.file}")
        return changed


@dataclass(frozen=True)
class Fault:
    """Something broken, and the check that must see it."""

    name: str
    edits: tuple[Edit, ...]
    check: str


def fault(name: str, file: str, old: str, new: str, check: str) -> Fault:
    """A fault of one edit."""
    return Fault(name, (Edit(file, old, new),), check)


def both(name: str, chapter: str, old: str, new: str, check: str) -> Fault:
    """A fault in the text of a chapter and in its notebook, as if it had been made again."""
    stored_old, stored_new = (json.dumps(text, ensure_ascii=False)[1:-1] for text in (old, new))
    edits = (Edit(f"{chapter}.md", old, new), Edit(f"{chapter}.ipynb", stored_old, stored_new))
    return Fault(name, edits, check)


def stored(name: str, chapter: str, change: Callable[[dict], None], check: str) -> Fault:
    """A fault in a stored notebook: the function changes it in place."""

    def edit(text: str) -> str:
        notebook = json.loads(text)
        change(notebook)
        return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"

    return Fault(name, (Edit(f"{chapter}.ipynb", change=edit),), check)


def outputs(notebook: dict, kind: str) -> dict:
    """The first output of a notebook that holds this kind of data, or, for "text", that was printed."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if kind in output.get("data", {}) or (kind == "text" and "text" in output):
                return output
    raise ValueError(f"no cell stores {kind}")


def first_run(notebook: dict) -> dict:
    """The last cell that ran."""
    return next(cell for cell in reversed(notebook["cells"]) if cell.get("execution_count"))


def other_digit(notebook: dict) -> None:
    """Change a printed digit."""
    output = outputs(notebook, "text")
    line = output["text"][0]
    place = next(i for i, letter in enumerate(line) if letter.isdigit())
    output["text"][0] = line[:place] + str((int(line[place]) + 1) % 10) + line[place + 1 :]


def other_glued_number(notebook: dict) -> None:
    """Change a number that the prose prints."""
    kind = "application/papermill.record/text/plain"
    output = outputs(notebook, kind)
    output["data"][kind] = ["'0.987'"]


def other_figure(notebook: dict) -> None:
    """Mirror a stored figure: the same size, other data."""
    output = outputs(notebook, "image/png")
    image = Image.open(io.BytesIO(base64.b64decode("".join(output["data"]["image/png"]))))
    target = io.BytesIO()
    ImageOps.mirror(image).save(target, format="PNG")
    output["data"]["image/png"] = base64.b64encode(target.getvalue()).decode()


def no_figure(notebook: dict) -> None:
    """Drop a stored figure."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                cell["outputs"].remove(output)
                return


def never_run(notebook: dict) -> None:
    """Store a cell as if it had never run."""
    cell = first_run(notebook)
    cell["execution_count"], cell["outputs"] = None, []


def with_path(notebook: dict) -> None:
    """Print where somebody keeps the book."""
    outputs(notebook, "text")["text"].append("saved in /home/somebody/book\n")


def with_stderr(notebook: dict) -> None:
    """Store a warning."""
    warning = {"name": "stderr", "output_type": "stream", "text": ["a warning\n"]}
    first_run(notebook)["outputs"].append(warning)


def without_alternative_text(notebook: dict) -> None:
    """Forget what a figure shows, for those who do not see it."""
    for cell in notebook["cells"]:
        if cell["metadata"].get("mystnb", {}).pop("image", None):
            return


CEILING, COVARIANCE, TOKENS = (
    "book/identity/ceiling",
    "book/identity/gradient_is_a_covariance",
    "book/identity/tokens",
)
FORCED = "book/looseness/forced"
WIDE = "tests/test_browser.py -k 'test_page and ceiling and wide'"

LIBRARY = [
    fault(
        "a parameter with a stand-in that reaches only so far",
        "src/ceilings/kl_budget.py",
        "1 - squares.sum(1) > tolerance",
        "1 - squares.sum(1) > 2",
        "tests/test_leash.py -k stand_in",
    ),
    fault(
        "leverages that forget the eigenvalues",
        "src/ceilings/kl_budget.py",
        "(self.vectors[:, kept] / self.values[kept].sqrt())",
        "self.vectors[:, kept]",
        "tests/test_leash.py -k 'dense or irreplaceable'",
    ),
    fault(
        "a KL leash that pulls away from the start",
        "src/ceilings/experiments/leash.py",
        "rewards - strength * (now - first)",
        "rewards + strength * (now - first)",
        "tests/test_leash.py -k ascends",
    ),
    fault(
        "changes dealt out among all tensors where it should be within each",
        "src/ceilings/experiments/leash.py",
        "order = (random + begin.tensors).argsort()",
        "order = random.argsort()",
        "tests/test_leash.py -k dealt_out_within",
    ),
    fault(
        "a quotient of whole numbers, which is float32",
        "src/ceilings/advantages.py",
        "(size.to(rewards) / (size - 1).to(rewards))[index]",
        "(size / (size - 1))[index].to(rewards)",
        "tests/test_advantages.py",
    ),
    fault(
        "a leash of the wrong sign in what DPO follows",
        "src/ceilings/method_forms.py",
        "(sign - leash) @ probs",
        "(sign + leash) @ probs",
        "tests/test_gradient_forms.py -k 'form and dpo'",
    ),
    fault(
        "a GRPO that divides by the tokens of the group, not by those of the response",
        "src/ceilings/losses/grpo.py",
        'masked_mean(token_losses / mask.sum(1, keepdim=True), mask, "responses")',
        'masked_mean(token_losses, mask, "tokens")',
        "tests/test_gradient_forms.py -k 'form and grpo'",
    ),
    fault(
        "a clip that also stops what goes back",
        "src/ceilings/losses/ppo.py",
        "-torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)",
        "-ratio.clamp(1 - epsilon, 1 + epsilon) * advantages",
        "tests/test_gradient_forms.py -k 'form and ppo'",
    ),
    fault(
        "a form of PPO that clips whatever the sign of the advantage",
        "src/ceilings/method_forms.py",
        "over & (advantages > 0)[:, :, None] | under & (advantages < 0)[:, :, None]",
        "over | under",
        "tests/test_gradient_forms.py -k clipped_update",
    ),
    fault(
        "a table that calls ORPO a covariance",
        "src/ceilings/algorithms.py",
        'update=r"**not a covariance**: two of them',
        'update=r"two covariances',
        "tests/test_gradient_forms.py -k 'words and orpo'",
    ),
    fault(
        "padding that holds NaN reaches a gradient",
        "src/ceilings/losses/reinforce.py",
        "return torch.where(mask, advantages, 0)",
        "return advantages",
        "tests/test_losses.py",
    ),
    fault(
        "the odds of ORPO without their last digits",
        "src/ceilings/losses/orpo.py",
        "torch.log(-torch.expm1(mean_log_probs))",
        "torch.log(1 - mean_log_probs.exp())",
        "tests/test_losses.py",
    ),
    fault(
        "a ratio to the present policy instead of the one that sampled",
        "src/ceilings/training.py",
        "behaviour = log_probs.detach() if behaviour is None else behaviour",
        "behaviour = log_probs.detach()",
        "tests/test_training.py",
    ),
    fault(
        "the extra term with the wrong sign of the baseline",
        "src/ceilings/off_policy.py",
        "return (behaviour_probs @ signals - baseline)",
        "return (behaviour_probs @ signals + baseline)",
        "tests/test_off_policy.py",
    ),
    fault(
        "an unlogged token with more mass than a logged one",
        "src/ceilings/off_policy.py",
        "cap = (1 - logged_probs.sum()).clamp_min(0), logged_probs.min()",
        "cap = (1 - logged_probs.sum()).clamp_min(0), logged_probs.max()",
        "tests/test_off_policy.py -k log",
    ),
    fault(
        "an importance weight that is not squared",
        "src/ceilings/off_policy.py",
        "(weights[:, None] * scores).square()",
        "(weights[:, None].sqrt() * scores).square()",
        "tests/test_off_policy.py",
    ),
    fault(
        "baseline left out",
        "src/ceilings/ceiling.py",
        "return (w * (rewards - w @ rewards)) @ (scores - w @ scores)",
        "return (w * rewards) @ scores",
        "tests/test_ceiling.py",
    ),
    fault(
        "divisor N - 1 in the reward, N in the gradient",
        "src/ceilings/ceiling.py",
        "return w @ (rewards - w @ rewards).square()",
        "return w @ (rewards - w @ rewards).square() * len(w) / max(len(w) - 1, 1)",
        "tests/test_ceiling.py",
    ),
    fault(
        "a number in the library",
        "src/ceilings/ceiling.py",
        "return torch.full_like(rewards, 1 / len(rewards))",
        "return torch.full_like(rewards, 1.001 / len(rewards))",
        "tests/test_ceiling.py",
    ),
    fault(
        "covariance without its sign",
        "src/ceilings/ceiling.py",
        "return (w * (rewards - w @ rewards)) @ (scores - w @ scores)",
        "return -(w * (rewards - w @ rewards)) @ (scores - w @ scores)",
        f"{COVARIANCE}.ipynb",
    ),
    fault(
        "square of the mean instead of mean of squares",
        "src/ceilings/fisher.py",
        "return scores.square().mean(0)",
        "return scores.mean(0).square()",
        "tests/test_fisher.py",
    ),
    fault(
        "score of a softmax without its mean",
        "src/ceilings/policies.py",
        "token_scores = self.features - mean_features[:, None, :]",
        "token_scores = self.features - 0 * mean_features[:, None, :]",
        "tests/test_policies.py",
    ),
    fault(
        "an equality reversed in its assertion",
        "src/ceilings/testing.py",
        "not error <= allowed",
        "not error >= allowed",
        "tests/test_testing.py",
    ),
    fault(
        "an inequality checked on its best coordinate",
        "src/ceilings/testing.py",
        "worst = int(excess.argmax())",
        "worst = int(excess.argmin())",
        "tests/test_testing.py",
    ),
    fault(
        "two uses of a tied matrix not added",
        "src/ceilings/score_sums.py",
        "write(block, some, number == 0)",
        "write(block, some, True)",
        "tests/test_scores.py",
    ),
    fault(
        "rows of a block counted from the top of the matrix",
        "src/ceilings/score_rules.py",
        "local += self.rows[begin:end] - rows.start",
        "local += self.rows[begin:end]",
        "tests/test_scores.py -k size_of_a_block",
    ),
    fault(
        "a wrong answer called right in the benchmark",
        "benchmarks/score_moments.py",
        "if max(errors.values()) > TOLERANCE:",
        "if min(errors.values()) > TOLERANCE:",
        "tests/test_benchmarks.py -k wrong",
    ),
    fault(
        "a square left out of the second moment",
        "src/ceilings/score_sums.py",
        "self.squares.index_add_(0, term.rows, found.square(), alpha=squares)",
        "self.squares.index_add_(0, term.rows, found, alpha=squares)",
        "tests/test_scores.py",
    ),
    fault(
        "cotangent with the weight instead of its root",
        "src/ceilings/scores.py",
        "(batch.scored[:, last] * root_weights.to(cotangent)[:, None])",
        "(batch.scored[:, last] * root_weights.to(cotangent).square()[:, None])",
        "tests/test_scores.py",
    ),
    fault(
        "padding scored",
        "src/ceilings/scores.py",
        "cotangent *= (batch.scored[:, last] * root_weights",
        "cotangent *= (torch.ones_like(batch.scored)[:, last] * root_weights",
        "tests/test_scores.py",
    ),
    fault(
        "rows that are not the sequences taken for them",
        "src/ceilings/score_capture.py",
        "or not _in_order(args[0])",
        "or False",
        "tests/test_architectures.py -k rows_than",
    ),
    fault(
        "an expert that the probes did not reach left out",
        "src/ceilings/scores.py",
        "capture.refused | self._awakened(logits)",
        "capture.refused",
        "tests/test_architectures.py -k rows_than",
    ),
    fault(
        "one sign for all tokens of a sequence",
        "src/ceilings/scores.py",
        "cotangent * self.signs[:, -cotangent.shape[1] :, None]",
        "cotangent * self.signs[:, :1, None]",
        "tests/test_levels.py -k sign",
    ),
    fault(
        "a merge that forgets the shift of the rewards",
        "src/ceilings/moments.py",
        "other = other.shifted(self.reward_shift)",
        "other = dataclasses.replace(other, reward_shift=self.reward_shift)",
        "tests/test_scores.py",
    ),
    fault(
        "sums handed over and kept",
        "src/ceilings/pooled_sums.py",
        "                    tensor.zero_()",
        "                    pass",
        "tests/test_pooled_sums.py",
    ),
    fault(
        "both uses of a tied matrix squared apart, on sharded sums",
        "src/ceilings/sharded_sums.py",
        "                    self._sums[name].add(blocks, root_weights, rewards)",
        "                    [self._sums[name].add([b], root_weights, rewards) for b in blocks]",
        "tests/test_sharded_sums.py",
    ),
    fault(
        "a sequence that fills up a step counted",
        "src/ceilings/sharded_sums.py",
        "present = (row < count)",
        "present = (row >= 0)",
        "tests/test_sharded_sums.py",
    ),
    fault(
        "an error of another process ignored",
        "src/ceilings/distributed.py",
        "            if isinstance(answer, _Failure):",
        "            if False:",
        "tests/test_distributed.py",
    ),
    fault(
        "a half that judges itself",
        "src/ceilings/estimation.py",
        "(a.sign() * b + b.sign() * a) / 2",
        "(a.sign() * a + b.sign() * b) / 2",
        "tests/test_estimation.py",
    ),
    fault(
        "a nested ceiling with the variance of the value",
        "src/ceilings/panel.py",
        "total += (variance.sqrt() * weight) @ deviation",
        "total += (variance * weight) @ deviation",
        "tests/test_panel.py",
    ),
    fault(
        "a prefix that counts in every row that holds it",
        "src/ceilings/experiments/exact.py",
        "return ids, mass * counts, step",
        "return ids, mass, step",
        "tests/test_panel.py -k divergence",
    ),
    fault(
        "the whole change of a ceiling laid to the Fisher information twice over",
        "src/ceilings/ceiling_change.py",
        "(second.double().log() - first.double().log()) / 2",
        "(second.double().log() - first.double().log())",
        "tests/test_ceiling_change.py -k parts",
    ),
    fault(
        "runs that train the weights that they are measured against",
        "src/ceilings/experiments/sharpening.py",
        "vector_to_parameters(weights.clone(),",
        "vector_to_parameters(weights,",
        "tests/test_experiments.py -k 'starts_from_the_same or run_that_it_says'",
    ),
    fault(
        "a number that is right if it only begins right",
        "src/ceilings/experiments/real_training.py",
        "and not said[len(wanted) : len(wanted) + 1].isdigit()",
        "and True",
        "tests/test_experiments.py -k said_first",
    ),
    fault(
        "stale records left out of the plan",
        "tools/refresh.py",
        'if everything or states[name] != "fresh"',
        "if everything",
        "tests/test_workflow.py -k stale_and_missing",
    ),
    fault(
        "what is true left in the direction that stands for chance",
        "src/ceilings/evidence.py",
        "nulls.append((a - b)",
        "nulls.append((a + b)",
        "tests/test_evidence.py -k 'functions or whatever'",
    ),
    fault(
        "in-sample tightness reported as if cross-fitted",
        "src/ceilings/summary.py",
        "totals.tightness.add(found[0])",
        "totals.tightness.add(inside[0])",
        "tests/test_measure.py -k cross_fitted_between",
    ),
    fault(
        "one prompt in both halves",
        "src/ceilings/folds.py",
        "first, second = halves(len(groups), generator, labels)",
        "first, second = halves(len(groups), generator)",
        "tests/test_summary.py -k whole",
    ),
    fault(
        "rewards permuted across prompts",
        "src/ceilings/measurement.py",
        "permutations, generator, labels[rows])",
        "permutations, generator)",
        "tests/test_measure.py -k permuted_columns",
    ),
    fault(
        "the last batch lost where it is not full",
        "src/ceilings/score_inputs.py",
        "            yield some, response_mask[some]\n",
        "            if len(some) == min(size, len(response_mask)):\n                yield some, response_mask[some]\n",
        "tests/test_scores.py -k one_backward",
    ),
    fault(
        "the mean over tokens instead of their sum",
        "src/ceilings/scores.py",
        "    return cotangent.to(logits.dtype)",
        "    return (cotangent / batch.scored.sum(1)[:, None, None]).to(logits.dtype)",
        "tests/test_scores.py -k one_backward",
    ),
    fault(
        "a real token left out because it is the pad token elsewhere",
        "src/ceilings/score_rules.py",
        'return {"weight": RowsTerm(inputs, cotangent)}',
        'return {"weight": RowsTerm(inputs, cotangent * (inputs != 0)[..., None])}',
        "tests/test_scores.py -k llama_of_hugging_face",
    ),
    fault(
        "the work of all processes expected of each",
        "src/ceilings/expected_cost.py",
        "* -(-len(rollouts) // processes)",
        "* len(rollouts)",
        "tests/test_expected_cost.py -k share",
    ),
    fault(
        "text of a report too small for a phone",
        "src/ceilings/charts.py",
        "_WIDTH: Final = 340",
        "_WIDTH: Final = 460",
        "tests/test_browser.py -k phone",
    ),
    fault(
        "groups centred on the members of one batch",
        "src/ceilings/scores.py",
        "    rewards = _centred(rewards, groups, weights)\n",
        "    rewards = torch.cat([_centred(r, g, None) for r, g in zip(rewards.split(4), groups.split(4))]) "
        "if groups is not None and weights is None else _centred(rewards, groups, weights)\n",
        "tests/test_accumulation.py -k straddle",
    ),
    fault(
        "a gap toward zero that is as wide as the one away from it",
        "src/ceilings/storage.py",
        "torch.where(narrow, gap / 4, gap / 2)",
        "torch.where(narrow, gap / 2, gap / 2)",
        "tests/test_storage.py -k every_finite",
    ),
    fault(
        "ties that change the even weights",
        "src/ceilings/storage.py",
        "abs() % 2 == 1",
        "abs() % 2 == 0",
        "tests/test_storage.py -k direction_of_the_step",
    ),
    fault(
        "a master that is no finer than its copy",
        "src/ceilings/storage.py",
        'torch.float32 if self.storage == "master" else self.dtype',
        "self.dtype",
        "tests/test_storage.py -k master",
    ),
    fault(
        "a step in other coordinates without the chain rule",
        "src/ceilings/rescaling.py",
        "scale.view_as(old) * old.grad",
        "old.grad",
        "tests/test_top_percent.py -k chain_rule",
    ),
    fault(
        "noise counted over all parameters instead of the top of the ceilings",
        "src/ceilings/top_overlap.py",
        "expected(high)[logs.topk(size).indices].sum()",
        "expected(high).sum()",
        "tests/test_top_percent.py -k arcsine",
    ),
    fault(
        "a top set of every tensor whose ties are settled one way",
        "src/ceilings/top_readings.py",
        "least + low, most + high",
        "least + high, most + high",
        "tests/test_top_percent.py -k trying_all_choices",
    ),
    fault(
        "tokens that count alike in answers of every length",
        "src/ceilings/experiments/top_percent.py",
        "law.probs / law.lengths",
        "law.probs",
        "tests/test_top_percent.py -k stood_for_the_ceiling",
    ),
    fault(
        "a second moment whose batch counts every pair",
        "src/ceilings/steps.py",
        "(batch - 1) * gradient.square()",
        "batch * gradient.square()",
        "tests/test_steps.py -k over_all_batches",
    ),
    fault(
        "ties at the cut of a top set that count as members",
        "src/ceilings/tied_overlaps.py",
        "above.long() * 2 + (sizes == cut).long()",
        "(sizes >= cut).long() * 2",
        "tests/test_tied_overlaps.py -k some_choice",
    ),
    fault(
        "rounding taken for a ceiling",
        "src/ceilings/looseness.py",
        "length > _ROUNDING * torch.maximum(own, length.max())",
        "length > _ROUNDING * own",
        "tests/test_looseness.py -k 'ceiling'",
    ),
    fault(
        "top sets that are counted in parts of the wrong length",
        "src/ceilings/shared_tops.py",
        "size / len(rows[0])",
        "size",
        "tests/test_shared_tops.py -k chance",
    ),
    fault(
        "a null model that deals values out among all tensors",
        "src/ceilings/experiments/_prompt_rows.py",
        "parts = ratio.split([len(w) for w in where.values()])",
        "parts = ratio.split([len(ratio)])",
        "tests/test_prompts.py -k within_tensors",
    ),
    fault(
        "halves of answers that overlap",
        "src/ceilings/rollout_scores.py",
        "order[: count // 2], order[count // 2 :]",
        "order[: count // 2 + 8], order[count // 2 - 8 :]",
        "tests/test_rollout_scores.py -k exact_mean",
    ),
]

CHAPTERS = [
    fault(
        "a chapter's text not made again",
        f"{CEILING}.md",
        "Before any reward is chosen",
        "After any reward is chosen",
        "tests/test_notebooks.py -k 'holds_its_text and ceiling'",
    ),
    stored("a stored printed digit", CEILING, other_digit, f"{CEILING}.ipynb"),
    stored("a stored number of the prose", CEILING, other_glued_number, f"{CEILING}.ipynb"),
    stored("a stored figure's data", CEILING, other_figure, f"{CEILING}.ipynb"),
    stored("a stored figure missing", CEILING, no_figure, f"{CEILING}.ipynb"),
    stored("a cell never run", CEILING, never_run, f"{CEILING}.ipynb"),
    stored("a cell never run, without running the chapter", CEILING, never_run, "stored"),
    stored("a path in an output", CEILING, with_path, "stored"),
    stored("a warning stored", CEILING, with_stderr, "stored"),
    stored(
        "a figure without alternative text",
        CEILING,
        without_alternative_text,
        "tests/test_notebooks.py -k 'alternative_text and ceiling'",
    ),
    both(
        "an inequality reversed in a chapter",
        TOKENS,
        "assert_at_most(nested, roof)",
        "assert_at_most(roof, nested)",
        f"{TOKENS}.ipynb",
    ),
    Fault(
        "assertions turned into prints",
        tuple(
            edit
            for name in ("assert_within_standard_errors(ratio", "assert_differs(ratio")
            for edit in both("", COVARIANCE, name, "print(ratio", "").edits
        ),
        "stored",
    ),
    both("a chapter without its last section", CEILING, "## References", "## Sources", "stored"),
]

CLAIMS = [
    fault("a claim's label", f"{TOKENS}.md", ":label: thm-nested", ":label: thm-nestled", "ledger"),
    fault(
        "a proof taken away",
        f"{TOKENS}.md",
        "```{prf:proof}",
        "```{note}",
        "tests/test_claims.py -k proved_in",
    ),
    fault(
        "a check of a claim that does not exist",
        f"{TOKENS}.md",
        "claims: {thm-tokens: symbolic}",
        "claims: {thm-token: symbolic}",
        "ledger",
    ),
    fault(
        "a claim that no cell checks",
        f"{FORCED}.md",
        "cor-average-reward: ",
        "thm-joint: ",
        "tests/test_claims.py -k asserted_by",
    ),
    fault(
        "a claim without words",
        "book/claims.yml",
        "thm-nested: >",
        "thm-nestled: >",
        "tests/test_claims.py -k in_words",
    ),
    fault("a ledger edited by hand", "book/claims.md", "proved, ", "proved twice, ", "ledger"),
]

RECORDS = [
    fault(
        "a stale record: its configuration",
        "src/ceilings/experiments/forced.py",
        "learning_rate: float = 0.01",
        "learning_rate: float = 0.02",
        "tests/test_results.py -k fresh",
    ),
    fault(
        "a stale record: the code behind it",
        "src/ceilings/ceiling.py",
        "_ZERO_VARIANCE = 1e-24",
        "_ZERO_VARIANCE = 2e-24",
        "tests/test_results.py -k fresh",
    ),
    Fault(
        "a record edited by hand",
        (Edit("results/forced.json", change=lambda text: text.replace("0.1", "0.2", 1)),),
        "tests/test_results.py -k fresh",
    ),
    fault(
        "two runs of one seed compared as two seeds",
        "src/ceilings/experiments/replication.py",
        "following = [*theirs[1:], theirs[0]]",
        "following = theirs",
        "tests/test_replication.py -k compared_with_the_next",
    ),
    fault(
        "runs on dealt out rewards that keep their rewards",
        "src/ceilings/experiments/_bases.py",
        "if method in NULLS else own",
        "if False else own",
        "tests/test_replication.py -k nulls_deal",
    ),
    fault(
        "chance of an overlap that forgets where the members may lie",
        "src/ceilings/changed_sets.py",
        "expected = float((a * b / total.clamp_min(1)).sum())",
        "expected = float(a.sum() * b.sum() / total.sum())",
        "tests/test_changed_sets.py -k every_way",
    ),
]

BOOK = [
    both("a broken TeX macro", CEILING, r"\Var_\pi(s_i)", r"\Variance_\pi(s_i)", WIDE),
    fault(
        "a broken link",
        "book/related.md",
        "(looseness/real_model.md)",
        "(looseness/surreal_model.md)",
        "build",
    ),
    fault(
        "a broken link in HTML",
        "book/related.md",
        "# Where",
        '<a href="nowhere.html">there</a>\n\n# Where',
        "links",
    ),
    fault(
        "a wrong citation key",
        "book/related.md",
        "{cite:t}`sutton1999policy`",
        "{cite:t}`sutton1998policy`",
        "build",
    ),
    fault(
        "a wrong reference to a theorem",
        "book/related.md",
        "{prf:ref}`thm-joint`",
        "{prf:ref}`thm-joined`",
        "build",
    ),
    fault(
        "a quoted number that nobody read",
        "book/quoted.yml",
        "cite: sung2021fish, confidence: A",
        "cite: sung2021fish, confidence: S",
        "build",
    ),
    fault(
        "a second-hand number that does not say so",
        "book/quoted.yml",
        "confidence: X, second_hand: true",
        "confidence: X",
        "tests/test_book.py -k quoted_numbers_may",
    ),
    fault(
        "a quoted number that is not there",
        "book/related.md",
        "{quoted}`fish-mask-share`",
        "{quoted}`fish-share`",
        "build",
    ),
    fault(
        "a quoted number on a page that does not cite its source",
        "book/related.md",
        "{cite:t}`sung2021fish`",
        "Sung and others",
        "tests/test_book.py -k cited_on_its_page",
    ),
    fault(
        "something loaded from elsewhere",
        "_config.yml",
        "      - sphinx-mathjax-offline\n",
        "",
        "loaded",
    ),
    fault(
        "an error on every page",
        "_config.yml",
        "      default_mode: auto\n",
        "      default_mode: bright\n",
        WIDE,
    ),
    fault(
        "a colour too pale to read",
        "book/_static/custom.css",
        "--book-roof: #a84700;",
        "--book-roof: #f5c39a;",
        WIDE,
    ),
    fault(
        "a table that widens the page",
        "book/_static/custom.css",
        "/* Prose */",
        ".bd-article .pst-scrollable-table-container { overflow: visible !important; }\n",
        "tests/test_browser.py -k 'test_page and notation and narrow'",
    ),
    fault(
        "a module that the page of the library forgets",
        "book/api.md",
        "ceilings.fisher",
        "ceilings.fishes",
        "tests/test_book.py -k page_of_the_library",
    ),
    fault(
        "a field of the report that nobody explains",
        "src/ceilings/report_schema.json",
        ', "description": "Class of the model in its library."',
        "",
        "tests/test_report_fields.py",
    ),
    fault(
        "the page of report.json edited by hand",
        "book/tool/report.md",
        "List of objects",
        "List of things",
        "tests/test_report_fields.py -k what_the_schema_says",
    ),
    fault(
        "a picture of the report without its colours in the book",
        "book/_static/custom.css",
        ".report-part .hollow",
        ".report-part .hallow",
        "tests/test_book.py -k pieces_of_a_report",
    ),
    fault(
        "a wrong count in the README", "README.md", "all 40 of", "all 41 of", "tests/test_readme.py -k counts"
    ),
    Fault(
        "a figure of the README edited by hand",
        (Edit("tools/readme.py", "manual_seed(3)", "manual_seed(4)"),),
        "tests/test_readme.py -k figure",
    ),
]

OFF_POLICY = [
    fault(
        "a token ceiling without the mean of its signal taken out",
        "src/ceilings/data_laws.py",
        "signal_spread = prefix_mean(law, centred.square()).sqrt()",
        "signal_spread = prefix_mean(law, signals.square()).sqrt()",
        "tests/test_data_laws.py -k nested_ceiling",
    ),
    fault(
        "a tempered law with its two ends exchanged",
        "src/ceilings/data_laws.py",
        "((1 - weight) * probs.log() + weight * data_probs.log())",
        "(weight * probs.log() + (1 - weight) * data_probs.log())",
        "tests/test_data_laws.py -k between_two_laws",
    ),
    fault(
        "accepted answers that the foreign law favours least",
        "src/ceilings/experiments/foreign.py",
        "favoured = (foreign / pi).argsort(descending=True)",
        "favoured = (foreign / pi).argsort()",
        "tests/test_experiments.py -k data_laws_are",
    ),
    fault(
        "supervised learning on batches of the policy's own answers instead of the data",
        "src/ceilings/experiments/foreign.py",
        "drawn = torch.multinomial(q,",
        "drawn = torch.multinomial(_log_probs(start, ids, mask).detach().exp(),",
        "book/off_policy/supervised.ipynb",
    ),
]

CHECKPOINTS = [
    fault(
        "the sizes of changes squared in place before they are counted",
        "src/ceilings/delta_scan.py",
        "square = size.double().square()",
        "square = size.double().square_()",
        "tests/test_checkpoint_diff.py -k agrees_with_dense",
    ),
    fault(
        "a tied head counted twice",
        "src/ceilings/ties.py",
        "    if same(head, embedding):",
        "    if False:",
        "tests/test_checkpoint_diff.py -k tied_heads",
    ),
    fault(
        "a change of format counted as a change",
        "src/ceilings/delta_scan.py",
        "return min(first, second, key",
        "return max(first, second, key",
        "tests/test_checkpoint_diff.py -k mere_change_of_format",
    ),
    fault(
        "ties at the cut of a top set broken silently",
        "src/ceilings/overlaps.py",
        "max(0, sum(shared) - at_at), most",
        "sum(shared), most",
        "tests/test_checkpoint_diff.py -k interval",
    ),
    fault(
        "a patch that goes onto any base of the same shapes",
        "src/ceilings/patch.py",
        "    if digest_of(what, old.raw(name)) != digest:",
        "    if digest is None:",
        "tests/test_patch.py -k another_base",
    ),
    fault(
        "a patch that does not check what it says of itself",
        "src/ceilings/patch_file.py",
        'if file.metadata["ceilings_sha256"] != _sha256(file.metadata["ceilings"]):',
        'if "ceilings_sha256" not in file.metadata:',
        "tests/test_patch.py -k damaged_byte",
    ),
    fault(
        "a checkpoint under its final name before it is complete",
        "src/ceilings/patch_file.py",
        'temporary = path.with_name(f".{path.name}.{os.getpid()}.part")',
        "temporary = path",
        "tests/test_patch.py -k 'killed or failure'",
    ),
    fault(
        "a merge in which the other patch decides",
        "src/ceilings/patch_union.py",
        "(a, b, of_b) if first else (b, a, of_a)",
        "(b, a, of_a) if first else (a, b, of_b)",
        "tests/test_patch_merge.py -k union",
    ),
    fault(
        "changes stored where all numbers would take less",
        "src/ceilings/patch_coding.py",
        "if len(whole) < len(where) + len(which):",
        "if not new.size:",
        "tests/test_patch.py -k 'never or next_to_nothing'",
    ),
    fault(
        "a stretch that is stored whole merged as if all of it had changed",
        "src/ceilings/patch_union.py",
        "    moved = after != before[found.positions]",
        "    moved = np.ones(len(after), bool)",
        "tests/test_patch_merge.py -k union",
    ),
    fault(
        "an adapter scaled by its rank where it is rank-stabilised",
        "src/ceilings/adapter_settings.py",
        "math.sqrt(rank) if config",
        "rank if config",
        "tests/test_adapter_peft.py -k peft_merges",
    ),
    fault(
        "a number of the comparison that its schema does not know",
        "src/ceilings/diff_report.py",
        '"unchanged": unchanged,',
        '"unchanged": unchanged, "same": unchanged,',
        "tests/test_diff.py -k schema",
    ),
    fault(
        "gaps of which too much is left uncoded",
        "src/ceilings/patch_numbers.py",
        "mean.bit_length() - 4",
        "mean.bit_length() + 2",
        "tests/test_patch.py -k random_positions",
    ),
]

FAULTS = [*LIBRARY, *OFF_POLICY, *CHECKPOINTS, *CHAPTERS, *CLAIMS, *RECORDS, *BOOK]
