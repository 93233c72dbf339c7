"""`mmserve`: the server, its configuration, its models and a prediction, from a shell."""

from __future__ import annotations

import argparse
import os
import re
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

import mmserve
from mmserve.cli import launcher
from mmserve.config.launch import Arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmserve.cli.client import Client, Reply, Workers
    from mmserve.config.load import Loaded

    Talk = Callable[[Client], None]

#: Exit codes. argparse itself ends with USAGE.
FAILED, USAGE, UNREACHABLE = 1, 2, 3

#: How long a prediction may take, unless `--timeout` says otherwise.
_INVOKE_TIMEOUT_S = 60.0

_TOP = """\
    Serves many models over HTTP, a drop-in for AWS Multi Model Server.

    To try it:
      mmserve archive --model-name hello --model-path hello/ --handler service:handle
      mmserve run hello.mar --input request.json
      mmserve serve --model-store . --models hello=hello.mar
      mmserve invoke hello --json '{"name": "Ada"}'
      mmserve stop
    """

_TOP_END = """\
    exit codes: 0 done; 1 the server or the configuration said no; 2 wrong usage;
    3 no server could be reached. `mmserve COMMAND --help` has more of each.
    """

_SERVE = """\
    Starts the server and stays: SIGTERM or Ctrl-C end it, after the requests in work.

      mmserve serve
      mmserve serve --model-store models/ --models ALL
      mmserve serve --mms-config production.properties --background
      mmserve stop

    In the background its own output goes to console.log, beside the other logs; where log_to is
    stdout or both it stays here.

    Settings come from the file, then the flags, then variables MMS_<KEY> where the file says
    enable_envvars_config=true. `mmserve config` shows what they come to.
    """

_STOP = """\
    Stops the server that was started with this temporary folder (TMPDIR, TEMP or TMP), as
    `multi-model-server --stop` does: running requests end first.

    Exit code 1 when none runs.
    """

_CONFIG = """\
    Prints every setting with its value, its unit and where the value comes from.

      mmserve config                       what a server started here would use
      mmserve config --check --mms-config production.properties

    --check also opens the files that a server opens at its start. Exit code 1, and a line on the
    standard error for each, when something is wrong.
    """

_MODELS = """\
    Looks after the models of a running server, at its management address.

      mmserve models list
      mmserve models load hello.mar --name hello --workers 2
      mmserve models describe hello
      mmserve models scale hello --min 4
      mmserve models unload hello
    """

_INVOKE = """\
    Sends one prediction request; the model's answer goes to the standard output as it is.

      mmserve invoke hello --json '{"name": "Ada"}'
      mmserve invoke resnet kitten.jpg
      curl -s https://example.org/cat.jpg | mmserve invoke resnet - --content-type image/jpeg
      mmserve invoke hello --address unix:/run/mmserve.sock --json '[1, 2]'
    """


_RUN = """\
    Runs one model without a server, to try its handler: in a process of its own, with a worker's
    context, decoding and errors.

      mmserve run hello/ --input request.json
      mmserve run resnet.mar --input kitten.jpg --input dog.jpg --batch
      mmserve run hello/ --input request.json --pdb      the debugger, where the handler raises

    Bodies of answers go to the standard output; time and memory of each call, status, headers,
    tracebacks and whatever the handler prints to the standard error. A breakpoint() in the
    handler opens the debugger too. Memory is Private_Dirty: what this process has for itself.

    Exit code 0 when all answers are below 400, 1 else.
    """


def main() -> int:
    return launcher.guarded(lambda: _run(sys.argv[1:]))


