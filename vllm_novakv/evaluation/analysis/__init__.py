"""What a basis, a quantizer and a partition do to the keys of one head, from captured tensors.

Nothing is re-exported; `compare` puts the parts together.
"""
