"""What a GPU would run, shown on a CPU: a second logical CPU device stands for the GPU."""
