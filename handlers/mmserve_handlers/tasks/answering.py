"""Question answering: the part of a text that answers a question.

    {"question": "Who sat?", "context": "A cat sat."}     {"score": 0.9, "start": 0, "end": 5,
                                                           "answer": "A cat"}
    {"question": "…", "context": "…", "top_k": 3}         a list of up to three, the best first
    [{"question": "…", "context": "…"}, …]                a list of either

As transformers' question-answering pipeline of version 4, with its parameters: `top_k`,
`doc_stride`, `max_seq_len`, `max_answer_len`, `handle_impossible_answer` and `align_to_words`.
A long text is read through windows that overlap; equal answers from several count together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mmserve_handlers import texts
from mmserve_handlers.contract import BadInput, Item, TooLarge
from mmserve_handlers.encoder import Chunk, Row
from mmserve_handlers.options import truth, whole
from mmserve_handlers.tasks.task import (
    MAX_WINDOWS,
    Answer,
    Loaded,
    Work,
    check_finite,
    one_or_list,
    short,
)

#: Tokens of a window with its question, and those that two windows share.
MAX_LENGTH, STRIDE = 384, 128
#: Tokens of an answer.
ANSWER_LENGTH = 15
MAX_TOP_K = 100
#: Tokens of the text that a window must have room for beside the question.
_LEAST_ROOM = 8


class _Question(NamedTuple):
    """One input and its windows: `Encoding` of each, question first."""

    given: texts.Input
    windows: Sequence[Any]


class Span(NamedTuple):
    """A candidate: tokens `start` to `end`, both of it."""

    score: float
    start: int
    end: int


class Answering:
    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._cls_id = loaded.tokens.whole.cls_token_id
        self._form = texts.Form(
            ("question", "context"),
            ("question", "context"),
            {
                "top_k": whole(1, MAX_TOP_K),
                "doc_stride": whole(0),
                "max_seq_len": whole(_LEAST_ROOM + 4, loaded.max_length),
                "max_answer_len": whole(1, 512),
                "handle_impossible_answer": truth,
                "align_to_words": truth,
            },
        )

    def read(self, item: Item, content_type: object) -> Work:
        asked = texts.read(item, content_type, self._form)
        questions, rows = [], []
        for each in asked.inputs:
            windows = self._windows(each)
            questions.append(_Question(each, windows))
            rows += [Row(window.ids, window.type_ids) for window in windows]
            if len(rows) > MAX_WINDOWS:
                raise TooLarge(
                    each.label("context"),
                    f"is too long; the texts of a request take at most {MAX_WINDOWS} windows "
                    f"of {self._length(each)} tokens. Send it in parts",
                )
        return Work(rows, (asked, questions))

    def _length(self, each: texts.Input) -> int:
        default = self._loaded.options.max_length or MAX_LENGTH
        asked: int = each.parameters.get("max_seq_len", default)
        return min(asked, self._loaded.max_length)

    def _windows(self, each: texts.Input) -> Sequence[Any]:
        tokens, length = self._loaded.tokens, self._length(each)
        default = self._loaded.options.stride
        default = min(length // 2, STRIDE) if default is None else default
        stride = each.parameters.get("doc_stride", default)
        question = each.fields["question"]
        taken = len(tokens.encode([(question, "")], None)[0].ids)
        room = length - taken
        if room < _LEAST_ROOM:
            raise BadInput(
                each.label("question"),
                f"is too long: {taken} tokens with its marks, of {length} that are read at once",
            )
        if stride >= room:
            if "doc_stride" in each.parameters:
                raise BadInput(
                    each.label("doc_stride"),
                    f"must be less than {room}, which is what the question leaves of a window",
                )
            stride = room // 2
        (first,) = tokens.encode(
            [(question, each.fields["context"])], length, stride=stride, strategy="only_second"
        )
        return [first, *first.overflowing]

    def forward(self, chunk: Chunk) -> Sequence[Any]:
        found = self._loaded.model(**chunk.inputs())
        both = torch.stack((found.start_logits, found.end_logits), dim=1).float().cpu()
        return [each[:, : len(row.ids)] for each, row in zip(both, chunk.rows, strict=True)]

    def answer(self, work: Work, outputs: Sequence[Any]) -> Answer:
        asked, questions = work.asked
        check_finite(*outputs)
        said, at = [], 0
        for question in questions:
            logits = outputs[at : at + len(question.windows)]
            at += len(question.windows)
            said.append(self._best(question, logits))
        return Answer(one_or_list(said, asked.is_list))

    def _best(self, question: _Question, logits: Sequence[torch.Tensor]) -> Any:
        parameters = question.given.parameters
        top_k = parameters.get("top_k", self._loaded.options.top_k)
        to_words = parameters.get("align_to_words", True)
        context = question.given.fields["context"]
        found: dict[str, dict[str, Any]] = {}
        none_score = 1.0
        for window, (starts, ends) in zip(question.windows, logits, strict=True):
            spans, none = best_spans(
                starts,
                ends,
                self._allowed(window),
                top_k or 1,
                parameters.get("max_answer_len", ANSWER_LENGTH),
            )
            none_score = min(none_score, none)
            for span in spans:
                start, end = _place(window, span, to_words)
                text = context[start:end]
                known = found.setdefault(
                    text.lower(), {"score": 0.0, "start": start, "end": end, "answer": text}
                )
                known["score"] += span.score
        answers = list(found.values())
        if parameters.get("handle_impossible_answer", False):
            answers.append({"score": none_score, "start": 0, "end": 0, "answer": ""})
        answers.sort(key=_score, reverse=True)
        told = [each | {"score": short(each["score"])} for each in answers[: top_k or 1]]
        if top_k is not None:
            return told
        return told[0] if told else {"score": 0.0, "start": 0, "end": 0, "answer": ""}

    def _allowed(self, window: Any) -> torch.Tensor:
        """Tokens of the text, and the mark of no answer; bool, (tokens,)."""
        of_text = torch.tensor([place == 1 for place in window.sequence_ids])
        return of_text.logical_or(torch.tensor(window.ids) == self._cls_id)

    def sample(self) -> Item:
        return {"body": {"question": "what", "context": "a warm model"}}


def best_spans(
    starts: torch.Tensor, ends: torch.Tensor, allowed: torch.Tensor, count: int, longest: int
) -> tuple[list[Span], float]:
    """The likeliest answers of one window.

    Args:
        starts, ends: logits, float32, (tokens,).
        allowed: bool, (tokens,); where an answer may lie. The first token, the mark of no answer,
            has its share of the probability, and is no answer.
        count: answers at most.
        longest: tokens of an answer at most.

    Returns:
        The spans, best first, and the score of no answer.

    Source: Chen et al., Reading Wikipedia to Answer Open-Domain Questions, 2017, section 3.2:
        the product of both probabilities, over all spans of at most so many tokens.
    """
    start = torch.softmax(starts.masked_fill(~allowed, -torch.inf), dim=0)
    end = torch.softmax(ends.masked_fill(~allowed, -torch.inf), dim=0)
    none = float(start[0] * end[0])
    start[0] = end[0] = 0.0
    tokens = len(start)
    # Row by length: scores[n, i] is that of the span of n + 1 tokens that begins at i.
    scores = torch.zeros(min(longest, tokens), tokens)
    for more in range(len(scores)):
        scores[more, : tokens - more] = start[: tokens - more] * end[more:]
    values, places = scores.flatten().topk(min(count, scores.numel()))
    spans = []
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        more, first = divmod(place, tokens)
        if allowed[first] and first + more < tokens and allowed[first + more] and first > 0:
            spans.append(Span(value, first, first + more))
    return spans, none


def _place(window: Any, span: Span, to_words: bool) -> tuple[int, int]:
    """Where a span begins and ends in the text, in characters; whole words if they are asked."""
    if to_words:
        words = window.token_to_word(span.start), window.token_to_word(span.end)
        if None not in words:
            first = window.word_to_chars(words[0], sequence_index=1)
            last = window.word_to_chars(words[1], sequence_index=1)
            if first is not None and last is not None:
                return first[0], last[1]
    return window.offsets[span.start][0], window.offsets[span.end][1]


def _score(answer: dict[str, Any]) -> float:
    return float(answer["score"])
