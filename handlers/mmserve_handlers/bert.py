"""Sentence embeddings from a BERT: `mmserve_handlers.bert:handle`.

An archive holds what `save_pretrained` writes: `config.json`, `model.safetensors` and the
tokenizer's files. Weights are mapped from the file, so workers of one model share their pages.
What classifies, answers or labels (`BertForSequenceClassification`) is refused: it needs a handler
of its own.

Requests, as JSON:

    "a sentence"                                          embeds it
    ["a sentence", "another"]                             embeds both
    {"sentences": ["a sentence", "another"]}              the same
    {"sentences": [...], "task": "similarity"}            how alike each is to each, -1 to 1
    {"pairs": [["a sentence", "another"], ...]}           how alike the two of each pair are

Any other text is one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from mmserve_handlers.contract import BadInput, Context, Item, answer, parse_json, payload

#: Sentences of one request at most. The time of a request grows with it, and others wait.
MAX_SENTENCES = 512
#: Sentences of one forward pass; sorted by length first, so that little of it is padding.
CHUNK = 32
#: Digits after the point in answers: float32 holds seven, and the tests of similarity want five.
DIGITS = 6
#: Heads that are there for training alone: sentences are embedded without them, by all who do.
TRAINING_HEADS = ("ForMaskedLM", "ForPreTraining")


class Asked(NamedTuple):
    """What one request wants: its sentences, and "embed", "similarity" or "pairs"."""

    sentences: list[str]
    task: str


def read(item: Item, content_type: object = None) -> Asked:
    """One request, checked.

    Raises:
        BadInput: names the field that is wrong.
    """
    value = payload(item, content_type)
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            value = raw.decode()
        except UnicodeDecodeError:
            raise BadInput("body", "is neither JSON nor text in UTF-8") from None
    if isinstance(value, str):
        # Unlabelled or text: JSON where it looks like it, else a sentence as it stands.
        value = parse_json(value) if value.lstrip()[:1] in ("{", "[", '"') else value
    if not isinstance(value, dict):
        return Asked(_sentences(value, "body"), "embed")
    if "pairs" in value:
        return Asked(_pairs(value["pairs"]), "pairs")
    if "sentences" not in value:
        raise BadInput("sentences", "is missing; send a list of texts")
    task = value.get("task", "embed")
    if task not in ("embed", "similarity"):
        raise BadInput("task", 'is neither "embed" nor "similarity"')
    return Asked(_sentences(value["sentences"], "sentences"), task)


def _sentences(value: Any, field: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise BadInput(field, "must be a text or a list of texts")
    if len(texts) > MAX_SENTENCES:
        raise BadInput(field, f"has {len(texts)} texts; at most {MAX_SENTENCES} are taken")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise BadInput(f"{field}[{index}]", "must be a text that is not empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{field}[{index}]", "has half of a surrogate pair") from None
    return texts


def _pairs(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise BadInput("pairs", "must be a list of pairs of texts")
    if 2 * len(value) > MAX_SENTENCES:
        raise BadInput("pairs", f"has {len(value)} pairs; at most {MAX_SENTENCES // 2} are taken")
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadInput(f"pairs[{index}]", "must be a list of two texts")
        _sentences(pair, f"pairs[{index}]")
    return [text for pair in value for text in pair]


def pool(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the token vectors, padding left out, scaled to length 1.

    Args:
        hidden: float, (batch, tokens, width).
        mask: int, (batch, tokens); 1 for a token, 0 for padding, at least one 1 in each row.

    Returns:
        float, (batch, width); rows have length 1.

    Source: Reimers and Gurevych, Sentence-BERT, 2019, section 3 (MEAN strategy).
    """
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=1)


