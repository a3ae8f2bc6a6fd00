"""Drafters, one per file; `specdec.registry` has their names."""
