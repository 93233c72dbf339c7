import os
import sys


def handle(data, context):
    if data is None:
        return None
    word = data[0]["body"]
    if word == "exit":
        sys.exit(0)
    if word == "at once":
        os._exit(3)
    if word == "interrupt":
        raise KeyboardInterrupt
    return [word]
