"""Heads in other projects' files: a module per format, each with `read(folder, model)` and `write(head, model, folder,
target)`. What `write` cannot say it refuses, and what `read` does not know it names: nothing is left out silently."""
