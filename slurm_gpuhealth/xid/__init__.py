"""Xids, SXids and their neighbours in the kernel log: NVIDIA's tables, and the decoder."""
