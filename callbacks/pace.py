"""Pace: how fast something goes and when it will be done, from the last half minute of work."""

from __future__ import annotations

from collections import deque


class Pace:
    """Counts per second, with pauses left out.

    Args:
        count: What is done already, for instance by the run that is resumed.
        now: Seconds on any clock.
        span: Over how many of the last seconds the speed is averaged.
    """

    def __init__(self, count: int, now: float, span: float = 30.0) -> None:
        self._marks = deque([(now, count)])
        self._span = span
        self._pause_began = now

    def mark(self, count: int, now: float) -> None:
        """Notes how far it is."""
        self._marks.append((now, count))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self._span:
            self._marks.popleft()

    def pause(self, now: float) -> None:
        """The time from here to `resume` does not count."""
        self._pause_began = now

    def resume(self, now: float) -> None:
        """Goes on after a pause."""
        idle = now - self._pause_began
        self._marks = deque((moment + idle, count) for moment, count in self._marks)

    def per_second(self) -> float:
        """The speed between the oldest and the newest mark of the span; 0 before anything is done."""
        (began, first), (ended, last) = self._marks[0], self._marks[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    def seconds_left(self, total: int) -> float | None:
        """Until `total` is done at this speed; None while there is no speed."""
        speed = self.per_second()
        return max(total - self._marks[-1][1], 0) / speed if speed else None


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds: "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
