"""The prefix index: which prompts share what, how probable a prefix is, and what is worth keeping.

Reading order: estimator.py (probability of a continuation), node.py, trie_reader.py and trie.py (the index),
snapshot.py (its file), clusters.py (groups of sequences); policy.py, retention.py and return_model.py (what to evict);
traces.py, replay.py and analyze.py (what a log of requests would have gained); pages.py, pins.py, shadow.py, served.py
and observer.py (beside a running server).

Only the standard library and numpy are needed.
"""
