"""What an archive made for TorchServe asks for and cannot have is named when it is registered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import InvalidModel
from mmserve.models.layout import read_layout
from mmserve.models.torchserve import may_be_torchserve, refuse_unserved
from mmserve.runtime.torchserve import config, requirements
from tests.models.workshop import open_shop, run, write_tree, zip_of

Files = dict[str, str | bytes]

#: Each line is ten of the one before: written out they would fill any memory.
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
FEW_LAUGHS = "a: &a [x, x]\nb: &b [*a, *a, *a, *a]\ntorchrun: [*a, *b, *b, *b]\n"


def archive(handler: str = "own.py", files: Files | None = None, **entries: str) -> Files:
    fields = {"modelName": "net", "handler": handler, **entries}
    text = json.dumps({"runtime": "python", "model": fields, "archiverVersion": "0.12.0"})
    return {"MAR-INF/MANIFEST.json": text, "own.py": "", **(files or {})}


def refusal(tmp_path: Path, files: Files, handler: str | None = None) -> str | None:
    layout = read_layout(write_tree(tmp_path / "tree", files), tmp_path)
    assert may_be_torchserve(layout.manifest)
    try:
        refuse_unserved(layout, handler, [str(tmp_path / "site")])
    except InvalidModel as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"MAR-INF/MANIFEST.json": '{"workflow": {"workflowName": "w"}}'},
            "it is a workflow (.war). Register the models that it names one by one",
        ),
        (archive("image_segmenter"), "'image_segmenter' has no equal here. What to do: bring a"),
        (archive("text_classifier:handle"), "'text_classifier' has no equal here"),
        (archive("vllm_handler"), "'vllm_handler' has no equal here"),
        (archive(serializedFile="w.pt"), "its serializedFile, 'w.pt', is not in it"),
        (archive(modelFile="../net.py"), "its modelFile, '../net.py', is not in it"),
        (
            archive(files={"r.txt": "here==1\nabsent-thing>=2 # why\n"}, requirementsFile="r.txt"),
            "'r.txt' asks for 'absent-thing>=2', not installed here. Nothing is installed",
        ),
        (
            archive(files={"c.yaml": "parallelType: pp\n"}, configFile="c.yaml"),
            "'c.yaml': parallelType='pp' is not supported: serve a model that fits one device",
        ),
        (
            archive(files={"c.yaml": "torchrun:\n  nproc-per-node: 4\n"}, configFile="c.yaml"),
            "torchrun={'nproc-per-node': 4} is not supported",
        ),
        (
            archive(files={"c.yaml": "continuousBatching: true\n"}, configFile="c.yaml"),
            "continuousBatching is not supported: answer each request in one piece",
        ),
        (archive(files={"c.yaml": "a: [\n"}, configFile="c.yaml"), "it is not valid YAML"),
        (archive(files={"c.yaml": "- a\n"}, configFile="c.yaml"), "it is no mapping"),
        (archive(files={"c.yaml": LAUGHS}, configFile="c.yaml"), "it has more than 16 aliases"),
        (archive(files={"c.yaml": FEW_LAUGHS}, configFile="c.yaml"), "torchrun=[['x', "),
        (archive(serializedFile="a\0b"), "its serializedFile, 'a\\x00b', is not in it"),
        (archive(modelFile="n" * 300), "is not in it"),
        (
            archive(
                files={"r.txt": "\n".join(f"no{n}" for n in range(99))}, requirementsFile="r.txt"
            ),
            "asks for 'no0', 'no1', 'no2', 'no3', 'no4' and 94 more, not installed here",
        ),
    ],
)
def test_what_cannot_be_served_is_named_with_what_to_do(
    files: Files, says: str, tmp_path: Path
) -> None:
    write_tree(tmp_path / "site", {"here-2.dist-info/METADATA": "Name: here\nVersion: 2\n"})
    said = refusal(tmp_path, files)
    assert said is not None
    assert said.startswith("This TorchServe archive cannot be served: ")
    assert says in said


@pytest.mark.parametrize(
    "files",
    [
        archive("image_classifier", {"w.pt": b""}, serializedFile="w.pt"),
        archive("image_segmenter.py", {"image_segmenter.py": ""}),
        archive(
            files={
                "r.txt": "-r more.txt\n\nHere\nhere >= 3\nother; python_version < '3'\n"
                "git+https://example.org/x.git\n",
                "c.yaml": "minWorkers: 2\nparallelLevel: 1\nuseJobTicket: false\nmine: [1]\n",
            },
            requirementsFile="r.txt",
            configFile="c.yaml",
        ),
        archive(files={"c.yaml": ""}, configFile="c.yaml"),
    ],
    ids=["our equal", "its own file", "harmless", "empty"],
)
def test_what_can_be_served_passes(files: Files, tmp_path: Path) -> None:
    write_tree(tmp_path / "site", {"here-2.dist-info/METADATA": "Name: here\nVersion: 2\n"})
    assert refusal(tmp_path, files) is None


def test_the_registrations_handler_is_stronger_than_the_archives(tmp_path: Path) -> None:
    files = archive("image_segmenter")
    assert refusal(tmp_path, files, "own:handle") is None


def test_a_registration_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            url = shop.add("flow.war", zip_of({"MAR-INF/MANIFEST.json": '{"workflow": {}}'}))
            before = shop.on_disk()
            with pytest.raises(InvalidModel, match="it is a workflow"):
                await shop.fetcher.fetch(url)
            assert shop.on_disk() == before
            good = shop.add("net.mar", zip_of(archive(files={"n.py": ""}, modelFile="n.py")))
            fetched = await shop.fetcher.fetch(good)
            assert (fetched.name, fetched.handler) == ("net", "own.py")
            assert fetched.names_libraries
            await fetched.lease.release()

    run(test)


# fmt: off
_WORDS = st.sampled_from([
    "a", "b-c", "==", ">=1", "; ", "extra", "python_version", "<'3'", "[x]", "@", " ", "#", "-r",
    "git+https://x", "\\\n", "\n", "&a ", "*a", "<<: ", ": ", "- ", "{", "}", "[", "]", "'", "---",
    "!!int ", "!!float ", "!!binary ", "0x", "0b", "1e9", "9" * 5000, "2001-99-99", "1:99:99.5",
    "\t", "\0", "\ud7ff", "%YAML", "!!timestamp ", "!!omap ", "!!set ", "? ", "!!python/none",
])
# fmt: on
_TEXTS = st.lists(_WORDS, max_size=12).map("".join) | st.text(max_size=40)


@given(_TEXTS)
def test_any_requirements_are_read(text: str) -> None:
    for line in requirements.missing(text, []):
        assert line in text.replace("\\\n", " ")


@given(_TEXTS)
def test_any_config_file_is_read_or_refused_in_words(text: str) -> None:
    try:
        settings = config.parse(text)
    except config.BadConfig as error:
        assert str(error)
    else:
        config.unserved(settings)
        config.unheeded(settings)
