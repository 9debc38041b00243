"""Stopping together: preemption signals, and wishes of single ranks that all ranks have to follow."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from acclight.strategies.process_group import SharedNotes

if TYPE_CHECKING:
    from types import TracebackType

# Ranks ask each other about this often; one small collective in a tenth of a second is lost in the noise of training.
_SECONDS_BETWEEN = 0.1
# The steps until the next question may turn out slower than those before: few enough that steps of a second each stay below the
# 30 s after which a launcher kills.
_MOST_STEPS_BETWEEN = 16
# Ranks that all wish to stop at one step come to it within this; after it, only some of them do, and the others hear of it at the
# next question.
_SECONDS_FOR_COMPANY = 2.0


#: The signals that may announce the end of a process.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


def preemption_signals() -> tuple[signal.Signals, ...]:
    """Those of `PREEMPTION` that do so for this process: SIGTERM; in a Slurm job SIGUSR1, too, where nobody handles it yet.

    `sbatch --signal=USR1@90` sends it 90 s before the time is over. Elsewhere programs use it for other things.
    """
    scheduled = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    if scheduled and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        return PREEMPTION
    return (signal.SIGTERM,)


class SignalWatch:
    """Notes signals instead of dying of them, while the context lasts; the former handlers come back afterwards.

    A signal that the program ignores stays ignored, and outside the main thread, where Python handles none, nothing is watched.

    Args:
        signums: The signals.

    Attributes:
        received: The one that has come first; None as long as none has.
    """

    def __init__(self, signums: tuple[signal.Signals, ...]) -> None:
        self.signums = signums
        self.received: signal.Signals | None = None
        self._process = os.getpid()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            for signum in self.signums:
                former = signal.getsignal(signum)
                if former not in (signal.SIG_IGN, None):
                    self._former[signum] = former
                    signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, former in self._former.items():
            signal.signal(signum, former)
        if self.received is not None and error is not None:
            # Delivered now, it could end the process before the exception, which is the news, has been shown.
            warnings.warn(f"{self.received.name} came while {type(error).__name__} ended the training", stacklevel=2)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked worker of a data loader has inherited the handler, but has nothing to finish.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.received = self.received or signal.Signals(signum)


class Agreement:
    """Makes what one rank wants the wish of all, at the same optimizer step.

    The ranks ask each other every so many steps; rank 0 measures the steps and says with each answer when the next question is.
    In between a rank that wishes to stop looks whether all others do, at this very step, and then they ask at once: so what every
    rank wishes comes true at the step at which it is wished, however long steps take. Ranks without a wish look for nothing.

    Args:
        notes: For ranks that wish to stop.
    """

    def __init__(self, notes: SharedNotes) -> None:
        self._notes = notes
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._interval = 1
        self._steps = 0
        self._questions = 0
        self._looked = False
        self._asked = time.monotonic()

    def ask(self, *wishes: bool, now: bool = False) -> tuple[bool, ...]:
        """What any rank wishes, where it is time to ask, else nothing; every rank calls this after every step.

        Args:
            wishes: This rank's; the first one is to stop.
            now: Ask in any case, and count no step; every rank has to say so.
        """
        if self._alone:
            return wishes
        self._steps += 0 if now else 1
        self._questions += 1
        if self._steps < self._interval and not now and not (wishes[0] and self._all_wish()):
            return (False,) * len(wishes)
        moment = time.monotonic()
        if self._steps:
            per_step = max((moment - self._asked) / self._steps, 1e-6)
            self._interval = min(max(int(_SECONDS_BETWEEN / per_step), 1), _MOST_STEPS_BETWEEN)
        votes = torch.tensor([*map(int, wishes), self._interval if dist.get_rank() == 0 else 0])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        *answers, self._interval = votes.tolist()
        self._steps, self._asked, self._looked = 0, moment, False
        return tuple(bool(answer) for answer in answers)

    def _all_wish(self) -> bool:
        """Whether every rank wishes to stop at this step; a rank looks once, then it waits for the next question."""
        if self._looked:
            return False
        self._looked = True
        return self._notes.meet(f"stop at {self._questions}", _SECONDS_FOR_COMPANY)
