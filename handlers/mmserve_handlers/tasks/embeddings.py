"""Sentence embeddings, and how alike sentences are.

    "a sentence"                                          embeds it
    ["a sentence", "another"]                             embeds both
    {"sentences": ["a sentence", "another"]}              the same; also "inputs" or "instances"
    {"sentences": [...], "task": "similarity"}            how alike each is to each, -1 to 1
    {"pairs": [["a sentence", "another"], ...]}           how alike the two of each pair are

The answer is {"embeddings": [[…], …]}, {"similarity": [[…], …]} or {"similarities": […]}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mmserve_handlers import texts
from mmserve_handlers.contract import BadInput, Item
from mmserve_handlers.encoder import Chunk, Row
from mmserve_handlers.tasks.task import Answer, Loaded, Work, check_finite

#: Digits after the point in answers: float32 holds seven, and the tests of similarity want five.
DIGITS = 6
POOLINGS = ("mean", "cls", "max")
_LISTS = ("sentences", "inputs", "instances")


class Asked(NamedTuple):
    """What one request wants: its sentences, and "embed", "similarity" or "pairs"."""

    sentences: list[str]
    task: str


def read(item: Item, content_type: object = None) -> Asked:
    """One request, checked. Raises BadInput, which names the field that is wrong."""
    name, value = texts.body(item, content_type, _LISTS)
    if not isinstance(value, dict):
        return Asked(_sentences(value, name), "embed")
    if "pairs" in value:
        return Asked(_pairs(value["pairs"]), "pairs")
    field = next((key for key in _LISTS if key in value), None)
    if field is None:
        raise BadInput("sentences", "is missing; send a list of texts")
    task = value.get("task", "embed")
    if task not in ("embed", "similarity"):
        raise BadInput("task", 'is neither "embed" nor "similarity"')
    return Asked(_sentences(value[field], field), task)


def _sentences(value: Any, field: str) -> list[str]:
    sentences = [value] if isinstance(value, str) else value
    if not isinstance(sentences, list) or not sentences:
        raise BadInput(field, "must be a text or a list of texts")
    texts.check_count(sentences, field)
    return [texts.checked(text, f"{field}[{index}]") for index, text in enumerate(sentences)]


def _pairs(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise BadInput("pairs", "must be a list of pairs of texts")
    texts.check_count(value, "pairs", texts.MAX_INPUTS // 2)
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadInput(f"pairs[{index}]", "must be a list of two texts")
        _sentences(pair, f"pairs[{index}]")
    return [text for pair in value for text in pair]


def pool(hidden: torch.Tensor, mask: torch.Tensor | None, how: str = "mean") -> torch.Tensor:
    """One vector for each row of token vectors, padding left out.

    Args:
        hidden: float, (batch, tokens, width).
        mask: int, (batch, tokens); 1 for a token, 0 for padding, at least one 1 in each row; None
            where there is no padding.
        how: one of POOLINGS; "cls" takes the first token.

    Returns:
        float32, (batch, width).

    Source: Reimers and Gurevych, Sentence-BERT, 2019, section 3 (CLS, MEAN and MAX strategies).
    """
    hidden = hidden.float()
    if how == "cls":
        return hidden[:, 0]
    if mask is None:
        return hidden.mean(dim=1) if how == "mean" else hidden.amax(dim=1)
    if how == "max":
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(dim=1)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


class Embeddings:
    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def read(self, item: Item, content_type: object) -> Work:
        asked = read(item, content_type)
        encoded = self._loaded.tokens.encode(asked.sentences, self._loaded.max_length)
        return Work([Row(tokens.ids, tokens.type_ids) for tokens in encoded], asked)

    def forward(self, chunk: Chunk) -> Sequence[torch.Tensor]:
        hidden = self._loaded.model(**chunk.inputs()).last_hidden_state
        vectors = pool(hidden, chunk.mask, self._loaded.pooling)
        if self._loaded.options.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.cpu().unbind()

    def answer(self, work: Work, outputs: Sequence[Any]) -> Answer:
        check_finite(*outputs)
        task, vectors = work.asked.task, torch.stack(list(outputs))
        if task == "embed":
            return Answer({"embeddings": _rounded(vectors)}, vectors)
        vectors = torch.nn.functional.normalize(vectors, dim=1)
        if task == "similarity":
            matrix = vectors @ vectors.T
            return Answer({"similarity": _rounded(matrix)}, matrix)
        alike = (vectors[0::2] * vectors[1::2]).sum(dim=1)
        return Answer({"similarities": _rounded(alike)}, alike)

    def sample(self) -> Item:
        return {"body": "a warm model"}


def _rounded(array: torch.Tensor) -> list[Any]:
    if array.dim() == 1:
        return [round(value, DIGITS) for value in array.tolist()]
    return [[round(value, DIGITS) for value in row] for row in array.tolist()]
