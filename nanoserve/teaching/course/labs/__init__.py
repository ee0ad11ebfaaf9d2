"""What students get: files that `start` copies."""
