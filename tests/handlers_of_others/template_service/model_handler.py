"""A service after the usual template: initialize, preprocess, inference, postprocess."""

import json
import logging
import os


class ModelHandler:
    def __init__(self):
        self.initialized = False
        self.labels = None
        self._batch_size = 0

    def initialize(self, context):
        properties = context.system_properties
        self._batch_size = properties["batch_size"]
        with open(os.path.join(properties["model_dir"], "labels.json")) as f:
            self.labels = json.load(f)
        logging.info("model %s loaded", context.model_name)
        self.initialized = True

    def preprocess(self, batch):
        assert self._batch_size >= len(batch), "Invalid input batch size: {}".format(len(batch))
        return [row.get("data") or row.get("body") for row in batch]

    def inference(self, model_input):
        return [len(value) % len(self.labels) for value in model_input]

    def postprocess(self, inference_output):
        return [{"class": self.labels[index], "index": index} for index in inference_output]

    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))


_service = ModelHandler()


def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return _service.handle(data, context)
