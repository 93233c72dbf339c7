"""Weights are mapped, whatever file they lie in, and what is wrong with them is told."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402 - only where torch is

from mmserve_handlers.weights import BadWeights, fill, load_state  # noqa: E402

pytestmark = pytest.mark.torch

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
LARGE = {"large": torch.arange(1 << 20, dtype=torch.float32)}


def _write_safetensors(folder: Path) -> None:
    save_file(STATE | LARGE, folder / "model.safetensors")


def _write_bin(folder: Path) -> None:
    torch.save(STATE | LARGE, folder / "pytorch_model.bin")


def _write_wrapped(folder: Path) -> None:
    torch.save({"epoch": 3, "state_dict": STATE | LARGE}, folder / "model.pt")


def _write_shards(folder: Path) -> None:
    save_file(STATE, folder / "a.safetensors")
    save_file(LARGE, folder / "b.safetensors")
    names = dict.fromkeys(STATE, "a.safetensors") | {"large": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _write_bin_shards(folder: Path) -> None:
    torch.save(STATE, folder / "a.bin")
    torch.save(LARGE, folder / "b.bin")
    names = dict.fromkeys(STATE, "a.bin") | {"large": "b.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    "write", [_write_safetensors, _write_bin, _write_wrapped, _write_shards, _write_bin_shards]
)
def test_weights_come_mapped_from_each_kind_of_file(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    state = load_state(tmp_path)
    assert all(torch.equal(state[name], tensor) for name, tensor in (STATE | LARGE).items())
    address = state["large"].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            assert str(tmp_path) in line, line
            return
    pytest.fail("the tensor lies nowhere")


def test_what_torch_wrote_long_ago_is_read_and_the_log_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load_state(tmp_path)["weight"], STATE["weight"])
    assert "cannot be mapped" in caplog.text


def test_safetensors_come_first(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert load_state(tmp_path).keys() == STATE.keys()
    assert load_state(tmp_path, ["pytorch_model.bin"]).keys() == {"other"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 3000, b"PK\x03\x04" + b"x" * 500, b"\x80\x02K"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadWeights, match=f"{re.escape(name)} (is damaged|holds something else)"):
        load_state(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, name: str) -> None:
    (_write_safetensors if name.endswith("safetensors") else _write_bin)(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadWeights, match=f"{re.escape(name)} is damaged or cut short"):
        load_state(tmp_path)


def test_a_pointer_of_git_lfs_is_told_as_one(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(text)
    with pytest.raises(BadWeights, match="git lfs pull"):
        load_state(tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("/tmp/must-not-be-there"),))


def test_nothing_is_unpickled_but_tensors(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(BadWeights, match=r"torch\.save\(model\.state_dict\(\)"):
        load_state(tmp_path)
    (tmp_path / "model.pt").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(BadWeights):
        load_state(tmp_path)
    assert not Path("/tmp/must-not-be-there").exists()


def test_no_weights_at_all_are_told_with_what_was_sought(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"model\.safetensors, pytorch_model\.bin, model\.pt"):
        load_state(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}']
)
def test_an_index_that_will_not_do_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadWeights, match=r"model\.safetensors\.index\.json"):
        load_state(tmp_path)


def test_a_shard_that_is_missing_or_outside_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(STATE, tmp_path / "outside.safetensors")
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadWeights, match=r"names outside\.safetensors"):
        load_state(folder)


def test_a_model_takes_the_tensors_themselves() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    fill(model, STATE | LARGE)
    assert model.weight.data_ptr() == STATE["weight"].data_ptr()
    assert not model.training and not model.weight.requires_grad


def test_what_does_not_fit_is_named() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    with pytest.raises(BadWeights, match=r"no bias\. Do this"):
        fill(model, {"weight": STATE["weight"]}, hint="Do this")
    with pytest.raises(BadWeights, match=r"weight has the shape \(3, 2\) .* \(2, 3\)"):
        fill(model, STATE | {"weight": torch.ones(3, 2)})


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_what_trainers_save_beside_the_weights_is_left_out(tmp_path: Path, key: str) -> None:
    torch.save({key: {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "model.pt")
    assert load_state(tmp_path)["a"].tolist() == [1, 1]


def test_torchscript_is_told_apart(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:  # as `torch.jit.save` leaves it
        file.writestr("model/constants.pkl", b"")
    with pytest.raises(BadWeights, match=r"model\.pt is TorchScript, not tensors by name"):
        load_state(tmp_path)
