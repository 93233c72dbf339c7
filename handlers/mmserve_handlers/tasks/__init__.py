"""What a BERT can be asked: one module for each task.

A task reads a request, says which rows of tokens go through the network for it, takes what it
needs of a pass, and makes an answer of it. The rows of all requests of a batch go together.
"""
