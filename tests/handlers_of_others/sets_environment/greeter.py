import os

GREETING = os.environ["GREETING"]
