"""A BERT of a folder of Hugging Face weights, without code: `mmserve_handlers.bert:handle`.

The folder holds what `save_pretrained` writes: `config.json`, weights (`weights.py` says in which
files) and the tokenizer's files. What the model is asked comes from `task` in `model.json`, or else
from `architectures` in `config.json`:

    embeddings             BertModel, and what sentence-transformers saved
    question-answering     BertForQuestionAnswering
    text-classification    BertForSequenceClassification
    token-classification   BertForTokenClassification
    fill-mask              BertForMaskedLM, BertForPreTraining

`tasks/` says what each takes and answers, `options.py` what else may stand in `model.json`.
Weights are mapped from their file, so that workers of one model share its pages.

    python -m mmserve_handlers.bert FOLDER      loads it as a worker would; says what it serves
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The tokenizer's threads would keep the process from being forked, and take other workers' cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoTokenizer, BertConfig
from transformers.models.bert import modeling_bert
from transformers.utils import logging as transformers_logging

from mmserve_handlers import encoder, options, precision, weights
from mmserve_handlers.contract import BadOutput, Context, Item, Refused
from mmserve_handlers.replies import refuse, reply
from mmserve_handlers.tasks.answering import Answering
from mmserve_handlers.tasks.embeddings import POOLINGS, Embeddings
from mmserve_handlers.tasks.filling import Filling
from mmserve_handlers.tasks.sequences import Sequences
from mmserve_handlers.tasks.task import Loaded, Task, Work
from mmserve_handlers.tasks.tokens import TokenLabels

log = logging.getLogger(__name__)
_CONFIG = "config.json"
_OF_ONE_MODEL = f"The weights and {_CONFIG} are not of one model; copy both from one source"


class _Served(NamedTuple):
    """How a task is built.

    Attributes:
        architecture: of transformers.
        arguments: of its constructor, beside the configuration.
        head: a tensor that only weights for this task have; "" where there is none.
        exact: layers that stay in float32 whatever the precision.
        has_labels: the head's rows are classes.
    """

    make: Callable[[Loaded], Task]
    architecture: str
    arguments: Mapping[str, Any]
    head: str
    exact: Sequence[str] = ()
    has_labels: bool = False


_SERVED: Mapping[str, _Served] = {
    options.EMBEDDINGS: _Served(Embeddings, "BertModel", {"add_pooling_layer": False}, ""),
    options.ANSWERING: _Served(
        Answering, "BertForQuestionAnswering", {}, "qa_outputs.weight", ["qa_outputs"]
    ),
    options.SEQUENCES: _Served(
        Sequences,
        "BertForSequenceClassification",
        {},
        "classifier.weight",
        ["classifier", "bert.pooler"],
        has_labels=True,
    ),
    options.TOKENS: _Served(
        TokenLabels,
        "BertForTokenClassification",
        {},
        "classifier.weight",
        ["classifier"],
        has_labels=True,
    ),
    options.FILLING: _Served(
        Filling,
        "BertForMaskedLM",
        {},
        "cls.predictions.transform.dense.weight",
        ["cls.predictions.decoder"],
    ),
}
_TASK_OF = {served.architecture: task for task, served in _SERVED.items()} | {
    "BertForPreTraining": options.FILLING
}


class Service:
    """One loaded model."""

    def __init__(self, context: Context, chosen: options.Options | None = None) -> None:
        """Loads tokenizer and weights from the model's directory; asks nothing of a network.

        Args:
            chosen: in the place of the options that lie in the directory.

        Raises:
            ValueError: something in the folder will not do; says what, and what to do.
        """
        folder = Path(context.system_properties["model_dir"])
        # Its lines would fill the worker's log. The library leaves this function untyped.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
        self.options = chosen or options.read(folder, getattr(context, "manifest", None))
        said = config_of(folder)
        self.name = task_of(self.options.task, said, folder)
        served = _SERVED[self.name]
        self.device = device(self.options.device, context.system_properties.get("gpu_id"))
        paths = weights.files(folder)
        state = named_for(served, weights.load_files(paths), said)
        self.labels = labels = labels_of(served, said, self.options.labels, state)
        model = _model(served, said, labels)
        weights.check(model, state, hint=_OF_ONE_MODEL)
        tokenizer = _tokenizer(folder)
        _check_vocabulary(tokenizer, model.config)
        place = precision.folder_of(context.system_properties)
        self.kind = precision.chosen(self.options.precision, self.device, place)
        types = precision.types_of(model, self.kind, served.exact)
        weights.fill(model, precision.prepared(state, types, paths, place))
        precision.lower(model, self.kind, served.exact)
        _fill_buffers(model)
        self.pad_id = int(tokenizer.pad_token_id or 0)
        loaded = Loaded(
            model=model.to(self.device),
            tokens=encoder.Tokens(tokenizer),
            options=self.options,
            labels=labels,
            max_length=_max_length(self.name, folder, self.options, tokenizer, model.config),
            problem=said.get("problem_type"),
            pooling=pooling_of(folder) if self.name == options.EMBEDDINGS else "mean",
        )
        self.task = served.make(loaded)
        self._warm_up()

    def _warm_up(self) -> None:
        """What the first pass sets up is there when the first request comes."""
        for _ in range(self.options.warmup):
            work = self.task.read(self.task.sample(), None)
            self._outputs(work.rows)

    def _outputs(self, rows: Sequence[encoder.Row]) -> list[Any]:
        return encoder.run(rows, self.task.forward, pad_id=self.pad_id, device=self.device)

    def handle(self, data: Sequence[Item], context: Context) -> list[bytes]:
        """Answers a batch; the rows of all its requests go through the model together."""
        works: list[Work | Refused] = []
        rows: list[encoder.Row] = []
        for index, item in enumerate(data):
            try:
                work = self.task.read(item, context.get_request_header(index, "content-type"))
            except Refused as mistake:
                works.append(mistake)
            else:
                works.append(work)
                rows += work.rows
        outputs = self._outputs(rows) if rows else []
        bodies, at = [], 0
        for index, outcome in enumerate(works):
            if isinstance(outcome, Refused):
                bodies.append(refuse(context, index, outcome))
                continue
            own = outputs[at : at + len(outcome.rows)]
            at += len(outcome.rows)
            bodies.append(self._body(context, index, outcome, own))
        return bodies

    def _body(self, context: Context, index: int, work: Work, outputs: Sequence[Any]) -> bytes:
        try:
            answer = self.task.answer(work, outputs)
        except BadOutput as problem:
            log.error("%s", problem)
            return refuse(context, index, problem)
        return reply(context, index, answer.said, answer.array)


# ------------------------------------------------------------------------------- what the files say


def config_of(folder: Path) -> dict[str, Any]:
    """`config.json`. Raises ValueError where it is missing, damaged or of no BERT."""
    said = options.json_file(folder / _CONFIG)
    if said is None:
        raise ValueError(
            f"the archive has no {_CONFIG}; model.save_pretrained(folder) writes it beside the "
            "weights"
        )
    if not isinstance(said, dict):
        raise ValueError(f"{_CONFIG} must hold an object, as save_pretrained writes it")
    kind = said.get("model_type", "bert")
    if kind != "bert":
        raise ValueError(
            f'{_CONFIG} says "model_type": {json.dumps(kind)}, and mmserve_handlers.bert serves '
            "bert only. Write a handler that loads it with transformers"
        )
    return said


def task_of(chosen: str | None, config: Mapping[str, Any], folder: Path) -> str:
    """What the model is asked.

    Args:
        chosen: the task of the options.
        config: `config.json`.
        folder: what sentence-transformers saved has `modules.json` in it.

    Raises:
        ValueError: the architecture is none that is served.
    """
    if chosen is not None:
        return chosen
    if (folder / "modules.json").is_file():
        return options.EMBEDDINGS
    architectures = config.get("architectures") or ["BertModel"]
    if not isinstance(architectures, list):
        raise ValueError(f"{_CONFIG}: architectures must be a list")
    for name in architectures:
        if name in _TASK_OF:
            return _TASK_OF[name]
    raise ValueError(
        f"{_CONFIG} names the architecture {', '.join(map(str, architectures))}; served are "
        f"{', '.join(_TASK_OF)}. Write a handler that loads it, or set "
        f'{{"task": "{options.EMBEDDINGS}"}} in {options.FILE} to use its encoder alone'
    )


def named_for(
    served: _Served, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Weights by the names that the architecture has for them, whoever saved them.

    Encoders saved alone have no `bert.` before their names, models with a head do; before 2019
    layer norms had a gamma and a beta.

    Raises:
        ValueError: they have no head for the task, or one that would be left out in silence.
    """
    has_head = served.architecture != "BertModel"
    named: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        name = name.removeprefix("module.").removeprefix("bert.")
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        is_encoder = name.startswith(("embeddings.", "encoder.", "pooler."))
        named[f"bert.{name}" if has_head and is_encoder else name] = tensor
    if has_head and served.head not in named:
        raise ValueError(
            f"the weights have no {served.head}, so they were not trained for "
            f"{_TASK_OF[served.architecture]}; choose another task in {options.FILE}, or other "
            "weights"
        )
    if not has_head and not config.get("architectures"):
        heads = [head for head in ("qa_outputs.weight", "classifier.weight") if head in named]
        if heads:
            raise ValueError(
                f"the weights have a head ({heads[0]}), and {_CONFIG} does not say what for; set "
                f'"task" in {options.FILE} to one of {", ".join(options.TASKS)}'
            )
    if served.architecture == "BertForMaskedLM":
        # Saved once where they are the same.
        shared = named.get("bert.embeddings.word_embeddings.weight")
        if shared is not None:
            named.setdefault("cls.predictions.decoder.weight", shared)
        if "cls.predictions.bias" in named:
            named.setdefault("cls.predictions.decoder.bias", named["cls.predictions.bias"])
    return named


