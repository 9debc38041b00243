"""The checkpoint folder in one process: what is written, what is refused, and what a crash leaves behind."""

from __future__ import annotations

import argparse
import enum
import errno
import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from acclight.checkpoint import (
    CheckpointError,
    Reader,
    export,
    files,
    latest,
    load_weights,
    prune,
    read_trainer,
    remove,
    verify,
    write,
)
from acclight.checkpoint import format as layout
from tests.distributed import clean_environment, run_command


def save(path: Path, step: int = 1, **changes: Any) -> Path:
    """A small checkpoint; `step` is in the weights too."""
    given: dict[str, Any] = {
        "model": {"w": torch.full((2, 3), float(step)), "b": torch.arange(3)},
        "optimizer": {"w/exp_avg": torch.full((2, 3), 0.5), "w/step": torch.tensor(float(step))},
        "optimizer_meta": {"groups": [{"params": ["w"], "lr": 0.1}]},
        "trainer": {"global_step": step},
        "schedulers": [{"last_epoch": step}],
        "data": {"seed": 7, "samples": 4 * step},
        "rng": {"torch": torch.get_rng_state(), "python": [3, [1, 2], None]},
    }
    return write(path, **(given | changes))


def reseal(path: Path, **entries: Any) -> None:
    """Write the manifest anew for the files as they are now, as someone who means harm would; `entries` are added."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {
        str(file.relative_to(path)): {
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    } | entries
    (path / "manifest.json").write_text(json.dumps(manifest))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().numpy(force=True).tobytes() == (b.contiguous().numpy(force=True).tobytes())
    )


# --- what is written -------------------------------------------------------------------------------------------------

FLOATS = ["float64", "float32", "float16", "complex64"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"]


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (4, 16), dtype=torch.uint8, generator=generator)
    raw[:, :2] = 0
    kinds = {f"dtype.{name}": raw.view(getattr(torch, name)) for name in FLOATS + INTEGERS} | {"dtype.bool": raw.bool()}
    buffer = torch.arange(10.0)
    return {
        **{name: tensor.clone() for name, tensor in kinds.items()},
        "scalar": torch.tensor(3.0),
        "scalar.int": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        "view.0": buffer[:4],
        "view.1": buffer[4:],
        "parameter": torch.nn.Parameter(torch.randn(3, 2, generator=generator)),
    }


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    given = tensors_of_all_kinds()
    path = save(tmp_path / "c", model=given, optimizer={f"{name}/exp_avg": tensor for name, tensor in given.items()})
    reader = Reader(path)
    model = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    optimizer = {f"{name}/exp_avg": torch.zeros_like(tensor) for name, tensor in given.items()}
    reader.load_model(model)
    reader.load_optimizer(optimizer)
    weights = load_weights(path)
    assert weights.keys() == given.keys()
    for name, tensor in given.items():
        assert same_bits(model[name], tensor), name
        assert same_bits(optimizer[f"{name}/exp_avg"], tensor), name
        assert same_bits(weights[name], tensor), name
        assert reader.model_tensors[name].shape == tuple(tensor.shape)
        assert reader.model_tensors[name].dtype == tensor.dtype


def test_bfloat16_and_float8_come_back_bit_for_bit(tmp_path: Path) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    given = {"bf16": raw.view(torch.bfloat16), "f8": raw.view(torch.float8_e4m3fn)}
    path = save(tmp_path / "c", model=given)
    into = {"bf16": torch.zeros(128, dtype=torch.bfloat16), "f8": torch.zeros(256, dtype=torch.float8_e4m3fn)}
    Reader(path).load_model(into)
    for tensors in (into, load_weights(path)):
        assert torch.equal(tensors["bf16"].view(torch.uint8), raw)
        assert torch.equal(tensors["f8"].view(torch.uint8), raw)


def test_a_parameter_is_loaded_in_place_and_keeps_its_dtype(tmp_path: Path) -> None:
    path = save(tmp_path / "c", model={"w": torch.tensor([1.0, 2.5])})
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    Reader(path).load_model({"w": parameter})
    assert parameter.requires_grad
    assert parameter.dtype == torch.float64
    assert parameter.tolist() == [1.0, 2.5]


def test_one_step_tensor_shared_by_all_parameters(tmp_path: Path) -> None:
    step = torch.tensor(4.0)
    path = save(tmp_path / "c", optimizer={"w/step": step, "b/step": step})
    into = {"w/step": torch.tensor(0.0), "b/step": torch.tensor(0.0)}
    Reader(path).load_optimizer(into)
    assert [float(tensor) for tensor in into.values()] == [4.0, 4.0]


def test_documents_come_back(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path / "c", step=3))
    assert reader.trainer == {"global_step": 3}
    assert read_trainer(reader.path) == {"global_step": 3}
    assert reader.optimizer_meta == {"groups": [{"params": ["w"], "lr": 0.1}]}
    assert reader.schedulers == [{"last_epoch": 3}]
    assert reader.data == {"seed": 7, "samples": 12}
    rng = reader.rng(0)
    assert rng is not None
    assert rng["python"] == [3, [1, 2], None]
    assert torch.equal(rng["torch"], torch.get_rng_state())
    assert reader.rng(1) is None


class Color(enum.Enum):
    RED = "red"


def test_values_that_json_does_not_know_become_plain(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5]).state_dict()
    hparams = {
        "path": Path("a/b"),
        "color": Color.RED,
        "half": np.float64(0.5),
        "three": np.int32(3),
        "yes": np.bool_(True),
        "array": np.array([[1, 2]], dtype=np.uint32),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        "best": float("inf"),
        "by_step": {10: "a", None: "b"},
        "__tensor__": "not a tensor",
    }
    shadow = torch.arange(4.0).view(2, 2).t()
    reader = Reader(
        save(
            tmp_path / "c",
            trainer={"hparams": hparams, "callbacks": {"EMA": {"shadow": {"w": shadow, "n": torch.tensor(2)}}}},
            optimizer_meta={"groups": [{"lr": torch.tensor(0.25)}]},
            schedulers=[milestones],
        )
    )
    assert reader.trainer["hparams"] == {
        "path": "a/b",
        "color": "red",
        "half": 0.5,
        "three": 3,
        "yes": True,
        "array": [[1, 2]],
        "args": {"lr": 0.1, "betas": [0.9, 0.99]},
        "best": float("inf"),
        "by_step": {10: "a", None: "b"},
        "__tensor__": "not a tensor",
    }
    assert read_trainer(reader.path)["callbacks"]["EMA"]["shadow"]["n"].item() == 2
    assert torch.equal(reader.trainer["callbacks"]["EMA"]["shadow"]["w"], torch.tensor([[0.0, 2.0], [1.0, 3.0]]))
    assert reader.trainer["callbacks"]["EMA"]["shadow"]["n"].item() == 2
    assert reader.optimizer_meta["groups"][0]["lr"].item() == 0.25
    assert Counter(reader.schedulers[0]["milestones"]) == Counter({2: 1, 5: 2})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trainer": {"hparams": {"loss": torch.nn.MSELoss()}}}, r"trainer\.hparams\.loss .*MSELoss"),
        ({"schedulers": [{}, {"f": [lambda: 0]}]}, r"schedulers\[1\]\.f\[0\]"),
        ({"data": {"seen": {1, 2}}}, r"data\.seen .*set"),
        ({"rng": {"raw": b"x"}}, r"rng\.raw .*bytes"),
        ({"optimizer_meta": {"by": {(1, 2): 3}}}, r"optimizer\.by: the key \(1, 2\)"),
        ({"trainer": {"a": {Path("x"): 1, "x": 2}}}, r"trainer\.a: two keys become 'x'"),
        ({"model": {"w": torch.zeros(2, device="meta")}}, r"'w' .*meta"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, r"'w' .*sparse"),
        ({"model": {"w": torch.zeros(2, dtype=torch.complex128)}}, r"'w' .*complex128"),
        ({"optimizer": {"w/step": 3}}, r"'w/step' is a int"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        save(tmp_path / "c", **changes)
    assert list(tmp_path.iterdir()) == []


def test_files_are_what_the_manifest_says_and_plain_safetensors_reads_them(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    assert {file.suffix for file in files.values()} == {".json", ".safetensors"}
    manifest = json.loads(files.pop("manifest.json").read_text())
    assert manifest["files"] == {
        name: {"size": len(file.read_bytes()), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for name, file in files.items()
    }
    (weights,) = (path / "model").iterdir()
    assert torch.equal(safetensors.torch.load_file(weights)["w"], torch.ones(2, 3))
    assert json.loads((path / "trainer.json").read_text()) == {"global_step": 1}


def test_without_optimizer(tmp_path: Path) -> None:
    path = save(tmp_path / "c", optimizer={}, optimizer_meta={}, schedulers=[])
    assert not (path / "optimizer").exists()
    assert verify(path) == []
    reader = Reader(path)
    reader.load_optimizer({})
    with pytest.raises(CheckpointError, match="not in the checkpoint: w/step"):
        reader.load_optimizer({"w/step": torch.tensor(0.0)})


# --- strict loading, tied weights, export ----------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_named_and_left_alone(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path / "c"))
    w = torch.zeros(2, 3)
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: c; only in the checkpoint: b"):
        reader.load_model({"w": w, "c": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"other shapes: 'b' is \(4,\) here and \(3,\) in the checkpoint"):
        reader.load_model({"w": w, "b": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="'b' has no memory"):
        reader.load_model({"w": w, "b": torch.zeros(3, device="meta")})
    assert torch.equal(w, torch.zeros(2, 3))


def test_tied_weights_are_stored_once_and_load_under_either_name(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    path = save(tmp_path / "c", model={"emb": weight}, trainer={"tied": {"head": "emb"}})
    weights = load_weights(path)
    assert weights.keys() == {"emb", "head"}
    assert weights["head"] is weights["emb"]
    reader = Reader(path)
    for names in (["emb"], ["head"], ["emb", "head"]):
        into = {name: torch.zeros(2, 3) for name in names}
        reader.load_model(into)
        assert all(torch.equal(tensor, weight) for tensor in into.values())


def test_tied_weights_given_twice_or_wrongly_are_refused(tmp_path: Path) -> None:
    weight = torch.ones(2, 3)
    with pytest.raises(CheckpointError, match="'emb' and 'head' for one tied weight"):
        save(tmp_path / "c", model={"emb": weight, "head": weight.detach()})
    with pytest.raises(CheckpointError, match="ties 'head' to 'embedding'"):
        save(tmp_path / "c", model={"emb": weight}, trainer={"tied": {"head": "embedding"}})
    assert list(tmp_path.iterdir()) == []


def test_export_loads_in_transformers_with_its_tie(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=4)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    trainer = {
        "tied": {"net.lm_head.weight": "net.transformer.wte.weight"},
        "hf_config": config.to_dict() | {"architectures": ["GPT2LMHeadModel"]},
        "hf_prefix": "net.",
    }
    path = save(tmp_path / "c", model=state | {"metric": torch.zeros(1)}, trainer=trainer)
    out = export(path, tmp_path / "out")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert "lm_head.weight" not in safetensors.torch.load_file(out / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, tensor in model.state_dict().items():
        assert same_bits(loaded.state_dict()[name], tensor), name


def test_export_options(tmp_path: Path) -> None:
    path = save(
        tmp_path / "c", model={"a.emb": torch.ones(2), "b": torch.zeros(1)}, trainer={"tied": {"a.head": "a.emb"}}
    )
    whole = safetensors.torch.load_file(export(path, tmp_path / "1") / "model.safetensors")
    assert whole.keys() == {"a.emb", "b"}
    part = safetensors.torch.load_file(export(path, tmp_path / "2", prefix="a.", keep_tied=True) / "model.safetensors")
    assert part.keys() == {"emb", "head"}
    assert part["head"].tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match=r"model\.safetensors exists"):
        export(path, tmp_path / "1")
    with pytest.raises(CheckpointError, match="prefix 'x' does not fit"):
        export(path, tmp_path / "3", prefix="x")


# --- damage and harm -------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sentinel),)


def weights_file(path: Path) -> Path:
    (file,) = (path / "model").iterdir()
    return file


def truncate(path: Path) -> str:
    os.truncate(weights_file(path), weights_file(path).stat().st_size - 1)
    return r"model/.*bytes, the manifest says"


def flip_a_bit(path: Path) -> str:
    content = bytearray(weights_file(path).read_bytes())
    content[-1] ^= 1
    weights_file(path).write_bytes(content)
    return r"model/.*SHA-256"


def delete_weights(path: Path) -> str:
    weights_file(path).unlink()
    return r"model/.* is missing"


def delete_trainer_json(path: Path) -> str:
    (path / "trainer.json").unlink()
    reseal(path)
    return r"trainer\.json is missing"


def delete_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return r"holds no manifest\.json"


def empty_manifest(path: Path) -> str:
    (path / "manifest.json").write_text("")
    return r"manifest\.json"


def manifest_of_a_later_format(path: Path) -> str:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    return "format version 2"


def add_a_foreign_file(path: Path) -> str:
    (path / "model" / "extra.safetensors").write_bytes(weights_file(path).read_bytes())
    return r"extra\.safetensors is not listed"


def deeply_nested_json(path: Path) -> str:
    (path / "data.json").write_text("[" * 100_000 + "]" * 100_000)
    reseal(path)
    return r"data\.json"


def link_to_a_file_outside(path: Path) -> str:
    outside = path.parent / "outside.safetensors"
    weights_file(path).rename(outside)
    (path / "model" / "w.safetensors").symlink_to(outside)
    reseal(path)
    return r"w\.safetensors is a link"


def link_to_a_folder_outside(path: Path) -> str:
    outside = path.parent / ".outside"
    (path / "model").rename(outside)
    (path / "model").symlink_to(outside)
    return r"model is not listed|is missing"


def fifo(path: Path) -> str:
    weights_file(path).unlink()
    os.mkfifo(path / "model" / "w.safetensors")
    reseal(path, **{"model/w.safetensors": {"size": 0, "sha256": hashlib.sha256().hexdigest()}})
    return r"w\.safetensors is a link or not a plain file"


def listed_as(name: str) -> Callable[[Path], str]:
    def harm(path: Path) -> str:
        (path.parent / "secret.json").write_text("{}")
        reseal(path, **{name: {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}})
        return "not a name that a checkpoint's file can have"

    harm.__name__ = f"listed as {name}"
    return harm


def pickle_under_a_listed_name(path: Path) -> str:
    weights_file(path).write_bytes(pickle.dumps(Payload(path.parent / "sentinel")))
    reseal(path)
    return r"model/.*header of \d+ bytes"


def pickle_as_json(path: Path) -> str:
    (path / "trainer.json").write_bytes(pickle.dumps(Payload(path.parent / "sentinel"), protocol=0))
    reseal(path)
    return r"trainer\.json"


def torch_file_beside_the_weights(path: Path) -> str:
    with open(path / "model" / ".metadata", "wb") as file:
        torch.save(Payload(path.parent / "sentinel"), file)
    reseal(path)
    return "not a name that a checkpoint's file can have"


def header_larger_than_the_file(path: Path) -> str:
    weights_file(path).write_bytes((2**40).to_bytes(8, "little") + b"{}" * 50)
    reseal(path)
    return r"model/.*header of 1099511627776 bytes"


def header_larger_than_allowed(path: Path) -> str:
    with open(weights_file(path), "wb") as file:
        file.write((200 * 10**6).to_bytes(8, "little"))
        file.truncate(201 * 10**6)  # takes no space on the disk
    reseal(path)
    return r"model/.*header of 200000000 bytes"


DAMAGE = [
    truncate,
    flip_a_bit,
    delete_weights,
    delete_trainer_json,
    empty_manifest,
    manifest_of_a_later_format,
    add_a_foreign_file,
    delete_manifest,
    deeply_nested_json,
    link_to_a_file_outside,
    link_to_a_folder_outside,
    fifo,
    listed_as("../secret.json"),
    listed_as("model/../../secret.json"),
    listed_as("/etc/secret.json"),
    listed_as("model\\secret.json"),
    listed_as("manifest.json"),
    listed_as("model/weights.bin"),
    pickle_under_a_listed_name,
    pickle_as_json,
    torch_file_beside_the_weights,
    header_larger_than_the_file,
    header_larger_than_allowed,
]


@pytest.mark.filterwarnings("ignore:Skipped a damaged checkpoint")
@pytest.mark.parametrize("harm", DAMAGE, ids=lambda harm: harm.__name__)
def test_damage_is_named_and_never_loaded(tmp_path: Path, harm: Callable[[Path], str]) -> None:
    good = save(tmp_path / "step-1", step=1)
    bad = save(tmp_path / "step-2", step=2)
    named = harm(bad)
    assert any(re.search(named, problem) for problem in verify(bad)), verify(bad)
    assert latest(tmp_path) == good
    reader = Reader.latest(tmp_path)
    assert reader is not None
    assert reader.trainer["global_step"] == 1
    with pytest.raises(CheckpointError, match=named):
        Reader(bad)
    if harm not in {deeply_nested_json, flip_a_bit}:  # not in what it reads
        with pytest.raises(CheckpointError, match=named):
            read_trainer(bad)
    with pytest.raises(CheckpointError, match=named):
        load_weights(bad)
    with pytest.raises(CheckpointError, match=named):
        export(bad, tmp_path / "out")
    assert not (tmp_path / "sentinel").exists()
    assert not (tmp_path / "out").exists()


def test_the_sentinel_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "sentinel")))  # noqa: S301  # proves that the payload above would act
    assert (tmp_path / "sentinel").exists()


def test_latest_says_which_is_damaged(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    truncate(save(tmp_path / "step-2"))
    with pytest.warns(UserWarning, match=r"Skipped a damaged checkpoint: .*step-2/model/.*bytes"):
        assert latest(tmp_path) == tmp_path / "step-1"
    truncate(tmp_path / "step-1")
    with pytest.warns(UserWarning, match="Skipped"):
        assert latest(tmp_path) is None
    with pytest.warns(UserWarning, match="Skipped"):
        assert Reader.latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("place", ["checkpoints", "version_0/checkpoints", "acclight_logs/version_3/checkpoints", "."])
def test_latest_finds_what_a_trainer_with_that_root_has_written(place: str, tmp_path: Path) -> None:
    save(tmp_path / "acclight_logs" / "version_1" / "checkpoints" / "step-1")
    newer = save(tmp_path / place / "step-2")
    assert latest(tmp_path) == newer


@pytest.mark.parametrize("read", [load_weights, read_trainer, verify, lambda path: export(path, "out")])
def test_no_path_is_said_to_be_none(read: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"the checkpoint's path is None: give its folder \(latest"):
        read(None)


def test_json_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "c")
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 100)
    assert "manifest.json is larger than 100 bytes" in verify(path)[0]
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 2000)
    with pytest.raises(CheckpointError, match=r"trainer\.json is larger than 2000 bytes"):
        save(tmp_path / "d", trainer={"text": "x" * 3000})
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ('{"w": {"saved_offsets": [1000000000000, 0]}}', "fill 6 of"),
        ('{"w": {"saved_offsets": [-1, 0]}}', "place of 'w'"),
        ('{"w": {"saved_offsets": [0]}}', "place of 'w'"),
        ('{"w": {"saved_offsets": [0, 0.5]}}', "place of 'w'"),
        ('{"v": 1}', "place of 'w'"),
        ("[", "JSONDecodeError"),
    ],
)
def test_false_places_of_pieces_are_refused_before_memory_is_taken(tmp_path: Path, places: str, named: str) -> None:
    path = save(tmp_path / "c")
    tensors = {"w": torch.ones(2, 3)}
    safetensors.torch.save_file(tensors, weights_file(path), metadata={"DCP_SHARDING_INFO": places})
    reseal(path)
    with pytest.raises(CheckpointError, match=named):
        Reader(path)
    with pytest.raises(CheckpointError, match=named):
        load_weights(path)


def test_files_without_places_hold_whole_tensors(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    weights_file(path).unlink()
    safetensors.torch.save_file({"w": torch.full((2, 3), 9.0)}, path / "model" / "model.safetensors")
    reseal(path)
    into = {"w": torch.zeros(2, 3)}
    Reader(path).load_model(into)
    assert torch.equal(into["w"], torch.full((2, 3), 9.0))


def test_weights_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    weights = load_weights(path)
    weights_file(path).write_bytes(b"")
    remove(path)
    assert torch.equal(weights["w"], torch.ones(2, 3))


# --- place, order, removal -------------------------------------------------------------------------------------------


def test_a_good_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    path = save(tmp_path / "c", step=1)
    with pytest.raises(CheckpointError, match="already holds a good checkpoint"):
        save(path, step=2)
    assert Reader(path).trainer["global_step"] == 1


@pytest.mark.parametrize(
    "harm", [truncate, delete_weights, delete_manifest, add_a_foreign_file], ids=lambda f: f.__name__
)
def test_a_damaged_checkpoint_is_replaced(tmp_path: Path, harm: Callable[[Path], str]) -> None:
    path = save(tmp_path / "c", step=1)
    with pytest.warns(UserWarning, match=f"replaces a damaged checkpoint: .*{harm(path)}"):
        save(path, step=2)
    assert verify(path) == []
    assert Reader(path).trainer["global_step"] == 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore:The save replaces a damaged checkpoint")
def test_a_foreign_file_in_a_damaged_checkpoint_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "c", step=1)
    (path / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"kept as .*/\.damaged-1-c"):
        save(path, step=2)
    assert Reader(path).trainer["global_step"] == 2
    assert (tmp_path / ".damaged-1-c" / "notes.txt").read_text() == "mine"
    assert latest(save(tmp_path / "d")) is None
    assert latest(tmp_path) == tmp_path / "d"
    assert (tmp_path / ".damaged-1-c" / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_no_checkpoint_is_never_touched(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    for action in (save, remove):
        with pytest.raises(CheckpointError, match="home"):
            action(home)
    (tmp_path / "link").symlink_to(home)
    for action in (save, remove):
        with pytest.raises(CheckpointError, match="link"):
            action(tmp_path / "link")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        save(tmp_path / "file")
    assert (home / "thesis.txt").read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "home", "link"]


def test_newest_is_the_last_committed_whatever_its_name_or_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "step-200", step=200)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    after = save(tmp_path / "step-060", step=60)
    os.utime(after, (0, 0))
    (tmp_path / "z-link").symlink_to(tmp_path / "step-200")
    assert latest(tmp_path) == after
    assert layout.candidates(tmp_path)[0] == [after, tmp_path / "step-200"]


def test_prune_keeps_the_last_good_one(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"step-{step}", step=step) for step in (1, 2, 3, 4)]
    (tmp_path / "other").mkdir()
    assert sorted(prune(tmp_path, {paths[1], paths[3]})) == [paths[0], paths[2]]
    truncate(paths[3])
    assert prune(tmp_path, {paths[3]}) == []
    assert verify(paths[1]) == []
    assert (tmp_path / "other").exists()
    assert prune(tmp_path, []) == [paths[3]]
    assert latest(tmp_path) == paths[1]


def test_a_removal_that_dies_half_way_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = save(tmp_path / "step-1"), save(tmp_path / "step-2")

    def die(path: Path) -> None:
        raise OSError(errno.EIO, "disk gone")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", die)
        with pytest.raises(CheckpointError, match=r"cannot remove .*step-2: .*disk gone"):
            remove(second)
    assert (second / "trainer.json").exists()
    with pytest.warns(UserWarning, match="step-2 holds no manifest"):
        assert latest(tmp_path) == first
    remove(second)
    remove(second)
    assert not second.exists()


# --- a save that dies ------------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from pathlib import Path
from acclight.checkpoint import files
from acclight.checkpoint import format as layout
from tests.test_checkpoint_format import save

where, folder = sys.argv[1], Path(sys.argv[2])
save(folder / "step-1", step=1)

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if where == "before the manifest":
    layout.write_manifest = die
elif where == "before the rename":
    os.rename = die
elif where == "inside a file":
    write = files.NewFile.write
    def half(self, content):
        write(self, content[: len(content) // 2])
        die()
    files.NewFile.write = half
save(folder / "step-2", step=2)
"""