class Service:
    """One loaded model."""

    def __init__(self, context: Context) -> None:
        """Loads tokenizer and weights from the model's directory; asks nothing of a network."""
        folder = Path(context.system_properties["model_dir"])
        check_has_no_head(folder)
        gpu_id = context.system_properties.get("gpu_id")
        has_gpu = gpu_id is not None and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{gpu_id}" if has_gpu else "cpu")
        # Its lines would fill the worker's log. The library leaves this function untyped.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True)
        self.model = model.eval().to(self.device)
        self.max_tokens = _max_tokens(folder, int(model.config.max_position_embeddings))

    def handle(self, data: Sequence[Item], context: Context) -> list[bytes]:
        """Answers a batch; all its sentences go through the model together."""
        asked: list[Asked | BadInput] = []
        for index, item in enumerate(data):
            try:
                asked.append(read(item, context.get_request_header(index, "content-type")))
            except BadInput as mistake:
                asked.append(mistake)
        every = [text for one in asked if isinstance(one, Asked) for text in one.sentences]
        vectors = self.embed(every) if every else torch.empty(0)
        outcomes: list[dict[str, Any] | BadInput] = []
        start = 0
        for one in asked:
            if isinstance(one, BadInput):
                outcomes.append(one)
                continue
            outcomes.append(_result(one.task, vectors[start : start + len(one.sentences)]))
            start += len(one.sentences)
        return answer(context, outcomes)

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """float32, (sentences, width), on the CPU, rows of length 1, in the order given."""
        tokens = self.tokenizer(list(sentences), truncation=True, max_length=self.max_tokens)
        lengths = [len(ids) for ids in tokens["input_ids"]]
        order = sorted(range(len(sentences)), key=lengths.__getitem__)
        rows: list[torch.Tensor] = [torch.empty(0)] * len(sentences)
        for start in range(0, len(order), CHUNK):
            chosen = order[start : start + CHUNK]
            part = {name: [column[i] for i in chosen] for name, column in tokens.items()}
            padded = self.tokenizer.pad(part, return_tensors="pt").to(self.device)
            hidden = self.model(**padded).last_hidden_state
            vectors = pool(hidden, padded["attention_mask"]).float().cpu()
            for index, vector in zip(chosen, vectors, strict=True):
                rows[index] = vector
        return torch.stack(rows)


def check_has_no_head(folder: Path) -> None:
    """Raises ValueError where the checkpoint has a head, which would be left out without a word."""
    try:
        said = json.loads((folder / "config.json").read_text())
        names = [str(name) for name in said.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError):
        return  # the library has its own words for that
    for name in names:
        if re.search(r"For[A-Z]", name) and not name.endswith(TRAINING_HEADS):
            raise ValueError(
                f"config.json names {name}, and mmserve_handlers.bert only embeds sentences: the "
                f"head would be left out. Write a handler that loads it as {name}, or save the "
                "encoder by itself with AutoModel"
            )


def _max_tokens(folder: Path, positions: int) -> int:
    """Tokens of a sentence at most: what the model was trained for, where it says so."""
    try:
        said = json.loads((folder / "sentence_bert_config.json").read_text())
        return min(positions, int(said["max_seq_length"]))
    except (OSError, ValueError, KeyError, TypeError):
        return positions


def _result(task: str, vectors: torch.Tensor) -> dict[str, Any]:
    if task == "embed":
        return {"embeddings": _rounded(vectors)}
    if task == "similarity":
        return {"similarity": _rounded(vectors @ vectors.T)}
    return {"similarities": _rounded((vectors[0::2] * vectors[1::2]).sum(dim=1, keepdim=True), 0)}


def _rounded(matrix: torch.Tensor, column: int | None = None) -> list[Any]:
    rows = [[round(value, DIGITS) for value in row] for row in matrix.tolist()]
    return rows if column is None else [row[column] for row in rows]


_service: Service | None = None


def handle(data: Sequence[Item] | None, context: Context) -> list[bytes] | None:
    """The entry point: loads on the first call, where `data` is None, then answers batches."""
    global _service
    if _service is None:
        _service = Service(context)
    return None if data is None else _service.handle(data, context)
