"""Token classification: names, places and whatever else the labels say, found in a text.

    "Jo lives in Oslo"                        one entry for each piece of a word with a label:
                                              [{"entity": "B-LOC", "score": 0.99, "index": 4,
                                                "word": "oslo", "start": 12, "end": 16}, …]
    {"text": "…", "aggregation_strategy": "simple"}
                                              pieces that belong together as one:
                                              [{"entity_group": "LOC", "score": 0.99, …}, …]
    ["…", {"text": "…"}]                      a list of such lists

As transformers' token-classification pipeline, with its parameters `aggregation_strategy`,
`ignore_labels` and `stride`. With `stride` a long text is read through windows that share so many
tokens; without it, it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mmserve_handlers import texts
from mmserve_handlers.contract import BadInput, Item, TooLarge
from mmserve_handlers.encoder import Chunk, Row
from mmserve_handlers.options import AGGREGATIONS, Wrong, one_of, whole
from mmserve_handlers.tasks.task import (
    MAX_WINDOWS,
    Answer,
    Loaded,
    Work,
    check_finite,
    one_or_list,
    short,
)

_IGNORED = ("O",)


class Piece(NamedTuple):
    """A token of the text.

    Attributes:
        scores: float32, (labels,).
        start, end: in characters.
        place: of the token in the window.
        goes_on: it continues the word of the piece before it.
    """

    word: str
    scores: torch.Tensor
    start: int
    end: int
    place: int
    goes_on: bool


class Labelled(NamedTuple):
    """A piece or a word, and its label."""

    label: str
    score: float
    word: str
    start: int
    end: int
    place: int | None = None


def _ignored(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise Wrong("allowed is a list of labels")
    return value


class TokenLabels:
    def __init__(self, loaded: Loaded) -> None:
        self._loaded, tokenizer = loaded, loaded.tokens.whole
        self._prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
        self._unknown_id = tokenizer.unk_token_id
        self._form = texts.Form(
            ("text",),
            ("text",),
            {
                "aggregation_strategy": one_of(AGGREGATIONS),
                "ignore_labels": _ignored,
                "stride": whole(0, loaded.max_length - 3),
            },
        )

    def read(self, item: Item, content_type: object) -> Work:
        asked = texts.read(item, content_type, self._form)
        every, rows = [], []
        for each in asked.inputs:
            windows = self._windows(each)
            every.append(windows)
            rows += [Row(window.ids, window.type_ids) for window in windows]
            if len(rows) > max(MAX_WINDOWS, texts.MAX_INPUTS):
                raise TooLarge(each.label("text"), "is too long; send it in parts")
        return Work(rows, (asked, every))

    def _strategy(self, each: texts.Input) -> str:
        default = self._loaded.options.aggregation_strategy
        return str(each.parameters.get("aggregation_strategy", default))

    def _windows(self, each: texts.Input) -> Sequence[Any]:
        stride = each.parameters.get("stride")
        if stride is not None and self._strategy(each) == "none":
            raise BadInput(
                each.label("stride"),
                'needs an aggregation_strategy other than "none": windows overlap',
            )
        if stride is None and self._strategy(each) != "none":
            stride = self._loaded.options.stride
        (first,) = self._loaded.tokens.encode(
            [each.fields["text"]], self._loaded.max_length, stride=stride or 0
        )
        return [first] if stride is None else [first, *first.overflowing]

    def forward(self, chunk: Chunk) -> Sequence[Any]:
        scores = self._loaded.model(**chunk.inputs()).logits.float().softmax(dim=-1).cpu()
        return [each[: len(row.ids)] for each, row in zip(scores, chunk.rows, strict=True)]

    def answer(self, work: Work, outputs: Sequence[Any]) -> Answer:
        asked, every = work.asked
        check_finite(*outputs)
        said, at = [], 0
        for each, windows in zip(asked.inputs, every, strict=True):
            scores = outputs[at : at + len(windows)]
            at += len(windows)
            said.append(self._entities(each, windows, scores))
        return Answer(one_or_list(said, asked.is_list))

    def _entities(
        self, each: texts.Input, windows: Sequence[Any], scores: Sequence[torch.Tensor]
    ) -> list[dict[str, Any]]:
        text, strategy = each.fields["text"], self._strategy(each)
        ignored = each.parameters.get("ignore_labels", _IGNORED)
        found: list[dict[str, Any]] = []
        for window, window_scores in zip(windows, scores, strict=True):
            pieces = self._pieces(window, text, window_scores)
            if strategy == "none":
                told = [_as_piece(self._best(piece)) for piece in pieces]
            else:
                told = self._groups(pieces, strategy)
            found += [
                entity
                for entity in told
                if entity.get("entity", entity.get("entity_group")) not in ignored
            ]
        return without_overlaps(found) if len(windows) > 1 else found

    def _pieces(self, window: Any, text: str, scores: torch.Tensor) -> list[Piece]:
        pieces = []
        for index, is_special in enumerate(window.special_tokens_mask):
            if is_special:
                continue
            start, end = window.offsets[index]
            word, spelt = window.tokens[index], text[start:end]
            if self._prefix:
                goes_on = len(word) != len(spelt)  # a prefix makes it longer
            else:  # a guess, for a tokenizer that knows no words
                goes_on = start > 0 and " " not in text[start - 1 : start + 1]
            if window.ids[index] == self._unknown_id:
                word, goes_on = spelt, False
            pieces.append(Piece(word, scores[index], start, end, index, goes_on))
        return pieces

    def _best(self, piece: Piece, scores: torch.Tensor | None = None) -> Labelled:
        scores = piece.scores if scores is None else scores
        place = int(scores.argmax())
        label = self._loaded.labels[place]
        score = float(scores[place])
        return Labelled(label, score, piece.word, piece.start, piece.end, piece.place)

    def _groups(self, pieces: Sequence[Piece], strategy: str) -> list[dict[str, Any]]:
        if strategy == "simple":
            labelled = [self._best(piece) for piece in pieces]
        else:
            labelled = [self._word(word, strategy) for word in words_of(pieces)]
        return [
            {
                "entity_group": group[0].label.split("-", 1)[-1],
                "score": short(sum(each.score for each in group) / len(group)),
                "word": self._joined([each.word for each in group]),
                "start": group[0].start,
                "end": group[-1].end,
            }
            for group in groups_of(labelled)
        ]

    def _word(self, pieces: Sequence[Piece], strategy: str) -> Labelled:
        if strategy == "first":
            best = self._best(pieces[0])
        elif strategy == "max":
            best = self._best(max(pieces, key=_certainty))
        else:
            mean = torch.stack([piece.scores for piece in pieces]).mean(dim=0)
            best = self._best(pieces[0], mean)
        word = self._joined([piece.word for piece in pieces])
        return Labelled(best.label, best.score, word, pieces[0].start, pieces[-1].end)

    def _joined(self, words: list[str]) -> str:
        return str(self._loaded.tokens.whole.convert_tokens_to_string(words))

    def sample(self) -> Item:
        return {"body": {"text": "a warm model"}}


def _certainty(piece: Piece) -> float:
    return float(piece.scores.max())


def _as_piece(found: Labelled) -> dict[str, Any]:
    return {
        "entity": found.label,
        "score": short(found.score),
        "index": found.place,
        "word": found.word,
        "start": found.start,
        "end": found.end,
    }


def words_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces, a list for each word."""
    word: list[Piece] = []
    for piece in pieces:
        if word and not piece.goes_on:
            yield word
            word = []
        word.append(piece)
    if word:
        yield word


def groups_of(labelled: Sequence[Labelled]) -> Iterator[list[Labelled]]:
    """Neighbours of one tag; a label that begins with `B-` begins a group."""
    group: list[Labelled] = []
    for each in labelled:
        begins, tag = bare(each.label)
        if group and (begins or tag != bare(group[-1].label)[1]):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def bare(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and its tag: "B-LOC" → (True, "LOC")."""
    return label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label


def without_overlaps(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entities of several windows: of two that overlap the longer one, then the likelier."""
    kept: list[dict[str, Any]] = []
    for entity in sorted(found, key=lambda entity: entity["start"]):
        last = kept[-1] if kept else None
        if last is None or entity["start"] >= last["end"]:
            kept.append(entity)
        elif _weight(entity) > _weight(last):
            kept[-1] = entity
    return kept


def _weight(entity: dict[str, Any]) -> tuple[int, float]:
    return entity["end"] - entity["start"], entity["score"]
