import os

os.environ["OMP_NUM_THREADS"] = "2"
os.environ.setdefault("GREETING", "hello")

import greeter


def handle(data, context):
    if data is None:
        os.environ["LOADED"] = context.model_name
        return None
    return [" ".join([greeter.GREETING, os.environ["LOADED"], os.environ["OMP_NUM_THREADS"]])]
