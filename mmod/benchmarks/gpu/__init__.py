"""One command for a first half hour on a GPU: correctness, speed, memory and training, each part boxed in time."""
