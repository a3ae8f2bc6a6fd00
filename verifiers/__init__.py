"""Verification rules, one per file; `specdec.registry` has their names."""
