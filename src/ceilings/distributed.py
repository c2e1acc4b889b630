r"""``ceilings measure`` on several processes: the sequences are dealt out, the sums are added.

Start the command with ``torchrun``, or with anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT::

    torchrun --nproc-per-node 2 -m ceilings measure smollm2 --rollouts rollouts.jsonl --out run

Process 0 does all that one process does: it reads, checks, writes, prints, heeds Ctrl-C. The others load the same
model and wait for calls: *sample these prompts*, *add these sequences*, *hand over your sums*. So nothing but
process 0 touches a file, and a run that was stopped goes on with any number of processes.

=================== ===================================================================================
what                who does it
=================== ===================================================================================
sampling            prompts are dealt out; each prompt has its own generator, so the sample does not
                    depend on the number of processes (as far as rounding goes)
rewards             process 0
sums                every batch is dealt out, row by row from the longest sequence to the shortest
a saving            sums of all processes move to process 0, which writes one file, as one process would
``--next-token``    process 0 alone; the others wait
=================== ===================================================================================

Every call ends with an answer of every process. One that fails answers with its error, which process 0 raises as its
own: one sentence, one exit code, no process left waiting. Memory a process: the whole weights, the whole sums and a
batch of its own; see `ceilings.sharded_sums` where that is too much.

Processes on CPUs talk through gloo; on GPUs the sums go through NCCL, and process k of a machine uses its GPU k.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from ceilings.moments import Level, ScoreMoments
from ceilings.pooled_sums import PooledAccumulator
from ceilings.run_folder import model_fingerprint
from ceilings.sampling import Sampled, sample_responses
from ceilings.scores import ScoreAccumulator

__all__ = ["LOST", "LostError", "Team", "TeamAccumulator", "launched", "run_together", "team"]

#: Exit code when another process of the run was lost.
LOST: Final = 5
_PATIENCE: Final = timedelta(minutes=30)  # that one process waits for another in the middle of a call
_END: Final = "end"


class LostError(Exception):
    """Another process ended without a word, or cannot be reached."""


class _Failure(NamedTuple):
    """Answer of a process that failed."""

    error: Exception
    text: str


class _RemoteError(Exception):
    """Traceback of another process, to be shown under the error."""


def launched() -> bool:
    """Whether this process is one of several of a run.

    Returns
    -------
    bool
        By the environment that launchers of PyTorch set.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in needed) and int(os.environ["WORLD_SIZE"]) > 1


