"""Text classification: how likely each label is for a text, or for a pair of texts.

    "I like it"                              {"label": "positive", "score": 0.98}
    {"text": "…", "text_pair": "…"}          the same for a pair
    {"text": "…", "top_k": 3}                a list of three, the likeliest first
    ["…", {"text": "…"}]                     a list of either

Scores are those of transformers' text-classification pipeline: a softmax over the labels; a
sigmoid for each where `problem_type` is multi_label_classification or there is one label only; the
number as it is for a regression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmserve_handlers import texts
from mmserve_handlers.contract import Item
from mmserve_handlers.encoder import Chunk, Row
from mmserve_handlers.options import whole
from mmserve_handlers.tasks.task import Answer, Loaded, Work, check_finite, one_or_list, short


class Sequences:
    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._form = texts.Form(("text", "text_pair"), ("text",), {"top_k": whole(1)})
        self._scores: Callable[[torch.Tensor], torch.Tensor]
        if loaded.problem == "regression":
            self._scores = _as_it_is
        elif loaded.problem == "multi_label_classification" or len(loaded.labels) == 1:
            self._scores = torch.sigmoid
        else:
            self._scores = _softmax

    def read(self, item: Item, content_type: object) -> Work:
        asked = texts.read(item, content_type, self._form)
        pairs = [
            (each.fields["text"], each.fields["text_pair"])
            if "text_pair" in each.fields
            else each.fields["text"]
            for each in asked.inputs
        ]
        encoded = self._loaded.tokens.encode(pairs, self._loaded.max_length)
        return Work([Row(tokens.ids, tokens.type_ids) for tokens in encoded], asked)

    def forward(self, chunk: Chunk) -> Sequence[torch.Tensor]:
        logits = self._loaded.model(**chunk.inputs()).logits.float()
        rows: Sequence[torch.Tensor] = self._scores(logits).cpu().unbind()
        return rows

    def answer(self, work: Work, outputs: Sequence[Any]) -> Answer:
        asked: texts.Asked = work.asked
        check_finite(*outputs)
        said = [
            self._named(scores, each.parameters.get("top_k", self._loaded.options.top_k))
            for each, scores in zip(asked.inputs, outputs, strict=True)
        ]
        return Answer(one_or_list(said, asked.is_list), torch.stack(list(outputs)))

    def _named(self, scores: torch.Tensor, top_k: int | None) -> Any:
        values, places = torch.sort(scores, descending=True, stable=True)
        count = top_k or 1
        named = [
            {"label": self._loaded.labels[place], "score": short(value)}
            for value, place in zip(values[:count].tolist(), places[:count].tolist(), strict=True)
        ]
        return named[0] if top_k is None else named

    def sample(self) -> Item:
        return {"body": "warm"}


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


def _as_it_is(logits: torch.Tensor) -> torch.Tensor:
    return logits
