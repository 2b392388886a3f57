"""pyslurm.core: its errors."""


class error:  # a module there
    class RPCError(Exception):
        pass