@pytest.mark.parametrize("where", ["inside a file", "before the manifest", "before the rename"])
def test_a_killed_save_leaves_the_previous_one(tmp_path: Path, where: str) -> None:
    root = str(Path(__file__).parent.parent)
    done = run_command([sys.executable, "-c", DIES, where, tmp_path], env={"PYTHONPATH": root})
    assert done.returncode == -signal.SIGKILL, done.stdout
    leftover = [entry for entry in tmp_path.iterdir() if entry.name != "step-1"]
    assert len(leftover) == 1, "the kill came too late to leave anything"
    assert latest(tmp_path) == tmp_path / "step-1"
    assert Reader(tmp_path / "step-1").trainer["global_step"] == 1
    path = save(tmp_path / "step-2", step=2)
    assert latest(tmp_path) == path
    assert not leftover[0].exists()


def test_the_temporary_folder_of_a_live_process_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=clean_environment()) as other:
        host = os.uname().nodename
        live = tmp_path / f".saving-{other.pid}@{host}@step-1"
        elsewhere = tmp_path / ".saving-1@elsewhere@step-1"
        old = tmp_path / ".saving-2@elsewhere@step-1"
        aside = tmp_path / ".damaged-1-step-1"  # a kill between the two renames leaves it
        for folder in (live, elsewhere, old, aside, aside / "model"):
            folder.mkdir()
        os.utime(old, (0, 0))
        path = save(tmp_path / "step-2")
        assert sorted(tmp_path.iterdir()) == sorted([live, elsewhere, path])
        other.communicate(b"\n")
    save(tmp_path / "step-3")
    assert not live.exists()


