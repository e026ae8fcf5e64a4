"""Measure what a KV cache costs in accuracy. Models are reached through callables, never through vLLM itself."""
