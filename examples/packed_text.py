"""Text as packed sequences of tokens: where it comes from, its tokenizer, the cache on disk and the loaders."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from acclight import DataModule

END_OF_TEXT = "<|endoftext|>"
#: One document in so many is for validation.
HELD_OUT = 20
#: A tokenizer is trained on at most so many characters.
TOKENIZER_CHARACTERS = 100_000_000
#: Tests, installed packages and generated tables teach a language model little.
SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "distutils", "encodings", "idle_test", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip
#: What is read where `--text` names a folder.
TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")


class TextError(ValueError):
    """There is no usable text where the user said it would be; the message is one line with the fix."""


@dataclass(frozen=True)
class Text:
    """Documents in a fixed order.

    Attributes:
        names: One per document; it alone decides to which side of the split a document goes.
        read: Gives the document of that number.
        fingerprint: Changes whenever a document does.
    """

    names: Sequence[str]
    read: Callable[[int], str]
    fingerprint: str

    def part(self, name: str) -> Iterator[str]:
        """The documents of "train" or "val".

        The hash of its name says whether a document is for validation, so that the split is the same on every machine.
        Where that would leave one side empty (few documents), the last tenth of each is for validation instead.
        """
        held_out = [int.from_bytes(hashlib.sha256(n.encode()).digest()[:4], "big") % HELD_OUT == 0 for n in self.names]
        by_document = any(held_out) and not all(held_out)
        for number, held in enumerate(held_out):
            if not by_document:
                document = self.read(number)
                cut = len(document) * 9 // 10
                yield document[:cut] if name == "train" else document[cut:]
            elif held == (name == "val"):
                yield self.read(number)


# --- sources ----------------------------------------------------------------------------------------------------------


def stdlib_text() -> Text:
    """The source of the Python standard library that runs this script: 9 MB in about 460 files for Python 3.11."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {f.relative_to(root).as_posix(): f for f in _files_below(root, (".py",), SKIPPED_FOLDERS)}
    return _text_of_files(files, str(root))


def files_text(paths: Sequence[str | Path]) -> Text:
    """The text of files, and of the text files in folders.

    Raises:
        TextError: For a path that does not exist, a file that is no UTF-8 text, or when all of it is empty.
    """
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            files |= {f.as_posix(): f for f in _files_below(path, TEXT_SUFFIXES)}
        elif path.exists():
            files[path.as_posix()] = path
        else:
            raise TextError(f"--text {path}: no such file or folder; give UTF-8 text files, or folders that hold some")
    return _text_of_files(files, ", ".join(map(str, paths)))


def hf_dataset_text(name: str) -> Text:
    """The "text" column (else the first column of strings) of the training split of a dataset of the Hugging Face Hub.

    Args:
        name: Of the dataset, or a local folder; a configuration goes behind a colon, as in
            "Salesforce/wikitext:wikitext-2-raw-v1".

    Raises:
        TextError: Without the package `datasets`, when it cannot load the dataset, or when no column holds strings.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise TextError(f"--hf-dataset {name} needs the package datasets; run: pip install datasets") from None
    path, _, configuration = name.partition(":")
    try:
        rows: Any = datasets.load_dataset(path, configuration or None, split="train")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TextError(f"--hf-dataset {name} cannot be loaded ({reason}); check the name and the network") from error
    columns = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if not columns:
        raise TextError(f"--hf-dataset {name} has no column of strings; its columns are {', '.join(rows.features)}")
    column = "text" if "text" in columns else columns[0]
    names = [str(number) for number in range(len(rows))]
    return Text(names, lambda number: str(rows[number][column] or ""), f"{rows._fingerprint}/{column}")


def _files_below(root: Path, suffixes: tuple[str, ...], skipped: Collection[str] = ()) -> list[Path]:
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return found


def _text_of_files(files: dict[str, Path], where: str) -> Text:
    names = sorted(files)
    documents: list[str] = []
    digest = hashlib.sha256()
    for name in names:
        content = files[name].read_bytes()
        digest.update(json.dumps([name, len(content)]).encode() + content)
        try:
            documents.append(content.decode())
        except UnicodeDecodeError as error:
            raise TextError(
                f"{files[name]} is no UTF-8 text (byte {error.start}): convert it or leave it out"
            ) from None
    if not any(document.strip() for document in documents):
        kinds = ", ".join(TEXT_SUFFIXES)
        raise TextError(f"there is no text in {where}; give --text with files that hold some, or folders with {kinds}")
    return Text(names, documents.__getitem__, digest.hexdigest())


# --- tokens -----------------------------------------------------------------------------------------------------------


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: it can spell every text, and needs no normalization.

    Args:
        documents: What it is trained on.
        vocab_size: At most so many tokens; the first is `END_OF_TEXT`, then the 256 bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    # A document that spells END_OF_TEXT, as this file does, has not ended there.
    tokenizer.encode_special_tokens = True
    return tokenizer


def write_tokens(tokenizer: Tokenizer, documents: Iterable[str], path: Path, dtype: np.dtype[Any]) -> None:
    """Writes the tokens of all documents one after the other, `END_OF_TEXT` behind each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rest = iter(documents)
    with path.open("wb") as file:
        while some := list(itertools.islice(rest, 256)):
            for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
                file.write(np.array([*encoding.ids, end], dtype=dtype).tobytes())


