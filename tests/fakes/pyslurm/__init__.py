"""A stand-in for PySlurm 25.11: its database API as far as we use it, with what is odd about the real one.

Jobs come from the JSON file in $PYSLURM_JOBS: a list of objects, attribute → value.
"""

import os

if os.environ.get("PYSLURM_FATAL") or not os.path.exists(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")):
    os.write(2, b"fatal: Unable to process configuration file\n")
    os._exit(1)  # as libslurm's fatal(): no exception, no exit handlers (after 60 s of waiting, which are left out)

from . import core, db

__version__ = "25.11.2"
__all__ = ("core", "db")
