import context as own_context
import handlers
import metrics
import server
import utils
import worker


def handle(data, context):
    if data is None:
        return None
    parts = (own_context, handlers, metrics, server, utils, worker)
    return [" ".join(part.WORD for part in parts)]