def _up_to(documents: Iterable[str], characters: int) -> Iterator[str]:
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


class PackedTokens(Dataset[Tensor]):
    """Sequences cut from one long row of tokens, with no padding; documents meet inside them.

    Item i is tokens i * seq_len to (i + 1) * seq_len, seq_len + 1 of them: the inputs, and shifted by one the targets,
    so that every token but the first is predicted exactly once.

    Args:
        path: File of tokens.
        dtype: Of the file.
        seq_len: Tokens of an input.
        limit: At most so many sequences, evenly spread over the file. Default: all.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], seq_len: int, limit: int | None = None) -> None:
        self.tokens = np.memmap(path, dtype=dtype, mode="r")
        self.seq_len = seq_len
        whole = max(0, (len(self.tokens) - 1) // seq_len)
        self.starts = np.linspace(0, whole, num=min(whole, limit or whole), endpoint=False).astype(np.int64) * seq_len

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        """Returns a LongTensor of shape [seq_len + 1]."""
        start = int(self.starts[index])
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))


# --- the data module --------------------------------------------------------------------------------------------------


class PackedText(DataModule):
    """Trains a tokenizer on a text and gives its tokens as packed sequences; the work is done once and kept on disk.

    A batch is a LongTensor of shape [batch_size, seq_len + 1].

    Args:
        text: The documents.
        cache: The folder of all prepared texts; each lies in a folder named by what it was made from.
        vocab_size: Of the tokenizer, at most.
        seq_len: Tokens of an input.
        batch_size: Sequences of a batch on one rank.
        val_sequences: Validate on at most so many sequences.
    """

    def __init__(
        self,
        text: Text,
        cache: str | Path,
        *,
        vocab_size: int,
        seq_len: int,
        batch_size: int,
        val_sequences: int = 256,
    ) -> None:
        self.text = text
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_sequences = val_sequences
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        made_from = json.dumps(["bpe-1", text.fingerprint, vocab_size, HELD_OUT])
        self.folder = Path(cache) / hashlib.sha256(made_from.encode()).hexdigest()[:20]
        self.train: PackedTokens
        self.val: PackedTokens

    def prepare_data(self) -> None:
        """Trains the tokenizer and writes the tokens, where that has not been done before.

        The folder appears under its name when it is complete, so neither a kill nor a second job leaves half a cache.
        """
        if self.folder.exists():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.folder.parent))
        try:
            tokenizer = train_tokenizer(_up_to(self.text.part("train"), TOKENIZER_CHARACTERS), self.vocab_size)
            tokenizer.save(str(unfinished / "tokenizer.json"))
            for part in ("train", "val"):
                write_tokens(tokenizer, self.text.part(part), unfinished / f"{part}.bin", self.dtype)
            try:
                os.rename(unfinished, self.folder)
            except OSError:
                if not self.folder.exists():
                    raise
                # Another job has prepared the same text in the meantime.
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def setup(self, stage: str) -> None:
        """Opens the files; the tokens stay on disk until they are needed.

        Raises:
            TextError: When the text is too short for one batch of training or one sequence of validation.
        """
        self.train = PackedTokens(self.folder / "train.bin", self.dtype, self.seq_len)
        self.val = PackedTokens(self.folder / "val.bin", self.dtype, self.seq_len, self.val_sequences)
        if not len(self.val) or len(self.train) < self.batch_size:
            raise TextError(
                f"the text is too short: it makes {len(self.train)} sequences of {self.seq_len} tokens for training, where "
                f"a batch needs {self.batch_size}, and {len(self.val)} for validation, where one is needed; "
                "give more text, or a smaller --seq-len"
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """All training sequences, in another order in every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The same sequences in every validation."""
        return DataLoader(self.val, batch_size=self.batch_size)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, once the data is prepared."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))
