"""One module per command: what a person runs, on top of the library.

Scope: what the commands do, with their options, data and reports.
Not here: parsing of the command line (`cli/`); anything a library user needs (`train/`, `store/`).
"""
