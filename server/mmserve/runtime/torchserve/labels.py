"""`index_to_name.json`, and classes of a module."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that a module defines itself, in their order.

    Args:
        parent_class: only those that extend it.
    """
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and (parent_class is None or issubclass(value, parent_class))
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Class number, as text → name; None where there is no such file.

    A file may have a list of names under `object_type_names`, and a list for a name, whose last
    entry is it (`["n02123045", "tabby"]`).

    Raises:
        ValueError: it is no JSON.
        TypeError: it has another form.
    """
    if not os.path.isfile(mapping_file_path):
        return None
    with open(mapping_file_path, encoding="utf-8") as file:
        mapping = json.load(file)
    where = os.path.basename(mapping_file_path)
    if not isinstance(mapping, dict):
        raise TypeError(f"{where} is no JSON object of class numbers and names.")
    names = mapping.get("object_type_names")
    if isinstance(names, list):
        mapping = {str(number): name for number, name in enumerate(names)}
    found = {}
    for key, value in mapping.items():
        name = value[-1] if isinstance(value, list) and value else value
        if not isinstance(name, str):
            raise TypeError(f"{where} has {value!r:.60} as the name of class {key!r:.60}.")
        found[key] = name
    return found


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Name → probability, for each row.

    Args:
        probs: probabilities, a row for each request.
        mapping: class number, as text → name; the number itself where it is None.
        lbl_classes: class of each probability; its position where it is None.
    """
    results = []
    for at, row in enumerate(probs):
        classes = range(len(row)) if lbl_classes is None else lbl_classes[at]
        keys = [str(number) for number in classes]
        named = keys if mapping is None else [mapping[key] for key in keys]
        results.append(dict(zip(named, row, strict=True)))
    return results
