"""A PostgreSQL for the tests: a real server, run as the user `postgres`, with TLS; stopped by its pid."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psycopg

from slurm_gpuhealth.config.settings import Settings, Store
from slurm_gpuhealth.frozen import replace
from slurm_gpuhealth.store.open import open_store
from tests.daemons import Daemons, free_ports, until

BIN = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/lib/postgresql/15/bin"))
AS = ("/usr/bin/setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
NODES = "gpuhealth_node"
"""The role that nodes use to ship."""
SECRET = "s3cret"  # noqa: S105


class Postgresql:
    def __init__(self, folder: Path) -> None:
        self.folder, self.data, (self.port,) = folder, folder / "data", free_ports(1)
        for name in ("run", "log"):
            (folder / name).mkdir()
        self.daemons = Daemons(folder, {"LC_ALL": "C.UTF-8"})
        self.data.mkdir()
        shutil.chown(self.data, "postgres", "postgres")
        self._run(*AS, str(BIN / "initdb"), "-D", str(self.data), "-A", "scram-sha-256", "--pwfile", str(self._owner()))
        key = ("-keyout", str(self.data / "server.key"), "-out", str(self.data / "server.crt"))
        name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
        self._run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *key, *name)
        for file in ("server.key", "server.crt"):
            shutil.chown(self.data / file, "postgres", "postgres")
        (self.data / "server.key").chmod(0o600)
        self.certificate = shutil.copy(self.data / "server.crt", folder / "root.crt")
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(f"port = {self.port}\nlisten_addresses = 'localhost'\nssl = on\nunix_socket_directories = ''\n")
        # Network connections only with TLS.
        (self.data / "pg_hba.conf").write_text("hostssl all all all scram-sha-256\n")
        self.passwords = folder / "pgpass"
        self.passwords.write_text(f"*:*:*:postgres:owner\n*:*:*:{NODES}:{SECRET}\n")
        self.passwords.chmod(0o600)

    def _owner(self) -> Path:
        path = self.folder / "owner"
        path.write_text("owner\n")
        return path

    def _run(self, *argv: str) -> None:
        subprocess.run(argv, check=True, capture_output=True, cwd="/")

    def url(self, user: str = "postgres") -> str:
        tls = f"sslmode=verify-full&sslrootcert={self.certificate}"
        return f"postgresql://{user}@localhost:{self.port}/postgres?{tls}"

    def start(self) -> None:
        self.daemons.start("postgresql", *AS, str(BIN / "postgres"), "-D", str(self.data))
        until(self._answers, "PostgreSQL")

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self, user: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(self.url(user), passfile=str(self.passwords), connect_timeout=5, autocommit=True)

    def store(self) -> tuple[Store, Store]:
        """An empty database with our tables: the controller's URL, and the nodes' URL, which may only insert."""
        with self.connect() as db:
            db.execute("DROP SCHEMA public CASCADE")
            db.execute("CREATE SCHEMA public")
            db.execute(f"DROP ROLE IF EXISTS {NODES}")
            db.execute(f"CREATE ROLE {NODES} LOGIN PASSWORD '{SECRET}'")
        store = Store(url=self.url(), password_file=str(self.passwords), timeout=5.0)
        open_store(Settings(store=store)).dispose()
        with self.connect() as db:
            db.execute(f"GRANT USAGE ON SCHEMA public TO {NODES}")
            db.execute(f"GRANT INSERT ON inbox TO {NODES}")
        return store, replace(store, url=self.url(NODES))

    def stop(self, sign: int = signal.SIGINT) -> None:
        """SIGINT: a fast shutdown; SIGQUIT: as in a crash."""
        self.daemons.stop("postgresql", sign=sign, timeout=60)

    def __enter__(self) -> Postgresql:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if not os.environ.get("KEEP"):
            shutil.rmtree(self.folder)
