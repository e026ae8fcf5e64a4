"""Cache operations: store, paged decode and prefill, each with a plain PyTorch reference."""
