"""A BERT and its tokenizer, run on texts of unlike lengths.

Rows are sorted by length and go through the network in chunks, each padded to its longest row, so
that little of the work is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

#: Rows of one pass at most, and tokens with their padding: what an activation's memory grows with.
CHUNK_ROWS, CHUNK_TOKENS = 32, 8192

Text = str | tuple[str, str]


class Row(NamedTuple):
    """What goes through the network in one piece: a text, or a window on a long one.

    Attributes:
        ids, types: token ids and segment numbers, of equal length.
        note: what the task wants to know of it in the pass.
    """

    ids: Sequence[int]
    types: Sequence[int]
    note: Any = None


class Chunk(NamedTuple):
    """Rows padded to the longest of them, on the model's device.

    Attributes:
        ids, types: int64, (rows, tokens).
        mask: int64, (rows, tokens), 1 for a token; None where there is no padding.
        rows: as they were given.
    """

    ids: torch.Tensor
    types: torch.Tensor
    mask: torch.Tensor | None
    rows: Sequence[Row]

    def inputs(self) -> dict[str, torch.Tensor | None]:
        """Arguments of the model."""
        return {"input_ids": self.ids, "token_type_ids": self.types, "attention_mask": self.mask}


class Tokens:
    """A tokenizer, set for each call to what the call asks; for one thread.

    Attributes:
        whole: transformers' own object, to turn ids into text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.whole = tokenizer
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_padding()

    def encode(
        self,
        texts: Sequence[Text],
        max_length: int | None,
        *,
        stride: int = 0,
        strategy: str = "longest_first",
        with_special: bool = True,
    ) -> list[Any]:
        """`tokenizers.Encoding` of each text or pair; what was cut off is in `overflowing`.

        Args:
            max_length: tokens at most, with the special ones; None for no end.
            stride: tokens that a window and the next one share.
            strategy: which text of a pair is cut: "longest_first" or "only_second".
        """
        if max_length is None:
            self._fast.no_truncation()
        else:
            self._fast.enable_truncation(max_length, stride=stride, strategy=strategy)
        encoded: list[Any] = self._fast.encode_batch(list(texts), add_special_tokens=with_special)
        return encoded


def run(
    rows: Sequence[Row],
    forward: Callable[[Chunk], Sequence[Any]],
    *,
    pad_id: int,
    device: torch.device,
) -> list[Any]:
    """What `forward` makes of each row, in the order of the rows.

    Args:
        forward: one pass; one result for each row of its chunk.
    """
    results: list[Any] = [None] * len(rows)
    with torch.inference_mode():
        for places in chunks([len(row.ids) for row in rows]):
            chunk = padded([rows[place] for place in places], pad_id, device)
            for place, result in zip(places, forward(chunk), strict=True):
                results[place] = result
    return results


def chunks(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of rows that go together, shortest first; each place once."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    chosen: list[int] = []
    for place in order:
        # Sorted, so the newest is the longest.
        if chosen and (
            len(chosen) == CHUNK_ROWS or (len(chosen) + 1) * lengths[place] > CHUNK_TOKENS
        ):
            yield chosen
            chosen = []
        chosen.append(place)
    if chosen:
        yield chosen


def padded(rows: Sequence[Row], pad_id: int, device: torch.device) -> Chunk:
    """Rows as tensors, each padded at its end to the longest."""
    lengths = [len(row.ids) for row in rows]
    longest = max(lengths)
    ids = [[*row.ids, *[pad_id] * (longest - len(row.ids))] for row in rows]
    types = [[*row.types, *[0] * (longest - len(row.types))] for row in rows]
    mask = None
    if min(lengths) < longest:
        places = torch.arange(longest).unsqueeze(0)
        mask = (places < torch.tensor(lengths).unsqueeze(1)).long().to(device)
    return Chunk(torch.tensor(ids).to(device), torch.tensor(types).to(device), mask, rows)
