"""Services of the 0.x kind subclass what used to be here, and they run on MXNet."""

raise ImportError(
    "Services of the 0.x kind (mms.model_service) need MXNet, which is not supported. "
    "Write a handler: a function handle(data, context), or a class with initialize and handle."
)
