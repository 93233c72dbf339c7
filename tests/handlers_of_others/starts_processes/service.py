import multiprocessing
import subprocess
import sys


def square(number):
    return number * number


def handle(data, context):
    if data is None:
        return None
    said = subprocess.run(
        [sys.executable, "-c", "import half; print(half.of(84))"],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.decode()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(square, [1, 2, 3])
    return [{"said": said.strip(), "squares": squares}]
