def handle(data, context):
    if data is None:
        return None
    return [type(data[0]["body"]).__name__]
