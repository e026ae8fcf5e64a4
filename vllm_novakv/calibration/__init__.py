"""Calibration: run a model once, observe its keys, queries and attention outputs, and fit the codec to them.

Reading order: prompts.py (the text), capture.py (the run inside vLLM), moments.py and kmeans.py (the statistics),
pipeline.py (the whole fit), command.py (the command line).
"""
