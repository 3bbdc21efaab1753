"""Run notebook cells and functions on shares of GPUs."""
