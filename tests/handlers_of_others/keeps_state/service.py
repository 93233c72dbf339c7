import time

model = None
calls = 0


def load():
    time.sleep(0)
    return {"a": "first", "b": "second"}


def predict(data, context):
    global model, calls
    if not data:
        return None
    if model is None:
        model = load()
    calls += 1
    return [{"calls": calls, "found": model.get(row["body"])} for row in data]
