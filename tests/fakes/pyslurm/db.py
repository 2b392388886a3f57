"""pyslurm.db: jobs of slurmdbd."""

import json
import os
import time

from .core import error


class JobFilter:
    """No state, no duplicates: there is no such attribute."""

    NAMES = frozenset({"ids", "start_time", "end_time", "users", "accounts", "clusters", "nodelist", "partitions"})

    def __init__(self, **wanted):
        for name, value in wanted.items():
            if name not in self.NAMES:
                raise AttributeError(f"'JobFilter' object has no attribute {name!r}")
            setattr(self, name, value)


class Job:
    def __init__(self, values):
        self.__dict__.update(values)
        self.exit_code = (values.get("exit_code") or 0) & 127  # 137 is 9
        took = (values.get("end_time") or 0) - (values.get("start_time") or 0)
        self.elapsed_time = took or None  # 0 s is None


class Jobs(dict):
    """One job for each id: of a requeued job the last run."""

    @staticmethod
    def load(db_filter=None):
        path = os.environ.get("PYSLURM_JOBS")
        if path == "hang":
            time.sleep(600)
        if not path:
            raise error.RPCError("Failed to get Jobs from slurmdbd")
        since, until = getattr(db_filter, "start_time", 0), getattr(db_filter, "end_time", 1 << 40)
        with open(path) as file:
            jobs = [Job(one) for one in json.load(file)]
        return Jobs(
            {one.id: one for one in jobs if one.start_time is None or since <= (one.end_time or since) <= until}
        )