def _run(argv: list[str]) -> int:
    if argv[:1] == ["archive"]:  # its flags are its own
        return _archive(argv[1:])
    flags = _parser().parse_args(argv)
    code: int = flags.run(flags)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmserve",
        description=dedent(_TOP),
        epilog=dedent(_TOP_END),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mmserve {mmserve.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = _command(commands, "serve", "start the server", _SERVE)
    launcher.add_server_flags(serve)
    serve.add_argument(
        "--background",
        action="store_true",
        help="return once it answers; it runs on until mmserve stop",
    )
    serve.set_defaults(run=_serve)

    stop = _command(commands, "stop", "stop the server, requests in work end", _STOP)
    stop.set_defaults(run=_stop)

    commands.add_parser(
        "archive",
        help="make a model archive, as model-archiver; or: archive bert, archive resnet, "
        "archive convert",
    )

    config = _command(commands, "config", "show the settings", _CONFIG)
    launcher.add_server_flags(config)
    config.add_argument("--check", action="store_true", help="print only what is wrong or odd")
    config.set_defaults(run=_config)

    _add_models(_command(commands, "models", "models of a running server", _MODELS))
    _add_invoke(_command(commands, "invoke", "send a prediction request", _INVOKE))
    _add_run(_command(commands, "run", "run one model without a server", _RUN))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help: str,
    text: str = "",
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help,
        description=dedent(text) or help[0].upper() + help[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    listing = _command(actions, "list", "names, workers ready/wanted, locations")
    listing.set_defaults(run=_list)

    load = _command(actions, "load", "register a model and start its workers")
    load.add_argument("url", metavar="LOCATION", help="archive in the model store, or its URL")
    load.add_argument("--name", help="the archive's own name by default")
    load.add_argument("--handler", metavar="MODULE:FUNCTION")
    load.add_argument("--runtime", metavar="PYTHON")
    load.add_argument("--workers", type=int, default=1, metavar="N", help="1 by default")
    load.add_argument("--batch-size", type=int, metavar="N")
    load.add_argument("--max-batch-delay", type=int, metavar="MILLISECONDS")
    load.add_argument("--response-timeout", type=int, metavar="SECONDS")
    load.add_argument(
        "--preload",
        action=argparse.BooleanOptionalAction,
        help="load it once, and fork its workers from that; preload_model by default",
    )
    load.set_defaults(run=_load)

    unload = _command(actions, "unload", "take a model out; running requests end first")
    unload.set_defaults(run=_unload)

    describe = _command(actions, "describe", "a model and its workers, as JSON")
    describe.set_defaults(run=_describe)

    scale = _command(actions, "scale", "change the number of workers")
    scale.add_argument("--min", type=int, metavar="N", required=True, help="workers at least")
    scale.add_argument(
        "--max", type=int, metavar="N", help="workers at most; like --min if missing"
    )
    scale.set_defaults(run=_scale)

    for action in (unload, describe, scale):
        action.add_argument("name", metavar="MODEL")
    for action in (load, scale):
        action.add_argument(
            "--no-wait", action="store_true", help="return before the workers are ready"
        )
    for action in (listing, load, unload, describe, scale):
        _add_connection(action, "management")


def _add_invoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL")
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="the request's body; - for the standard input"
    )
    parser.add_argument("--json", metavar="TEXT", help="the body, and its type application/json")
    parser.add_argument("--content-type", metavar="TYPE", help="guessed from FILE's name otherwise")
    _add_headers(parser)
    _add_connection(parser, "inference")
    parser.set_defaults(run=_invoke)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory or archive")
    parser.add_argument(
        "--input",
        metavar="FILE",
        action="append",
        required=True,
        help="a request's body, - for the standard input; may be given several times",
    )
    parser.add_argument(
        "--batch", action="store_true", help="send all inputs to the handler together"
    )
    parser.add_argument(
        "--content-type", metavar="TYPE", help="of all inputs; guessed from each name otherwise"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        action="append",
        default=[],
        help="where an answer's body goes, instead of the standard output; once for each input",
    )
    parser.add_argument("--handler", metavar="MODULE:FUNCTION", help="instead of the manifest's")
    parser.add_argument("--name", metavar="NAME", help="of the model; the manifest's by default")
    parser.add_argument("--gpu", metavar="N", type=int, help="gpu_id of the context; none else")
    parser.add_argument(
        "--pdb", action="store_true", help="open the debugger where the handler raises"
    )
    _add_headers(parser)
    parser.set_defaults(run=_run_model)


def _add_headers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--header",
        metavar="NAME: VALUE",
        action="append",
        default=[],
        type=_header,
        help="one more header",
    )


def _header(text: str) -> tuple[str, str]:
    if not (parts := re.fullmatch(r"([!-9;-~]+):[ \t]*([ -~\t\xa0-\xff]*)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like NAME: VALUE")
    return parts[1], parts[2]


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return float(text)


def _add_connection(parser: argparse.ArgumentParser, which: str) -> None:
    where = parser.add_argument_group("the server")
    where.add_argument(
        "--address",
        metavar="URL",
        help=f"http://, https:// or unix:/PATH; the configuration's {which}_address by default",
    )
    where.add_argument("--mms-config", metavar="FILE", help="configuration to find the address in")
    if which == "management":
        where.add_argument(
            "--token-file", metavar="FILE", help="its token; management_token_file by default"
        )
    default_s = _INVOKE_TIMEOUT_S if which == "inference" else None
    where.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=default_s,
        help=f"{'none' if default_s is None else f'{default_s:g}'} by default",
    )
    where.add_argument("--ca-file", metavar="FILE", help="certificates to trust, PEM")
    where.add_argument("--insecure", action="store_true", help="accept any certificate")
    parser.set_defaults(address_key=f"{which}_address", token_file=None)


