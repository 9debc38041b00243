"""The example's text: the split, the tokenizer, packing, the cache, and its errors."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import packed_text
from packed_text import (
    END_OF_TEXT,
    PackedText,
    PackedTokens,
    Text,
    TextError,
    files_text,
    hf_dataset_text,
    stdlib_text,
    train_tokenizer,
    write_tokens,
)


def text_of(documents: dict[str, str], fingerprint: str = "f") -> Text:
    return Text(list(documents), list(documents.values()).__getitem__, fingerprint)


# --- sources and split ------------------------------------------------------------------------------------------------


def test_split_is_by_the_name_alone() -> None:
    names = [f"package/module_{n}.py" for n in range(1000)]
    text = text_of({name: name for name in names})
    train, val = list(text.part("train")), list(text.part("val"))
    assert sorted(train + val) == sorted(names)
    assert not set(train) & set(val)
    assert [name for name in names if name in set(train)] == train, "the order stays"
    # 1000 draws at 1 in 20: the mean is 50, four standard deviations are 28.
    assert 22 <= len(val) <= 78
    half = text_of({name: name for name in names[::2]})
    assert set(half.part("val")) == set(val) & set(names[::2]), "other documents change nothing"


def test_split_of_known_names() -> None:
    # `printf ast.py | sha256sum` begins with b4fa779c, a multiple of 20; `printf os.py | sha256sum` with d9d7c69c, which is none.
    assert (0xB4FA779C % 20, 0xD9D7C69C % 20) == (0, 16)
    text = text_of({"ast.py": "a", "os.py": "o"})
    assert list(text.part("val")) == ["a"]
    assert list(text.part("train")) == ["o"]


def test_few_documents_are_cut() -> None:
    # Neither `printf a | sha256sum` (ca978112) nor `printf b | sha256sum` (3e23e816) is a multiple of 20.
    text = text_of({"a": "abcdefghij", "b": "0123456789" * 2})
    assert list(text.part("train")) == ["abcdefghi", "012345678901234567"]
    assert list(text.part("val")) == ["j", "89"]


def test_standard_library() -> None:
    text = stdlib_text()
    assert text.names == sorted(text.names)
    assert "textwrap.py" in text.names
    assert not [name for name in text.names if "site-packages" in name or name.startswith("test/")]
    source = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text(encoding="utf-8")
    assert text.read(text.names.index("textwrap.py")) == source
    sizes = {part: sum(map(len, text.part(part))) for part in ("train", "val")}
    assert sizes["val"] > 100_000
    assert sizes["train"] > 10 * sizes["val"]


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("bee")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "picture.png").write_bytes(b"\x89\xff")
    (tmp_path / "odd.suffix").write_text("odd")
    text = files_text([tmp_path])
    assert [text.read(n) for n in range(len(text.names))] == ["a", "bee"]
    named = files_text([tmp_path / "odd.suffix"])
    assert named.read(0) == "odd"
    before = files_text([tmp_path]).fingerprint
    assert files_text([tmp_path]).fingerprint == before
    (tmp_path / "a.txt").write_text("A")
    assert files_text([tmp_path]).fingerprint != before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: [folder / "missing.txt"], ["missing.txt", "no such file or folder", "give"]),
        (lambda folder: [_write(folder / "empty.txt", b" \n")], ["no text", "empty.txt", "--text"]),
        (lambda folder: [folder], ["no text", ".py"]),
        (lambda folder: [_write(folder / "latin.txt", b"caf\xe9")], ["latin.txt", "no UTF-8", "byte 3"]),
    ],
)
def test_unusable_files(tmp_path: Path, make: Any, words: list[str]) -> None:
    with pytest.raises(TextError) as error:
        files_text(make(tmp_path))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_dataset_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TextError, match="pip install datasets"):
        hf_dataset_text("owner/name")


def test_dataset_columns_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Rows(list[dict[str, Any]]):
        features: ClassVar[dict[str, Any]] = {"id": NUMBER, "title": STRING, "text": STRING}
        _fingerprint = "1234"

    def load_dataset(path: str, name: str | None, split: str) -> Rows:
        asked.append((path, name, split))
        if path == "gone":
            raise FileNotFoundError("no such\ndataset")
        return Rows([{"id": 1, "title": "t", "text": "one"}, {"id": 2, "title": "t", "text": None}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    text = hf_dataset_text("owner/name:raw")
    assert asked == [("owner/name", "raw", "train")]
    assert [text.read(n) for n in range(len(text.names))] == ["one", ""]
    assert hf_dataset_text("owner/name").fingerprint == text.fingerprint
    with pytest.raises(TextError, match=r"--hf-dataset gone .*no such dataset"):
        hf_dataset_text("gone")
    Rows.features = {"id": NUMBER, "title": STRING}
    assert hf_dataset_text("owner/name").read(0) == "t", "without a text column the first of strings"
    Rows.features = {"id": NUMBER}
    with pytest.raises(TextError, match="no column of strings; its columns are id"):
        hf_dataset_text("owner/name")


NUMBER, STRING = SimpleNamespace(dtype="int64"), SimpleNamespace(dtype="string")


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokenizer_spells_everything_and_is_reproducible() -> None:
    documents = [Path(packed_text.__file__).read_text(encoding="utf-8")]
    tokenizer = train_tokenizer(documents, 600)
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    for text in (documents[0], "naïve 🦙\t\x00 \r\n  x", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert train_tokenizer(documents, 600).to_str() == tokenizer.to_str()


def test_packing_by_hand(tmp_path: Path) -> None:
    # 257 tokens leave no room for merges: END_OF_TEXT and the bytes.
    tokenizer = train_tokenizer(["ab"], 257)
    a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
    path = tmp_path / "tokens.bin"
    write_tokens(tokenizer, ["ab", "", "c"], path, np.dtype(np.uint16))
    assert np.fromfile(path, dtype=np.uint16).tolist() == [a, b, 0, 0, c, 0]
    packed = PackedTokens(path, np.dtype(np.uint16), seq_len=2)
    assert [item.tolist() for item in packed] == [[a, b, 0], [0, 0, c]]
    assert str(packed[0].dtype) == "torch.int64"
    assert [item.tolist() for item in PackedTokens(path, np.dtype(np.uint16), seq_len=5)] == [[a, b, 0, 0, c, 0]]
    assert len(PackedTokens(path, np.dtype(np.uint16), seq_len=6)) == 0


def test_limit_is_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(31, dtype=np.uint16).tofile(path)
    starts = [item[0].item() for item in PackedTokens(path, np.dtype(np.uint16), seq_len=3, limit=5)]
    assert starts == [0, 6, 12, 18, 24]
    assert len(PackedTokens(path, np.dtype(np.uint16), seq_len=3, limit=100)) == 10


# --- the data module --------------------------------------------------------------------------------------------------


def packed(text: Text, cache: Path, **changes: Any) -> PackedText:
    return PackedText(text, cache, **{"vocab_size": 300, "seq_len": 8, "batch_size": 2} | changes)


DOCUMENTS = {f"{n}.py": f"def function_{n}(x):\n    return x + {n}\n" * 3 for n in range(60)}


def test_prepared_once_and_named_by_its_content(tmp_path: Path) -> None:
    data = packed(text_of(DOCUMENTS), tmp_path)
    data.prepare_data()
    assert sorted(f.name for f in data.folder.iterdir()) == ["tokenizer.json", "train.bin", "val.bin"]
    stamp = (data.folder / "train.bin").stat().st_mtime_ns
    again = packed(text_of(DOCUMENTS), tmp_path, seq_len=4, batch_size=1)
    assert again.folder == data.folder, "length and batch are decided when it is read"
    again.prepare_data()
    assert (data.folder / "train.bin").stat().st_mtime_ns == stamp
    assert packed(text_of(DOCUMENTS), tmp_path, vocab_size=301).folder != data.folder
    assert packed(text_of(DOCUMENTS, "g"), tmp_path).folder != data.folder

    data.setup("fit")
    for batch in data.train_dataloader():
        assert tuple(batch.shape) == (2, 9)
    tokenizer = data.tokenizer()
    first = data.val[0].tolist()
    expected = tokenizer.encode(next(text_of(DOCUMENTS).part("val"))).ids
    assert first == expected[:9]


def test_two_that_prepare_at_once(tmp_path: Path) -> None:
    slow, fast = packed(text_of(DOCUMENTS), tmp_path), packed(text_of(DOCUMENTS), tmp_path)
    read = slow.text.read

    def read_after_the_other(number: int) -> str:
        fast.prepare_data()
        return read(number)

    slow.text = Text(slow.text.names, read_after_the_other, "f")
    slow.prepare_data()
    assert [folder.name for folder in tmp_path.iterdir()] == [fast.folder.name]


def test_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    def read(number: int) -> str:
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        packed(Text(["a", "b"], read, "f"), tmp_path).prepare_data()
    assert list(tmp_path.iterdir()) == []


def test_small_numbers_for_small_vocabularies(tmp_path: Path) -> None:
    assert packed(text_of({}), tmp_path, vocab_size=65_536).dtype == np.uint16
    assert packed(text_of({}), tmp_path, vocab_size=65_537).dtype == np.uint32


@pytest.mark.parametrize("changes", [{"seq_len": 5000}, {"batch_size": 5000}])
def test_too_short(tmp_path: Path, changes: dict[str, int]) -> None:
    data = packed(text_of(DOCUMENTS), tmp_path, **changes)
    data.prepare_data()
    with pytest.raises(TextError, match=r"too short: .* give more text, or a smaller --seq-len"):
        data.setup("fit")
