"""Fill-mask: the words that may stand where a text says [MASK].

    "Paris is the [MASK] of France."    [{"score": 0.9, "token": 3007, "token_str": "capital",
                                          "sequence": "paris is the capital of france."}, …]
    {"text": "…", "top_k": 2, "targets": ["capital", "king"]}      only these words
    a text with several [MASK]          a list of such lists, one for each

As transformers' fill-mask pipeline. The network's last layer, which is as wide as the vocabulary,
runs for masks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mmserve_handlers import texts
from mmserve_handlers.contract import BadInput, Item
from mmserve_handlers.encoder import Chunk, Row
from mmserve_handlers.options import Wrong, whole
from mmserve_handlers.tasks.task import Answer, Loaded, Work, check_finite, one_or_list, short

TOP_K, MAX_TOP_K = 5, 1000
#: Masks of one request at most, and words that are told of them.
MAX_MASKS, MAX_WORDS = 512, 10_000
#: Masks whose words are weighed at once: 64 times a vocabulary of 30,000 are 8 MB.
_AT_ONCE = 64


class _Note(NamedTuple):
    """What a row's pass must know.

    Attributes:
        masks: places of its masks.
        targets: token ids that may be told, or None for all.
    """

    masks: Sequence[int]
    targets: Sequence[int] | None
    top_k: int


def _targets(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not 1 <= len(words) <= MAX_TOP_K:
        raise Wrong(f"allowed is a list of 1 to {MAX_TOP_K} words")
    for word in words:
        try:
            texts.checked(word, "targets")
        except BadInput as wrong:
            raise Wrong(f"each word {str(wrong).partition(': ')[2]}") from None
    return words


class Filling:
    def __init__(self, loaded: Loaded) -> None:
        """Raises ValueError: the tokenizer has no mask."""
        self._loaded, tokenizer = loaded, loaded.tokens.whole
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "the tokenizer has no mask_token, which fill-mask needs; name it in "
                "tokenizer_config.json, or set another task in model.json"
            )
        self._mask, self._mask_id = str(tokenizer.mask_token), int(tokenizer.mask_token_id)
        self._words: dict[str, int] = tokenizer.get_vocab()
        self._form = texts.Form(
            ("text",), ("text",), {"top_k": whole(1, MAX_TOP_K), "targets": _targets}
        )

    def read(self, item: Item, content_type: object) -> Work:
        asked = texts.read(item, content_type, self._form)
        length = self._loaded.max_length
        encoded = self._loaded.tokens.encode([each.fields["text"] for each in asked.inputs], length)
        rows, total, words = [], 0, 0
        for each, tokens in zip(asked.inputs, encoded, strict=True):
            masks = [place for place, id_ in enumerate(tokens.ids) if id_ == self._mask_id]
            if not masks:
                self._refuse(each.label("text"), each.fields["text"], length)
            targets = self._target_ids(each)
            top_k = each.parameters.get("top_k", self._loaded.options.top_k or TOP_K)
            top_k = min(top_k, len(self._words) if targets is None else len(targets))
            total, words = total + len(masks), words + len(masks) * top_k
            rows.append(Row(tokens.ids, tokens.type_ids, _Note(masks, targets, top_k)))
        if total > MAX_MASKS:
            raise BadInput("body", f"has {total} masks; at most {MAX_MASKS} are filled at once")
        if words > MAX_WORDS:
            raise BadInput("top_k", f"asks for {words} words in all; at most {MAX_WORDS} are told")
        return Work(rows, asked)

    def _refuse(self, field: str, text: str, length: int) -> None:
        if self._mask in text:
            raise BadInput(field, f"has its {self._mask} beyond the {length} tokens that are read")
        raise BadInput(field, f"has no {self._mask}; put it where a word is sought")

    def _target_ids(self, each: texts.Input) -> list[int] | None:
        words = each.parameters.get("targets")
        if words is None:
            return None
        ids = {self._words[word] for word in words if word in self._words}
        others = [word for word in words if word not in self._words]
        # The first piece stands for a word that is no token, as in the pipeline.
        for tokens in self._loaded.tokens.encode(others, None, with_special=False):
            ids.update(tokens.ids[:1])
        if not ids:
            raise BadInput(each.label("targets"), "names no word that the model knows")
        return sorted(ids)

    def forward(self, chunk: Chunk) -> Sequence[Any]:
        model = self._loaded.model
        hidden = model.bert(**chunk.inputs()).last_hidden_state
        at_masks = [hidden[row, each.note.masks] for row, each in enumerate(chunk.rows)]
        return [
            self._best(model.cls, masked, row.note)
            for masked, row in zip(at_masks, chunk.rows, strict=True)
        ]

    def _best(self, head: Any, masked: torch.Tensor, note: _Note) -> Any:
        """Scores and token ids, both (masks, top_k)."""
        scores, ids = [], []
        for part in torch.split(masked, _AT_ONCE):
            chances = head(part).float().softmax(dim=-1)
            if note.targets is not None:
                chances = chances[:, note.targets]
            best = chances.topk(note.top_k)
            scores.append(best.values.cpu())
            ids.append(best.indices.cpu())
        places = torch.cat(ids)
        if note.targets is not None:
            places = torch.tensor(note.targets)[places]
        return torch.cat(scores), places

    def answer(self, work: Work, outputs: Sequence[Any]) -> Answer:
        said = []
        for row, (scores, ids) in zip(work.rows, outputs, strict=True):
            check_finite(scores)
            told = [
                self._told(row, place, *best)
                for place, *best in zip(row.note.masks, scores.tolist(), ids.tolist(), strict=True)
            ]
            said.append(told[0] if len(told) == 1 else told)
        return Answer(one_or_list(said, work.asked.is_list))

    def _told(self, row: Row, place: int, scores: list[float], ids: list[int]) -> Any:
        tokenizer = self._loaded.tokens.whole
        is_only = len(row.note.masks) == 1  # of several masks the others stay visible
        before, after = list(row.ids[:place]), list(row.ids[place + 1 :])
        return [
            {
                "score": short(score),
                "token": id_,
                "token_str": tokenizer.decode([id_]),
                "sequence": tokenizer.decode(
                    [each for each in (*before, id_, *after) if each != tokenizer.pad_token_id],
                    skip_special_tokens=is_only,
                ),
            }
            for score, id_ in zip(scores, ids, strict=True)
        ]

    def sample(self) -> Item:
        return {"body": {"text": f"a {self._mask} day"}}
