"""`ts.utils.util`."""

from typing import Any

from mmserve.runtime.failures import PredictionException
from mmserve.runtime.torchserve.config import parse
from mmserve.runtime.torchserve.labels import (
    list_classes_from_module,
    load_label_mapping,
    map_class_to_label,
)

__all__ = [
    "PredictionException",
    "get_yaml_config",
    "list_classes_from_module",
    "load_label_mapping",
    "map_class_to_label",
]


def get_yaml_config(yaml_file_path: str) -> dict[str, Any]:
    """The settings in a YAML file. Raises OSError, BadConfig."""
    with open(yaml_file_path, encoding="utf-8") as file:
        return parse(file.read())
