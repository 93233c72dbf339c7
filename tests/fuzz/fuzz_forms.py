"""Bytes as a form, a query, a path and a registration: what is read, or refused in words."""

from __future__ import annotations

from mmserve.errors import BadRequest
from mmserve.frontend.forms import MAX_FIELDS, body_parameters, first_values
from mmserve.frontend.registration import asked_by_json
from mmserve.frontend.routes import route_of

URLENCODED = "application/x-www-form-urlencoded"


def one_input(data: bytes) -> None:
    """Raises what a client should never cause.

    The first byte chooses the kind of input; of a multipart form, the first line is what follows
    `multipart/form-data;` in the header.
    """
    kind, rest = data[:1], data[1:]
    try:
        match kind[0] % 5 if kind else 0:
            case 0:
                _check_form(URLENCODED, rest)
            case 1:
                options, _, body = rest.partition(b"\n")
                _check_form("multipart/form-data;" + options.decode("latin-1"), body)
            case 2:
                body = b"--B\r\nContent-Disposition: form-data; name=a" + rest
                _check_form("multipart/form-data; boundary=B", body)
            case 3:
                asked_by_json(rest)
            case _:
                text = rest.decode("latin-1")
                first_values(text)
                route_of("/" + text)
    except BadRequest as error:
        assert str(error)


def _check_form(content_type: str, body: bytes) -> None:
    parameters = body_parameters(content_type, body)
    assert len(parameters) <= MAX_FIELDS
    for parameter, value in parameters:
        assert parameter.size == len(value) <= max(len(body), 4 * len(value))
