"""Runs the fuzz targets: every `fuzz_*.py` here has a `one_input(data)`.

    python tests/fuzz/drive.py --seconds 60 [--seed 7] [fuzz_edge …]

Where atheris is installed it steers by coverage. Else inputs are made by the target's own
`mutate(chance)` or `mutated(seed, chance)`, or from its `SEEDS` by cutting, copying and flipping.
Ends with the first input that raises, which is written to `results/fuzz/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
FOUND = Path("results/fuzz")
LONGEST = 4096


def targets() -> list[Path]:
    return sorted(HERE.glob("fuzz_*.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def maker(module: ModuleType) -> Callable[[random.Random], bytes]:
    """What makes inputs for a target: its `mutate`, or its `mutated` seeds, or the loop below."""
    own: Callable[[random.Random], bytes] | None = getattr(module, "mutate", None)
    if own is not None:
        return own
    listed = module.seeds() if hasattr(module, "seeds") else getattr(module, "SEEDS", ())
    seeds: list[bytes] = [bytes(seed) for seed in listed] or [b"\0"]
    mutated: Callable[[bytes, random.Random], bytes] | None = getattr(module, "mutated", None)
    if mutated is not None:
        return lambda chance: bytes(mutated(chance.choice(seeds), chance))

    def make(chance: random.Random) -> bytes:
        data = bytearray(b"".join(chance.choices(seeds, k=chance.randint(1, 3))))
        for _ in range(chance.randint(0, 8)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    del data[at : at + chance.randint(1, 16)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randint(1, 16))
                case _:
                    data[at:at] = data[at : at + chance.randint(1, 64)]
        return bytes(data[:LONGEST])

    return make


def by_chance(path: Path, seconds: float, seed: int) -> int:
    module = load(path)
    make, chance, tried, end = maker(module), random.Random(seed), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = make(chance)
        try:
            module.one_input(data)
        except BaseException:
            FOUND.mkdir(parents=True, exist_ok=True)
            kept = FOUND / f"{path.stem}-{seed}-{tried}"
            kept.write_bytes(data)
            print(f"{path.stem}: input {tried} of seed {seed} is kept in {kept}", flush=True)
            raise
        tried += 1
    print(
        f"{path.stem}: {tried} inputs of seed {seed} in {seconds:g} s, none misbehaved", flush=True
    )
    return 0


def by_coverage(path: Path, seconds: float, seed: int) -> int:
    """In a process of its own: libFuzzer ends the one that it runs in."""
    FOUND.mkdir(parents=True, exist_ok=True)
    code = (
        "import sys, atheris; sys.path.insert(0, sys.argv.pop(1))\n"
        "with atheris.instrument_imports(include=['mmserve']):\n"
        f"    import {path.stem} as target\n"
        "atheris.Setup(sys.argv, target.one_input); atheris.Fuzz()\n"
    )
    flags = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-verbosity=0"]
    flags += [f"-max_len={LONGEST}", f"-artifact_prefix={FOUND}/{path.stem}-"]
    code_of = subprocess.run([sys.executable, "-c", code, str(HERE), *flags], check=False)
    print(f"{path.stem}: atheris, {seconds:g} s, exit code {code_of.returncode}", flush=True)
    return code_of.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr] # there is one
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("names", nargs="*", metavar="TARGET", help="all of them by default")
    chosen = parser.parse_args()
    run = by_coverage if importlib.util.find_spec("atheris") else by_chance
    failed = [
        path.stem
        for path in targets()
        if (not chosen.names or path.stem in chosen.names)
        and run(path, chosen.seconds, chosen.seed)
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
