"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import threading

from acclight.checkpoint.ranks import StoreGather
from acclight.checkpoint.writer import Writing


class BackgroundSave:
    """Finishes a save in a thread of its own. Every rank makes one at the same point of the program.

    The ranks' threads wait for each other through the job's store, so that no collective of training is disturbed.

    Args:
        writing: The content, copied: training changes what it was taken from.
    """

    def __init__(self, writing: Writing) -> None:
        self.path = writing.path
        self._error: BaseException | None = None
        self._given_up = threading.Event()
        self._gather = StoreGather(self._given_up)
        # A daemon: `give_up` bounds the wait at the end of a training that has failed.
        self._thread = threading.Thread(target=self._finish, args=(writing,), name=f"saving {self.path}", daemon=True)
        self._thread.start()

    def _finish(self, writing: Writing) -> None:
        try:
            writing.finish(self._gather)
        except BaseException as error:  # it leaves by `wait`, in the thread that trains
            self._error = error

    @property
    def ended(self) -> bool:
        """The checkpoint is committed, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the commit.

        Raises:
            CheckpointError: The checkpoint could not be written, on this rank or another; on every rank.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self, seconds: float) -> str | None:
        """Waits so long at most, where the other ranks may be gone; says what is wrong where there is no checkpoint then."""
        self._thread.join(seconds)
        self._given_up.set()
        self._thread.join(1.0)
        if self._thread.is_alive():
            return f"it was not written within {seconds:g} s"
        return None if self._error is None else str(self._error)
