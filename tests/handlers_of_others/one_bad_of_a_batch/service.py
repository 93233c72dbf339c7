import json


def handle(data, context):
    if data is None:
        return None
    return [json.loads(bytes(row["body"]))["n"] + 1 for row in data]
