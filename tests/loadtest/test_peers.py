"""What each peer is given to start, and how a request to it looks."""

import ast
import base64
import io
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve_loadtest.peers import JSON_TYPE, NOOP_MODEL, PEERS, Peer, Place, Setup, Workload, noop

BODIES = st.binary(min_size=1, max_size=200)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)
each_peer = pytest.mark.parametrize("peer", [pytest.param(p, id=n) for n, p in PEERS.items()])


def json_workload(value: object) -> Workload:
    body = json.dumps(value).encode()
    return Workload(name="m", source=NOOP_MODEL, body=body, content_type=JSON_TYPE)


def place_of(peer: Peer) -> Place:
    return Place(
        venv=Path("/peers") / peer.name,
        python="3.11",
        home=Path("/home-of-it"),
        ports=tuple(range(21_001, 21_001 + peer.ports)),
        libraries="/libraries" if peer.borrows else "",
        path="/usr/bin",
    )


def sources(setup: Setup) -> dict[str, str]:
    """Python of a setup, that inside archives too."""
    found = {path: text.decode() for path, text in setup.files.items() if path.endswith(".py")}
    for path, content in setup.files.items():
        if path.endswith(".mar"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                names = (name for name in archive.namelist() if name.endswith(".py"))
                found |= {f"{path}/{name}": archive.read(name).decode() for name in names}
    return found


@given(BODIES)
def test_torchserve_is_sent_the_body_itself(body: bytes) -> None:
    request = PEERS["torchserve"].request(noop(body))
    assert (request.path, request.body, request.headers) == ("/predictions/noop", body, ())


def test_torchserve_is_told_the_type_of_the_body() -> None:
    request = PEERS["torchserve"].request(json_workload([1]))
    assert request.headers == (("Content-Type", JSON_TYPE),)


@given(BODIES)
def test_triton_is_sent_the_body_as_one_binary_tensor(body: bytes) -> None:
    request = PEERS["triton"].request(noop(body))
    assert request.path == "/v2/models/noop/infer"
    length = int(dict(request.headers)["Inference-Header-Content-Length"])
    head, sent = json.loads(request.body[:length]), request.body[length:]
    assert sent == body
    (tensor,) = head["inputs"]
    assert tensor["shape"] == [len(body)] == [tensor["parameters"]["binary_data_size"]]
    assert tensor["datatype"] == "UINT8"
    assert head["outputs"] == [{"name": "output", "parameters": {"binary_data": True}}]


@given(BODIES)
def test_litserve_is_sent_bytes_in_base64(body: bytes) -> None:
    request = PEERS["litserve"].request(noop(body))
    assert request.path == "/predict"
    assert base64.b64decode(json.loads(request.body)["input"]) == body


@given(JSON_VALUES)
def test_litserve_is_sent_json_as_it_is(value: object) -> None:
    request = PEERS["litserve"].request(json_workload(value))
    assert json.loads(request.body) == {"input": value}
    assert request.headers == (("Content-Type", JSON_TYPE),)


@each_peer
@pytest.mark.parametrize("workload", [noop(b"x"), json_workload([1])], ids=["bytes", "json"])
def test_what_a_peer_is_given_is_python_and_has_the_model_in_it(
    peer: Peer, workload: Workload
) -> None:
    given = sources(peer.setup(workload, place_of(peer)))
    for text in given.values():
        ast.parse(text)
    assert NOOP_MODEL in given.values()
    handlers = [text for text in given.values() if "from bench_model import load" in text]
    assert len(handlers) == 1


@each_peer
def test_a_peer_listens_where_it_was_told_and_nowhere_else(peer: Peer) -> None:
    place = place_of(peer)
    setup = peer.setup(noop(b"x"), place)
    archives = {path for path in setup.files if path.endswith(".mar")}
    texts = [text.decode() for path, text in setup.files.items() if path not in archives]
    told = " ".join((*setup.command, *texts))
    assert all(str(port) in told for port in place.ports)
    assert "127.0.0.1" in told
    assert "0.0.0.0" not in told


@each_peer
def test_a_peer_is_started_from_its_own_environment_in_its_own_folder(peer: Peer) -> None:
    place = place_of(peer)
    setup = peer.setup(noop(b"x"), place)
    assert setup.command[0].startswith(str(place.venv))
    for path in (*setup.files, *setup.links):
        assert not Path(path).is_absolute()
        assert ".." not in Path(path).parts
    assert all(target.is_relative_to(place.venv) for target in setup.links.values())


@each_peer
def test_weights_are_named_to_the_model_and_not_copied(peer: Peer, tmp_path: Path) -> None:
    workload = Workload(name="m", source=NOOP_MODEL, body=b"x", weights=tmp_path)
    given = sources(peer.setup(workload, place_of(peer)))
    assert any(f"load({str(tmp_path)!r})" in text for text in given.values())


@each_peer
def test_what_is_installed_is_pinned(peer: Peer) -> None:
    wanted = [*peer.requirements, *peer.alone]
    assert any(word.startswith(f"{peer.distribution}==") for word in wanted)
