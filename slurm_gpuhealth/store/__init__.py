"""The cluster's record: what the nodes ship and accounting tells, in SQLite beside the controller or PostgreSQL."""
