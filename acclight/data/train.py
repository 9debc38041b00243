"""Training data of one rank: an order that belongs to (seed, epoch), and a position to resume from anywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from acclight.data.deal import TrainDeal
from acclight.data.dispatch import DispatchReader, RanksSource, RoundSource, Scatter, StreamSource, dispatches
from acclight.data.indexed import IndexedReader
from acclight.data.loader import (
    Dealt,
    Differs,
    Limit,
    Reader,
    check_limit,
    checked,
    limited,
    reading_copy,
    samples_of,
    set_epoch,
    size_of,
)
from acclight.data.order import EpochOrder
from acclight.data.stream import PlainReader, StreamReader


class TrainData:
    """What one rank reads of the user's training loader.

    Map-style dataset in a DataLoader: everything of the loader is kept but the order of indices. That is a pure
    function of (seed, epoch), the same on all ranks, and each rank takes its slices of it (`TrainDeal` says which, and
    what happens to the end of an epoch). A custom sampler is followed, batches of a custom batch sampler stay whole,
    and a sampler that divides itself among the ranks (`DistributedSampler`) is used as it is. A torch generator given
    to the loader or a sampler is set by (seed, epoch) for the draw, then put back.

    IterableDataset in a DataLoader: element k goes to rank k % world_size (`SharedStream` says more), unless the
    dataset divides itself: it says so with attributes `rank` and `num_replicas` (or `world_size`), or the ranks' first
    elements differ, as in one that asks for its rank in `__iter__`. So a stream that all ranks share has to give them
    the same elements: what is random in it has to come from Python's, NumPy's or torch's global generators. Anything
    else that can be iterated over: every rank trains on all the batches that it was given. Their number of batches may
    differ between ranks.

    Worker processes are seeded by (seed, epoch, rank), and making an iterator leaves the global random state alone.

    Args:
        loader: A DataLoader, or an iterable of batches.
        rank: This process, 0 to world_size - 1.
        world_size: Number of processes.
        seed: Of the sample order; a loaded state brings its own.
        limit: Batches per rank and epoch: a number (int), or a fraction of what there is (float).
        limit_name: What a user calls the limit, for errors.
        split_batches: Whether the loader's batch size is that of all ranks together.
        even_batches: Whether the end of an epoch is filled up, to a multiple of world_size, with its first samples.
        own_share: Whether the ranks were given different data (their `rank_identity` differs), so that each reads the
            whole of its own.
        dispatch_batches: Whether rank 0 reads for all.
        scatter: How rank 0 sends; without it each rank reads for itself.
        differs: Whether a digest differs between the ranks; with it, they compare the first elements of a stream when it
            is read for the first time.

    Raises:
        TypeError: Several loaders, or nothing that can be iterated over.
        ValueError: `limit` is out of range, or a fraction of an unknown length; the batch size cannot be split; a
            sampler was made for another rank or world size; `dispatch_batches` cannot be.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        limit: Limit = 1.0,
        limit_name: str = "limit_train_batches",
        split_batches: bool = False,
        even_batches: bool = True,
        own_share: bool = False,
        dispatch_batches: bool | None = None,
        scatter: Scatter | None = None,
        differs: Differs | None = None,
    ) -> None:
        self._loader, declared = checked(loader, rank, world_size)
        dispatched = scatter is not None and dispatches(dispatch_batches, loader, world_size, declared=declared)
        if dispatched:
            differs = None
        own_share = own_share and not dispatched
        self._own_share = own_share
        self._own = declared or own_share
        check_limit(limit, limit_name)
        self._limit_name = limit_name
        self._world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.batches_done = 0
        """Batches of this epoch that this rank has trained on, those before a resume included."""
        self._samples = 0
        self._limit = limit
        self._begun = False
        self._restored = False
        self._agreed = False
        self._least: int | None = None  # what every rank has of the epoch, once they have agreed
        self._ahead: deque[Dealt] = deque()  # what was read, but not yet trained on
        self._own_state: Any = None  # where the loader or the dataset itself says that this rank is
        parts = split(loader, world_size) if split_batches else loader
        sizes = (getattr(one, "batch_size", None) for one in (parts, getattr(parts, "batch_sampler", None)))
        self.batch_size: int | None = next((size for size in sizes if isinstance(size, int)), None)
        """Samples of this rank's full batches; None when the loader does not say."""
        self._reader: Reader
        source: RoundSource | None = None
        if not isinstance(parts, DataLoader):
            self._reader = PlainReader(parts, world_size=world_size)
        elif isinstance(parts.dataset, IterableDataset):
            self._reader = StreamReader(
                parts, rank=rank, world_size=world_size, own=self._own, differs=differs, whole_batches=False,
                tells_place=True,
            )  # fmt: skip
            if dispatched and rank == 0:
                source = StreamSource(parts, world_size=world_size, whole_batches=False)
        else:
            deal = TrainDeal(0, 1, even_batches) if self._own else TrainDeal(rank, world_size, even_batches)
            order = EpochOrder(parts)
            self._reader = IndexedReader(parts, order, deal, rank=rank, share=world_size if self._own else 1)
            if dispatched and rank == 0:
                deals = [TrainDeal(one, world_size, even_batches) for one in range(world_size)]
                source = RanksSource([IndexedReader(parts, order, one, rank=i) for i, one in enumerate(deals)])
        if scatter is not None and dispatched:
            self._reader = DispatchReader(self._reader, source, scatter, keep_last=False)
        limited(self._reader.count(0), limit, limit_name)  # raises now what would else be raised later

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch, after the limit; after `agree`, those that every rank has. None when unknown."""
        if self._agreed:
            return self._least
        return limited(self._reader.count(0), self._limit, self._limit_name)

    @property
    def batches_left(self) -> int | None:
        """What is left of `num_batches` in this epoch; None when unknown."""
        if self._agreed and self._least is None:
            return None
        left, most = self._reader.count(self._samples), self._most_left()
        return left if most is None or left is None else min(left, most)

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks have the same number of batches for certain; else they have to `agree`."""
        return self._world_size == 1 or (isinstance(self._reader, (IndexedReader, DispatchReader)) and not self._own)

    def agree(self, gather: Callable[[Any], list[Any]]) -> list[int | None]:
        """Learns how many batches of this epoch every rank has, for `num_batches` and `batches_left`. A collective.

        Args:
            gather: Gives the value of every rank.

        Returns:
            Each rank's own number in this epoch; None where it is unknown.
        """
        self._agreed, self._least = False, None
        left = self.batches_left
        counts = gather(None if left is None else self.batches_done + left)
        self._agreed, self._least = True, None if None in counts else min(counts)
        return counts

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; of the epoch of a state just loaded, to where that was taken.

        `set_epoch(epoch)` is called on the loader, its samplers and its dataset, where they have it.
        """
        if self._restored and epoch == self.epoch:
            self._restored = False
        else:
            self._enter(epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of this epoch, from the first that was not trained on."""
        if not self._begun:
            self._enter(self.epoch, 0)
        self._ahead.clear()
        for batch, dealt in self._reader.read(self._samples, self._most_left()):
            self._ahead.append(dealt)
            yield batch

    def consumed(self, batches: int) -> None:
        """Counts batches that every rank has trained on, the oldest of those read since.

        Raises:
            ValueError: So many have not been read.
        """
        if batches > len(self._ahead):
            raise ValueError(f"consumed({batches}): only {len(self._ahead)} batches have been read and not counted")
        for _ in range(batches):
            dealt = self._ahead.popleft()
            self._samples += dealt.samples
            self._own_state = dealt.state
        self.batches_done += batches

    def samples(self, ahead: int) -> int | None:
        """Number of samples of a batch of this rank that was read; None where the loader does not make batches of indices.

        Args:
            ahead: Which of the batches that were read and not yet counted, from 0.
        """
        return samples_of(self._ahead[ahead].entry)

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank, as values that JSON holds.

        Returns:
            seed, epoch, samples (used in this epoch over all ranks), dataset (type and length) and sampler (type).
            Streams count full batches, plain iterables count batches.
        """
        return {"seed": self.seed, "epoch": self.epoch, "samples": self._samples, **self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken, also with another number of ranks or another batch size.

        Raises:
            ValueError: The dataset is another one, or the state's position is none of this loader's.
        """
        here = self._fingerprint()
        then, now = state["dataset"], here["dataset"]
        unequal = then["length"] is not None and now["length"] is not None and then["length"] != now["length"]
        if then["type"] != now["type"] or unequal:
            raise ValueError(
                f"the checkpoint was taken on a dataset of type {then['type']} and length {then['length']}, but this "
                f"one is of type {now['type']} and length {now['length']}; resume with the same data, or load the "
                "weights alone, before a new fit, by module.load_state_dict(checkpoint.load_weights(path))"
            )
        if state["sampler"] != here["sampler"] and state["samples"]:
            rank_zero_warn(
                f"the checkpoint was taken with the sampler {state['sampler']}, this loader has {here['sampler']}: in "
                f"epoch {state['epoch']} some samples may come twice and some not at all"
            )
        self.seed = state["seed"]
        self._enter(state["epoch"], state["samples"])
        self._restored = True

    def own_state(self) -> Any:
        """Where this rank's loader or dataset itself says that it is, beside `state_dict`; None where it says nothing."""
        return self._own_state

    def load_own_state(self, state: Any) -> None:
        """After `load_state_dict`, with as many ranks: lets the loader or dataset go to its place by itself."""
        if state is not None:
            self._own_state = state
            self._reader.restore(state)

    def close(self) -> None:
        """Ends the worker processes that the loader keeps between epochs."""
        self._reader.close()

    def _enter(self, epoch: int, samples: int) -> None:
        set_epoch(self._loader, epoch)
        self._reader.begin(self.seed, epoch)
        self.epoch, self._samples = epoch, samples
        self.batches_done = self._reader.batches_before(samples) if samples else 0
        self._begun, self._restored = True, False
        self._own_state = None
        self._ahead.clear()

    def _most_left(self) -> int | None:
        most = self._least
        if most is None:
            most = self._limit if isinstance(self._limit, int) else self.num_batches
        return None if most is None else max(most - self.batches_done, 0)

    def _fingerprint(self) -> dict[str, Any]:
        dataset = getattr(self._loader, "dataset", self._loader)
        sampler = None
        if isinstance(self._loader, DataLoader) and not isinstance(dataset, IterableDataset):
            own_batches = (
                self._loader.batch_sampler is not None and type(self._loader.batch_sampler) is not BatchSampler
            )
            sampler = type(self._loader.batch_sampler if own_batches else self._loader.sampler).__name__
        # Not the length of what only this rank has: the state is the same on all ranks.
        shared = self._world_size == 1 or (isinstance(self._loader, DataLoader) and not self._own_share)
        length = size_of(dataset) if shared else None
        return {"dataset": {"type": type(dataset).__name__, "length": length}, "sampler": sampler}


def split(loader: object, world_size: int) -> DataLoader[Any]:
    """The loader with this rank's part of the batch size; for training and evaluation.

    Raises:
        ValueError: There is no batch size, or it cannot be divided by the number of processes.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise ValueError("split_batches=True needs a DataLoader with a batch_size; give one, or split_batches=False")
    part, left = divmod(loader.batch_size, world_size)
    if left:
        raise ValueError(
            f"split_batches=True: the batch size {loader.batch_size} cannot be divided among {world_size} processes; "
            f"give a multiple of {world_size}"
        )
    return reading_copy(loader, batch_size=part, batch_sampler=BatchSampler(loader.sampler, part, loader.drop_last))
