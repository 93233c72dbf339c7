"""Models of ours: BERT and ResNet, served without writing code.

A handler here is named in an archive's manifest, `mmserve_handlers.bert:handle`, and the archive
holds weights only. The package knows the handler contract (`contract.py`) and nothing of the
server that calls it.
"""
