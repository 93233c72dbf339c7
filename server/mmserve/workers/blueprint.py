"""All that is needed to start a worker of one model, and which way it starts. Quiet."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its workers see it.

    Attributes:
        model_name: registered name.
        model_dir: absolute directory.
        handler: handler text.
        manifest: text of MAR-INF/MANIFEST.json, or "".
        batch_size: at most so many requests in a batch.
        decode_input: `decode_input_request`.
        max_response_size: bytes.
        environ: the whole environment of its processes.
        top_names: importable top-level names that lie on the model's own path.
        names_libraries: its sources name a library that the server preloads.
        preload: load once in a template, then fork.
        busy_poll_s: how long its workers stay awake for the next batch after a quick one.
    """

    model_name: str
    model_dir: str
    handler: str
    manifest: str
    batch_size: int
    decode_input: bool
    max_response_size: int
    environ: Mapping[str, str]
    top_names: Collection[str] = ()
    names_libraries: bool = True
    preload: bool = False
    busy_poll_s: float = 0.0


class Way(msgspec.Struct, frozen=True):
    """How a worker starts.

    Attributes:
        kind: "library" (fork with the libraries), "bare" (fork without), "fresh" (a new
            interpreter) or "wait" (the libraries are being imported).
        reason: why it is not the plain one, for describe and the log.
    """

    kind: str
    reason: str = ""


def choose_way(
    blueprint: Blueprint,
    *,
    worker_start: str,
    has_library: bool,
    is_settled: bool,
    clash: str | None,
) -> Way:
    """Decides how a worker of this model starts.

    Args:
        worker_start: the setting, "fork" or "fresh".
        has_library: a library process is ready.
        is_settled: the library is ready, or there will be none.
        clash: why a fork of the library or, where there is none yet, of the zygote would see other
            modules than a fresh interpreter.
    """
    if worker_start == "fresh":
        return Way("fresh", "worker_start is fresh")
    if not is_settled and blueprint.names_libraries:
        return Way("wait")
    if clash:
        return Way("fresh", clash)
    if not is_settled:
        return Way("bare", "the preloaded libraries were not ready, and its code names none")
    return Way("library" if has_library else "bare")
