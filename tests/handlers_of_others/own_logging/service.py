import logging
import tempfile

log_file = tempfile.NamedTemporaryFile(mode="r", suffix=".log")
logger = logging.getLogger("model")
logger.setLevel(logging.DEBUG)
own = logging.FileHandler(log_file.name)
own.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
logger.addHandler(own)
logging.basicConfig(level=logging.DEBUG, format="never used: %(message)s")


def handle(data, context):
    if data is None:
        return None
    logger.debug("debug %s", data[0]["body"])
    logger.warning("warning %s", data[0]["body"])
    own.flush()
    return [log_file.read()]
