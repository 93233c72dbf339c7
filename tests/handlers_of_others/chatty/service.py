import os
import subprocess
import sys

print("a word while importing")


def handle(data, context):
    if data is None:
        print("a word while loading", file=sys.stderr)
        return None
    for number in range(2000):
        print("line", number, "of many: 好 é", end=" | \n")
    sys.stderr.write("warn\n" * 2000)
    os.write(1, b"\xff\xfe raw bytes\n")
    subprocess.call([sys.executable, "-c", "print('from a child')"])
    print("no newline at the end", end="")
    return ["said"]
