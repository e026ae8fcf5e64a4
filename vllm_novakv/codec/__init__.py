"""The KV-cache codec: the byte map (`layout`), the format's numeric definition (`quantizer`), the bases (`transform`).

Nothing is re-exported, so that importing one part costs only that part.
"""
