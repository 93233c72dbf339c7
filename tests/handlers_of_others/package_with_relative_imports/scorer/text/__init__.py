from .split import words

__all__ = ["words"]
