"""Recording how a constructor fills parameters that have no memory, and filling them later in pieces.

Scope: watching a constructor (`watching`, `recording`), what it did (`records`, `operators`), and doing it again with
the same random numbers (`program`, `timeline`).
Not here: the public face (`train/materialize.py`).
"""
