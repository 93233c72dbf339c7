"""What a model's files say about how to serve it: `model.json`, checked and typed.

    {"task": "question-answering", "precision": "auto", "device": "auto", "max_length": 384}

The same keys may stand in the manifest as `{"model": {"options": {…}}}`; `model.json` wins. Quiet
but for `read` and `main`, and free of torch, so that archives are checked without it:

    echo '{"task": "fill-mask"}' | python -m mmserve_handlers.options
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

FILE = "model.json"
EMBEDDINGS, ANSWERING = "embeddings", "question-answering"
SEQUENCES, TOKENS, FILLING = "text-classification", "token-classification", "fill-mask"
TASKS = (EMBEDDINGS, ANSWERING, SEQUENCES, TOKENS, FILLING)
#: Other names that a task goes by; the first two are those of transformers' pipelines.
ALIASES = {
    "sentiment-analysis": SEQUENCES,
    "ner": TOKENS,
    "sequence-classification": SEQUENCES,
    "sentence-similarity": EMBEDDINGS,
}
PRECISIONS = ("auto", "fp32", "amp")
#: How pieces of words become entities. Source: transformers, TokenClassificationPipeline.
AGGREGATIONS = ("none", "simple", "first", "average", "max")
MAX_WARMUP = 1000


class BadOption(ValueError):
    """An option that will not do; the message names key, value and what is allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is served.

    Attributes:
        task: one of TASKS; None leaves it to `architectures` of config.json.
        labels: of the classes, in the order of the weights; None leaves them to config.json.
        precision: "fp32", "amp" (products in 16 bits, the rest in 32) or "auto", the quicker.
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_length: tokens of one pass at most; None for what the model was made for.
        top_k: results per input where the request does not say; None for the task's own number.
        warmup: passes before the model counts as loaded.
        normalize: embeddings are scaled to length 1.
        aggregation_strategy: one of AGGREGATIONS, where the request does not say.
        stride: tokens that two windows on a long text share; None for the task's own number.
    """

    task: str | None = None
    labels: tuple[str, ...] | None = None
    precision: str = "auto"
    device: str = "auto"
    max_length: int | None = None
    top_k: int | None = None
    warmup: int = 1
    normalize: bool = True
    aggregation_strategy: str = "none"
    stride: int | None = None


class Wrong(Exception):
    """What is allowed instead."""


def one_of(allowed: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> Reader:
    def read(value: Any) -> str:
        found = (aliases or {}).get(value, value) if isinstance(value, str) else None
        if found not in allowed:
            raise Wrong(f"allowed are {', '.join(allowed)}")
        return found

    return read


def whole(low: int, high: int | None = None) -> Reader:
    def read(value: Any) -> int:
        in_range = type(value) is int and low <= value <= (value if high is None else high)
        if not in_range:
            upper = "" if high is None else f" to {high}"
            raise Wrong(f"allowed are whole numbers from {low}{upper}")
        return int(value)

    return read


def device(value: Any) -> str:
    """Reads the name of a device."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise Wrong("allowed are auto, cpu, cuda and cuda:N")
    return value


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong("allowed are true and false")
    return value


def _labels(value: Any) -> tuple[str, ...]:
    """A list, or an object as `id2label` of config.json is one."""
    if isinstance(value, dict):
        try:
            by_place = {int(place): label for place, label in value.items()}
            value = [by_place[place] for place in range(len(by_place))]
        except (ValueError, KeyError):
            raise Wrong('allowed is each class by its place: {"0": "no", "1": "yes"}') from (None)
    if not isinstance(value, list) or not value or not all(map(_is_label, value)):
        raise Wrong("allowed is a list of texts, one for each class")
    labels = tuple(str(label) for label in value)
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise Wrong(f"allowed is each label once, and {twice[0]!r} is there more often")
    return labels


def _is_label(value: object) -> bool:
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        return False
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


Reader = Callable[[Any], Any]
_READERS: Mapping[str, Reader] = {
    "task": one_of(TASKS, ALIASES),
    "labels": _labels,
    "precision": one_of(PRECISIONS),
    "device": device,
    "max_length": whole(3),  # two of them mark beginning and end
    "top_k": whole(1),
    "warmup": whole(0, MAX_WARMUP),
    "normalize": truth,
    "aggregation_strategy": one_of(AGGREGATIONS),
    "stride": whole(0),
}
_NULLABLE = ("task", "labels", "max_length", "top_k", "stride")


def parse(said: object, where: str = FILE) -> Options:
    """Options from a JSON object; what it does not say has its default.

    Args:
        said: the object.
        where: what it came from, for messages.

    Raises:
        BadOption: names the key, its value and what is allowed, or the nearest key that is known.
    """
    return Options(**_parsed(said, where, _READERS, _NULLABLE))


def _parsed(
    said: object, where: str, readers: Mapping[str, Reader], nullable: Collection[str]
) -> dict[str, Any]:
    if not isinstance(said, Mapping):
        raise BadOption(f'{where} must hold an object, like {{"top_k": 3}}')
    found: dict[str, Any] = {}
    for key, value in said.items():
        reader = readers.get(key)
        if reader is None:
            raise BadOption(f"{where}: {unknown(str(key), readers)}")
        if value is None and key in nullable:
            continue
        try:
            found[key] = reader(value)
        except Wrong as allowed:
            raise BadOption(f"{where}: {key} is {_shown(value)}; {allowed}") from None
    return found


def unknown(key: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """A sentence on a key that nobody knows: the nearest one, else all there are."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"{_shown(key)} is no known key; {hint}"


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read(folder: Path, manifest: object = None) -> Options:
    """The options of a model.

    Args:
        folder: that of the model; `model.json` need not be there.
        manifest: the archive's, or None.

    Raises:
        BadOption: as `parse`; or the file is no JSON or cannot be read.
    """
    return Options(**said_of(folder, manifest, _READERS, _NULLABLE))


def said_of(
    folder: Path,
    manifest: object,
    readers: Mapping[str, Reader],
    nullable: Collection[str] = (),
) -> dict[str, Any]:
    """What a model says of the keys of these readers; what it does not say is not there.

    Args:
        readers: key → what makes its value of JSON, or raises `Wrong`.
        nullable: keys that may be null, which says nothing.

    Raises:
        BadOption: as `read`.
    """
    found: dict[str, Any] = {}
    model = manifest.get("model") if isinstance(manifest, Mapping) else None
    if isinstance(model, Mapping) and model.get("options") is not None:
        found = _parsed(model["options"], "the manifest's model.options", readers, nullable)
    said = json_file(folder / FILE)
    return found | _parsed({} if said is None else said, FILE, readers, nullable)


def json_file(path: Path) -> Any:
    """What a JSON file holds; None where it is not there. Raises BadOption where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as wrong:
        raise BadOption(f"{path.name} cannot be read: {wrong.strerror}") from None
    except (ValueError, RecursionError) as wrong:
        raise BadOption(f"{path.name} is not JSON ({wrong})") from None


def main() -> int:
    """Checks options given as JSON on the standard input: 0, or 1 and what is wrong with them."""
    try:
        parse(json.load(sys.stdin))
    except ValueError as wrong:
        print(wrong)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
