"""What `self.log` collects, and how it is reduced over micro-batches, batches and ranks."""

from acclight.logging.shown import Shown
from acclight.logging.store import MetricStore

__all__ = ["MetricStore", "Shown"]
