"""vLLM on the same prompts, from an environment of its own."""
