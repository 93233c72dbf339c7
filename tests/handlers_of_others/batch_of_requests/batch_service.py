def handle(data, context):
    if data is None:
        return None
    sizes = [len(row["body"]) for row in data]
    if sizes[0] == 0:
        return ["too few"]
    for index, size in enumerate(sizes):
        context.set_response_header(index, "X-Place", "place " + str(size))
        if size == 3:
            context.set_response_status(206, "Odd", index)
    return [row["body"].upper() for row in data]
