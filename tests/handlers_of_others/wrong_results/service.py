def handle(data, context):
    if data is None:
        return None
    results = {
        "none": None,
        "tuple": ("x",),
        "dict": {"x": 1},
        "text": "x",
        "generator": (x for x in "x"),
        "set": [{1}],
        "nested bytes": [[b"x"]],
        "circle": [loop],
        "surrogate": ["\ud800"],
        "not a number": [float("nan")],
        "list": ["x"],
    }
    return results[data[0]["body"]]


loop = []
loop.append(loop)