@pytest.mark.parametrize("file", ["model", "optimizer", "trainer.json", "manifest.json", "rank-00000.safetensors"])
def test_a_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    save(tmp_path / "step-1", step=1)
    import io

    real = io.open

    class Full:
        """A file that takes half of what it is given."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, content: bytes) -> int:
            self.stream.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.stream.close()

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = real(path, mode, *args, **kwargs)
        hit = file in Path(os.fspath(path)).parts if isinstance(path, (str, Path)) else False
        return Full(stream) if hit and ("w" in mode or "x" in mode) else stream

    with monkeypatch.context() as patched:
        patched.setattr("io.open", opened)
        patched.setattr("builtins.open", opened)
        with pytest.raises(CheckpointError, match=rf"{file}.*No space left on device"):
            save(tmp_path / "step-2", step=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    assert latest(tmp_path) == tmp_path / "step-1"
    assert latest(save(tmp_path / "step-2", step=2).parent) == tmp_path / "step-2"


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from acclight.checkpoint import CheckpointError, latest
from tests.test_checkpoint_format import save

folder = Path(sys.argv[1])
save(folder / "step-1")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save(folder / "step-2", model={"w": torch.zeros(10_000)})
except CheckpointError as error:
    print(error)
print(latest(folder).name, [entry.name for entry in folder.iterdir()])
"""


def test_a_file_that_the_system_cuts_short(tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    done = run_command([sys.executable, "-c", LIMITED, tmp_path], env={"PYTHONPATH": root})
    assert done.returncode == 0, done.stdout
    assert "model/shard-00001-model-00001-of-00001.safetensors" in done.stdout
    assert "File too large" in done.stdout
    assert done.stdout.splitlines()[-1] == "step-1 ['step-1']"


def test_ctrl_c_inside_a_save_leaves_as_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any, content: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.NewFile, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []
