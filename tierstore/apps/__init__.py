"""One module per command: what a person runs, on top of the library.

Scope: the training loop of `tierstore train`, with its options, presets, data and reports.
Not here: parsing of the command line (`cli.py`); anything a library user needs (`train/`, `store/`).
"""
