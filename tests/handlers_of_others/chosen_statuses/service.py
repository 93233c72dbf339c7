from mms.service import PredictionException


def created(context):
    context.set_response_status(code=201, phrase="Made", idx=0)
    context.set_response_content_type(0, "text/csv")
    context.set_response_header(0, "X-Model", context.model_name)
    return ["1,2"]


def refused(context):
    context.set_all_response_status(507, "Full")
    return ["Invalid response"]


def by_request_processor(context):
    processor = context.request_processor[0]
    kind = processor.get_request_property("X-Kind")
    processor.report_status(418, "Teapot")
    processor.add_response_property("X-Kind", "re: " + kind)
    return [str(processor.get_response_status_code())]


def unknown(context):
    raise PredictionException("no such word", 404)


def unusual(context):
    raise PredictionException("some text", 599)


def plain(context):
    raise PredictionException("just failed")


def out_of_memory(context):
    raise MemoryError("too big")


def handle(data, context):
    if data is None:
        return None
    return globals()[data[0]["body"]](context)
