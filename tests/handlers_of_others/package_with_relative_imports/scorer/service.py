from . import weights
from .text import words


def handle(data, context):
    if data is None:
        return None
    return [sum(weights.OF.get(word, 0) for word in words(row["body"])) for row in data]