class Team:
    """The processes of a run, as process 0 sees them. Alone, everything is done here and now.

    Parameters
    ----------
    device
        Device of each process; of a GPU only the kind, since each process takes one of its own.
    together
        Whether to join the other processes of the run. Collective.

    Attributes
    ----------
    size, rank
        Number of processes; number of this one.
    here
        Number of processes on this machine: they share its memory.
    device
        Device of this process.

    Raises
    ------
    ValueError
        If the device cannot be shared out.
    LostError
        If the processes do not find one another.
    """

    def __init__(self, device: str = "cpu", together: bool = False) -> None:
        self.size, self.rank, self.here, self.device = 1, 0, 1, device
        self._accumulators: dict[int, PooledAccumulator] = {}
        self._forgotten: list[int] = []
        self._model: nn.Module | None = None
        self._calls = self._made = 0
        if not together:
            return
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        self.device = _own_device(device, self.here)
        try:
            self._store, self.rank, self.size = next(iter(rendezvous("env://", timeout=_PATIENCE)))
            place = {"store": self._store, "rank": self.rank, "world_size": self.size, "timeout": _PATIENCE}
            dist.init_process_group("nccl" if torch.device(self.device).type == "cuda" else "gloo", **place)
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except RuntimeError as error:
            raise LostError(
                f"the {os.environ['WORLD_SIZE']} processes do not find one another: {error}"
            ) from error

    def accumulator(
        self,
        model: nn.Module,
        reward_names: tuple[str, ...] = ("reward",),
        batch_size: int = 16,
        *,
        level: Level = "sequence",
        sign_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> ScoreAccumulator | TeamAccumulator:
        """Accumulator whose sequences are dealt out to all processes.

        Parameters
        ----------
        model, reward_names, level, sign_draws, generator
            As in `ceilings.scores.ScoreAccumulator`. Each process draws signs of its own, from a seed that comes from
            the generator.
        batch_size
            Sequences in one pass of one process.

        Returns
        -------
        ScoreAccumulator or TeamAccumulator
            An ordinary one where there is one process.
        """
        options = {"level": level, "sign_draws": sign_draws, "generator": generator}
        if self.size == 1:
            return ScoreAccumulator(model, reward_names, batch_size, **options)  # type: ignore[arg-type]
        self._meet(model)
        return TeamAccumulator(self, reward_names, batch_size, options)

    def sample(
        self,
        model: nn.Module,
        prompts: Sequence[tuple[int, ...]],
        samples: int,
        generators: Sequence[torch.Generator],
        *,
        max_new_tokens: int,
        end_ids: Sequence[int] = (),
    ) -> Sampled:
        """Draw responses on all processes.

        Parameters
        ----------
        model, prompts, samples, generators, max_new_tokens, end_ids
            As in `ceilings.sampling.sample_responses`.

        Returns
        -------
        Sampled
            In the order of the prompts.
        """
        options = {"max_new_tokens": max_new_tokens, "end_ids": tuple(end_ids)}
        if self.size == 1:
            return sample_responses(model, prompts, samples, generators, **options)  # type: ignore[arg-type]
        self._meet(model)
        bounds = [len(prompts) * rank // self.size for rank in range(self.size + 1)]
        shares = [
            (list(prompts[a:b]), samples, [g.get_state() for g in generators[a:b]], options)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        parts: list[Sampled] = [part for part in self.call("sample", shares) if part is not None]
        return Sampled(
            tuple(ids for part in parts for ids in part.response_ids),
            tuple(row for part in parts for row in part.log_probs),
            None,
        )

    def call(self, what: str, shares: Sequence[Any]) -> list[Any]:
        """Let every process do its share, this one too.

        Parameters
        ----------
        what
            Which of the methods of a process.
        shares
            Its argument, for each process.

        Returns
        -------
        list
            What each process answered.

        Raises
        ------
        LostError
            If a process does not answer any more.
        Exception
            What a process raised; the first of them, if several did.
        """
        answers: list[Any] = [None] * self.size
        try:
            self._store.set(self._key(), what)
            self._receive([(what, share) for share in shares])
            mine = self._answer(what, shares[0])
            dist.gather_object(mine, answers, dst=0, group=self._group)
        except RuntimeError as lost:
            raise LostError(_LOST_SENTENCE) from lost
        self._calls += 1
        if isinstance(mine, _Failure):
            raise mine.error
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Failure):
                error: Exception = _found_by(rank, answer)
                raise error
        return answers

    def serve(self, load: Callable[[str], nn.Module]) -> None:
        """Do what process 0 asks for, until it asks for no more.

        Parameters
        ----------
        load
            Loads the model of this process onto a device.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 decides
        failure: _Failure | None = None
        try:
            self._model = load(self.device)
        except Exception as error:
            failure = _failure(error)
        try:
            while self._next() != _END:
                what, share = self._receive(None)
                answer = failure or self._answer(what, share)
                dist.gather_object(answer, None, dst=0, group=self._group)
                self._calls += 1
            dist.destroy_process_group()
        except RuntimeError:
            return  # process 0 is gone, and has said why

    def end(self) -> None:
        """Send the others home."""
        try:
            self._store.set(self._key(), _END)
            dist.destroy_process_group()
        except RuntimeError:
            return  # whoever kept the store is gone

    def number(self) -> int:
        """Name for one more accumulator.

        Returns
        -------
        int
            The next number.
        """
        self._made += 1
        return self._made

    def forget(self, number: int) -> None:
        """Let an accumulator go here, and on the other processes when the next one is made.

        Parameters
        ----------
        number
            Which.
        """
        self._accumulators.pop(number, None)
        self._forgotten.append(number)

    def forgotten(self) -> list[int]:
        """Take the list of accumulators that the others still hold.

        Returns
        -------
        list
            Their numbers.
        """
        self._forgotten, numbers = [], self._forgotten
        return numbers

    def _meet(self, model: nn.Module) -> None:
        """Make sure that all have the same model."""
        if self._model is model:
            return
        self._model = model
        for rank, found in enumerate(answers := self.call("fingerprint", [None] * self.size)):
            if found != answers[0]:
                raise ValueError(
                    f"process {rank} has loaded another model than process 0: give every machine the same files"
                )

    def _key(self) -> str:
        """Where the next call is announced."""
        return f"ceilings/{self._calls}"

    def _next(self) -> str:
        """Wait for the next call, for as long as it takes: process 0 may be busy with something else for hours."""
        pause = 1e-4
        while not self._store.check([self._key()]):
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return str(self._store.get(self._key()).decode())

    def _receive(self, calls: list[tuple[str, Any]] | None) -> tuple[str, Any]:
        """Share of this process in a call."""
        found: list[Any] = [None]
        dist.scatter_object_list(found, calls, src=0, group=self._group)
        return found[0]

    def _answer(self, what: str, share: Any) -> Any:
        """Do a share; an error is an answer too."""
        try:
            return getattr(self, f"_on_{what}")(share)
        except Exception as error:
            return _failure(error)

    def _on_fingerprint(self, share: None) -> str:
        assert self._model is not None
        return model_fingerprint(self._model)

    def _on_sample(self, share: tuple[Any, ...]) -> Sampled | None:
        prompts, samples, states, options = share
        if not prompts:
            return None
        generators = [torch.Generator().set_state(state) for state in states]
        assert self._model is not None
        return sample_responses(self._model, prompts, samples, generators, **options)

    def _on_open(self, share: tuple[Any, ...]) -> None:
        number, names, batch_size, options, forgotten = share
        for old in forgotten:
            self._accumulators.pop(old, None)
        assert self._model is not None
        if options["sign_draws"] is not None:
            options = options | {"generator": torch.Generator()}
        self._accumulators[number] = PooledAccumulator(self._model, names, batch_size, **options)

    def _on_add(self, share: tuple[Any, ...]) -> None:
        number, rows, attention_mask, seed = share
        if len(rows[0]):
            if seed is not None:
                self._accumulators[number].reseed(seed)
            ids, mask, rewards = (tensor.to(self.device) for tensor in rows)
            attention_mask = None if attention_mask is None else attention_mask.to(self.device)
            self._accumulators[number].add(ids, mask, rewards, attention_mask=attention_mask)

    def _on_pool(self, number: int) -> None:
        self._accumulators[number].pool(self._group)


class TeamAccumulator:
    """What process 0 holds in place of a `ceilings.scores.ScoreAccumulator`; made by `Team.accumulator`.

    Parameters
    ----------
    team
        The processes.
    reward_names, batch_size, options
        As in `ceilings.scores.ScoreAccumulator`.
    """

    def __init__(
        self, team: Team, reward_names: tuple[str, ...], batch_size: int, options: dict[str, Any]
    ) -> None:
        self._team, self._number = team, team.number()
        self._generator: torch.Generator | None = options.pop("generator")
        # NOTE sums are as large as the model: whoever lets this object go must not keep them elsewhere.
        weakref.finalize(self, team.forget, self._number)
        gc.collect()  # an earlier one may only hang in a cycle, with sums as large as the model
        team.call("open", [(self._number, reward_names, batch_size, options, team.forgotten())] * team.size)

    def add(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        rewards: Tensor,
        *,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Deal out a portion of sequences: as `ceilings.scores.ScoreAccumulator.add`.

        Parameters
        ----------
        input_ids, response_mask, rewards, attention_mask
            The portion.
        """
        rows = [tensor.cpu() for tensor in (input_ids, response_mask, rewards)]
        mask = None if attention_mask is None else attention_mask.cpu()
        size = self._team.size
        seeds: list[int | None] = [None] * size
        if self._generator is not None:
            seeds = torch.randint(2**62, (size,), generator=self._generator).tolist()
        # NOTE cloned, because pickling a view takes along all that it is a view of.
        shares = [
            (
                self._number,
                [tensor[rank::size].clone() for tensor in rows],
                None if mask is None else mask[rank::size].clone(),
                seeds[rank],
            )
            for rank in range(size)
        ]
        self._team.call("add", shares)

    def restore(self, moments: ScoreMoments) -> None:
        """Go on from moments that were saved: as `ceilings.scores.ScoreAccumulator.restore`.

        Parameters
        ----------
        moments
            By however many processes they were made.
        """
        self._mine().restore(moments)

    def moments(self) -> ScoreMoments:
        """Moments of everything that any process was given so far.

        Returns
        -------
        ScoreMoments
            Shares its tensors with the accumulator of this process.
        """
        self._team.call("pool", [self._number] * self._team.size)
        return self._mine().moments()

    @property
    def slow_seconds(self) -> float:
        """Time that the parameters without a fast rule have cost on this process."""
        return self._mine().slow_seconds

    def _mine(self) -> PooledAccumulator:
        """Sums of this process."""
        return self._team._accumulators[self._number]


_LOST_SENTENCE: Final = (
    "another process of this run was lost, perhaps for lack of memory: what it printed says more; "
    "the same command goes on from the last checkpoint"
)
_team = Team()


def team() -> Team:
    """The processes that this one leads: itself alone, unless the command was started on several.

    Returns
    -------
    Team
        There is one at a time.
    """
    return _team


def run_together(device: str, lead: Callable[[str], int], load: Callable[[str], nn.Module]) -> int:
    """Run a command on all processes of a run: process 0 leads, the others serve it.

    Parameters
    ----------
    device
        As the user gave it.
    lead
        The command, given the device of its process; returns an exit code.
    load
        Loads the model onto the device of its process.

    Returns
    -------
    int
        Exit code: what the command returned on process 0, 0 on the others, `LOST` if there are no others any more.
    """
    global _team
    from ceilings.console import WRONG_INPUT, fail

    try:
        joined = Team(device, together=True)
    except ValueError as error:
        return fail(str(error), WRONG_INPUT)
    except LostError as error:
        return fail(str(error), LOST)
    if joined.rank:
        joined.serve(load)
        return 0
    _team = joined
    try:
        return lead(joined.device)
    except LostError as error:
        return fail(str(error), LOST)
    finally:
        sys.stdout.flush()  # before the others end, and a launcher takes that for the end of all
        _team = Team()
        joined.end()


def _own_device(device: str, here: int) -> str:
    """Device of this process."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return device
    if kind != "cuda" or index:
        raise ValueError(
            f"several processes share cpu or cuda, not {device!r}: give --device cpu or --device cuda"
        )
    if torch.cuda.device_count() < here:
        raise ValueError(
            f"{here} processes on a machine with {torch.cuda.device_count()} GPUs: start one for each"
        )
    number = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def _failure(error: Exception) -> _Failure:
    """An error that can be sent, with its traceback in words."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failure(error, text)


def _found_by(rank: int, failure: _Failure) -> Exception:
    """What process 0 raises for a process that failed."""
    error = failure.error
    if isinstance(error, ValueError):
        return ValueError(f"process {rank}: {error}")
    error.__cause__ = _RemoteError(f"in process {rank}\n{failure.text}")
    return error
