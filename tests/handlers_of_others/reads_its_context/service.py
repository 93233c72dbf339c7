def handle(data, context):
    if data is None:
        assert context.request_ids is None or isinstance(context.request_ids, dict)
        return None
    properties = dict(context.system_properties)
    assert properties.pop("model_dir")
    headers = context.get_all_request_header(0)
    assert context.get_request_id(0) == context.request_ids[0]
    return [
        {
            "model": context.model_name,
            "handler": context.manifest["model"]["handler"],
            "version": context.manifest["model"]["modelVersion"],
            "properties": sorted(properties),
            "batch_size": properties["batch_size"],
            "server": [properties["server_name"], properties["server_version"]],
            "own header": context.get_request_header(0, "X-Own"),
            "no header": context.get_request_header(0, "X-None"),
            "body": headers["body"],
            "status": list(context.get_response_status(0)),
        }
    ]
