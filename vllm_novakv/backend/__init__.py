"""vLLM integration: attention backend, cache specs and the band's block manager."""
