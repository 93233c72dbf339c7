"""What all tasks have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mmserve_handlers.contract import BadOutput, Item
from mmserve_handlers.encoder import Chunk, Row, Tokens
from mmserve_handlers.options import Options

#: Windows on the texts of one request at most; 256 of 384 tokens are a text of 100 pages.
MAX_WINDOWS = 256


class Loaded(NamedTuple):
    """A model, ready.

    Attributes:
        model: of transformers, in evaluation mode.
        labels: of its classes, in order; () where it has none.
        max_length: tokens of one pass at most, the special ones counted.
        problem: `problem_type` of config.json.
        pooling: "mean", "cls" or "max".
    """

    model: Any
    tokens: Tokens
    options: Options
    labels: Sequence[str]
    max_length: int
    problem: str | None = None
    pooling: str = "mean"


class Work(NamedTuple):
    """A request on its way.

    Attributes:
        rows: what goes through the network for it.
        asked: the request as its task read it, and whatever else the task needs for the answer.
    """

    rows: Sequence[Row]
    asked: Any


class Answer(NamedTuple):
    """One request's answer: for readers of JSON, and where there is one, as an array."""

    said: Any
    array: torch.Tensor | None = None


class Task(Protocol):
    """One of the things that a BERT can be asked; made once for each loaded model."""

    def read(self, item: Item, content_type: object) -> Work:
        """One request, checked and in tokens. Raises BadInput."""

    def forward(self, chunk: Chunk) -> Sequence[Any]:
        """One pass: for each row what `answer` needs of it, as float32 on the CPU."""

    def answer(self, work: Work, outputs: Sequence[Any]) -> Answer:
        """The answer to a request. Raises BadOutput where the numbers are none."""

    def sample(self) -> Item:
        """A request to warm up with."""


def check_finite(*tensors: torch.Tensor) -> None:
    """Raises BadOutput where the model did not answer with numbers."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise BadOutput(
            "The model answered with NaN or infinity: its weights are damaged, or 16 bits are too "
            'few for them ("precision": "fp32" in model.json helps then).'
        )


def short(value: float) -> float:
    """A float32 without the digits that only its double has."""
    return float(f"{value:.8g}")


def one_or_list(answers: list[Any], is_list: bool) -> Any:
    """A list in, a list out."""
    return answers if is_list else answers[0]
