"""What Prometheus reads: `table` explains each metric, `node` gathers the values, `text` writes them."""
