import time

from mms.metrics.dimension import Dimension


def handle(data, context):
    if data is None:
        context.metrics.add_counter("Loads", 1)
        return None
    began = time.time()
    metrics = context.metrics
    metrics.add_counter("Requests", 1, idx=0)
    metrics.add_counter("Requests", 1, idx=0)
    metrics.add_counter("Regional", 1, 0, [Dimension("Region", "north")])
    metrics.add_size("Body", len(data[0]["body"]) / 1024, 0, "kB")
    metrics.add_percent("Load", 12.5, 0)
    metrics.add_metric("Free", 3, 0, "Slots")
    metrics.add_time("Inference", (time.time() - began) * 1000, None, "ms")
    names = sorted(metric.name for metric in metrics.store)
    counter = [metric.value for metric in metrics.store if metric.name == "Requests"]
    return [{"names": names, "requests": counter}]
