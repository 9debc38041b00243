"""What `self.log` collects, and how it is reduced over micro-batches, batches and ranks."""

from acclight.logging.meter import Meter
from acclight.logging.store import MetricStore

__all__ = ["Meter", "MetricStore"]