# serve, archive, config


def _serve(flags: argparse.Namespace) -> int:
    return launcher.start(flags, os.environ, foreground=not flags.background)


def _stop(flags: argparse.Namespace) -> int:
    return launcher.stop(os.environ)


def _archive(argv: list[str]) -> int:
    if argv[:1] == ["convert"]:
        from mmserve.cli import archive_convert

        return archive_convert.main(argv[1:], on_written=print)
    if argv[:1] == ["bert"]:
        from mmserve.cli import archive_bert

        return archive_bert.main(argv[1:], on_written=print)
    if argv[:1] == ["resnet"]:
        from mmserve.cli import archive_resnet

        return archive_resnet.main(argv[1:], on_written=print)
    from mmserve.cli import archiver

    sys.argv = ["mmserve archive", *argv]
    return archiver.main(on_written=print)


def _config(flags: argparse.Namespace) -> int:
    from mmserve.config import report

    errors: list[str] = []
    loaded = _loaded(launcher.arguments_of(flags), errors=errors)
    if loaded is None:
        return FAILED
    warnings = list(loaded.warnings)
    if flags.check:
        from mmserve.cli import check

        if (problem := launcher.problem(flags, os.environ)) is not None:
            errors.append(problem)
        errors += check.errors(loaded.settings)
        warnings += check.warnings(loaded.settings)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for error in errors:
        print(f"Invalid configuration: {error}", file=sys.stderr)
    if errors:
        return FAILED
    if flags.check:
        many = f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}"
        verdict = f"usable, with {many}" if warnings else "fine"
        print(f"{loaded.file or 'the built-in configuration'} is {verdict}")
        return 0
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    print("\n".join(report.lines(loaded)))
    return 0


def _loaded(
    arguments: Arguments, *, with_gpus: bool = True, errors: list[str] | None = None
) -> Loaded | None:
    """The settings; None, and a line on the standard error, where they are wrong.

    `errors` collects what is wrong with single keys, and then the settings come all the same.
    """
    from mmserve.config.load import load_settings
    from mmserve.errors import ConfigurationError

    try:
        return load_settings(arguments, os.environ, with_gpus=with_gpus, errors=errors)
    except ConfigurationError as error:
        print(f"Invalid configuration: {error}", file=sys.stderr)
        return None


# A running server


def _list(flags: argparse.Namespace) -> int:
    from mmserve.logs.escape import escaped

    def show(client: Client) -> None:
        for page in client.pages():
            width = max((len(escaped(name)) for name, _ in page), default=0)
            for name, url in page:
                workers = client.workers(name)
                count = "-" if workers is None else f"{workers.ready}/{workers.wanted}"
                print(f"{escaped(name):{width}}  {count:>5}  {escaped(url)}")

    return _talk(flags, show)


def _load(flags: argparse.Namespace) -> int:
    asked = {
        "url": flags.url,
        "model_name": flags.name,
        "handler": flags.handler,
        "runtime": flags.runtime,
        "initial_workers": flags.workers,
        "batch_size": flags.batch_size,
        "max_batch_delay": flags.max_batch_delay,
        "response_timeout": flags.response_timeout,
        "preload_model": None if flags.preload is None else str(flags.preload).lower(),
        "synchronous": not flags.no_wait,
    }
    given = {name: value for name, value in asked.items() if value is not None}

    def load(client: Client) -> None:
        reply = client.load(given)
        name = flags.name or client.only_name_of(flags.url)
        workers = None if name is None else client.workers(name)
        if name is None or workers is None:
            _print_status(reply)
        else:
            _print_loaded(name, workers)

    return _talk(flags, load)


def _unload(flags: argparse.Namespace) -> int:
    return _talk(flags, lambda client: _print_status(client.unload(flags.name)))


def _describe(flags: argparse.Namespace) -> int:
    return _talk(flags, lambda client: _write(client.describe(flags.name)))


