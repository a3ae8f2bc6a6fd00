"""Training of heads and drafters: data preparation, losses, one recipe per head, ending in an evaluation."""
