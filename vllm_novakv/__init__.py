"""vLLM plugin that stores the KV cache in about two bits per element.

Importing this package loads nothing heavy: neither torch nor vLLM.
"""

__version__ = "0.1.0"