def labels_of(
    served: _Served,
    config: Mapping[str, Any],
    chosen: Sequence[str] | None,
    state: Mapping[str, torch.Tensor],
) -> tuple[str, ...]:
    """Names of the classes; () for a task without. Raises ValueError where their count differs."""
    if not served.has_labels:
        return ()
    count = len(state[served.head])
    if chosen is not None:
        if len(chosen) != count:
            raise ValueError(
                f"{options.FILE} names {len(chosen)} labels, and the weights have {count} classes; "
                f"labels must be a list of {count}"
            )
        return tuple(chosen)
    said = config.get("id2label")
    if said is None:
        return tuple(f"LABEL_{place}" for place in range(count))
    try:
        labels = tuple(str(said[str(place)]) for place in range(len(said)))
    except (KeyError, TypeError):
        raise ValueError(
            f'{_CONFIG}: id2label must name each class by its place: {{"0": "no", "1": "yes"}}'
        ) from None
    if len(labels) != count:
        raise ValueError(
            f"{_CONFIG} names {len(labels)} labels in id2label, and the weights have {count} "
            f'classes; put the right ones into {options.FILE}: {{"labels": [{count} of them]}}'
        )
    return labels


def pooling_of(folder: Path) -> str:
    """How sentence-transformers make one vector of many, where they saved the model; else "mean".

    Raises:
        ValueError: in a way that is not served, or by a module that would be left out.
    """
    modules = options.json_file(folder / "modules.json")
    paths = {"1_Pooling"}
    if isinstance(modules, list):
        for module in modules:
            kind = str(module.get("type")) if isinstance(module, dict) else ""
            name = kind.rpartition(".")[2]
            if name == "Pooling":
                paths = {Path(str(module.get("path"))).name}
            elif name not in ("Transformer", "Normalize"):
                raise ValueError(
                    f"modules.json names {kind}, which mmserve_handlers.bert does not have; write "
                    "a handler that loads the model with sentence-transformers"
                )
    said = options.json_file(folder / paths.pop() / _CONFIG)
    if not isinstance(said, dict):
        return "mean"
    names = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
    chosen = [
        key.removeprefix("pooling_mode_")
        for key, value in said.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if isinstance(said.get("pooling_mode"), str):
        chosen = [said["pooling_mode"]]
    found = [str(names.get(name, name)) for name in chosen]
    if len(found) != 1 or found[0] not in POOLINGS:
        raise ValueError(
            f"the pooling of {_CONFIG} in the model's pooling folder is "
            f"{' and '.join(chosen) or 'none'}; served is one of {', '.join(names)}"
        )
    return found[0]


def _max_length(
    task: str, folder: Path, chosen: options.Options, tokenizer: Any, config: Any
) -> int:
    """Tokens of one pass at most: what the model was trained for, where it says so."""
    positions = min(int(config.max_position_embeddings), int(tokenizer.model_max_length))
    if chosen.max_length is not None:
        if chosen.max_length > config.max_position_embeddings:
            raise options.BadOption(
                f"{options.FILE}: max_length is {chosen.max_length}; the model reads at most "
                f"{config.max_position_embeddings} tokens"
            )
        return chosen.max_length
    if task == options.EMBEDDINGS:
        said = options.json_file(folder / "sentence_bert_config.json")
        length = said.get("max_seq_length") if isinstance(said, dict) else None
        if type(length) is int and length >= 3:
            return min(positions, length)
    return positions


# ------------------------------------------------------------------------------- what is built


def device(chosen: str, gpu_id: object) -> torch.device:
    """The device of the options.

    Args:
        chosen: "auto", "cpu", "cuda" or "cuda:N".
        gpu_id: the one that the server gave this worker, or None.

    Raises:
        BadOption: it is not there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen == "cpu" or (chosen == "auto" and (gpu_id is None or not gpus)):
        return torch.device("cpu")
    own = 0 if gpu_id is None else int(str(gpu_id))
    number = int(chosen[5:]) if chosen.startswith("cuda:") else own
    if number >= gpus:
        raise options.BadOption(
            f"{options.FILE}: device is {json.dumps(chosen)}, and this machine has {gpus} GPUs "
            "that torch can use; allowed are cpu, and auto, which takes what is there"
        )
    return torch.device("cuda", number)


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        raise ValueError(
            "the archive has no tokenizer: neither tokenizer.json nor vocab.txt is there; "
            "tokenizer.save_pretrained(folder) writes them"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as wrong:  # a broken file makes it raise of many kinds
        said = " ".join(str(wrong).split())[:200]
        raise ValueError(
            f"the tokenizer cannot be loaded ({said}); tokenizer.save_pretrained(folder) writes "
            "its files anew"
        ) from None
    if not tokenizer.is_fast:
        raise ValueError(
            "the tokenizer is of transformers' slow kind; convert it: "
            "BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)"
        )
    return tokenizer


def _check_vocabulary(tokenizer: Any, config: Any) -> None:
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer knows {len(tokenizer)} tokens, and the weights {config.vocab_size}: "
            "they are not of one model"
        )


def _model(served: _Served, said: Mapping[str, Any], labels: Sequence[str]) -> Any:
    """The network without weights: nothing of it is made to be thrown away."""
    fields: dict[str, Any] = {key: said[key] for key in said if key not in _NOT_OURS}
    if labels:
        fields["num_labels"] = len(labels)
    try:
        config = BertConfig(**fields)
        # One kernel for attention: other ways want masks of the weights' own type.
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = getattr(modeling_bert, served.architecture)(config, **served.arguments)
    except Exception as wrong:  # whatever a stranger's numbers make it raise
        said_it = " ".join(str(wrong).split())[:200]
        raise ValueError(f"{_CONFIG} does not describe a BERT ({said_it})") from None
    return model


#: Keys of config.json that say how it was saved, or what we say ourselves.
_NOT_OURS = (
    "architectures",
    "attn_implementation",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "num_labels",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "_name_or_path",
)


def _fill_buffers(model: Any) -> None:
    """What is in no file: numbers of positions and of the first segment."""
    for name, buffer in list(model.named_buffers()):
        if not buffer.is_meta:
            continue
        owner, _, key = name.rpartition(".")
        values = torch.zeros(buffer.shape, dtype=buffer.dtype)
        if key == "position_ids":
            values += torch.arange(buffer.shape[-1])
        elif key != "token_type_ids":
            raise ValueError(f"this version of transformers wants a buffer {name} that is unknown")
        setattr(model.get_submodule(owner), key, values)


_service: Service | None = None


def handle(data: Sequence[Item] | None, context: Context) -> list[bytes] | None:
    """The entry point: loads on the first call, where `data` is None, then answers batches."""
    global _service
    if _service is None:
        _service = Service(context)
    return None if data is None else _service.handle(data, context)


class _Alone:
    """A context without a server."""

    model_name = "model"

    def __init__(self, folder: Path) -> None:
        self.system_properties: Mapping[str, Any] = {"model_dir": str(folder), "gpu_id": None}

    def get_request_header(self, idx: int, key: str) -> Any:
        return None

    def set_response_content_type(self, idx: int, value: str) -> None: ...

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None: ...


def main(words: Sequence[str]) -> int:
    """Loads a folder on the CPU: 0 and a line on what it serves, or 1 and why it cannot be."""
    folder = Path(words[0])
    try:
        chosen = options.read(folder)
        # It may be meant for another machine than this one.
        chosen = dataclasses.replace(chosen, device="cpu", precision="fp32")
        service = Service(_Alone(folder), chosen)
    except ValueError as wrong:
        print(" ".join(str(wrong).split()))
        return 1
    labels = service.labels
    print(f"{service.name}{f', {len(labels)} labels: ' if labels else ''}{', '.join(labels[:8])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
