"""Parsers of the official file formats: bytes in, tensors out, IntegrityError for anything else."""
