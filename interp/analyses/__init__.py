"""One file per question. Each has pure kernels (tensors in, tensors out) and a door that people call."""
