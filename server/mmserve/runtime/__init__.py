"""Inside a worker process: the model's code, what it is given and what becomes of its answers.

`worker.py` is the loud half; `python -I -m mmserve.runtime --fd N` starts it in a fresh
interpreter, the zygote calls it in a fork. All that the runtime needs of the standard library is
imported before the model's directory comes onto the module path, where a file of the archive may
have the name of one of its modules.
"""