def _scale(flags: argparse.Namespace) -> int:
    asked = {
        "min_worker": flags.min,
        "max_worker": flags.min if flags.max is None else flags.max,
        "synchronous": "false" if flags.no_wait else "true",
    }

    def scale(client: Client) -> None:
        reply = client.scale(flags.name, asked)
        workers = client.workers(flags.name)
        if workers is None:
            _print_status(reply)
        else:
            _print_scaled(flags.name, workers)

    return _talk(flags, scale)


def _invoke(flags: argparse.Namespace) -> int:
    if flags.json is not None and flags.file is not None:
        return _complain("give either FILE or --json", USAGE)
    headers = dict(flags.header)
    try:
        body = _body(flags)
    except OSError as error:
        return _complain(f"{flags.file} cannot be read: {error.strerror}", USAGE)
    if (content_type := _content_type(flags)) is not None:
        headers["Content-Type"] = content_type
    return _talk(flags, lambda client: _write(client.invoke(flags.name, body, headers)))


def _run_model(flags: argparse.Namespace) -> int:
    from mmserve.cli import run

    return run.run(flags)


def _body(flags: argparse.Namespace) -> bytes | None:
    if flags.json is not None:
        return str(flags.json).encode(errors="surrogateescape")
    if flags.file is None:
        return None
    if flags.file == "-":
        return sys.stdin.buffer.read()
    with open(flags.file, "rb") as file:
        return file.read()


def _content_type(flags: argparse.Namespace) -> str | None:
    if flags.content_type is not None:
        return str(flags.content_type)
    if flags.json is not None:
        return "application/json"
    if flags.file is None:
        return None
    import mimetypes

    return mimetypes.guess_type(flags.file)[0] or "application/octet-stream"


def _talk(flags: argparse.Namespace, use: Talk) -> int:
    from mmserve.cli.client import Refused, Unreachable

    client = _client(flags)
    if isinstance(client, int):
        return client
    try:
        use(client)
    except Refused as refused:
        return _complain(str(refused), FAILED)
    except Unreachable as unreachable:
        return _complain(str(unreachable), UNREACHABLE)
    return 0


def _client(flags: argparse.Namespace) -> Client | int:
    """A client for the server that the flags name, or the exit code where they are wrong."""
    from mmserve.cli.client import Client, read_token
    from mmserve.config import addresses
    from mmserve.errors import ConfigurationError

    address_text, token_file = flags.address, flags.token_file
    if address_text is None:
        loaded = _loaded(Arguments(mms_config=flags.mms_config), with_gpus=False)
        if loaded is None:
            return FAILED
        address_text = getattr(loaded.settings, flags.address_key)
        token_file = token_file or loaded.settings.management_token_file
    try:
        address = addresses.parse(address_text, flags.address_key)
    except ConfigurationError as error:
        return _complain(str(error).replace(f"{flags.address_key}=", "--address "), USAGE)
    if not address.is_unix and address.port == 0:
        return _complain(
            f"the port of {address.url} was chosen at start; --address names it", USAGE
        )
    token = None
    if token_file is not None and flags.address_key == "management_address":
        try:
            token = read_token(token_file)
        except (OSError, UnicodeDecodeError) as error:
            return _complain(f"the token in {token_file} cannot be read: {error}", USAGE)
    try:
        return Client(
            address,
            token=token,
            timeout_s=flags.timeout,
            ca_file=flags.ca_file,
            is_insecure=flags.insecure,
        )
    except OSError as error:
        return _complain(f"{flags.ca_file} holds no certificate to trust: {error}", USAGE)


def _print_status(reply: Reply) -> None:
    import json

    from mmserve.logs.escape import escaped

    try:
        print(escaped(json.loads(reply.body)["status"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        _write(reply)


def _print_loaded(name: str, workers: Workers) -> None:
    from mmserve.logs.escape import escaped

    print(f'Model "{escaped(name)}" loaded, {_count(workers)}')


def _print_scaled(name: str, workers: Workers) -> None:
    from mmserve.logs.escape import escaped

    print(f'Model "{escaped(name)}": {_count(workers)}')


def _count(workers: Workers) -> str:
    ready, wanted = workers
    many = f"{wanted} worker{'' if wanted == 1 else 's'}"
    return many if ready == wanted else f"{ready} of {many} ready"


def _write(reply: Reply) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(reply.body)
    if sys.stdout.isatty() and not reply.body.endswith(b"\n"):
        sys.stdout.buffer.write(b"\n")


def _complain(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
