"""mmserve: many PyTorch models behind one HTTP server, a drop-in for AWS Multi Model Server."""

__version__ = "0.1.0"

#: What handlers read as `context.system_properties["server_version"]`: the release of Multi Model
#: Server whose contract we keep.
MMS_VERSION = "1.1.11"
