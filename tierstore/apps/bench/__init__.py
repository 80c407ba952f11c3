"""`tierstore bench`: this package, its peers and the limits of the machine in one run, in turns.

Scope: contestants as processes (`arena.py`, `serve.py`, `worker.py`), a case each (`disk.py`, `adam.py`, ...), the
    tables. Not here: what a disk or a kernel does (`measure/`, `kernels/`), the peers' own code (`tools/peers/`).
"""
