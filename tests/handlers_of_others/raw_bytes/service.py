import hashlib

kept = []


def handle(data, context):
    if data is None:
        return None
    body = data[0].get("body")
    kept.append(body)
    if len(kept) > 1:
        assert bytes(kept[0]) == b"\xff\xd8first", "an earlier body has changed"
    context.set_response_content_type(0, "application/octet-stream")
    context.set_response_header(0, "X-Digest", hashlib.sha256(body).hexdigest()[:8])
    body.reverse()
    answer = bytes(body)
    body.reverse()
    return [answer]
