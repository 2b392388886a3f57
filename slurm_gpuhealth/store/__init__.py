"""The cluster's record: what nodes ship and accounting has, in SQLite on the controller or in PostgreSQL."""
