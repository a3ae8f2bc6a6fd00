"""Acceptance, speed and fidelity of drafters, measured against plain decoding and against Hugging Face generate."""
