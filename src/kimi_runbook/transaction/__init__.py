"""Changing a fleet as a transaction: what stands on each host, which batches, when, by whose approval, how it ended."""
