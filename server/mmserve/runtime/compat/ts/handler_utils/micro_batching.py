"""There is no equal for `ts.handler_utils.micro_batching`."""

raise ImportError(
    "ts.handler_utils.micro_batching is not served: register the model with the batch_size that "
    "suits its inference."
)
