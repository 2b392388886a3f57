"""What Prometheus reads: `table` explains each metric, `node` and `cluster` gather the values, `text` writes them."""
